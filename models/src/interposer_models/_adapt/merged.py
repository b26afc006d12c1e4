"""Projections of one input, computed as one matmul.

The forward of the class stays. The first projection that the class calls computes the merged
matmul; the other projections return slices of the result, while the forward runs and the input is
the same tensor.

Dimensions: I input features, O output features of all projections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from interposer import Verdict
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.forwards import class_forward, forward_one_input
from interposer_models._adapt.module_forward import forward_of
from interposer_models._adapt.packed_weight import PackedWeight, Restore
from interposer_models._adapt.projections import (
    check_projection,
    find_restore,
    kernel_call,
    layer_kernel_name,
    release_weight,
    set_weights,
)
from interposer_ops.layers.linear import Linear, MergedLinear, PlainLinear


class _MatmulResult:
    """The merged result for one input; valid while the forward runs."""

    __slots__ = ("num_unread_parts", "out", "version", "x")

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.out: Tensor | None = None
        self.version = 0
        self.num_unread_parts = 0


class _ThreadState(threading.local):
    """The result cached by the forward that runs in this thread."""

    result: _MatmulResult | None = None


class SharedMatmul:
    """A merged matmul that is computed once for each input within a forward.

    Args:
        kernel: called with the input and ``operands``, returns ``[..., O]``.
        num_parts: the number of projections that read a slice of the result.
    """

    def __init__(
        self, kernel: Callable[..., Tensor], operands: tuple[Any, ...], num_parts: int
    ) -> None:
        self._kernel, self._operands, self._num_parts = kernel, operands, num_parts
        self._state = _ThreadState()
        self._traced: _MatmulResult | None = None

    def __deepcopy__(self, memo: object) -> SharedMatmul:
        return self

    def part(self, start: int, end: int, x: Tensor) -> Tensor:
        """Compute the outputs from ``start`` to ``end``, contiguous as a projection's."""
        return self._matmul(x)[..., start:end].contiguous()

    def _matmul(self, x: Tensor) -> Tensor:
        compiling = is_compiling()
        result = self._traced if compiling else self._state.result
        if result is None:
            return self._kernel(x, *self._operands)
        # Inference tensors have no version counter. The trace showed that the class does not write
        # to the input between the projections.
        version = 0 if compiling or x.is_inference() else x._version
        out = result.out
        if out is None or result.x is not x or result.version != version:
            out = self._kernel(x, *self._operands)
            result.x, result.out, result.version = x, out, version
            result.num_unread_parts = self._num_parts
        result.num_unread_parts -= 1
        if not result.num_unread_parts:
            result.x = result.out = None
        return out

    def enter(self) -> _MatmulResult | None:
        """Cache results until ``exit``, and return the state for ``exit``."""
        if is_compiling():
            previous, self._traced = self._traced, _MatmulResult()
        else:
            previous, self._state.result = self._state.result, _MatmulResult()
        return previous

    def exit(self, previous: _MatmulResult | None) -> None:
        """Discard the results cached since ``enter``."""
        if is_compiling():
            self._traced = previous
        else:
            self._state.result = previous


def bind_merged(
    adaptation: Adaptation, module: nn.Module, name: str, group: tuple[str, ...]
) -> str | Verdict:
    """Bind projections of ``module`` that read the same input as one matmul.

    Returns: the kernel's name.
    """
    module_forward = forward_of(module)
    if module_forward is None or module_forward.scope is not None:
        return Verdict.refuse("the forward of this instance is replaced already")
    parts: list[Any] = [module._modules[label] for label in group]
    names = [f"{name}.{label}" if name else label for label in group]
    for part in parts:
        verdict = adaptation.check_module(part)
        if not verdict:
            return verdict
    weights: list[Tensor] = [part.weight for part in parts]
    dtype = weights[0].dtype
    if any(weight.dtype is not dtype for weight in weights):
        return Verdict.refuse("its projections differ in their dtype")
    layer = _merged_layer(adaptation, name, dict(zip(group, parts, strict=True)), dtype)
    quantized = not isinstance(layer.method, PlainLinear)
    kernel, merged_kernels = layer_kernel_name(layer), _kernels_at(adaptation, layer.prefix)
    for part_name, part in zip(names, parts, strict=True):
        # A merged site has other sizes and another name, so that rules or measurements may select
        # another kernel. Merging must not change the selection.
        unmerged_kernels = _kernels_without_merging(adaptation, part_name, part, dtype)
        if unmerged_kernels != merged_kernels:
            listed = [
                ", ".join(sorted(kernels)) or "no kernel"
                for kernels in (unmerged_kernels, merged_kernels)
            ]
            return Verdict.refuse(f"{part_name} runs on {listed[0]}, one product on {listed[1]}")
    set_weights(
        layer, weight=torch.cat([weight.data for weight in weights]), bias=_merged_bias(parts)
    )
    function, operands = kernel_call(layer)
    matmul = SharedMatmul(function, operands, len(parts))
    restore = None if quantized else find_merged_restore(layer, operands)
    if restore is None and not quantized:
        return Verdict.refuse(
            "its kernel cannot restore the plain weights, which would stay in memory twice"
        )
    merged_weight = None
    if restore is not None:
        merged_weight = _MergedWeight(restore, sum(weight.shape[0] for weight in weights))
        # The checks below restore each projection: one restore of the merged weight serves all of
        # them.
        merged_weight.cache(weights[0])
    start = 0
    for part_name, part in zip(names, parts, strict=True):
        end = start + part.out_features
        forward = forward_one_input(
            partial(matmul.part, start, end), (), class_forward(part), dtype, adaptation.device
        )
        part_restore = None
        if merged_weight is not None:
            part_restore = partial(merged_weight.part, start)
            verdict = check_projection(part, forward, part.weight, part.weight.data, part.bias)
            if not verdict:
                return verdict
        packed = PackedWeight(part.weight, part_restore, f"{part_name}.weight")
        verdict = release_weight(adaptation, [(part, "weight")], part.weight, packed)
        if not verdict:
            return verdict
        adaptation.bind_forward(part, part_name, forward)
        other_labels = ", ".join(label for label in group if module._modules[label] is not part)
        adaptation.mark_bound(part, part_name, kernel, f"one product with {other_labels}")
        start = end
    if merged_weight is not None:
        merged_weight.clear()
    adaptation.changes.set(module_forward, "scope", matmul)
    adaptation.changes.set(module_forward, "watched_children", group)
    adaptation.changes.set(module, "forward", module_forward)
    adaptation.layers_by_modules[tuple(map(id, parts))] = layer
    return kernel


def _merged_layer(
    adaptation: Adaptation, name: str, parts: dict[str, Any], dtype: torch.dtype
) -> MergedLinear:
    """Return the standard layer for the projections, on the meta device."""
    label = "+".join(parts)
    site = adaptation.site(f"{name}.{label}" if name else label, dtype)
    sizes = {label: part.out_features for label, part in parts.items()}
    has_bias = any(part.bias is not None for part in parts.values())
    in_features = next(iter(parts.values())).in_features
    with torch.device("meta"):
        return MergedLinear(site, in_features, sizes, has_bias)


def _kernels_without_merging(
    adaptation: Adaptation, name: str, projection: Any, dtype: torch.dtype
) -> set[str]:
    """Return the kernels that the projection would run on without merging."""
    with torch.device("meta"):
        Linear(
            adaptation.site(name, dtype),
            projection.in_features,
            projection.out_features,
            projection.bias is not None,
        )
    return _kernels_at(adaptation, name)


def _kernels_at(adaptation: Adaptation, name: str) -> set[str]:
    """Return the kernels that the resolver chose for the site ``name``."""
    choices = adaptation.resolver.choices.values()
    return {kernel_name(choice) for choice, prefixes in choices if name in prefixes}


def _merged_bias(parts: list[Any]) -> Tensor | None:
    """Return the concatenated bias, zeros for projections without one; None if all lack one."""
    if all(part.bias is None for part in parts):
        return None
    biases = [
        part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.data
        for part in parts
    ]
    return torch.cat(biases)


def find_merged_restore(layer: MergedLinear, operands: tuple[Any, ...]) -> Restore | None:
    """Return a function that restores the plain merged weight, None if the kernel cannot."""
    assert isinstance(layer.method, PlainLinear)
    restore = find_restore(layer.method.bound, operands)
    if restore is not None:
        return restore
    # A kernel that does not pack still holds the plain weight as an operand.
    weight = operands[0] if operands else None
    sizes = (sum(layer.parts.values()), layer.in_features)
    if isinstance(weight, Tensor) and weight.shape == sizes:
        return partial(_copy_into, weight)
    return None


def _copy_into(weight: Tensor, into: Tensor) -> None:
    into.copy_(weight)


class _MergedWeight:
    """The plain merged weight; each projection restores its rows from a slice."""

    def __init__(self, restore: Restore, num_rows: int) -> None:
        self._restore = restore
        self._num_rows = num_rows
        self._cached: Tensor | None = None

    def cache(self, like: Tensor) -> None:
        """Restore the weight once for all reads until ``clear``."""
        self._cached = self._restore_all(like)

    def clear(self) -> None:
        """Restore the weight anew for each later read."""
        self._cached = None

    def part(self, start: int, into: Tensor) -> None:
        """Fill ``into`` with the rows from ``start`` on."""
        merged = self._restore_all(into) if self._cached is None else self._cached
        into.copy_(merged[start : start + into.shape[0]])

    def _restore_all(self, like: Tensor) -> Tensor:
        merged = torch.empty(self._num_rows, like.shape[1], dtype=like.dtype, device=like.device)
        self._restore(merged)
        return merged
