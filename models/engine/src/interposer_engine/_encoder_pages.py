"""Cache pages of encoder inputs, which sequences with equal inputs share.

The pages of an input stay until the pool needs them. So a window of speech that is decoded again at
another temperature, or a preempted sequence, is not encoded again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from interposer_engine._pages import PagePool


@dataclass(slots=True, eq=False)
class EncodedInput:
    """An encoder input in the cache.

    Attributes:
        key: Digest of the input.
        pages: Cache pages, in order.
        num_users: Number of sequences that hold the pages.
        is_encoded: Whether the pages hold the input's keys and values.
    """

    key: bytes
    pages: list[int] = field(default_factory=list)
    num_users: int = 0
    is_encoded: bool = False


class EncoderPagePool(PagePool):
    """Page pool of encoder inputs that keeps pages without a user until it needs them."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._inputs: dict[bytes, EncodedInput] = {}
        # Inputs without a user, the one that was used last at the end.
        self._unused: OrderedDict[bytes, EncodedInput] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence holds."""
        return super().num_free + sum(len(unused.pages) for unused in self._unused.values())

    @property
    def kept_pages(self) -> set[int]:
        """Pages that no sequence holds, and that still hold an encoder input."""
        return {page for unused in self._unused.values() for page in unused.pages}

    def is_encoded(self, key: bytes) -> bool:
        """Return whether the cache holds the keys and values of an input."""
        encoded = self._inputs.get(key)
        return encoded is not None and encoded.is_encoded

    def attach(self, key: bytes, num_tokens: int) -> EncodedInput | None:
        """Return the pages of an input for one more user; None if too few pages are free."""
        encoded = self._inputs.get(key)
        if encoded is None:
            if self.pages_for(num_tokens) > self.num_free:
                return None
            encoded = self._inputs[key] = EncodedInput(key)
            while not self._extend_by_free_pages(encoded.pages, num_tokens):
                self._drop(next(iter(self._unused.values())))
        self._unused.pop(key, None)
        encoded.num_users += 1
        return encoded

    def detach(self, encoded: EncodedInput) -> None:
        """Give up the pages of an input as one of its users."""
        encoded.num_users -= 1
        if encoded.num_users:
            return
        if encoded.is_encoded and self._inputs.get(encoded.key) is encoded:
            self._unused[encoded.key] = encoded
        else:
            self._drop(encoded)

    def forget(self) -> None:
        """Share no present input with later sequences, because weights have changed."""
        for unused in [*self._unused.values()]:
            self._drop(unused)
        self._inputs.clear()

    def _extend_by_free_pages(self, pages: list[int], num_tokens: int) -> bool:
        if self.pages_for(num_tokens) > super().num_free:
            return False
        return self.extend(pages, num_tokens)

    def _drop(self, encoded: EncodedInput) -> None:
        # After ``forget``, another entry can have the same key.
        if self._inputs.get(encoded.key) is encoded:
            del self._inputs[encoded.key]
            self._unused.pop(encoded.key, None)
        self.release(encoded.pages)
