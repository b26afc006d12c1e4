"""Projections of one input as one product, of which each takes its part.

The forward of the class stays: the first projection that it calls computes the product of all, the
others find their parts, as long as the forward runs and the input is the same tensor.

Dimensions: I input features, O output features of all.
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
from interposer_models._adapt.forwards import one_input, own_forward
from interposer_models._adapt.module_forward import forward_of
from interposer_models._adapt.packed_weight import PackedWeight, Restore
from interposer_models._adapt.projections import (
    bound_name,
    call_of,
    fill,
    give_up,
    judge_projection,
    restore_of,
)
from interposer_ops.layers.linear import Linear, MergedLinear, PlainLinear


class _Held:
    """The product of one input, while the forward that wants its parts runs."""

    __slots__ = ("left", "out", "version", "x")

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.out: Tensor | None = None
        self.version = 0
        self.left = 0


class _Here(threading.local):
    """The state of the forward that runs in this thread."""

    held: _Held | None = None


class SharedProduct:
    """The product of several projections, computed once for an input within a forward.

    Args:
        kernel: called with the input and ``operands``, returns ``[..., O]``.
        num_parts: how many take a part of it.
    """

    def __init__(
        self, kernel: Callable[..., Tensor], operands: tuple[Any, ...], num_parts: int
    ) -> None:
        self._kernel, self._operands, self._num_parts = kernel, operands, num_parts
        self._here = _Here()
        self._traced: _Held | None = None

    def __deepcopy__(self, memo: object) -> SharedProduct:
        return self

    def part(self, start: int, end: int, x: Tensor) -> Tensor:
        """Return the outputs from ``start`` to ``end``, dense as a projection's are."""
        return self._product(x)[..., start:end].contiguous()

    def _product(self, x: Tensor) -> Tensor:
        compiling = is_compiling()
        held = self._traced if compiling else self._here.held
        if held is None:
            return self._kernel(x, *self._operands)
        # Nothing counts what is written to tensors of inference mode. The trace showed that the
        # class writes to none in between.
        version = 0 if compiling or x.is_inference() else x._version
        out = held.out
        if out is None or held.x is not x or held.version != version:
            out = self._kernel(x, *self._operands)
            held.x, held.out, held.version, held.left = x, out, version, self._num_parts
        held.left -= 1
        if not held.left:
            held.x = held.out = None
        return out

    def enter(self) -> _Held | None:
        """Let the product be shared until ``leave``, which gets what this returns."""
        if is_compiling():
            before, self._traced = self._traced, _Held()
        else:
            before, self._here.held = self._here.held, _Held()
        return before

    def leave(self, before: _Held | None) -> None:
        """Forget what was shared since ``enter``."""
        if is_compiling():
            self._traced = before
        else:
            self._here.held = before


def bind_merged(
    adaptation: Adaptation, module: nn.Module, name: str, group: tuple[str, ...]
) -> str | Verdict:
    """Bind projections of ``module`` that read one input as one product.

    Returns: the kernel's name.
    """
    own = forward_of(module)
    if own is None or own.scope is not None:
        return Verdict.refuse("the forward of this instance is replaced already")
    parts: list[Any] = [module._modules[label] for label in group]
    places = [f"{name}.{label}" if name else label for label in group]
    for part in parts:
        fit = adaptation.judge(part)
        if not fit:
            return fit
    weights: list[Tensor] = [part.weight for part in parts]
    dtype = weights[0].dtype
    if any(weight.dtype is not dtype for weight in weights):
        return Verdict.refuse("its projections differ in their dtype")
    layer = _layer(adaptation, name, dict(zip(group, parts, strict=True)), dtype)
    quantized = not isinstance(layer.method, PlainLinear)
    chosen, together = bound_name(layer), _kernels(adaptation, layer.prefix)
    for place, part in zip(places, parts, strict=True):
        alone = _alone(adaptation, place, part, dtype)
        if alone != together:
            listed = [", ".join(sorted(kernels)) or "no kernel" for kernels in (alone, together)]
            return Verdict.refuse(f"{place} runs on {listed[0]}, one product on {listed[1]}")
    fill(layer, weight=torch.cat([weight.data for weight in weights]), bias=_bias(parts))
    kernel, operands = call_of(layer)
    product = SharedProduct(kernel, operands, len(parts))
    restore = None if quantized else restore_of_merged(layer, operands)
    if restore is None and not quantized:
        return Verdict.refuse("its kernel gives no plain weights back, which would be held twice")
    whole = None
    if restore is not None:
        whole = _Whole(restore, sum(weight.shape[0] for weight in weights))
        whole.keep(weights[0])
    start = 0
    for place, part in zip(places, parts, strict=True):
        end = start + part.out_features
        forward = one_input(
            partial(product.part, start, end), (), own_forward(part), dtype, adaptation.device
        )
        back = None
        if whole is not None:
            back = partial(whole.part, start)
            verdict = judge_projection(part, forward, part.weight, part.weight.data, part.bias)
            if not verdict:
                return verdict
        packed = PackedWeight(part.weight, back, f"{place}.weight")
        verdict = give_up(adaptation, [(part, "weight")], part.weight, packed)
        if not verdict:
            return verdict
        adaptation.bind_forward(part, place, forward)
        others = ", ".join(label for label in group if module._modules[label] is not part)
        adaptation.hold(part, place, chosen, f"one product with {others}")
        start = end
    if whole is not None:
        whole.drop()
    adaptation.changes.set(own, "scope", product)
    adaptation.changes.set(own, "watched", group)
    adaptation.changes.set(module, "forward", own)
    adaptation.layers[tuple(map(id, parts))] = layer
    return chosen


def _layer(
    adaptation: Adaptation, name: str, parts: dict[str, Any], dtype: torch.dtype
) -> MergedLinear:
    """Return the standard layer for these projections, on the meta device."""
    label = "+".join(parts)
    site = adaptation.site(f"{name}.{label}" if name else label, dtype)
    sizes = {label: part.out_features for label, part in parts.items()}
    biased = any(part.bias is not None for part in parts.values())
    inputs = next(iter(parts.values())).in_features
    with torch.device("meta"):
        return MergedLinear(site, inputs, sizes, biased)


def _alone(adaptation: Adaptation, place: str, part: Any, dtype: torch.dtype) -> set[str]:
    """Return the kernels that a projection would run on by itself."""
    with torch.device("meta"):
        Linear(
            adaptation.site(place, dtype),
            part.in_features,
            part.out_features,
            part.bias is not None,
        )
    return _kernels(adaptation, place)


def _kernels(adaptation: Adaptation, place: str) -> set[str]:
    """Return the kernels that were chosen for a place."""
    chosen = adaptation.resolver.choices.values()
    return {kernel_name(choice) for choice, prefixes in chosen if place in prefixes}


def _bias(parts: list[Any]) -> Tensor | None:
    """Return the bias of all, zeros for those that have none; None if nobody has one."""
    if all(part.bias is None for part in parts):
        return None
    found = [
        part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.data
        for part in parts
    ]
    return torch.cat(found)


def restore_of_merged(layer: MergedLinear, operands: tuple[Any, ...]) -> Restore | None:
    """Return what fills a tensor with the plain weight of all, None where nothing does."""
    assert isinstance(layer.method, PlainLinear)
    found = restore_of(layer.method.bound, operands)
    if found is not None:
        return found
    # A kernel that packs nothing reads the weight as it was given.
    held = operands[0] if operands else None
    sizes = (sum(layer.parts.values()), layer.in_features)
    if isinstance(held, Tensor) and held.shape == sizes:
        return partial(_copied, held)
    return None


def _copied(held: Tensor, into: Tensor) -> None:
    into.copy_(held)


class _Whole:
    """The plain weight of all, of which each projection gets its rows back."""

    def __init__(self, restore: Restore, num_rows: int) -> None:
        self._restore = restore
        self._num_rows = num_rows
        self._kept: Tensor | None = None

    def keep(self, like: Tensor) -> None:
        """Make it once for all who ask until ``drop``."""
        self._kept = self._made(like)

    def drop(self) -> None:
        """Make it anew for everybody who asks from now on."""
        self._kept = None

    def part(self, start: int, into: Tensor) -> None:
        """Fill ``into`` with the rows from ``start`` on."""
        full = self._made(into) if self._kept is None else self._kept
        into.copy_(full[start : start + into.shape[0]])

    def _made(self, like: Tensor) -> Tensor:
        full = torch.empty(self._num_rows, like.shape[1], dtype=like.dtype, device=like.device)
        self._restore(full)
        return full
