"""Cost model that turns speculative decoding off while drafting loses time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

_LOSS_FRACTION = 0.01  # fraction of decode time that draft tokens may lose
_MAX_BUDGET_STEPS = 4  # the loss budget is at most the time of this many plain steps
_MIN_PLAIN_STEPS = 3  # plain steps to measure before the first draft tokens
_WINDOW = 9  # measured steps per median
_MAX_RATIO = 2  # a step counts at most this multiple of the median: slower steps were disturbed
_MAX_SKIPPED = 8  # consecutive steps without measurement
_STALE_AFTER = 32  # drafted steps after which plain steps are measured again: sequences grow


@dataclass(slots=True)
class _BatchSize:
    """Measured decode steps with about the same number of sequences.

    Attributes:
        plain: Seconds of the last steps without draft tokens, except those right after a drafted
            step.
        drafted: Seconds of the last steps that verified draft tokens, without drafting.
        num_drafted: Number of drafted steps since the last plain one.
        median_plain: Median of ``plain``.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    drafted: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    num_drafted: int = 0
    median_plain: float = 0.0


class DraftCostModel:
    """Decides which steps use draft tokens, so that drafting loses at most 1% of the decode time.

    A plain step gives each sequence one token. A drafted step costs its duration. It saves the
    seconds in which plain steps produce as many tokens: tokens per sequence, times the median of
    the last plain steps with about as many sequences (equal bit length of the number). A plain step
    right after a drafted step finds less of the model in the processor's caches: the extra time
    counts as a loss of the draft tokens, and not in the median. A step counts at most twice the
    median of its kind, because slower steps waited for something else.

    The next step uses draft tokens if the loss budget is not negative. The budget grows by 1% of
    the time of all decode steps and by savings, and is at most the time of 4 plain steps. So the
    loss of any period is bounded. The first drafted step of each batch size is not counted, because
    kernels are compiled. While draft tokens pause, only every ninth step is measured, because
    measuring takes time; the others count as typical.
    """

    def __init__(self, agreed: Callable[[bool], bool] = bool) -> None:
        """Start with an empty loss budget.

        Args:
            agreed: ``Engine.agreed``: makes all ranks follow the clock of one.
        """
        self._agreed = agreed
        self._budget = 0.0
        self._batch_sizes: dict[int, _BatchSize] = {}
        self._is_after_drafted = False
        self._num_skips = 0

    def skips_measurement(self) -> bool:
        """Return whether the next step runs plain and unmeasured."""
        is_skipped = self._num_skips > 0
        self._num_skips -= is_skipped
        return self._agreed(is_skipped)

    def allows_drafts(self, num_sequences: int) -> bool:
        """Return whether the next step may use draft tokens."""
        size = self._size(num_sequences)
        is_measured = len(size.plain) >= _MIN_PLAIN_STEPS and size.num_drafted < _STALE_AFTER
        return self._agreed(is_measured and self._budget >= 0)

    def record_plain_step(
        self, num_sequences: int, seconds: float, drafting_seconds: float
    ) -> None:
        """Record a decode step without draft tokens.

        Args:
            drafting_seconds: Time spent on drafting without a result, in addition to ``seconds``.
        """
        size = self._size(num_sequences)
        is_after_drafted, self._is_after_drafted = self._is_after_drafted, False
        lost_seconds = drafting_seconds
        # The drafted step before evicted model weights from caches: charge the slowdown to
        # drafting.
        if is_after_drafted and size.plain:
            lost_seconds += min(seconds, _MAX_RATIO * size.median_plain) - size.median_plain
        else:
            size.plain.append(seconds)
            size.median_plain = _median(size.plain)
            size.num_drafted = 0
        self._update_budget(size, seconds + drafting_seconds, lost_seconds)
        # Skip as many measurements as it takes to earn the budget back.
        if self._budget < 0 and size.median_plain > 0:
            earned_seconds = _LOSS_FRACTION * size.median_plain
            self._num_skips = min(int(-self._budget / earned_seconds), _MAX_SKIPPED)
            self._budget += earned_seconds * self._num_skips

    def record_drafted_step(
        self, num_sequences: int, seconds: float, num_tokens: int, drafting_seconds: float
    ) -> None:
        """Record a step that verified draft tokens and produced ``num_tokens`` tokens.

        Args:
            seconds: Time of the step without drafting.
        """
        size, self._is_after_drafted = self._size(num_sequences), True
        size.num_drafted += 1
        # The first drafted step of a size compiles kernels: measure it, but do not charge it.
        is_warm = len(size.drafted) > 0
        size.drafted.append(seconds)
        if is_warm:
            seconds = min(seconds, _MAX_RATIO * _median(size.drafted)) + drafting_seconds
            gained_seconds = size.median_plain * num_tokens / num_sequences
            self._update_budget(size, seconds, seconds - gained_seconds)

    def _update_budget(self, size: _BatchSize, seconds: float, lost_seconds: float) -> None:
        self._budget = min(
            self._budget + _LOSS_FRACTION * seconds - lost_seconds,
            _MAX_BUDGET_STEPS * size.median_plain,
        )

    def _size(self, num_sequences: int) -> _BatchSize:
        bit_length = num_sequences.bit_length()
        size = self._batch_sizes.get(bit_length)
        if size is None:
            size = self._batch_sizes[bit_length] = _BatchSize()
        return size


def _median(seconds: Collection[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]
