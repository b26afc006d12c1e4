"""A request to the selection: kind, name, device, dtype and dims as one hashable value."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from interposer._contract.capability import Capability

Kind = Literal[
    "platform", "kernel", "layer", "attention", "scheme", "model", "checkpoint", "communicator"
]
AttentionType = Literal["decoder", "encoder", "encoder_only", "encoder_decoder", "indexer"]


class Detail(Hashable, Protocol):
    """A typed request that can be sent to another process."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""


_UNKNOWN = Capability(architecture="unknown")


@dataclass(frozen=True, slots=True)
class Request:
    """The facts by which the selection chooses one kernel, layer, backend or other object.

    Attributes:
        kind: the kind of thing that is requested.
        name: the op, layer id, attention type, quantization method, architecture, file suffix or
            collective; empty for platforms.
        platform: name of the platform to run on; empty in a request for a platform.
        capability: capability of the device to run on.
        dtype: torch name without ``torch.``, or empty if the dtype does not matter.
        dims: static dimensions and options by name.
        detail: the typed request, such as an ``AttentionSpec``, if this kind has one.
        prefix: dotted path in the model; ignored by comparisons, so that layers with equal requests
            share one answer.
    """

    kind: Kind
    name: str
    platform: str = ""
    capability: Capability = _UNKNOWN
    dtype: str = ""
    dims: Mapping[str, int | float | str | bool] = field(default_factory=dict, hash=False)
    detail: Detail | None = None
    prefix: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[object, ...]:
        """Cache key among the requests of one device: all fields except capability and prefix."""
        # The capability is left out: a resolver has one device.
        dims = tuple(sorted(self.dims.items()))
        return (self.kind, self.name, self.platform, self.dtype, dims, self.detail)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values for another process, without the prefix."""
        return {
            "kind": self.kind,
            "name": self.name,
            "platform": self.platform,
            "capability": self.capability.to_json(),
            "dtype": self.dtype,
            "dims": dict(self.dims),
            "detail": None if self.detail is None else self.detail.to_json(),
        }

    def __str__(self) -> str:
        parts = [part for part in (self.dtype, self.platform) if part]
        # Options that are off are the ordinary case, and would only lengthen the text.
        shown_dims = (
            (name, value) for name, value in sorted(self.dims.items()) if value is not False
        )
        parts += [f"{name}={value}" for name, value in shown_dims]
        subject = f"{self.kind} {self.name!r}" if self.name else self.kind
        return subject + (f" [{' '.join(parts)}]" if parts else "")
