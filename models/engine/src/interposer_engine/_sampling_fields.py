"""Markers for the fields of ``SamplingParams``: where a field takes effect, and who sets it.

Ops are named, not imported: the commands read the fields for ``--help``, which imports no torch.

Dimensions: B sequences, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from interposer import CustomOp


@dataclass(frozen=True, slots=True)
class Draw:
    """Marks a field as the argument of ``sample_tokens`` with the field's name.

    Attributes:
        op_name: Op of ``interposer_ops.sampling`` that applies the field alone to logits, for the
            distributions of draft tokens. Fields of one op are its arguments after the logits, in
            the order of the fields.
    """

    op_name: str

    @property
    def op(self) -> CustomOp[..., Any]:
        """The op of ``interposer_ops.sampling`` that is named ``op_name``."""
        return _op(self.op_name)


@dataclass(frozen=True, slots=True)
class Penalty:
    """Marks a field as an argument of the op ``apply_penalties``.

    Attributes:
        argument: Name of the argument.
    """

    argument: str


@dataclass(frozen=True, slots=True)
class LogitEdit:
    """Marks a field that edits the logits before penalties and draws.

    Attributes:
        op_name: Op of ``interposer_ops.sampling``, ``(logits, values) -> logits`` with one value
            ``[B]`` per row of ``[B, V]``, which leaves a row with the field's default unchanged;
            None for a field whose arguments ``RequestEdits`` builds.
    """

    op_name: str | None = None

    @property
    def op(self) -> CustomOp[..., Tensor] | None:
        """The op of ``interposer_ops.sampling`` that is named ``op_name``; None without a name."""
        return None if self.op_name is None else _op(self.op_name)


@dataclass(frozen=True, slots=True)
class Suggested:
    """Marks a field whose value a checkpoint may suggest, as in ``generation_config.json``.

    Attributes:
        for_greedy: Whether the suggestion holds for greedy answers too.
    """

    for_greedy: bool = False


@dataclass(frozen=True, slots=True)
class RequestField:
    """Marks a field that bodies of HTTP requests have too, with the same name, type and bounds.

    Attributes:
        description: Description of the allowed values for clients; None for that of the parameter.
    """

    description: str | None = None


@dataclass(frozen=True, slots=True)
class CommandField:
    """Marks a field for which commands have an option, with the same description and bounds."""


def _op(name: str) -> CustomOp[..., Any]:
    from interposer_ops import sampling

    op: CustomOp[..., Any] = getattr(sampling, name)
    return op
