"""The platform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from interposer import Capability, Device, Memory, Platform, Verdict

_BYTES = 2**32


class AcmePlatform(Platform):
    """A board with one device, which shares the memory of the host."""

    name = "acme"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        """Accept any machine."""
        return Verdict.accept("one board found")

    def devices(self) -> Sequence[Device]:
        """Return the one device."""
        return [Device(self.name, "cpu", "Acme board", self.capability("cpu"))]

    def capability(self, device: str) -> Capability:
        """Return what the board can do."""
        return Capability(
            architecture="acme-1",
            features=frozenset({"dot8"}),
            formats=frozenset({"float32"}),
            units=4,
            memory_bytes=_BYTES,
            caches_bytes={"l2": 2**20},
        )

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return float32."""
        return [torch.float32]

    def memory(self, device: str) -> Memory:
        """Return the memory of the board."""
        return Memory(total_bytes=_BYTES, free_bytes=_BYTES // 2)

    def synchronize(self, device: str) -> None:
        """Return at once."""

    def num_threads(self) -> int:
        """Return how many threads compute."""
        return torch.get_num_threads()

    def default_kernels(self) -> Mapping[str, str]:
        """Return the reference for what the board has been seen to do slowly."""
        return {"silu_and_mul": "reference"}
