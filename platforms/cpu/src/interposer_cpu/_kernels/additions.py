"""LoRA in fused calls: forward hooks that add a low-rank matmul to a projection's result.

A forward hook must run right after the projection, so a layer with an unknown hook calls all parts
one by one. A hook that declares LoRA kernels, see ``AddsLowRank``, becomes part of the fused call.

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

_MOST_PARTS = 8  # same as kMostParts in native code


class LowRankSum(Protocol):
    """LoRA of one projection: kernels and matrices, for each part (q, k, v) of the projection.

    Attributes:
        shrink: kernel of the op ``lora_shrink``.
        first: prepared matrices of ``shrink``, ``[A, P R, I]``.
        expansions: for each part, the kernel of ``lora_expand``, its prepared matrices
            ``[A, R, O]``, and the first output column of the part.
    """

    shrink: Callable[..., Any]
    first: torch.Tensor
    expansions: Sequence[tuple[Callable[..., Any], torch.Tensor, int]]


class AddsLowRank(Protocol):
    """Interface of a forward hook that only adds a LoRA result to the layer's result.

    Attributes:
        low_rank: the kernels and matrices; None if the hook does anything else.
    """

    low_rank: LowRankSum | None

    def adapter_ids(self, num_rows: int) -> torch.Tensor:
        """Return the adapter id of each row of the layer's input, ``[num_rows]`` int64."""
        ...


class LoraArguments(NamedTuple):
    """LoRA arguments of a fused call: address of the LoRA struct per projection, and one hook.

    Any of the hooks will do: all hooks of a model agree on the adapter of a row.
    """

    addresses: tuple[int, ...]
    hook: AddsLowRank | None

    def ids(self, num_rows: int) -> int:
        """Return the address of the adapter ids of the rows; 0 without LoRA."""
        return 0 if self.hook is None else self.hook.adapter_ids(num_rows).data_ptr()


class ProjectionHooks:
    """Forward hooks of the modules in a fused call, with the LoRA that hooks declare.

    Hooks of projections can be LoRA. A hook of any other module prevents the fused call.
    """

    __slots__ = ("_by_projection", "_cache", "_others", "_without_lora", "projections")

    def __init__(
        self, projections: Iterable[nn.Module], other_modules: Iterable[nn.Module]
    ) -> None:
        self.projections = tuple(projections)
        self._others = ForwardHooks(other_modules, before=self.projections)
        self._by_projection: tuple[Any, ...] = tuple(m._forward_hooks for m in self.projections)
        self._without_lora = LoraArguments((0,) * len(self._by_projection), None)
        # Weak references to the hooks with their projections' indices, and the result of _read().
        self._cache: tuple[tuple[Any, ...], Any] = ((), None)

    def __reduce__(self) -> tuple[type[ProjectionHooks], tuple[Any, ...]]:
        """Rebuild the object from the copied modules when a layer is copied."""
        return ProjectionHooks, (self.projections, self._others.modules)

    @property
    def dicts(self) -> tuple[Any, ...]:
        """All forward-hook dictionaries; every one is empty if there is no hook."""
        return *self._others.dicts, *self._by_projection

    def lora(self) -> LoraArguments | None:
        """Return the LoRA arguments of the projections; None if a hook is not LoRA."""
        if any(self._others.dicts):
            return None
        if not any(self._by_projection):
            return self._without_lora
        hooks = [
            (index, hook)
            for index, projection_hooks in enumerate(self._by_projection)
            for hook in projection_hooks.values()
        ]
        cached_hooks, cached = self._cache
        if len(cached_hooks) != len(hooks) or not all(map(_is_same, cached_hooks, hooks)):
            cached = self._read()
            self._cache = tuple((index, _reference(hook)) for index, hook in hooks), cached
        return None if cached is None else LoraArguments(cached[0], hooks[0][1])

    def _read(self) -> tuple[tuple[int, ...], list[torch.Tensor]] | None:
        """Build the LoRA structs of all projections; None if a hook is not LoRA.

        Returns: addresses of the structs, and the tensors that own the memory.
        """
        # One hook per projection at most: the call adds one low-rank product.
        addresses, memory = [], []
        for hooks in self._by_projection:
            structs = [_low_rank_struct(hook) for hook in hooks.values()]
            if len(structs) > 1 or any(struct is None for struct in structs):
                return None
            memory += structs
            addresses.append(structs[0].data_ptr() if structs else 0)  # type: ignore[union-attr]
        return tuple(addresses), memory  # type: ignore[return-value]


def _reference(hook: Any) -> Callable[[], Any]:
    """Return a weak reference to a hook, or a dead reference if the hook supports none."""
    try:
        return ref(hook)
    except TypeError:  # for example a built-in function
        return lambda: None


def _is_same(cached: tuple[int, Callable[[], Any]], current: tuple[int, Any]) -> bool:
    return cached[0] == current[0] and cached[1]() is current[1]


def _low_rank_struct(hook: Any) -> torch.Tensor | None:
    """Build the native LoRA struct of a hook; None if the hook uses other LoRA kernels."""
    low_rank: LowRankSum | None = getattr(hook, "low_rank", None)
    if low_rank is None or not is_declared(low_rank.shrink, "lora_shrink"):
        return None
    first, parts = low_rank.first, low_rank.expansions
    if len(parts) > _MOST_PARTS:
        return None
    fields = [first.data_ptr(), TYPES[first.dtype], first.shape[1] // len(parts), first.shape[2]]
    fields.append(len(parts))
    for expand, second, offset in parts:
        if not is_declared(expand, "lora_expand"):
            return None
        fields += [second.data_ptr(), second.shape[2], offset]
    return torch.tensor(fields, dtype=torch.int64)
