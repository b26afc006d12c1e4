"""Checkpoints of recurrent states at page ends, from which other sequences continue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from interposer_models._engine.state_rows import States, copy_rows


class StateCheckpoints:
    """Copies of state rows at page ends, by the key of the page.

    When all rows are in use, the least recently used checkpoint is evicted.

    Attributes:
        on_evict: Called with the key and the row before another checkpoint overwrites the row.
        rows: State tensors of the checkpoints.
    """

    def __init__(self, states: States, rows: States, num_rows: int) -> None:
        """Create an empty set of checkpoints.

        Args:
            states: State tensors of the running sequences.
            rows: State tensors of the same layers, with ``num_rows`` rows, at least one.
        """
        self.on_evict: Callable[[bytes, int], None] = _ignore
        self.rows = rows
        self._states = states
        self._row_by_key: OrderedDict[bytes, int] = OrderedDict()
        self._free = [*range(num_rows)]

    def __len__(self) -> int:
        """Return the number of checkpoints."""
        return len(self._row_by_key)

    def has_key(self, key: bytes) -> bool:
        """Return whether there is a checkpoint for ``key``."""
        return key in self._row_by_key

    def save(self, key: bytes, slot: int) -> None:
        """Copy the state of a sequence to a new checkpoint, unless ``key`` has one."""
        if key in self._row_by_key:
            self._row_by_key.move_to_end(key)
            return
        if not self._free:
            oldest, row = self._row_by_key.popitem(last=False)
            self.on_evict(oldest, row)
            self._free.append(row)
        row = self._row_by_key[key] = self._free.pop()
        copy_rows(self._states, [slot], self.rows, [row])

    def restore(self, key: bytes, slot: int) -> None:
        """Copy the checkpoint of ``key`` to the state of a sequence."""
        self._row_by_key.move_to_end(key)
        copy_rows(self.rows, [self._row_by_key[key]], self._states, [slot])

    def forget(self) -> None:
        """Drop all checkpoints."""
        self._free += self._row_by_key.values()
        self._row_by_key.clear()


def _ignore(key: bytes, row: int) -> None: ...
