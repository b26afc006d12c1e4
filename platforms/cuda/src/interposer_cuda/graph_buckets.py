"""The sizes of batches that graphs are captured for."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from interposer.errors import ConfigError

__all__ = ["GraphBuckets"]


@dataclass(frozen=True, slots=True)
class GraphBuckets:
    """Sizes, ascending: a batch runs in the smallest that holds it.

    Raises: ConfigError: there is none, one is not positive, or they do not ascend.
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or list(self.sizes) != sorted({*self.sizes}):
            raise ConfigError(
                f"buckets are {self.sizes}, must be positive numbers that ascend. "
                "Try: GraphBuckets.up_to(64)"
            )

    @classmethod
    def up_to(cls, most: int) -> GraphBuckets:
        """Return 1, 2, 4, 8, then every eighth up to 256, then every sixteenth, and ``most``.

        Padding is then less than half of a batch, and of the larger ones a few percent, while the
        captured graphs stay few.
        """
        steps = [1, 2, 4, *range(8, 257, 8), *range(272, max(most, 272) + 1, 16)]
        return cls((*(size for size in steps if size < most), most))

    def size_for(self, num_sequences: int) -> int | None:
        """Return the smallest size that holds the batch; None where none does."""
        place = bisect_left(self.sizes, num_sequences)
        return self.sizes[place] if num_sequences > 0 and place < len(self.sizes) else None
