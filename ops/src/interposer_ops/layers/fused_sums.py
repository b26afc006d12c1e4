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
from interposer_ops.layers.divided_linear import AllReduce, RowLinear
from interposer_ops.layers.linear import Linear

__all__ = ["FUSED_SUM", "LeftSum", "ends_in_projection", "leave_sum"]

FUSED_SUM = "all_reduce_add_rms_norm"
"""Name of the collective that does all-reduce, residual add and RMSNorm in one call."""


class LeftSum:
    """The all-reduce of a projection, moved to the norm that follows.

    The projection does the sum itself while a forward hook could see the difference.

    Attributes:
        between: layers that return the projection's result; a forward hook on one of them must see
            the sum.
        readers: layers whose input is the projection's result; a pre-hook on one must see the sum.
        is_paused: another layer reads the projection's result, too.
    """

    def __init__(
        self,
        sum_alone: AllReduce,
        fused: tuple[Any, ...],
        between: tuple[nn.Module, ...],
        readers: tuple[nn.Module, ...],
    ) -> None:
        self._sum_alone, self._fused = sum_alone, fused
        self.between, self.readers = between, readers
        self.is_paused = False

    def is_left(self) -> bool:
        """Check whether the norm does the sum, rather than the projection."""
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
        fused = self._fused[x.numel() > self._sum_alone.limit]
        if fused is None:
            return norm.add_norm(self._sum_alone(x), residual, norm.constants[1], norm.eps)  # type: ignore[no-any-return]
        return fused.all_reduce_add_rms_norm(x, residual, norm.weight, norm.eps)  # type: ignore[no-any-return]


def leave_sum(
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
        between, readers: attributes of the ``LeftSum``.
    Returns: whether the norm does the sum from now on.
    """
    if type(projection) is not RowLinear or not norm.takes_sums:
        return False
    reduce_alone = projection.reduce_alone
    # Index 0: the communicator for few rows, index 1: for many rows.
    fused = tuple(_fused(site, reduce_alone, index) for index in range(2))
    if fused == (None, None):
        return False
    left_sum = LeftSum(reduce_alone, fused, (projection, *between), (*readers,))
    projection.left = norm.left = (left_sum,)
    return True


def ends_in_projection(part: nn.Module, standard: type[PluggableLayer]) -> bool:
    """Check whether a layer's own class declares that its last projection gives its result."""
    return isinstance(part, standard) and bool(vars(type(part)).get("ends_in_projection"))


def _fused(site: Site, reduce_alone: AllReduce, index: int) -> Communicator | None:
    """Return the communicator with the fused collective, for few (0) or many (1) rows, or None."""
    choice = reduce_alone.choices[index]
    if FUSED_SUM not in getattr(choice.chosen.record, "collectives", ()):
        _note_separate(site, choice, f"{choice.chosen.name} has no {FUSED_SUM}")
        return None
    try:
        fused, communicator = site.resolver.communicator(
            FUSED_SUM, reduce_alone.dtype, reduce_alone.num_bytes[index], site.prefix
        )
    except NoCandidateError as error:
        refusals = "; ".join(map(str, error.refusals))
        _note_separate(site, choice, f"{FUSED_SUM} was refused: {refusals}")
        return None
    # Fusing must not change the communicator that was chosen for the all-reduce.
    if fused.chosen.qualified_name != choice.chosen.qualified_name:
        _note_separate(site, choice, f"{FUSED_SUM} is that of {fused.chosen.name}")
        return None
    return communicator


def _note_separate(site: Site, sums: Choice, reason: str) -> None:
    """Note on the choice of the all-reduce why the norm stays separate."""
    note, resolver = f"norms behind sums run apart: {reason}", cast("Any", site.resolver)
    for key, (choice, _) in [*resolver.choices.items()]:
        if choice.request == sums.request and note not in choice.notes:
            resolver.annotate(key, note)
