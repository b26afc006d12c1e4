"""Adapters in fused calls: what forward hooks add to the results of projections.

A hook on a projection has to run where the projection does, so that layers that have one do their
parts one by one. One that states its sum, as ``AddsLowRank`` says, is computed in the fused call.

Dimensions: T tokens, I inputs, O outputs of a part, A adapters, R rank, P parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from interposer_cpu._kernels.fusion import ForwardHooks, is_declared
from interposer_cpu._kernels.interface import TYPES

_MOST_PARTS = 8  # as kMostParts


class LowRankSum(Protocol):
    """Kernels of a sum with their operands.

    Attributes:
        shrink: of the op ``lora_shrink``.
        first: its prepared matrices, ``[A, P R, I]``.
        expansions: of each part the kernel of ``lora_expand``, its prepared matrices
            ``[A, R, O]``, and the first column that it adds to.
    """

    shrink: Callable[..., Any]
    first: torch.Tensor
    expansions: Sequence[tuple[Callable[..., Any], torch.Tensor, int]]


class AddsLowRank(Protocol):
    """A forward hook that only adds a sum to the result of its layer, as its input says.

    Attributes:
        low_rank: the sum; None where there is more to it.
    """

    low_rank: LowRankSum | None

    def adapter_ids(self, num_rows: int) -> torch.Tensor:
        """Return the adapter of each row that the layer computes, ``[num_rows]`` int64."""
        ...


class Added(NamedTuple):
    """Addresses of interposer_low_rank by projection, 0 without, and a hook that knows rows."""

    addresses: tuple[int, ...]
    hook: AddsLowRank | None

    def ids(self, num_rows: int) -> int:
        """Return the address of the adapters of rows, 0 where nothing is added."""
        return 0 if self.hook is None else self.hook.adapter_ids(num_rows).data_ptr()


class ProductHooks:
    """The hooks of a fused call: of its projections, which may add, and of all else in it."""

    __slots__ = ("_nothing", "_others", "_own", "projections")

    def __init__(self, projections: Iterable[nn.Module], others: Iterable[nn.Module]) -> None:
        self.projections = tuple(projections)
        self._others = ForwardHooks(others, before=self.projections)
        self._own: tuple[Any, ...] = tuple(m._forward_hooks for m in self.projections)
        self._nothing = Added((0,) * len(self._own), None)

    def __reduce__(self) -> tuple[type[ProductHooks], tuple[Any, ...]]:
        """Let a copy look at the copies of the modules."""
        return ProductHooks, (self.projections, self._others.modules)

    def added(self) -> Added | None:
        """Return what is added to each projection; None where a hook does something else."""
        if any(self._others.dicts):
            return None
        if not any(self._own):
            return self._nothing
        addresses = []
        user = None
        for hooks in self._own:
            address = 0
            if hooks:
                (hook, *more) = hooks.values()
                if more or not (address := _address_of(hook)):
                    return None
                user = hook
            addresses.append(address)
        return Added(tuple(addresses), user)


# As long as the hooks are there.
_WORDS: WeakKeyDictionary[Any, torch.Tensor | None] = WeakKeyDictionary()


def _address_of(hook: Any) -> int:
    """Return the address of an interposer_low_rank, 0 where a hook states none that is known."""
    low_rank: LowRankSum | None = getattr(hook, "low_rank", None)
    if low_rank is None:
        return 0
    if hook not in _WORDS:
        _WORDS[hook] = _words_of(low_rank)
    words = _WORDS[hook]
    return 0 if words is None else words.data_ptr()


def _words_of(low_rank: LowRankSum) -> torch.Tensor | None:
    """Return an interposer_low_rank, None where kernels are not those of the library."""
    if not is_declared(low_rank.shrink, "lora_shrink"):
        return None
    first, parts = low_rank.first, low_rank.expansions
    if len(parts) > _MOST_PARTS:
        return None
    words = [first.data_ptr(), TYPES[first.dtype], first.shape[1] // len(parts), first.shape[2]]
    words.append(len(parts))
    for expand, second, offset in parts:
        if not is_declared(expand, "lora_expand"):
            return None
        words += [second.data_ptr(), second.shape[2], offset]
    return torch.tensor(words, dtype=torch.int64)
