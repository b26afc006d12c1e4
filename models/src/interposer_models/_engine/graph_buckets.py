"""The sizes of batches that graphs are captured for."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from interposer.errors import ConfigError

_FIRST_WIDTH = 64
_WIDER = 4


class Bucket(NamedTuple):
    """The capacity of one graph: sequences, and pages of the longest of them."""

    num_sequences: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class GraphBuckets:
    """Sizes and widths, both ascending: a batch runs in the smallest bucket that holds it.

    Attributes:
        sizes: numbers of sequences.
        widths: numbers of pages per sequence. A graph is launched for the longest sequence that
            it has room for, whatever those of the moment are.

    Raises: ConfigError: there is none, one is not positive, or they do not ascend.
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
    def up_to(cls, most: int, most_pages: int) -> GraphBuckets:
        """Return 1, 2, 4, 8, then every eighth up to 256, then every sixteenth, and ``most``.

        Padding is then less than half of a batch, and of the larger ones a few percent, while the
        captured graphs stay few. Widths grow four times each, up to ``most_pages``.
        """
        steps = [1, 2, 4, *range(8, 257, 8), *range(272, max(most, 272) + 1, 16)]
        widths = []
        width = _FIRST_WIDTH
        while width < most_pages:
            widths.append(width)
            width *= _WIDER
        return cls((*(size for size in steps if size < most), most), (*widths, most_pages))

    def bucket_for(self, num_sequences: int, num_pages: int) -> Bucket | None:
        """Return the smallest bucket that holds the batch, or None."""
        size, width = _least(self.sizes, num_sequences), _least(self.widths, num_pages)
        return None if size is None or width is None else Bucket(size, width)


def _least(numbers: tuple[int, ...], wanted: int) -> int | None:
    place = bisect_left(numbers, wanted)
    return numbers[place] if wanted > 0 and place < len(numbers) else None
