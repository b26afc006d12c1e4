"""Registered pages by first token and preceding page, to find partial matches."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items


class PrefixTails:
    """Index of pages by the key of the preceding page and the first token."""

    def __init__(self) -> None:
        self._tails: dict[tuple[bytes, int], dict[bytes, list[int]]] = {}
        self._position_by_key: dict[bytes, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        """Return the number of indexed pages."""
        return len(self._position_by_key)

    def add(self, before: bytes, key: bytes, tokens: list[int]) -> None:
        """Add a page with at least one token.

        Args:
            before: Key of the page before the page.
            key: Key of the page.
            tokens: Tokens of the page.
        """
        if key not in self._position_by_key:
            position = self._position_by_key[key] = before, tokens[0]
            self._tails.setdefault(position, {})[key] = tokens

    def remove(self, key: bytes) -> None:
        """Remove a page; do nothing if it is unknown."""
        if (position := self._position_by_key.pop(key, None)) is not None:
            del self._tails[position][key]
            if not self._tails[position]:
                del self._tails[position]

    def after(self, before: bytes, tokens: Items[int]) -> Iterator[tuple[bytes, list[int]]]:
        """Yield keys and tokens of pages after ``before`` that share the first of ``tokens``."""
        yield from self._tails.get((before, tokens[0]), {}).items()

    def clear(self) -> None:
        """Remove all pages."""
        self._tails.clear()
        self._position_by_key.clear()
