"""Comparison of a result with what was expected of it: its values, and its form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree

from interposer_testing._checks.fault import Fault


def compare_value(
    where: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    bound: torch.Tensor,
    *,
    exact: bool = False,
) -> Iterator[Fault]:
    """Yield a fault if an element is farther from ``expected`` than ``bound``.

    NaN and infinities must stand exactly where they are expected, and so must the signs of zeros
    if ``exact``.

    Args:
        actual: any shape and dtype.
        expected: shape of ``actual``, float64 or an integer dtype.
        bound: shape of ``actual``.
    """
    if not expected.dtype.is_floating_point:
        actual, expected = actual.cpu(), expected.cpu()
        wrong = actual != expected
        if wrong.any():
            place = _index(wrong)
            found, wanted = actual[place].item(), expected[place].item()
            yield Fault(
                "value", where, f"{wanted} expected at {list(place)}, got {found}; {_share(wrong)}"
            )
        return
    found64 = actual.cpu().double()
    error = (found64 - expected).abs()
    same = (found64 == expected) | (found64.isnan() & expected.isnan())
    wrong = ~same & ~((error <= bound) & expected.isfinite())
    if not wrong.any():
        flipped = same & (found64.signbit() != expected.signbit()) & ~expected.isnan()
        if exact and flipped.any():
            place = _index(flipped)
            found, wanted = float(found64[place]), float(expected[place])
            reason = f"{wanted} expected at {list(place)}, got {found}; {_share(flipped)}"
            yield Fault("value", where, reason)
        return
    not_finite = wrong & ~(found64.isfinite() & expected.isfinite())
    if not_finite.any():
        place = _index(not_finite)
        found, wanted = float(found64[place]), float(expected[place])
        reason = f"{wanted} expected at {list(place)}, got {found}; {_share(not_finite)}"
        yield Fault("value", where, reason)
        return
    place = _index((error - bound) == (error - bound).nan_to_num(-torch.inf).max())
    yield Fault(
        "value",
        where,
        f"{float(expected[place]):.6g} expected at {list(place)}, got {float(found64[place]):.6g}; "
        f"the error {float(error[place]):.2e} is above the bound {float(bound[place]):.2e}; "
        f"{_share(wrong)}",
        float(error[place]),
        float(bound[place]),
    )


def compare_form(actual: Any, fake: Any, device_type: str = "") -> Iterator[Fault]:
    """Yield a fault wherever a result differs from the fake one in structure or form.

    The form of a tensor is its shape, dtype, device and stride; a stride counts only along
    dimensions of more than one element.

    Args:
        device_type: where tensors have to be, if not where the fake ones are.
    """
    found, found_tree = _pytree.tree_flatten(actual)
    wanted, wanted_tree = _pytree.tree_flatten(fake)
    if found_tree != wanted_tree or [type(v) for v in found if not _is_tensor(v)] != [
        type(v) for v in wanted if not _is_tensor(v)
    ]:
        yield Fault("structure", "result", f"{_outline(fake)} expected, got {_outline(actual)}")
        return
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if _is_tensor(one) and _is_tensor(other):
            wanted_type = device_type or other.device.type
            yield from _compare_tensor_form(f"output {number}", one, other, wanted_type)


def _compare_tensor_form(
    where: str, found: torch.Tensor, fake: torch.Tensor, device_type: str
) -> Iterator[Fault]:
    if found.shape != fake.shape:
        yield Fault("shape", where, f"{list(fake.shape)} expected, got {list(found.shape)}")
        return
    if found.dtype != fake.dtype:
        yield Fault("dtype", where, f"{fake.dtype} expected, got {found.dtype}")
    if found.device.type != device_type:
        yield Fault("structure", where, f"on {device_type} expected, got one on {found.device}")
    if found.numel() and _strides(found) != _strides(fake):
        yield Fault("stride", where, f"{fake.stride()} expected, got {found.stride()}")


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _outline(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_outline(part) for part in value)
    return type(value).__name__


def _strides(tensor: torch.Tensor) -> list[int]:
    return [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _index(mask: torch.Tensor) -> tuple[int, ...]:
    """Return the place of the first true element."""
    return tuple(int(i) for i in mask.nonzero()[0])


def _share(wrong: torch.Tensor) -> str:
    return f"{int(wrong.sum())} of {wrong.numel()} wrong"
