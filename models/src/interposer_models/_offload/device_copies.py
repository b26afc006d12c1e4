"""Weights in pinned host memory, copied into buffers of a device beside its computing.

Tokens were those of a resident model on an H100. Tests run it with a platform that is the processor
posing as a device, where copies happen at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interposer import Platform
from interposer_models._offload.ring import Filler

_LINE_BYTES = 256
"""Tensors begin at multiples of it, as in memory that a device's allocator gives."""


class Packet:
    """The memories of a block, one behind the other in pinned host memory.

    Attributes:
        host: uint8, pinned.
        places: the first byte of each memory, by its number.
    """

    def __init__(self, memories: dict[int, torch.Tensor], platform: Platform) -> None:
        self.places: dict[int, int] = {}
        end = 0
        for number, memory in memories.items():
            self.places[number] = end
            end += -(-memory.nbytes // _LINE_BYTES) * _LINE_BYTES
        self.host = platform.pin_memory(torch.empty(end, dtype=torch.uint8))
        for number, at in self.places.items():
            memory = memories.pop(number)  # so that a block is held twice, not the model
            self.host[at : at + memory.nbytes].copy_(memory)


class DeviceCopies(Filler):
    """Copies packets into buffers of a device on streams of their own, ordered by events."""

    def __init__(
        self, platform: Platform, device: str, packets: Sequence[Packet], num_buffers: int
    ) -> None:
        self._platform, self._device = platform, device
        self._packets = [packet.host for packet in packets]
        size = max(packet.nbytes for packet in self._packets)
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) for _ in range(num_buffers)
        ]
        # The host's memory has been written when a call returns, so that nothing is waited for.
        self._is_queued = torch.device(device).type != "cpu"
        self._used: list[Any] = [self._event() for _ in range(num_buffers)]

    def memory(self, buffer: int, at: int, num_bytes: int) -> torch.Tensor:
        """Return a part of a buffer, uint8."""
        return self._buffers[buffer][at : at + num_bytes]

    def fill(self, block: int, buffer: int) -> Any:
        """Queue the copy of a block behind the last work on the buffer, beside all other work."""
        packet = self._packets[block]
        with self._platform.stream(self._device):
            if (used := self._used[buffer]) is not None:
                used.wait()
            self._buffers[buffer][: packet.nbytes].copy_(packet, non_blocking=True)
            return self._event()

    def wait(self, filling: Any) -> None:
        """Let the work that is queued from now on follow a copy."""
        if filling is not None:
            filling.wait()

    def done(self, buffer: int) -> None:
        """Let the next copy into a buffer follow the work that was queued so far."""
        self._used[buffer] = self._event()

    def _event(self) -> torch.Event | None:
        """Return an event behind all that is queued on the current stream."""
        if not self._is_queued:
            return None
        event = torch.Event(self._device)
        event.record()
        return event
