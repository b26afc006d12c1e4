"""What is asked of the selection: one frozen, hashable value."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from interposer.capability import Capability

__all__ = ["AttentionType", "Kind", "Request"]

Kind = Literal["platform", "kernel", "layer", "attention", "scheme"]
AttentionType = Literal["decoder", "encoder", "encoder_only", "encoder_decoder"]

_UNKNOWN = Capability(architecture="unknown")


@dataclass(frozen=True, slots=True)
class Request:
    """One question to the selection mechanism.

    Attributes:
        kind: ``platform``, ``kernel``, ``layer``, ``attention`` or ``scheme``.
        name: the op, layer id, attention type or quantization method; empty for platforms.
        platform: name of the platform to run on; empty when platforms themselves are chosen.
        capability: of the device to run on.
        dtype: torch name without ``torch.``, or empty where it does not matter.
        dims: static dimensions and options by name.
        detail: the typed request behind it where there is one, such as an ``AttentionSpec``.
        prefix: dotted place in the model; does not take part in equality, so that layers that
            ask for the same thing share one answer.
    """

    kind: Kind
    name: str
    platform: str = ""
    capability: Capability = _UNKNOWN
    dtype: str = ""
    dims: Mapping[str, int | float | str | bool] = field(default_factory=dict, hash=False)
    detail: Hashable = None
    prefix: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for requests of one device that must get equal answers, wherever they stand."""
        dims = tuple(sorted(self.dims.items()))
        return (self.kind, self.name, self.platform, self.dtype, dims, self.detail)

    def __str__(self) -> str:
        parts = [part for part in (self.dtype, self.platform) if part]
        parts += [f"{name}={value}" for name, value in sorted(self.dims.items())]
        named = f"{self.kind} {self.name!r}" if self.name else self.kind
        return named + (f" [{' '.join(parts)}]" if parts else "")
