"""Comparison of a result with the expected values, structure, shape, dtype and strides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree

from interposer_testing._checks.fault import Fault
from interposer_testing._checks.remote_value import RemoteValue


def compare_value(
    where: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    error_bound: torch.Tensor,
    *,
    exact: bool = False,
) -> Iterator[Fault]:
    """Yield a fault if the error of an element is above ``error_bound``.

    Expected NaN and infinities must be matched exactly.

    Args:
        exact: the signs of zeros must be equal too.
        actual: any shape and dtype.
        expected: shape of ``actual``, float64 or an integer dtype.
        error_bound: largest allowed absolute error, shape of ``actual``.
    """
    if not expected.dtype.is_floating_point:
        actual, expected = actual.cpu(), expected.cpu()
        is_wrong = actual != expected
        if is_wrong.any():
            yield Fault("value", where, _first_difference(actual, expected, is_wrong))
        return
    actual64 = actual.cpu().double()
    error = (actual64 - expected).abs()
    is_equal = (actual64 == expected) | (actual64.isnan() & expected.isnan())
    is_wrong = ~is_equal & ~((error <= error_bound) & expected.isfinite())
    if not is_wrong.any():
        # ``==`` treats 0.0 and -0.0 as equal, so compare signs separately.
        is_flipped = is_equal & (actual64.signbit() != expected.signbit()) & ~expected.isnan()
        if exact and is_flipped.any():
            yield Fault("value", where, _first_difference(actual64, expected, is_flipped))
        return
    # For NaN and infinities, an error and a bound would say nothing.
    is_not_finite = is_wrong & ~(actual64.isfinite() & expected.isfinite())
    if is_not_finite.any():
        yield Fault("value", where, _first_difference(actual64, expected, is_not_finite))
        return
    # Report the element that exceeds its bound most.
    index = _first_index(
        (error - error_bound) == (error - error_bound).nan_to_num(-torch.inf).max()
    )
    value, expected_value = float(actual64[index]), float(expected[index])
    yield Fault(
        "value",
        where,
        f"{expected_value:.6g} expected at {list(index)}, got {value:.6g}; "
        f"the error {float(error[index]):.2e} is above the bound {float(error_bound[index]):.2e}; "
        f"{_num_wrong(is_wrong)}",
        float(error[index]),
        float(error_bound[index]),
    )


def compare_form(actual: Any, fake: Any, device_type: str = "") -> Iterator[Fault]:
    """Yield a fault for each difference of structure or form between ``actual`` and ``fake``.

    The form of a tensor means shape, dtype, device and strides. Strides are compared only for
    dimensions with more than one element.

    Args:
        device_type: the expected device type of tensors; empty for the device of ``fake``.
    """
    leaves, tree = _pytree.tree_flatten(actual)
    fake_leaves, fake_tree = _pytree.tree_flatten(fake)
    if tree != fake_tree or [type(v) for v in leaves if not _is_tensor(v)] != [
        type(v) for v in fake_leaves if not _is_tensor(v)
    ]:
        yield Fault("structure", "result", f"{_outline(fake)} expected, got {_outline(actual)}")
        return
    for number, (leaf, fake_leaf) in enumerate(zip(leaves, fake_leaves, strict=True)):
        if _is_tensor(leaf) and _is_tensor(fake_leaf):
            expected_type = device_type or fake_leaf.device.type
            yield from _compare_tensor_form(f"output {number}", leaf, fake_leaf, expected_type)


def _compare_tensor_form(
    where: str, actual: torch.Tensor, fake: torch.Tensor, device_type: str
) -> Iterator[Fault]:
    if type(actual) not in (torch.Tensor, torch.nn.Parameter):
        # A subclass may compute when it is looked at, and then look right to a comparison.
        reason = f"a plain torch.Tensor expected, got a {type(actual).__qualname__}"
        yield Fault("structure", where, reason)
        return
    if actual.shape != fake.shape:
        yield Fault("shape", where, f"{list(fake.shape)} expected, got {list(actual.shape)}")
        return
    if actual.dtype != fake.dtype:
        yield Fault("dtype", where, f"{fake.dtype} expected, got {actual.dtype}")
    if actual.device.type != device_type:
        yield Fault("structure", where, f"on {device_type} expected, got one on {actual.device}")
    if actual.numel() and _strides(actual) != _strides(fake):
        yield Fault("stride", where, f"{fake.stride()} expected, got {actual.stride()}")


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _outline(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_outline(part) for part in value)
    return value.kind if isinstance(value, RemoteValue) else type(value).__name__


def _strides(tensor: torch.Tensor) -> list[int]:
    # The stride of a dimension with one element has no effect, and torch sets it arbitrarily.
    return [s for size, s in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _first_index(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _first_difference(actual: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> str:
    """Describe the first element that ``mask`` selects, and the number of selected elements."""
    index = _first_index(mask)
    value, expected_value = actual[index].item(), expected[index].item()
    return f"{expected_value} expected at {list(index)}, got {value}; {_num_wrong(mask)}"


def _num_wrong(mask: torch.Tensor) -> str:
    return f"{int(mask.sum())} of {mask.numel()} wrong"
