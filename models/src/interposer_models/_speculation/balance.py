"""The seconds that guesses gain and lose, by which steps are with or without them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

_SHARE = 0.01  # of the time of decode steps, which guesses may lose
_MOST_STEPS = 4  # plain ones, whose time is the most that is kept to be lost later
_LEAST_PLAIN = 3
_KEPT = 9
_MOST_TYPICAL = 2  # times the median, which a step takes unless something else ran meanwhile
_MOST_RESTS = 8  # steps in a row that nobody measures
_RENEWED_AFTER = 32  # steps with guesses, since longer sequences take longer


@dataclass(slots=True)
class _Size:
    """The decode steps of about as many sequences.

    Attributes:
        plain: seconds of the last ones without guesses, but for those right behind guesses.
        drafted: seconds in which the last ones with guesses were verified.
        num_drafted: of these since the last plain one.
        step: the median of ``plain``.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    drafted: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    num_drafted: int = 0
    step: float = 0.0


class Balance:
    """Decides which steps are with guesses, so that these never cost more than a small share.

    A step without guesses gives each sequence one token. A step with them loses its seconds, and
    gains those in which as many tokens come without: their number by sequence, times the median of
    the last plain steps of about as many sequences, which are those of equal bit length. The plain
    step right behind finds caches in which less of the model is left. What it takes more is lost
    by the guesses, and the median leaves it out. A step counts as twice the median of its kind at
    most: what takes longer waited for something else.

    The next step is one with guesses if seconds are left to be lost: 1% of the time of all decode
    steps and what guesses gained, of which no more is kept than the time of 4 plain steps. So what
    any stretch of steps loses is bounded, whatever was gained or spent long before. The first step
    with guesses of each size is not counted, as kernels are compiled in it. In a pause only
    every ninth step is measured, since that takes time as well; the others count as typical ones.
    """

    def __init__(self, agreed: Callable[[bool], bool] = bool) -> None:
        """Begin with nothing to be lost.

        Args:
            agreed: of the engine: what comes of an answer, of which the clock of one process
                decides.
        """
        self._agreed = agreed
        self._left = 0.0
        self._sizes: dict[int, _Size] = {}
        self._behind = False
        self._rests = 0

    def rests(self) -> bool:
        """Say whether the next step goes by unmeasured, in a pause that it does not end."""
        rests = self._rests > 0
        self._rests -= rests
        return self._agreed(rests)

    def allows(self, num_sequences: int) -> bool:
        """Say whether the next step is to be one with guesses."""
        size = self._size(num_sequences)
        known = len(size.plain) >= _LEAST_PLAIN and size.num_drafted < _RENEWED_AFTER
        return self._agreed(known and self._left >= 0)

    def count_plain(self, num_sequences: int, seconds: float, guessing_seconds: float) -> None:
        """Count a step of decodes without guesses.

        Args:
            guessing_seconds: besides, for which no guess came.
        """
        size, behind, self._behind = self._size(num_sequences), self._behind, False
        lost = guessing_seconds
        if behind and size.plain:
            lost += min(seconds, _MOST_TYPICAL * size.step) - size.step
        else:
            size.plain.append(seconds)
            size.step = _median(size.plain)
            size.num_drafted = 0
        self._count(size, seconds + guessing_seconds, lost)
        if self._left < 0 and size.step > 0:
            earned = _SHARE * size.step
            self._rests = min(int(-self._left / earned), _MOST_RESTS)
            self._left += earned * self._rests

    def count_drafted(
        self, num_sequences: int, seconds: float, num_tokens: int, guessing_seconds: float
    ) -> None:
        """Count a step with guesses of any of its sequences, which gave them so many tokens.

        Args:
            seconds: without those of guessing.
        """
        size, self._behind = self._size(num_sequences), True
        size.num_drafted += 1
        is_warm = len(size.drafted) > 0
        size.drafted.append(seconds)
        if is_warm:
            seconds = min(seconds, _MOST_TYPICAL * _median(size.drafted)) + guessing_seconds
            gained = size.step * num_tokens / num_sequences
            self._count(size, seconds, seconds - gained)

    def _count(self, size: _Size, seconds: float, lost: float) -> None:
        self._left = min(self._left + _SHARE * seconds - lost, _MOST_STEPS * size.step)

    def _size(self, num_sequences: int) -> _Size:
        place = num_sequences.bit_length()
        found = self._sizes.get(place)
        if found is None:
            found = self._sizes[place] = _Size()
        return found


def _median(seconds: Collection[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]
