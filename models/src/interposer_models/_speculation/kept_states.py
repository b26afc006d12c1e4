"""States of recurrent layers as they were before guesses, which these layers take in for good."""

from __future__ import annotations

from collections.abc import Sequence

from interposer_models._decoder.recurrent import RecurrentLayer
from interposer_models._engine.caches import slots_for
from interposer_models._engine.state_rows import States, copy_rows
from interposer_ops.devices.host_memory import cache_memory


class KeptStates:
    """A second row of every state, to which a sequence returns when a guess is rejected."""

    def __init__(self, layers: Sequence[RecurrentLayer], max_sequences: int, device: str) -> None:
        """Allocate the rows.

        Args:
            max_sequences: that have states at once.
        """
        count = slots_for(max_sequences)
        layouts = [layer.state_layout() for layer in layers]
        self._kept = [layout.allocate(count, device, cache_memory) for layout in layouts]

    def keep(self, states: States, slots: Sequence[int]) -> None:
        """Keep the rows of sequences as they are now."""
        copy_rows(states, slots, self._kept, slots)

    def restore(self, states: States, slots: Sequence[int]) -> None:
        """Write what was kept of these rows last."""
        copy_rows(self._kept, slots, states, slots)
