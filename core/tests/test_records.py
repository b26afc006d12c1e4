"""A record that cannot mean anything is refused where it is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from interposer import (
    AttentionEntry,
    CheckpointEntry,
    Kernel,
    LayerEntry,
    ModelEntry,
    OpEntry,
    PlatformEntry,
    SchemeEntry,
)
from interposer.errors import RecordError
from interposer.records import Record, identity, load_target

TARGET = "acme.kernels:fast"
MAKERS: list[Callable[..., Record]] = [
    lambda name="x", target=TARGET, **more: OpEntry(name, target, **more),
    lambda name="x", target=TARGET, **more: Kernel("linear", name, target, **more),
    lambda name="x", target=TARGET, **more: LayerEntry("rms_norm", name, target, **more),
    lambda name="x", target=TARGET, **more: AttentionEntry(name, target, **more),
    lambda name="x", target=TARGET, **more: SchemeEntry("gptq", name, target, **more),
    lambda name="x", target=TARGET, **more: ModelEntry(("A",), name, target, **more),
    lambda name="x", target=TARGET, **more: CheckpointEntry(".acme", name, target, **more),
    lambda name="x", target=TARGET, **more: PlatformEntry(name, target, **more),
]
KINDS = ["op", "kernel", "layer", "attention", "scheme", "model", "checkpoint", "platform"]
each_kind = pytest.mark.parametrize("make", MAKERS, ids=KINDS)
each_scored_kind = pytest.mark.parametrize("make", MAKERS[1:], ids=KINDS[1:])

MALFORMED = [
    "acme.kernels",
    "acme.kernels:",
    ":fast",
    "acme..kernels:fast",
    "acme:a.b",
    "a:b:c",
    "",
]


@pytest.mark.landing(25)
@each_kind
@pytest.mark.parametrize("target", MALFORMED)
def test_a_malformed_import_string_is_named(make: Callable[..., Record], target: str) -> None:
    with pytest.raises(RecordError) as caught:
        make(target=target)
    assert repr(target) in str(caught.value)
    assert "'package.module:name'" in str(caught.value)


@pytest.mark.parametrize("field", ["predicate", "prepare", "confirm"])
def test_a_malformed_optional_import_string_is_named(field: str) -> None:
    wrong: dict[str, Any] = {field: "acme.kernels"}
    with pytest.raises(RecordError, match=r"'acme.kernels', which is not of the form"):
        Kernel("linear", "linear_fast", TARGET, **wrong)


@each_kind
@pytest.mark.parametrize("name", ["", None, 3])
def test_a_record_must_have_a_name(make: Callable[..., Record], name: Any) -> None:
    with pytest.raises(RecordError, match=f"the name {name!r}, which is not a name"):
        make(name=name)


@pytest.mark.parametrize(
    ("make", "label"),
    [
        (lambda: Kernel("", "fast", TARGET), "op"),
        (lambda: LayerEntry("", "fast", TARGET), "layer_id"),
        (lambda: SchemeEntry("", "fast", TARGET), "method"),
        (lambda: CheckpointEntry("", "fast", TARGET), "suffix"),
    ],
)
def test_a_record_must_have_a_subject(make: Callable[[], Record], label: str) -> None:
    with pytest.raises(RecordError, match=f"the {label} '', which is not a name"):
        make()


@pytest.mark.parametrize("suffix", ["acme", ".", ".a.b", ".ACME", "./acme", ".a\\b"])
def test_a_suffix_must_be_a_file_suffix(suffix: str) -> None:
    with pytest.raises(RecordError, match=r"must be like '\.acme', in lower case"):
        CheckpointEntry(suffix, "fast", TARGET)


@each_scored_kind
@pytest.mark.parametrize("score", [math.nan, "10", None])
def test_a_score_must_be_a_number(make: Callable[..., Record], score: Any) -> None:
    with pytest.raises(RecordError, match=f"the score {score!r}, which is not a number"):
        make(score=score)


def test_an_unknown_property_is_named_with_the_nearest() -> None:
    with pytest.raises(RecordError) as caught:
        Kernel("linear", "fast", TARGET, properties=frozenset({"determinstic", "traceable"}))
    assert "['determinstic']" in str(caught.value)
    assert "known, nearest first: 'deterministic', " in str(caught.value)


def test_a_differentiable_kernel_prepares_nothing() -> None:
    differentiable = frozenset({"differentiable"})
    assert Kernel("linear", "fast", TARGET, properties=differentiable).prepare == ""
    with pytest.raises(RecordError, match="differentiable, but prepares constants"):
        Kernel("linear", "fast", TARGET, properties=differentiable, prepare=TARGET)


def test_only_the_op_itself_is_the_reference() -> None:
    with pytest.raises(RecordError, match="'reference', as the op itself is"):
        Kernel("linear", "reference", TARGET)


def test_identity_distinguishes_records() -> None:
    records = [make() for make in MAKERS] + [Kernel("embedding", "x", TARGET)]
    assert len({identity(record) for record in records}) == len(records)
    assert identity(Kernel("linear", "x", TARGET)) == identity(Kernel("linear", "x", "other:one"))


def test_a_target_is_loaded() -> None:
    assert load_target("math:tau") == math.tau


def test_a_missing_target_is_named() -> None:
    with pytest.raises(
        RecordError, match="'math:taw' points nowhere: math has no 'taw'; nearest: tan, tau, "
    ):
        load_target("math:taw")
    with pytest.raises(ModuleNotFoundError, match="acme_of_nowhere"):
        load_target("acme_of_nowhere.kernels:fast")


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (("",), "'board' runs '', which is not the name of a platform"),
        ((7,), "'board' runs 7, which is not the name of a platform"),
        (("cpu", "board"), "'board' runs 'board', which is itself. Try: leave it out"),
        ("cpu", r"'board' runs 'cpu', which is no tuple. Try: runs=\('cpu',\)"),
    ],
)
def test_a_platform_runs_names_of_other_platforms(runs: Any, said: str) -> None:
    with pytest.raises(RecordError, match=said):
        PlatformEntry("board", TARGET, runs=runs)
