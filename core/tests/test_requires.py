"""A requirement that is not met says which, with the value found and the limit."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer import Capability, Dim, Request, Requires
from interposer.errors import RecordError
from interposer.requires import DTYPES

CAPABILITY = Capability("x86_64", features=frozenset({"avx2", "fma"}))
REQUEST = Request(
    "kernel",
    "linear",
    capability=CAPABILITY,
    dtype="float16",
    dims={"size": 48, "ratio": 0.5, "layout": "nk", "fused": True},
)

REFUSED = [
    (Requires(features=frozenset({"avx512_bf16", "amx", "fma"})), "needs amx, avx512_bf16, which"),
    (Requires(architectures=frozenset({"s390x", "aarch64"})), "needs aarch64, s390x, .* x86_64"),
    (Requires(dtypes=("float32", "bfloat16")), "needs dtype float32 or bfloat16, got float16"),
    (Requires(dims={"size": Dim(at_least=64)}), "size is 48, must be at least 64"),
    (Requires(dims={"size": Dim(at_most=32)}), "size is 48, must be at most 32"),
    (Requires(dims={"size": Dim(multiple_of=32)}), "size is 48, must be a multiple of 32"),
    (Requires(dims={"size": Dim(one_of=(64, 128))}), r"size is 48, must be one of \[64, 128\]"),
    (Requires(dims={"ratio": Dim(at_least=1)}), "ratio is 0.5, must be at least 1"),
    (Requires(dims={"layout": Dim(one_of=("kn",))}), r"layout is 'nk', must be one of \['kn'\]"),
    (Requires(dims={"layout": Dim(at_least=1)}), "layout is 'nk', must be a number"),
    (Requires(dims={"fused": Dim(one_of=(False,))}), r"fused is True, must be one of \[False\]"),
    (Requires(dims={"group": Dim(at_least=1)}), "needs to know group, which .* does not state"),
    (Requires(dims={"group": Dim()}), "needs to know group"),
]

ACCEPTED = [
    Requires(),
    Requires(features=frozenset({"avx2"})),
    Requires(architectures=frozenset({"x86_64", "s390x"})),
    Requires(dtypes=("float16",)),
    Requires(dims={"size": Dim(at_least=48, at_most=48, multiple_of=16, one_of=(48,))}),
    Requires(dims={"ratio": Dim(at_most=1), "layout": Dim(one_of=("nk", "kn")), "fused": Dim()}),
]


@pytest.mark.parametrize(("requires", "reason"), REFUSED)
def test_an_unmet_requirement_is_refused_with_value_and_limit(
    requires: Requires, reason: str
) -> None:
    verdict = requires.judge(REQUEST)
    assert not verdict
    assert re.match(reason, verdict.reason)


@pytest.mark.parametrize("requires", ACCEPTED)
def test_a_request_that_meets_every_requirement_is_accepted(requires: Requires) -> None:
    assert requires.judge(REQUEST)


limits = st.none() | st.integers(-5, 20)


@given(st.integers(-10, 30), limits, limits, st.none() | st.integers(-2, 8))
def test_a_dimension_is_accepted_exactly_within_its_limits(
    value: int, at_least: int | None, at_most: int | None, multiple_of: int | None
) -> None:
    crossed = at_least is not None and at_most is not None and at_least > at_most
    if crossed or (multiple_of is not None and multiple_of < 1):
        with pytest.raises(RecordError):
            Dim(at_least, at_most, multiple_of)
        return
    verdict = Dim(at_least, at_most, multiple_of).judge("size", value)
    expected = (
        (at_least is None or value >= at_least)
        and (at_most is None or value <= at_most)
        and (multiple_of is None or value % multiple_of == 0)
    )
    assert bool(verdict) is expected
    assert expected or str(value) in verdict.reason


def test_the_first_unmet_requirement_is_named() -> None:
    requires = Requires(features=frozenset({"amx"}), dtypes=("float32",))
    assert requires.judge(REQUEST).reason == "needs amx, which the device lacks"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ((5, 2, None), "at_least=5 above at_most=2"),
        ((None, None, 0), "multiple_of=0, must be 1 or more"),
        ((1, 1, -8), "multiple_of=-8"),
    ],
)
def test_an_unsatisfiable_dimension_is_refused(
    limits: tuple[int | None, int | None, int | None], reason: str
) -> None:
    with pytest.raises(RecordError, match=reason):
        Dim(*limits)


@pytest.mark.parametrize(
    ("dtype", "nearest"),
    [("fp32", "float32"), ("bf16", "bfloat16"), ("torch.float16", "float16"), ("", "")],
)
def test_a_dtype_that_torch_lacks_is_refused(dtype: str, nearest: str) -> None:
    with pytest.raises(RecordError, match=f"dtype '{dtype}', which .*; nearest: .*{nearest}"):
        Requires(dtypes=("float32", dtype))


def test_a_strange_dtype_is_shown_in_printable_ascii() -> None:
    with pytest.raises(RecordError) as caught:
        Requires(dtypes=("\x1b[31mé" * 1_000,))
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1_000


def test_dtypes_equal_torch() -> None:
    """A name that only a newer torch has would have to be listed here."""
    torch_dtypes = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    newer: set[str] = set()
    assert {name.removeprefix("torch.") for name in torch_dtypes} == DTYPES - newer
