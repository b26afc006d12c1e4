"""Rules for the tokens of a transcript: start tokens, suppressed tokens and pairs of timestamps.

This module imports no torch, so that the commands can print help without it.

Source: arXiv:2212.04356, section 2.3 and the decoding code published with it.

Dimensions: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TranscriptRules:
    """The tokens that may follow each other in a transcript by Whisper.

    Timestamps count steps of 20 ms from the start of the window. They come in pairs: the end of a
    segment, then the start of the next one, which is never earlier.

    Attributes:
        start: The tokens with which the output starts, such as language and task. Each is the
            likeliest of a tuple of tokens.
        suppressed: Tokens that never follow ``start``.
        suppressed_first: Further tokens that do not follow ``start`` at once.
        end_token: The end token of the model, above all tokens of texts and below all timestamps.
        first_timestamp: The token of timestamp 0, followed by those of all others; None for a
            transcript without timestamps.
        latest_start: Largest number of steps of the first timestamp; None for no limit.
        no_speech: Token whose probability as the first one is recorded; None for no record.
    """

    start: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    end_token: int = 0
    first_timestamp: int | None = None
    latest_start: int | None = None
    no_speech: int | None = None

    @property
    def largest_token(self) -> int:
        """The largest token id that the rules name."""
        lists = (*self.start, self.suppressed, self.suppressed_first)
        listed_tokens = [token for tokens in lists for token in tokens]
        return max([*listed_tokens, self.end_token, self.first_timestamp or 0, self.no_speech or 0])

    def forbid(self, output: Sequence[int], forbidden: Tensor) -> None:
        """Mark the tokens that cannot follow ``output``, which is not shorter than ``start``.

        Args:
            forbidden: ``[V]`` bool on the CPU, all False.
        """
        text = output[len(self.start) :]
        forbidden[list(self.suppressed)] = True
        if not text:
            forbidden[list(self.suppressed_first)] = True
        first = self.first_timestamp
        if first is None:
            return
        if not text:
            # A transcript with timestamps starts with one.
            forbidden[:first] = True
            if self.latest_start is not None:
                forbidden[first + self.latest_start + 1 :] = True
            return
        ends_in_timestamp = text[-1] >= first
        has_pair = ends_in_timestamp and (len(text) < 2 or text[-2] >= first)
        if has_pair:
            forbidden[first:] = True
        elif ends_in_timestamp:
            forbidden[: self.end_token] = True
        latest = next((token for token in reversed(text) if token >= first), None)
        if latest is not None:
            # The second timestamp of a pair may equal the first one; others are later.
            is_half_pair = ends_in_timestamp and not has_pair
            forbidden[first : latest + (0 if is_half_pair else 1)] = True
