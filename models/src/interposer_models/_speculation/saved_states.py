"""Copies of recurrent states before draft tokens; recurrent states cannot be truncated."""

from __future__ import annotations

from collections.abc import Sequence

from interposer_models._decoder.recurrent import RecurrentLayer
from interposer_models._engine.caches import slots_for
from interposer_models._engine.state_rows import States, copy_rows
from interposer_ops.devices.host_memory import cache_memory


class SavedStates:
    """A second copy of each state row, to restore after a draft token was rejected."""

    def __init__(self, layers: Sequence[RecurrentLayer], max_sequences: int, device: str) -> None:
        """Allocate the copies.

        Args:
            max_sequences: Most sequences with a state at once.
        """
        count = slots_for(max_sequences)
        layouts = [layer.state_layout() for layer in layers]
        self._copies = [layout.allocate(count, device, cache_memory) for layout in layouts]

    def save(self, states: States, slots: Sequence[int]) -> None:
        """Save the present state rows of sequences."""
        copy_rows(states, slots, self._copies, slots)

    def restore(self, states: States, slots: Sequence[int]) -> None:
        """Restore the last saved state rows of sequences."""
        copy_rows(self._copies, slots, states, slots)
