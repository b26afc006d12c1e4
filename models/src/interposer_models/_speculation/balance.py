"""The seconds that guesses gain and lose, by which steps are with or without them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

_SHARE = 0.02  # of the time of all decode steps, which guesses may lose
_CREDIT_STEPS = 16  # whose time is the most that gains can be lost again later
_LEAST_PLAIN = 3
_KEPT_PLAIN = 9
_RENEWED_AFTER = 32  # steps with guesses, since longer sequences take longer


@dataclass(slots=True)
class _Size:
    """The decode steps of about as many sequences.

    Attributes:
        plain: seconds of the last ones without guesses.
        num_drafted: steps with guesses since.
        warm: one with guesses was run.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_PLAIN))
    num_drafted: int = 0
    warm: bool = False


class Balance:
    """Decides which steps are with guesses, so that these never cost more than a small share.

    A step without guesses gives each sequence one token. A step with them loses its seconds, and
    gains those in which as many tokens come without: their number by sequence, times the median of
    the last plain steps of about as many sequences, which are those of equal bit length. Guesses go
    on while the loss is at most 2% of the time of all decode steps. Gains are kept for later up to
    16 plain steps. The first step with guesses of each size is not counted, as kernels are compiled
    in it.
    """

    def __init__(self) -> None:
        self._loss = 0.0  # negative is a gain
        self._spent = 0.0
        self._sizes: dict[int, _Size] = {}

    def allows(self, num_sequences: int) -> bool:
        """Say whether the next step is to be one with guesses."""
        size = self._size(num_sequences)
        known = len(size.plain) >= _LEAST_PLAIN and size.num_drafted < _RENEWED_AFTER
        return known and self._loss <= _SHARE * self._spent

    def count_plain(self, num_sequences: int, seconds: float, guessing_seconds: float) -> None:
        """Count a step of decodes without guesses.

        Args:
            guessing_seconds: besides, for which no guess came.
        """
        size = self._size(num_sequences)
        size.plain.append(seconds)
        size.num_drafted = 0
        self._spent += seconds + guessing_seconds
        self._loss += guessing_seconds

    def count_drafted(self, num_sequences: int, seconds: float, num_tokens: int) -> None:
        """Count a step with guesses of any of its sequences, which gave them so many tokens."""
        size = self._size(num_sequences)
        size.num_drafted += 1
        if not size.warm:
            size.warm = True
            return
        step = median(size.plain)
        gained = self._loss + seconds - step * num_tokens / num_sequences
        self._loss = max(gained, -_CREDIT_STEPS * step)
        self._spent += seconds

    def _size(self, num_sequences: int) -> _Size:
        return self._sizes.setdefault(num_sequences.bit_length(), _Size())
