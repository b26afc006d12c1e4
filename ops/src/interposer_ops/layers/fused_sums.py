"""Sums over ranks, each with the residual stream and the norm that read it.

A projection that is cut by inputs leaves its sum to the norm behind it. This is ``all_reduce``,
then the op ``fused_add_rms_norm``, unless the communicator has a method that does both.

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
"""The collective that does what a sum is left to a norm for."""


class LeftSum:
    """The sum of a projection, as the norm takes it that the projection leaves it to.

    Attributes:
        between: layers that return the result of the projection. A hook on one of them is to see
            the sum, which the projection takes itself then.
        readers: layers that are called with it.
        is_paused: something else reads the result of the projection, too.
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
        """Say whether the norm adds up."""
        return not (
            self.is_paused
            or every_module._global_forward_hooks
            or every_module._global_forward_pre_hooks
            or any(module._forward_hooks for module in self.between)
            or any(module._forward_pre_hooks for module in self.readers)
        )

    def add_norm(self, norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the residual stream and the sum of ``x`` ``[T, H]``, and both added.

        ``x`` may be overwritten.
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
    """Leave the sum of a projection to a norm if ranks add it up and the norm can take it.

    Args:
        site: of the norm.
        norm: an ``RMSNorm`` that is given the residual stream.
        between, readers: those of ``LeftSum``.
    """
    if type(projection) is not RowLinear or not norm.takes_sums:
        return False
    alone = projection.reduce_alone
    fused = tuple(_fused(site, alone, index) for index in range(2))
    if fused == (None, None):
        return False
    left = LeftSum(alone, fused, (projection, *between), (*readers,))
    projection.left = norm.left = (left,)
    return True


def ends_in_projection(part: nn.Module, standard: type[PluggableLayer]) -> bool:
    """Say whether a layer returns what its last projection does, as its own class says."""
    return isinstance(part, standard) and bool(vars(type(part)).get("ends_in_projection"))


def _fused(site: Site, alone: AllReduce, index: int) -> Communicator | None:
    """Return what does all at once, for few or for many rows; None where steps run apart."""
    choice = alone.choices[index]
    if FUSED_SUM not in getattr(choice.chosen.record, "collectives", ()):
        _tell(site, choice, f"{choice.chosen.name} has no {FUSED_SUM}")
        return None
    try:
        fused, held = site.resolver.communicator(
            FUSED_SUM, alone.dtype, alone.num_bytes[index], site.prefix
        )
    except NoCandidateError as error:
        refusals = "; ".join(map(str, error.refusals))
        _tell(site, choice, f"{FUSED_SUM} was refused: {refusals}")
        return None
    if fused.chosen.qualified_name != choice.chosen.qualified_name:
        _tell(site, choice, f"{FUSED_SUM} is that of {fused.chosen.name}")
        return None
    return held


def _tell(site: Site, sums: Choice, reason: str) -> None:
    """Note with the choice for sums why norms run apart from them."""
    note, resolver = f"norms behind sums run apart: {reason}", cast("Any", site.resolver)
    for key, (choice, _) in [*resolver.choices.items()]:
        if choice.request == sums.request and note not in choice.notes:
            resolver.annotate(key, note)
