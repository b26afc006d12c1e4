"""The selection mechanism: request + candidates + policy -> choice.

Order: pins of the user, preferences of the user, measured time, proof on the device's architecture,
score, then the provider's name. Every caller in the SDK uses ``select``, for platforms, kernels,
layers and backends alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from interposer._config.policy import Policy
from interposer._contract.choice import Candidate, Choice, Measured
from interposer._contract.errors import (
    ConfigError,
    InterposerError,
    NoCandidateError,
    PluginError,
    UnknownNameError,
    described,
    foreign_errors,
    traced,
)
from interposer._contract.records import OpEntry
from interposer._contract.request import Request
from interposer._contract.verdict import Refusal, Verdict
from interposer._selection.figures import duration, is_scattered

Gate = Callable[[Request, Candidate], Verdict]
"""One check of a candidate; an exception refuses the candidate."""

Loader = Callable[[Candidate], Any]
"""Loads the object that a candidate's record names; an exception refuses the candidate."""


class CandidateRefusedError(Exception):
    """Loading showed that a candidate cannot serve the request, for the reason of ``verdict``."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


_FREE = Policy()
_ACCEPTED = Verdict.accept()
_UNMEASURED = (1, 0.0)
_Rule = Literal["preference", "time", "proof", "score", "name"]


def select(
    request: Request,
    candidates: Iterable[Candidate],
    policy: Policy = _FREE,
    *,
    measured: Measured | str | None = None,
    gates: Sequence[Gate] = (),
) -> Choice:
    """Choose the best candidate for ``request``; see ``select_and_load``, without a loader."""
    return select_and_load(request, candidates, policy, measured=measured, gates=gates)[0]


def select_and_load(
    request: Request,
    candidates: Iterable[Candidate],
    policy: Policy = _FREE,
    *,
    measured: Measured | str | None = None,
    gates: Sequence[Gate] = (),
    load: Loader | None = None,
) -> tuple[Choice, Any]:
    """Choose the best candidate for ``request``, independent of the order of ``candidates``.

    Args:
        policy: rules of the configuration; forbidden candidates are not even judged.
        measured: run times of candidates; a measured candidate precedes every unmeasured one. A
            string is the reason why measurements cannot be used, and becomes a note.
        gates: costly last checks of the winner, in this order; if one refuses, the next best
            candidate is checked.
        load: loads the winner after the gates; if loading fails, the next best candidate is
            checked and loaded.
    Returns: the choice, and the loaded object, None without ``load``.
    Raises:
        UnknownNameError: the pin names no candidate.
        ConfigError: the pin names candidates of several providers.
        NoCandidateError: all candidates or the pinned one are refused; or the policy is strict, and
            no preference is met or only names could decide.
    """
    ordered = sorted(candidates, key=_by_score)
    verdicts = [(c, _judge(c, request, policy)) for c in ordered]
    measurement_problem = measured if isinstance(measured, str) else ""
    if isinstance(measured, str):
        measured = None
    seconds_by_name = measured.seconds if measured is not None else {}
    measured_names = [
        c.qualified_name
        for c, verdict in verdicts
        if verdict and c.qualified_name in seconds_by_name
    ]
    fastest = min(measured_names, key=lambda name: (seconds_by_name[name], name), default="")
    ranking = _Ranking(policy, measured, fastest, request.capability.architecture)
    accepted = sorted((c for c, verdict in verdicts if verdict), key=ranking.key)
    refused = [(c, verdict) for c, verdict in verdicts if not verdict]
    # Candidates that may win; without a pin or strict preferences, all that were accepted.
    eligible_candidates = accepted
    if policy.pin is not None:
        pinned = _find(request, ordered, policy.pin)
        eligible_candidates = [c for c in accepted if c is pinned]
    elif policy.strict and policy.prefer:
        eligible_candidates = [c for c in accepted if ranking.prefers(c)]
    chosen = loaded = None
    for candidate in eligible_candidates:
        # Only winners pass through the gates and are loaded, which is costly.
        verdict, loaded = _examine(gates, load, request, candidate)
        if verdict:
            chosen = candidate
            break
        refused.append((candidate, verdict))
        # A candidate that a gate refused is reported as refused, not as outranked.
        accepted = [c for c in accepted if c is not candidate]
    # Gates append refusals in the order of ranks; reports list them by score.
    refused.sort(key=lambda entry: _by_score(entry[0]))
    if chosen is None:
        raise _no_candidate_error(request, policy, ordered, accepted, refused)
    outranked_candidates = [c for c in accepted if c is not chosen]
    if policy.strict and policy.pin is None:
        _refuse_tie(request, ranking, chosen, outranked_candidates)
    outranked_refusals = [
        Refusal(c.name, c.origin, ranking.outranked(c, chosen)) for c in outranked_candidates
    ]
    notes = (
        *ranking.notes(chosen, refused),
        *_acceptance_notes(request, verdicts, chosen),
        measurement_problem,
    )
    choice = Choice(
        request,
        chosen,
        ranking.why(chosen, outranked_candidates),
        (*outranked_refusals, *(_refusal(c, verdict) for c, verdict in refused)),
        {
            c.qualified_name: seconds_by_name[c.qualified_name]
            for c in ordered
            if c.qualified_name in seconds_by_name
        },
        tuple(filter(None, notes)),
        policy.pin is not None or bool(ranking.preferred(chosen)),
    )
    return choice, loaded


def _examine(
    gates: Iterable[Gate], load: Loader | None, request: Request, candidate: Candidate
) -> tuple[Verdict, Any]:
    """Check a candidate by ``gates``, then load it; return (verdict, loaded object or None).

    An exception in a candidate's code is a refusal.
    """
    try:
        for gate in gates:
            verdict = gate(request, candidate)
            if not verdict:
                return verdict, None
        return _ACCEPTED, None if load is None else load(candidate)
    except CandidateRefusedError as error:
        return error.verdict, None
    except PluginError as error:
        trace = error.trace or traced(error)
        return Verdict.refuse(error.reason, trace), None
    # A candidate that chooses kernels for itself found none.
    except NoCandidateError as error:
        return Verdict.refuse(f"cannot be built: {error}"), None
    except foreign_errors() as error:
        reason = str(error) if isinstance(error, InterposerError) else f"raised {described(error)}"
        return Verdict.refuse(reason, traced(error)), None


def acceptable(
    request: Request, candidates: Iterable[Candidate], policy: Policy = _FREE
) -> list[Candidate]:
    """Return the candidates that ``select`` could choose: at most one if there is a pin."""
    return [
        candidate
        for candidate in candidates
        if (policy.pin is None or policy.pin in (candidate.name, candidate.qualified_name))
        and _judge(candidate, request, policy)
    ]


@dataclass(frozen=True, slots=True)
class _Ranking:
    """The ranking of accepted candidates, and the reason why one ranks above another."""

    policy: Policy
    measured: Measured | None
    fastest: str
    architecture: str

    def key(self, candidate: Candidate) -> tuple[object, ...]:
        rules = self.preference(candidate), self.seconds(candidate), self.unproven(candidate)
        return (*rules, *_by_score(candidate))

    def unproven(self, candidate: Candidate) -> bool:
        """Tell whether the candidate was neither proven on the architecture nor measured."""
        proven = candidate.is_proven_on(self.architecture)
        return not proven and self.seconds(candidate) == _UNMEASURED

    def preference(self, candidate: Candidate) -> int:
        """Return the position of the first preference that is met, or one past the last.

        The platform's preference follows those of the user.
        """
        globs = (*self.policy.prefer, *filter(None, [self.policy.default]))
        return next((i for i, glob in enumerate(globs) if _matches(glob, candidate)), len(globs))

    def prefers(self, candidate: Candidate) -> bool:
        return self.preference(candidate) < len(self.policy.prefer)

    def preferred(self, candidate: Candidate) -> str:
        """Return text that says whether user or platform prefer a candidate, or ""."""
        if self.prefers(candidate):
            return "preferred by the configuration"
        default = self.policy.default
        return "preferred by the platform" if default and _matches(default, candidate) else ""

    def seconds(self, candidate: Candidate) -> tuple[int, float]:
        """Return a key that sorts the fastest candidate first and unmeasured ones last.

        A candidate within the spread of the fastest candidate's repeats counts as equally fast, so
        that noise does not decide.
        """
        if self.measured is None or candidate.qualified_name not in self.measured.seconds:
            return _UNMEASURED
        seconds = self.measured.seconds[candidate.qualified_name]
        fastest = self.measured.seconds[self.fastest]
        noisy = seconds <= self.measured.upper.get(self.fastest, fastest)
        return 0, fastest if noisy else seconds

    def shown(self, candidate: Candidate) -> str:
        assert self.measured is not None
        return duration(self.measured.seconds[candidate.qualified_name])

    def deciding_rule(self, first: Candidate, second: Candidate) -> _Rule:
        """Return the first ranking criterion, such as "time", in which two candidates differ."""
        # The same order as ``key``.
        if self.preference(first) != self.preference(second):
            return "preference"
        if self.seconds(first) != self.seconds(second):
            return "time"
        if self.unproven(first) != self.unproven(second):
            return "proof"
        return "score" if first.score != second.score else "name"

    def why(self, chosen: Candidate, rivals: Sequence[Candidate]) -> str:
        if self.policy.pin is not None:
            return "pinned by the configuration"
        preferred = self.preferred(chosen)
        if preferred:
            rivals = [c for c in rivals if self.deciding_rule(chosen, c) != "preference"]
            if not rivals:
                return preferred
        if not rivals:
            is_reference = isinstance(chosen.record, OpEntry)
            return f"the only one accepted{', runs PyTorch kernels' if is_reference else ''}"
        match self.deciding_rule(chosen, rivals[0]):
            case "time":
                source = "" if self.measured is None else self.measured.source
                reason = f"fastest in {source} ({self.shown(chosen)})"
            case "proof":
                reason = f"the others were never measured on this device ({self.architecture})"
            case "score":
                reason = f"highest score ({chosen.score:g})"
                if self.seconds(chosen) != _UNMEASURED and self.measured is not None:
                    reason += f" of the equally fast ones in {self.measured.source}"
            case _:
                reason = f"tie at score {chosen.score:g}, decided by provider and name"
        return f"{preferred}, then {reason}" if preferred else reason

    def outranked(self, candidate: Candidate, chosen: Candidate) -> str:
        if self.policy.pin is not None:
            return f"accepted, but {chosen.name} is pinned"
        match self.deciding_rule(chosen, candidate):
            case "preference":
                return f"accepted, but {chosen.name} is preferred"
            case "time" if self.seconds(candidate) == _UNMEASURED:
                return f"accepted, but has no measurement, and {chosen.name} has one"
            case "time":
                return f"accepted, but slower ({self.shown(candidate)} > {self.shown(chosen)})"
            case "proof":
                return f"accepted, but never measured on this device ({self.architecture})"
            case "score":
                scores = f"score {candidate.score:g} < {chosen.score:g}"
                if self.seconds(candidate) == _UNMEASURED:
                    return f"accepted, but outranked ({scores})"
                times = f"{self.shown(candidate)} and {self.shown(chosen)}"
                equal = f"equally fast within the spread ({times})"
                return f"accepted, {equal}, but outranked ({scores})"
            case "name":
                return f"accepted, but ties with {chosen.name} and ranks lower by provider and name"

    def notes(
        self, chosen: Candidate, refused: Iterable[tuple[Candidate, Verdict]]
    ) -> Iterator[str]:
        """Yield notes on unmet preferences, an emulation, lost accuracy and missing proof."""
        unmet = () if self.policy.pin is not None else self.policy.prefer[: self.preference(chosen)]
        for glob in unmet:
            reasons = [f"{c.name}: {v.reason}" for c, v in refused if _matches(glob, c)]
            if reasons:
                yield f"preferred, but refused: {glob!r} ({'; '.join(reasons)})"
            else:
                yield f"preferred, but no candidate matches: {glob!r}"
        if chosen.emulation:
            yield f"an emulation: it {chosen.emulation}"
        if extra := getattr(chosen.record, "extra_roundings", 0):
            yield f"may be off by {extra} roundings more than the op allows"
        if self.unproven(chosen):
            remedy = "Try: interposer verify, then interposer tune"
            yield f"never measured on this device ({self.architecture}). {remedy}"
        if self.measured is not None and self.fastest and self.policy.pin is None:
            seconds = self.measured.seconds[self.fastest]
            upper = self.measured.upper.get(self.fastest, seconds)
            if is_scattered(seconds, upper):
                yield (
                    f"{self.measured.source} are scattered: {self.fastest} took "
                    f"{duration(seconds, 3)}, but more than {duration(upper, 3)} in a quarter of "
                    "the runs, and times below that count as equally fast. Try: interposer tune, "
                    "while the machine does nothing else"
                )


def _acceptance_notes(
    request: Request, verdicts: Iterable[tuple[Candidate, Verdict]], chosen: Candidate
) -> tuple[str, ...]:
    """Return the chosen candidate's reason for acceptance, except for platforms."""
    reasons = (verdict.reason for candidate, verdict in verdicts if candidate is chosen)
    return tuple(filter(None, reasons)) if request.kind != "platform" else ()


def _judge(candidate: Candidate, request: Request, policy: Policy) -> Verdict:
    excluded = _excluded(candidate, policy)
    return Verdict.refuse(excluded) if excluded else candidate.judge(request)


def _excluded(candidate: Candidate, policy: Policy) -> str:
    """Return the reason why the policy excludes a candidate, or ""."""
    for glob in sorted(policy.forbid):
        if _matches(glob, candidate):
            return f"forbidden by the configuration ({glob!r})"
    if candidate.emulation and not policy.emulation:
        return f"an emulation, which the configuration refuses: it {candidate.emulation}"
    missing = ", ".join(sorted(policy.require - candidate.properties))
    return f"does not promise {missing}" if missing else ""


def _matches(glob: str, candidate: Candidate) -> bool:
    return fnmatchcase(candidate.name, glob) or fnmatchcase(candidate.qualified_name, glob)


def _by_score(candidate: Candidate) -> tuple[float, str, str, str]:
    return -candidate.score, candidate.provider, candidate.name, candidate.version


def _find(request: Request, candidates: list[Candidate], pinned: str) -> Candidate:
    matches = [c for c in candidates if pinned in (c.name, c.qualified_name)]
    if not matches:
        names = [c.name for c in candidates]
        where = f"for {request.name!r}" if request.name else ""
        is_glob = set("*?[") & set(pinned)
        hint = f"A pin names one candidate. Try: Rule(prefer=[{pinned!r}])" if is_glob else ""
        raise UnknownNameError(request.kind, pinned, names, hint, where)
    if len(matches) > 1:
        qualified = " or ".join(repr(c.qualified_name) for c in matches)
        raise ConfigError(f"{pinned!r} is ambiguous for {request}. Try: {qualified}")
    return matches[0]


def _no_candidate_error(
    request: Request,
    policy: Policy,
    ordered: Sequence[Candidate],
    accepted: Sequence[Candidate],
    refused: Sequence[tuple[Candidate, Verdict]],
) -> NoCandidateError:
    """Build the error for a request with no candidate that the policy allows."""
    names = ", ".join(repr(c.name) for c in accepted) or "none"
    if policy.pin is not None:
        pinned = _find(request, list(ordered), policy.pin)
        return NoCandidateError(
            f"{policy.pin!r} for {request}, which the configuration pins",
            [_refusal(c, verdict) for c, verdict in refused if c is pinned],
            f"remove the pin; accepted here: {names}",
        )
    if policy.strict and policy.prefer:
        preferred = " or ".join(repr(glob) for glob in policy.prefer)
        return NoCandidateError(
            f"{preferred} for {request}, which the configuration strictly prefers",
            [_refusal(c, v) for c, v in refused if any(_matches(g, c) for g in policy.prefer)],
            f"strict=False, or prefer another; accepted here: {names}",
        )
    excluded = any(_excluded(c, policy) for c, _ in refused)
    action = "forbid or require less in the configuration" if excluded else ""
    return NoCandidateError(
        f"candidate for {request}", [_refusal(c, verdict) for c, verdict in refused], action
    )


def _refuse_tie(
    request: Request, ranking: _Ranking, chosen: Candidate, rivals: Sequence[Candidate]
) -> None:
    tied = [c for c in rivals if ranking.deciding_rule(chosen, c) == "name"]
    if tied:
        names = " or ".join(repr(c.qualified_name) for c in (chosen, *tied))
        raise NoCandidateError(
            f"single best candidate for {request}, which strict=True requires",
            [Refusal(c.name, c.origin, f"ties at score {c.score:g}") for c in (chosen, *tied)],
            f"pin or prefer {names}",
        )


def _refusal(candidate: Candidate, verdict: Verdict) -> Refusal:
    return Refusal(candidate.name, candidate.origin, verdict.reason, verdict.traceback)
