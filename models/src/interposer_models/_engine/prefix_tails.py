"""Tokens of pages by what lies before them, to find the one that agrees farthest."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items


class PrefixTails:
    """Knows pages by the page before them and by their first token."""

    def __init__(self) -> None:
        self._tails: dict[tuple[bytes, int], dict[bytes, list[int]]] = {}
        self._places: dict[bytes, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        """Return how many pages are known."""
        return len(self._places)

    def add(self, before: bytes, key: bytes, tokens: list[int]) -> None:
        """Know a page by its tokens, one at least.

        Args:
            before, key: of the page before it, and its own.
        """
        if key not in self._places:
            place = self._places[key] = before, tokens[0]
            self._tails.setdefault(place, {})[key] = tokens

    def remove(self, key: bytes) -> None:
        """Know a page no more; it may be unknown."""
        if (place := self._places.pop(key, None)) is not None:
            del self._tails[place][key]
            if not self._tails[place]:
                del self._tails[place]

    def after(self, before: bytes, tokens: Items[int]) -> Iterator[tuple[bytes, list[int]]]:
        """Yield the keys and tokens of pages behind ``before`` that begin as ``tokens`` do."""
        yield from self._tails.get((before, tokens[0]), {}).items()

    def clear(self) -> None:
        """Know no page."""
        self._tails.clear()
        self._places.clear()
