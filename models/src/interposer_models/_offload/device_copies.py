"""Copies offloaded weights from pinned host memory to device buffers, parallel to the computation.

On an H100, tokens equalled the tokens of a resident model. Tests use a platform that presents the
CPU as a device, where copies are synchronous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interposer import Platform
from interposer_models._offload.ring import Filler

_ALIGNED_BYTES = 256
"""Alignment of tensors in a buffer, the same as that of the device's allocator."""


class PinnedBlock:
    """All memories of a block, one after another in pinned host memory.

    Attributes:
        host: the pinned memory, uint8.
        offsets: offset of each memory in bytes, by number.
    """

    def __init__(self, memories: dict[int, torch.Tensor], platform: Platform) -> None:
        self.offsets: dict[int, int] = {}
        end = 0
        for number, memory in memories.items():
            self.offsets[number] = end
            end += -(-memory.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        # Only copies from pinned memory run parallel to the host.
        self.host = platform.pin_memory(torch.empty(end, dtype=torch.uint8))
        for number, offset in self.offsets.items():
            memory = memories.pop(number)  # free it: one block is in memory twice, not the model
            self.host[offset : offset + memory.nbytes].copy_(memory)


class DeviceCopies(Filler):
    """Copies blocks into device buffers on a stream of its own, ordered by events."""

    def __init__(
        self,
        platform: Platform,
        device: str,
        pinned_blocks: Sequence[PinnedBlock],
        num_buffers: int,
    ) -> None:
        self._platform, self._device = platform, device
        self._host_blocks = [pinned_block.host for pinned_block in pinned_blocks]
        size = max(pinned_block.nbytes for pinned_block in self._host_blocks)
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) for _ in range(num_buffers)
        ]
        # Host computation is synchronous and needs no events.
        self._is_queued = torch.device(device).type != "cpu"
        self._last_uses: list[Any] = [self._event() for _ in range(num_buffers)]

    def memory(self, buffer: int, offset: int, num_bytes: int) -> torch.Tensor:
        """Return a part of a buffer, as uint8."""
        return self._buffers[buffer][offset : offset + num_bytes]

    def fill(self, block: int, buffer: int) -> Any:
        """Queue the copy of a block, after the last work that uses the buffer."""
        pinned_block = self._host_blocks[block]
        with self._platform.stream(self._device):
            # The block that used the buffer before may still be computing.
            if (last_use := self._last_uses[buffer]) is not None:
                last_use.wait()
            self._buffers[buffer][: pinned_block.nbytes].copy_(pinned_block, non_blocking=True)
            return self._event()

    def wait(self, handle: Any) -> None:
        """Let subsequently queued work wait for a copy."""
        if handle is not None:
            handle.wait()

    def done(self, buffer: int) -> None:
        """Let the next copy into a buffer wait for the work queued so far."""
        self._last_uses[buffer] = self._event()

    def _event(self) -> torch.Event | None:
        """Record an event on the current stream; None if the device is synchronous."""
        if not self._is_queued:
            return None
        event = torch.Event(self._device)
        event.record()
        return event
