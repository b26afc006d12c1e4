"""Groups of trials as pytest tests: one group per candidate, aspect and dtype."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from interposer import Config, Device, Registry, current_registry, place
from interposer_testing._reports.tally import examined
from interposer_testing._reports.text import wrong_lines
from interposer_testing._trials.outcome import Outcome, Scope, outcome_of, trials, untried
from interposer_testing._trials.trial import Trial
from interposer_testing._trials.verification import absent, known_scope

# Kind, subject, provider and name of the candidate; aspect; dtype.
_Key = tuple[tuple[str, str, str, str], str, str]


def trial_groups(
    distribution: str,
    *,
    op: str = "",
    quick: bool = True,
    seed: int = 0,
    platform: str = "",
    registry: Registry | None = None,
    device: Device | None = None,
) -> list[TrialGroup]:
    """Return all groups of a distribution; arguments and exceptions are as for ``verify``."""
    config = Config(platform=platform) if platform else Config()
    registry = registry or current_registry(config)
    scope = known_scope(registry, Scope(distribution, op, "", seed, quick))
    device = device or place(config).device
    trials_by_key = dict[_Key, list[Trial]]()
    for trial in trials(registry, device, scope):
        trials_by_key.setdefault(_key(trial), []).append(trial)
    groups = [
        TrialGroup(candidate, aspect, dtype, tuple(members), scope, platform)
        for (candidate, aspect, dtype), members in trials_by_key.items()
    ]
    tested = [candidate for candidate, _, _ in trials_by_key]
    # A candidate without trials gets a test that is skipped with the reason.
    for candidate in absent(registry, device, scope, tested):
        identity = (candidate.kind, candidate.subject, candidate.provider, candidate.name)
        groups.append(
            TrialGroup(identity, "not run", "", (), scope, platform, absent=candidate.absent)
        )
    return groups


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """The trials of one candidate, aspect and dtype, which one pytest test runs.

    Attributes:
        absent: reason why there are no trials; empty if there are.
    """

    candidate: tuple[str, str, str, str]
    aspect: str
    dtype: str
    trials: tuple[Trial, ...] = field(repr=False)
    scope: Scope
    platform: str
    absent: str = ""

    def verify(self) -> None:
        """Run the trials: the test fails if any trial fails, and is skipped if none could run."""
        __tracebackhide__ = True
        if self.absent:
            pytest.skip(self.absent)
        outcomes = [outcome_of(trial) for trial in self.trials]
        failed = [outcome for outcome in outcomes if outcome.state == "failed"]
        if failed:
            pytest.fail("\n".join(self._lines(outcomes, failed)), pytrace=False)
        if not any(outcome.state == "passed" for outcome in outcomes):
            reasons = Counter(f"{outcome.state}: {outcome.reason}" for outcome in outcomes)
            pytest.skip("; ".join(f"{text} ({count} times)" for text, count in reasons.items()))

    def _lines(self, outcomes: list[Outcome], failed: list[Outcome]) -> list[str]:
        """Return the first faults in full, and one line for each further failed trial."""
        # All outcomes of a group belong to one candidate and one aspect.
        (candidate,) = examined(outcomes, self.scope, self.platform)
        (tally,) = candidate.tallies
        lines = wrong_lines(candidate, tally)
        shown_cases = {finding.case for finding in tally.findings}
        other_failures = [outcome for outcome in failed if outcome.case not in shown_cases]
        if other_failures:
            lines.append("The others:")
        lines += [f"  case {o.case!r}: {'; '.join(map(str, o.faults))}" for o in other_failures]
        return lines

    def __str__(self) -> str:
        kind, subject, provider, name = self.candidate
        parts = (kind, subject, f"{provider}/{name}", self.aspect, self.dtype)
        return "-".join(part for part in parts if part)


def _key(trial: Trial) -> _Key:
    outcome = untried(trial)
    return outcome.candidate, outcome.aspect, outcome.dtype
