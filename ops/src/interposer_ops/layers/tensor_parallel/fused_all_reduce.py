"""Fused all-reduce, residual add and RMSNorm after a row-parallel projection.

The projection skips its all-reduce and the next norm does the sum. If the communicator has no fused
method, ``all_reduce`` and the op ``fused_add_rms_norm`` run one after the other.

Dimensions: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as every_module

from interposer import Choice, Communicator, PluggableLayer, Site
from interposer.errors import NoCandidateError
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.tensor_parallel.collectives import AllReduce
from interposer_ops.layers.tensor_parallel.linear import RowParallelLinear

__all__ = ["FUSED_ALL_REDUCE", "FusedAllReduceNorm", "ends_in_projection", "fuse_all_reduce"]

FUSED_ALL_REDUCE = "all_reduce_add_rms_norm"
"""Name of the collective that does all-reduce, residual add and RMSNorm in one call."""


class FusedAllReduceNorm:
    """The all-reduce of a projection, done by the RMSNorm that follows.

    The projection does the all-reduce itself while a forward hook could see the difference.

    Attributes:
        between: layers that return the projection's result; a forward hook on one of them must see
            the sum.
        readers: layers whose input is the projection's result; a pre-hook on one must see the sum.
        is_paused: another layer reads the projection's result, too.
    """

    def __init__(
        self,
        all_reduce: AllReduce,
        fused: tuple[Any, ...],
        between: tuple[nn.Module, ...],
        readers: tuple[nn.Module, ...],
    ) -> None:
        self._all_reduce, self._fused = all_reduce, fused
        self.between, self.readers = between, readers
        self.is_paused = False

    def is_fused(self) -> bool:
        """Check whether the norm, rather than the projection, does the all-reduce now."""
        return not (
            self.is_paused
            # Hooks that were registered for every module see this one, too.
            or every_module._global_forward_hooks
            or every_module._global_forward_pre_hooks
            or any(module._forward_hooks for module in self.between)
            or any(module._forward_pre_hooks for module in self.readers)
        )

    def add_norm(self, norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Sum ``x`` over the ranks and add the residual; return ``(normalised stream, stream)``.

        ``x`` ``[T, H]`` is this rank's summand, and may be overwritten.
        """
        fused = self._fused[x.numel() > self._all_reduce.limit]
        if fused is None:
            return norm.add_norm(self._all_reduce(x), residual, norm.constants[1], norm.eps)  # type: ignore[no-any-return]
        return fused.all_reduce_add_rms_norm(x, residual, norm.weight, norm.eps)  # type: ignore[no-any-return]


def fuse_all_reduce(
    site: Site,
    projection: Linear,
    norm: Any,
    between: Iterable[nn.Module],
    readers: Iterable[nn.Module] = (),
) -> bool:
    """Move a projection's all-reduce to the next norm, if layers and communicator allow it.

    Args:
        site: site of the norm.
        norm: an ``RMSNorm`` that receives the residual stream.
        between, readers: attributes of the ``FusedAllReduceNorm``.
    Returns: whether the norm does the sum from now on.
    """
    if type(projection) is not RowParallelLinear or not norm.can_fuse_all_reduce:
        return False
    all_reduce = projection.all_reduce
    # Index 0: the communicator for few rows, index 1: for many rows.
    fused = tuple(_fused(site, all_reduce, index) for index in range(2))
    if fused == (None, None):
        return False
    fused_norm = FusedAllReduceNorm(all_reduce, fused, (projection, *between), (*readers,))
    projection.fused_all_reduce = norm.fused_all_reduce = (fused_norm,)
    return True


def ends_in_projection(part: nn.Module, standard: type[PluggableLayer]) -> bool:
    """Check whether a standard layer's own class declares ``ends_in_projection``."""
    return isinstance(part, standard) and bool(vars(type(part)).get("ends_in_projection"))


def _fused(site: Site, all_reduce: AllReduce, index: int) -> Communicator | None:
    """Return a communicator with fused all-reduce for few (0) or many (1) rows, or None."""
    choice = all_reduce.choices[index]
    if FUSED_ALL_REDUCE not in getattr(choice.chosen.record, "collectives", ()):
        _note_separate(site, choice, f"{choice.chosen.name} has no {FUSED_ALL_REDUCE}")
        return None
    try:
        fused, communicator = site.resolver.communicator(
            FUSED_ALL_REDUCE, all_reduce.dtype, all_reduce.num_bytes[index], site.prefix
        )
    except NoCandidateError as error:
        refusals = "; ".join(map(str, error.refusals))
        _note_separate(site, choice, f"{FUSED_ALL_REDUCE} was refused: {refusals}")
        return None
    # Fusing must not change the communicator that was chosen for the all-reduce.
    if fused.chosen.qualified_name != choice.chosen.qualified_name:
        _note_separate(site, choice, f"{FUSED_ALL_REDUCE} is that of {fused.chosen.name}")
        return None
    return communicator


def _note_separate(site: Site, all_reduce: Choice, reason: str) -> None:
    """Add a note to the all-reduce's choice: the reason why the norm is not fused with it."""
    resolver = cast("Any", site.resolver)
    note = f"the next norm is not fused with the all-reduce: {reason}"
    for key, (choice, _) in [*resolver.choices.items()]:
        if choice.request == all_reduce.request and note not in choice.notes:
            resolver.annotate(key, note)
