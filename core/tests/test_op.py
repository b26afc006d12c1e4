"""An op is a plain function; its schema, fake kernel and tolerance follow from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer import Case, CustomOp, Tolerance, custom_op
from interposer.errors import RecordError


def no_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    yield from ()


@custom_op("halve_rows", cases=no_cases, constants=("weight",))
def halve_rows(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Return every other row of ``x`` times ``weight``, ``[T / 2, H]``."""
    return x[::2].contiguous() * weight + eps


@custom_op("count_up", cases=no_cases, mutates=("counter",))
def count_up(counter: torch.Tensor, by: int) -> None:
    """Add ``by`` to ``counter`` in place."""
    counter.add_(by)


@custom_op("split", cases=no_cases)
def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first element and a transposed copy."""
    return x[:1].clone(), x.t().clone()


def test_calling_an_op_runs_its_definition() -> None:
    x = torch.arange(8.0).reshape(4, 2)
    weight = torch.tensor([1.0, 2.0])
    assert torch.equal(halve_rows(x, weight, 0.0), x[::2] * weight)
    assert torch.equal(halve_rows.reference(x, weight), halve_rows(x, weight))


def test_the_schema_is_taken_from_the_annotations() -> None:
    assert halve_rows.schema == "halve_rows(Tensor x, Tensor weight, float eps=1e-06) -> Tensor"
    assert split.schema == "split(Tensor x) -> (Tensor, Tensor)"
    assert count_up.schema == "count_up(Tensor(a0!) counter, SymInt by) -> ()"
    assert repr(split) == f"CustomOp({split.schema})"


def test_declarations_are_kept() -> None:
    assert halve_rows.name == "halve_rows"
    assert halve_rows.constants == ("weight",)
    assert count_up.mutates == ("counter",)
    assert list(halve_rows.signature.parameters) == ["x", "weight", "eps"]
    assert (halve_rows.__doc__ or "").startswith("Return every other row")
    assert halve_rows.tolerance == Tolerance()


def test_the_fake_has_the_shape_of_the_result_and_computes_nothing() -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    fake = halve_rows.fake(x, weight=torch.randn(3, dtype=torch.float64))
    assert isinstance(fake, torch._subclasses.FakeTensor)
    assert (fake.shape, fake.dtype, fake.device) == ((3, 3), torch.float64, x.device)
    first, transposed = split.fake(x)
    assert first.shape == (1, 3)
    assert transposed.stride() == split(x)[1].stride()


def test_the_fake_of_a_mutation_writes_nothing() -> None:
    counter = torch.zeros(3, dtype=torch.int64)
    count_up.fake(counter, 5)
    assert torch.equal(counter, torch.zeros(3, dtype=torch.int64))
    count_up(counter, 5)
    assert torch.equal(counter, torch.full((3,), 5))


@pytest.mark.parametrize(
    "declared", [{"mutates": ("y",)}, {"constants": ("y",)}, {"differentiable": ("y",)}]
)
def test_a_declaration_about_an_unknown_parameter_raises(
    declared: dict[str, tuple[str, ...]],
) -> None:
    with pytest.raises(RecordError, match=r"op 'double' declares \['y'\], which are not its par"):

        @custom_op("double", cases=no_cases, **declared)  # type: ignore[arg-type]
        def double(x: torch.Tensor) -> torch.Tensor:
            return x + x


def test_an_op_that_writes_its_arguments_has_no_gradient() -> None:
    with pytest.raises(RecordError, match="op 'double' writes x, so it cannot declare a gradient"):

        @custom_op("double", cases=no_cases, mutates=("x",), differentiable=("x",))
        def double(x: torch.Tensor) -> None:
            x.mul_(2)


def test_an_op_without_annotations_has_no_schema() -> None:
    def double(x):  # type: ignore[no-untyped-def]
        return x + x

    with pytest.raises(ValueError, match="must have a type annotation"):
        CustomOp(double, "double", (), (), no_cases, Tolerance())


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 4096),
    st.floats(0, 1e4),
    st.integers(1, 4),
)
def test_a_bound_covers_the_roundings_and_grows_with_the_sum(
    dtype: torch.dtype, reduction: int, magnitude: float, roundings: int
) -> None:
    expected = torch.tensor([0.0, 1.0, -1000.0], dtype=torch.float64)
    tolerance = Tolerance(roundings)
    limit = tolerance.bound(expected, dtype, Case("x", {}, {}, reduction, magnitude))
    one_rounding = expected.abs() * torch.finfo(dtype).eps / 2
    assert bool((limit >= roundings * one_rounding).all())
    longer = tolerance.bound(expected, dtype, Case("x", {}, {}, reduction + 1, magnitude))
    assert bool((longer >= limit).all())


def test_integers_must_be_equal() -> None:
    limit = Tolerance().bound(torch.tensor([3, 4]), torch.int64, Case("x", {}))
    assert torch.equal(limit, torch.tensor([0, 0]))
