"""Spaces of cases hold the declared cases, layouts and special values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer import Case, custom_op
from interposer.errors import RecordError
from interposer_testing._checks.operand import Operand
from interposer_testing.cases import (
    Axis,
    CaseSpace,
    Point,
    longest_row,
    normal,
    peak,
    planned_cases,
    uniform,
)
from interposer_testing.cases._layout import LAYOUTS


def build(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Case:
    x = normal(point["shape"], dtype, generator)
    return Case("", {"x": x, "scale": point["scale"], "bias": normal((4,), dtype, generator)})


SPACE = CaseSpace(
    build,
    Axis("shape", {"rows": (3, 4), "one row": (1, 4), "none": (0, 4)}),
    Axis("scale", {"": 1.0, "negative": -2.0, "zero": 0.0}),
    strided={"x": "any", "bias": "offset"},
    special={"x": ("infinities", "NaN", "subnormals", "negative zeros")},
    crossed={"shape": ("rows",)},
    alone={"shape": ("none",)},
    valid=lambda point, dtype: point["scale"] != 0 or dtype == torch.float32,
)


@custom_op("scaled", cases=SPACE)
def scaled(x: torch.Tensor, scale: float, bias: torch.Tensor) -> torch.Tensor:
    """Return ``x * scale + bias``."""
    return x * scale + bias


def points(dtype: torch.dtype = torch.float32) -> list[Point]:
    return SPACE.points(dtype)


def test_points_are_axis_combinations_plus_crossed_layouts_and_specials() -> None:
    labels = [point.label for point in points()]
    assert len(set(labels)) == len(labels)
    assert labels[:4] == ["rows", "rows, negative", "rows, zero", "one row"]
    # Nine combinations less two of the empty shape; layouts and specials at three of them.
    assert len(labels) == 7 + 3 * (len(LAYOUTS) + 4)
    assert "none" in labels
    assert "none, negative" not in labels
    assert "rows, negative, transposed" in labels
    assert "one row, transposed" not in labels


def test_points_invalid_for_a_dtype_are_omitted() -> None:
    assert any(point["scale"] == 0 for point in points())
    assert not any(point["scale"] == 0 for point in points(torch.bfloat16))
    assert SPACE.points(torch.float64) == []


def test_covering_points_contain_every_label() -> None:
    few = SPACE.covering(torch.float32)
    assert {pair for p in few for pair in p.coordinates()} == {
        pair for p in points() for pair in p.coordinates()
    }
    assert len(few) < len(points()) / 2


@given(st.sampled_from(points()), st.integers(0, 2**32))
def test_a_case_depends_only_on_point_and_seed(point: Point, seed: int) -> None:
    first, again = (SPACE.build(point, torch.float32, seed) for _ in range(2))
    other_seed = SPACE.build(point, torch.float32, seed + 1)
    assert first.label == point.label
    for name in ("x", "bias"):
        a, b = first.arguments[name], again.arguments[name]
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(first.arguments["bias"], other_seed.arguments["bias"])


@pytest.mark.landing(25)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5), (7,), (1, 1), (1, 6, 1)])
def test_a_layout_changes_strides_but_no_values(layout: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    moved = LAYOUTS[layout](tensor, 0)
    assert torch.equal(moved, tensor)
    guarded = Operand(moved, "cpu").tensor
    assert torch.equal(guarded, tensor)
    assert guarded.stride() == moved.stride()
    if layout == "offset by one":
        assert guarded.is_contiguous()
        assert guarded.data_ptr() % 16 == 4
    elif min(shape) > 1 and len(shape) > 1:
        assert not guarded.is_contiguous()
        assert (moved.stride(-1) == 1) == (layout not in ("transposed", "spread"))


def test_uneven_rows_differ_between_arguments() -> None:
    tensor = torch.randn(4, 8)
    assert LAYOUTS["uneven rows"](tensor, 0).stride() != LAYOUTS["uneven rows"](tensor, 1).stride()


def test_only_declared_arguments_get_a_layout() -> None:
    point = next(p for p in points() if p.layout == "transposed")
    arguments = SPACE.build(point, torch.float32, 0).arguments
    assert arguments["x"].stride() == (1, 3)
    assert arguments["bias"].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_special_values_are_added_to_ordinary_ones(dtype: torch.dtype) -> None:
    of = {p.special: SPACE.build(p, dtype, 0).arguments["x"] for p in points(dtype)}
    assert sorted(of["infinities"][of["infinities"].isinf()].tolist()) == [-torch.inf, torch.inf]
    assert int(of["NaN"].isnan().sum()) == 1
    zeros = of["negative zeros"]
    assert bool((zeros.signbit() & (zeros == 0)).any())
    small = of["subnormals"][-1]
    assert bool((small.abs() < torch.finfo(dtype).smallest_normal).all())
    assert bool((small != 0).any())
    assert bool((of["subnormals"][0].abs() > 1e-3).any())


def test_planning_builds_no_cases() -> None:
    plans = list(planned_cases(scaled, seed=0))
    assert len(plans) == sum(len(points(dtype)) for dtype in SPACE.dtypes)
    assert plans[0].build().arguments["x"].dtype == plans[0].dtype == torch.float32
    assert len(list(planned_cases(scaled, seed=0, quick=True))) < len(plans)


def test_a_plain_generator_is_planned_too() -> None:
    def cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
        yield Case("only", {"x": torch.zeros(1, dtype=dtype)})

    @custom_op("negated", cases=cases)
    def negated(x: torch.Tensor) -> torch.Tensor:
        """Return ``-x``."""
        return -x

    plans = list(planned_cases(negated, seed=0, quick=True))
    assert [(p.label, p.dtype) for p in plans] == [
        ("only", d) for d in (torch.float32, torch.bfloat16, torch.float16)
    ]
    assert all(plan.build().label == "only" for plan in plans)


def test_unknown_axes_and_labels_are_named() -> None:
    axis = Axis("shape", {"one": (1,)})
    with pytest.raises(RecordError, match=r"no axis 'shape' with the labels \['two'\]"):
        CaseSpace(build, axis, crossed={"shape": ("two",)})
    with pytest.raises(RecordError, match="no axis 'width'"):
        CaseSpace(build, axis, alone={"width": ()})
    with pytest.raises(RecordError, match="has no value"):
        Axis("shape", {})
    with pytest.raises(RecordError, match="which every space has already"):
        Axis("layout", {"dense": None})


def test_bounds_ignore_values_that_are_not_finite() -> None:
    x = torch.tensor([[3.0, -torch.inf], [4.0, torch.nan]])
    assert peak(x) == 4.0
    assert peak(torch.empty(0)) == 0.0
    matrix = torch.randn(5, 300)
    assert longest_row(matrix) >= float(matrix.double().norm(dim=1).max())
    drawn = uniform((1000,), torch.float32, torch.Generator().manual_seed(0), 2.0, 3.0)
    assert 2.0 <= float(drawn.min()) < 2.01 < 2.99 < float(drawn.max()) <= 3.0
