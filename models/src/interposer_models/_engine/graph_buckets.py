"""Batch sizes for which graphs are captured."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from interposer.errors import ConfigError

_FIRST_WIDTH = 64
_WIDER = 4


class Bucket(NamedTuple):
    """Capacity of one graph: the number of sequences, and the pages of the longest sequence."""

    num_sequences: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class GraphBuckets:
    """Captured batch sizes and page-table widths; a batch runs in the smallest that fits.

    Attributes:
        sizes: Numbers of sequences, ascending.
        widths: Numbers of pages per sequence, ascending. A graph always runs as for the longest
            sequence that fits.

    Raises: ConfigError: a list is empty, not ascending, or has a number that is not positive.
    """

    sizes: tuple[int, ...]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        for numbers in (self.sizes, self.widths):
            if not numbers or numbers[0] < 1 or list(numbers) != sorted({*numbers}):
                raise ConfigError(
                    f"buckets are {numbers}, must be positive numbers that ascend. "
                    "Try: GraphBuckets.up_to(64, 128)"
                )

    @classmethod
    def up_to(cls, max_sequences: int, max_pages: int) -> GraphBuckets:
        """Return the sizes 1, 2, 4, 8, then steps of 8 up to 256, steps of 16, and the maximum.

        So padding is less than half of a small batch and a few percent of a large one, and the
        number of graphs stays small. Widths grow by a factor of four, up to ``max_pages``.
        """
        steps = [1, 2, 4, *range(8, 257, 8), *range(272, max(max_sequences, 272) + 1, 16)]
        widths = []
        width = _FIRST_WIDTH
        while width < max_pages:
            widths.append(width)
            width *= _WIDER
        return cls(
            (*(size for size in steps if size < max_sequences), max_sequences), (*widths, max_pages)
        )

    def bucket_for(self, num_sequences: int, num_pages: int) -> Bucket | None:
        """Return the smallest bucket that holds the batch; None if no bucket does."""
        size, width = (
            _smallest_at_least(self.sizes, num_sequences),
            _smallest_at_least(self.widths, num_pages),
        )
        return None if size is None or width is None else Bucket(size, width)


def _smallest_at_least(numbers: tuple[int, ...], minimum: int) -> int | None:
    index = bisect_left(numbers, minimum)
    return numbers[index] if minimum > 0 and index < len(numbers) else None
