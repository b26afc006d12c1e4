"""Adapters in fused calls: what forward hooks add to the results of projections.

A hook on a projection has to run where the projection does, so that layers that have one do their
parts one by one. One that states its sum, as ``AddsLowRank`` says, is computed in the fused call.

Dimensions: T tokens, I inputs, O outputs of a part, A adapters, R rank, P parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ref

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

    __slots__ = ("_known", "_nothing", "_others", "_own", "projections")

    def __init__(self, projections: Iterable[nn.Module], others: Iterable[nn.Module]) -> None:
        self.projections = tuple(projections)
        self._others = ForwardHooks(others, before=self.projections)
        self._own: tuple[Any, ...] = tuple(m._forward_hooks for m in self.projections)
        self._nothing = Added((0,) * len(self._own), None)
        # References to hooks with their places, and what was read of them.
        self._known: tuple[tuple[Any, ...], Any] = ((), None)

    def __reduce__(self) -> tuple[type[ProductHooks], tuple[Any, ...]]:
        """Let a copy look at the copies of the modules."""
        return ProductHooks, (self.projections, self._others.modules)

    @property
    def dicts(self) -> tuple[Any, ...]:
        """All hooks; none is true where there is no hook."""
        return *self._others.dicts, *self._own

    def added(self) -> Added | None:
        """Return what is added to each projection; None where a hook does something else."""
        if any(self._others.dicts):
            return None
        if not any(self._own):
            return self._nothing
        hooks = [(place, hook) for place, own in enumerate(self._own) for hook in own.values()]
        known, held = self._known
        if len(known) != len(hooks) or not all(map(_is_known, known, hooks)):
            held = self._read()
            self._known = tuple((place, _reference(hook)) for place, hook in hooks), held
        return None if held is None else Added(held[0], hooks[0][1])

    def _read(self) -> tuple[tuple[int, ...], list[torch.Tensor]] | None:
        """Return addresses, and the memory that they are of; None where a hook does more."""
        addresses, memory = [], []
        for hooks in self._own:
            words = [_words_of(hook) for hook in hooks.values()]
            if len(words) > 1 or any(one is None for one in words):
                return None
            memory += words
            addresses.append(words[0].data_ptr() if words else 0)  # type: ignore[union-attr]
        return tuple(addresses), memory  # type: ignore[return-value]


def _reference(hook: Any) -> Callable[[], Any]:
    """Return a call that returns a hook as long as it is there."""
    try:
        return ref(hook)
    except TypeError:  # such as a function that is built in
        return lambda: None


def _is_known(known: tuple[int, Callable[[], Any]], found: tuple[int, Any]) -> bool:
    return known[0] == found[0] and known[1]() is found[1]


def _words_of(hook: Any) -> torch.Tensor | None:
    """Return an interposer_low_rank, None where a hook states none of the library's kernels."""
    low_rank: LowRankSum | None = getattr(hook, "low_rank", None)
    if low_rank is None or not is_declared(low_rank.shrink, "lora_shrink"):
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
