"""Copies of the states of sequences at the end of pages, from which others go on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from interposer_models._engine.state_rows import States, copy_rows


class StateCheckpoints:
    """Rows of states by the key of the page at whose end they were taken.

    The one that was used longest ago gives its row to the next one.

    Attributes:
        on_evict: told the key and the row before another checkpoint takes it.
        kept: the rows.
    """

    def __init__(self, states: States, kept: States, num_rows: int) -> None:
        """Keep nothing yet.

        Args:
            states: of sequences.
            kept: of the same layers, with ``num_rows`` rows, one at least.
        """
        self.on_evict: Callable[[bytes, int], None] = _ignore
        self.kept = kept
        self._states = states
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        self._free = [*range(num_rows)]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._rows)

    def knows(self, key: bytes) -> bool:
        """Say whether there is a checkpoint of a key."""
        return key in self._rows

    def keep(self, key: bytes, slot: int) -> None:
        """Copy the state of a sequence, unless there is one of its key."""
        if key in self._rows:
            self._rows.move_to_end(key)
            return
        if not self._free:
            oldest, row = self._rows.popitem(last=False)
            self.on_evict(oldest, row)
            self._free.append(row)
        row = self._rows[key] = self._free.pop()
        copy_rows(self._states, [slot], self.kept, [row])

    def restore(self, key: bytes, slot: int) -> None:
        """Copy a checkpoint to the row of a sequence."""
        self._rows.move_to_end(key)
        copy_rows(self.kept, [self._rows[key]], self._states, [slot])

    def forget(self) -> None:
        """Keep nothing any more."""
        self._free += self._rows.values()
        self._rows.clear()


def _ignore(key: bytes, row: int) -> None:
    """Let a checkpoint go."""
