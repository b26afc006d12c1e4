"""Every value of every axis leads where no other does: a kernel could be wrong there alone.

A kernel sees nothing of a case but its arguments. So a value is worth its cases only if it has
arguments, by form or by the kind of their numbers, that no case without it has.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.landing import landing_sample

from interposer import CustomOp, OpEntry
from interposer.records import load_target
from interposer_ops import plugin
from interposer_testing.cases import CaseSpace

SPACES: dict[str, CaseSpace] = {}
for record in plugin.interposer_records():
    if isinstance(record, OpEntry):
        op: CustomOp[..., Any] = load_target(record.target)
        assert isinstance(op.cases, CaseSpace)
        SPACES[record.name] = op.cases


def scale_of(number: float, step: float) -> int | None:
    """Return the power of two of a size, so coarsely that chance seldom changes it."""
    return round(math.log2(number) / step) if number else None


def kind_of_floats(tensor: torch.Tensor) -> tuple[Any, ...]:
    wide = tensor.double()
    finite = wide[wide.isfinite()]
    rows = wide.reshape(-1, wide.shape[-1]) if wide.ndim else wide[None, None]
    kind = (
        bool(wide.isnan().any()),
        bool((wide == math.inf).any()),
        bool((wide == -math.inf).any()),
        bool((~rows.isfinite()).all(1).any()),
    )
    if not len(finite):
        return kind
    sizes = finite.abs()
    positive = sizes[sizes > 0]
    median = float(positive.median()) if len(positive) else 0.0
    smallest = torch.finfo(tensor.dtype).smallest_normal
    return (
        *kind,
        bool((finite >= 0).all()),
        bool((finite <= 0).all()),
        bool((sizes == 0).any()),
        bool(((finite == 0) & finite.signbit()).any()),
        bool((positive < smallest).any()),
        bool((finite == finite[0]).all()),
        scale_of(float(sizes.max()), 3),
        scale_of(median, 3),
        scale_of(len(finite.unique()) / len(finite), 2),
    )


def kind_of_integers(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.long().flatten()
    low, high = int(flat.min()), int(flat.max())
    return (
        low < 0,
        low.bit_length(),
        high.bit_length(),
        bool((flat.diff() >= 0).all()),
        scale_of(len(flat.unique()) / len(flat), 1),
    )


def described(value: Any) -> Any:
    """Return the properties of an argument that a kernel can distinguish."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    if not value.numel():
        return tuple(value.shape), value.dtype
    kind = kind_of_floats if value.is_floating_point() else kind_of_integers
    form = tuple(value.shape), value.dtype, value.stride(), value.storage_offset()
    return form, kind(value)


@pytest.mark.landing(3)
@pytest.mark.parametrize("name", landing_sample(SPACES, every=3))
def test_every_value_of_an_axis_yields_its_own_arguments(name: str) -> None:
    space = SPACES[name]
    # Of another dtype than float32, which tells what is stored in float32 from the rest.
    dtype = space.dtypes[:2][-1]
    cases = [
        (point, tuple(map(described, space.build(point, dtype, 0).arguments.values())))
        for point in space.points(dtype)
    ]
    useless = []
    for axis in space.axes:
        for label in axis.values:
            other_arguments = {
                arguments for point, arguments in cases if point.labels[axis.name] != label
            }
            arguments_of_value = (
                arguments for point, arguments in cases if point.labels[axis.name] == label
            )
            if all(arguments in other_arguments for arguments in arguments_of_value):
                useless.append((axis.name, label))
    assert useless == []
