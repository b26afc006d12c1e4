"""The one selection mechanism: request + candidates + policy -> choice.

Order: what the user pinned, what the user prefers, what was measured, what is proven on such a
device, the score, then the provider's name. Every caller in the SDK goes through ``select``,
whether it wants a platform, a kernel, a layer or a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

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
from interposer._contract.request import Request
from interposer._contract.verdict import Refusal, Verdict
from interposer._selection.figures import duration

Gate = Callable[[Request, Candidate], Verdict]
"""One examination; what it raises refuses the candidate."""

_FREE = Policy()
_ACCEPTED = Verdict.accept()
_UNMEASURED = (1, 0.0)
_Rule = Literal["wish", "time", "proof", "score", "name"]


def select(
    request: Request,
    candidates: Iterable[Candidate],
    policy: Policy = _FREE,
    *,
    measured: Measured | str | None = None,
    gates: Sequence[Gate] = (),
) -> Choice:
    """Return the best candidate for ``request``, the same for any order of ``candidates``.

    Args:
        policy: what the configuration wants; what it forbids is not even judged.
        measured: figures of candidates, which go before all that have none; a text says why there
            are none that could be used, and becomes a note.
        gates: costly last examinations, asked of a winner in this order; if one refuses, the next
            best candidate is asked.
    Raises:
        UnknownNameError: the pin names no candidate.
        ConfigError: the pin names candidates of several providers.
        NoCandidateError: all are refused, or the pinned one is; or the policy is strict, and no
            preference is met or only names could decide.
    """
    ordered = sorted(candidates, key=_by_score)
    verdicts = [(c, _judge(c, request, policy)) for c in ordered]
    unusable = measured if isinstance(measured, str) else ""
    if isinstance(measured, str):
        measured = None
    known = measured.seconds if measured is not None else {}
    timed = [c.qualified_name for c, verdict in verdicts if verdict and c.qualified_name in known]
    fastest = min(timed, key=lambda name: (known[name], name), default="")
    ranking = _Ranking(policy, measured, fastest, request.capability.architecture)
    accepted = sorted((c for c, verdict in verdicts if verdict), key=ranking.key)
    refused = [(c, verdict) for c, verdict in verdicts if not verdict]
    contenders = accepted
    if policy.pin is not None:
        pinned = _find(request, ordered, policy.pin)
        contenders = [c for c in accepted if c is pinned]
    elif policy.strict and policy.prefer:
        contenders = [c for c in accepted if ranking.prefers(c)]
    chosen = None
    for contender in contenders:
        verdict = _passed(gates, request, contender)
        if verdict:
            chosen = contender
            break
        refused.append((contender, verdict))
        accepted = [c for c in accepted if c is not contender]
    refused.sort(key=lambda entry: _by_score(entry[0]))
    if chosen is None:
        raise _none(request, policy, ordered, accepted, refused)
    others = [c for c in accepted if c is not chosen]
    if policy.strict and policy.pin is None:
        _refuse_tie(request, ranking, chosen, others)
    outranked = [Refusal(c.name, c.origin, ranking.outranked(c, chosen)) for c in others]
    told = (*ranking.notes(chosen, refused), *_told(request, verdicts, chosen), unusable)
    return Choice(
        request,
        chosen,
        ranking.why(chosen, others),
        (*outranked, *(_refusal(c, verdict) for c, verdict in refused)),
        {c.qualified_name: known[c.qualified_name] for c in ordered if c.qualified_name in known},
        tuple(filter(None, told)),
        policy.pin is not None or bool(ranking.preferred(chosen)),
    )


def _passed(gates: Iterable[Gate], request: Request, candidate: Candidate) -> Verdict:
    """Return the first refusal of ``gates``; an exception of a candidate's code is one."""
    try:
        for gate in gates:
            verdict = gate(request, candidate)
            if not verdict:
                return verdict
    except PluginError as error:
        trace = error.trace or traced(error)
        return Verdict.refuse(error.reason, trace)
    except NoCandidateError as error:
        return Verdict.refuse(f"cannot be built: {error}")
    except foreign_errors() as error:
        reason = str(error) if isinstance(error, InterposerError) else f"raised {described(error)}"
        return Verdict.refuse(reason, traced(error))
    return _ACCEPTED


def acceptable(
    request: Request, candidates: Iterable[Candidate], policy: Policy = _FREE
) -> list[Candidate]:
    """Return the candidates that ``select`` could choose: of a pin, at most one."""
    return [
        candidate
        for candidate in candidates
        if (policy.pin is None or policy.pin in (candidate.name, candidate.qualified_name))
        and _judge(candidate, request, policy)
    ]


@dataclass(frozen=True, slots=True)
class _Ranking:
    """The order of accepted candidates, and how one rank is explained against another."""

    policy: Policy
    measured: Measured | None
    fastest: str
    architecture: str

    def key(self, candidate: Candidate) -> tuple[object, ...]:
        rules = self.preference(candidate), self.seconds(candidate), self.unproven(candidate)
        return (*rules, *_by_score(candidate))

    def unproven(self, candidate: Candidate) -> bool:
        """Say whether neither its author has run it on such a device, nor anybody measured it."""
        proven = candidate.is_proven_on(self.architecture)
        return not proven and self.seconds(candidate) == _UNMEASURED

    def preference(self, candidate: Candidate) -> int:
        """Return the position of the first preference that is met, or one past the last.

        What the platform prefers comes behind what the user does.
        """
        globs = (*self.policy.prefer, *filter(None, [self.policy.default]))
        return next((i for i, glob in enumerate(globs) if _meant(glob, candidate)), len(globs))

    def prefers(self, candidate: Candidate) -> bool:
        return self.preference(candidate) < len(self.policy.prefer)

    def preferred(self, candidate: Candidate) -> str:
        """Return by whom a candidate is preferred, or nothing."""
        if self.prefers(candidate):
            return "preferred by the configuration"
        default = self.policy.default
        return "preferred by the platform" if default and _meant(default, candidate) else ""

    def seconds(self, candidate: Candidate) -> tuple[int, float]:
        """Return what sorts the fastest first and those without a figure last.

        What differs from the fastest by less than its repeats do among themselves counts as equal
        to it, so that noise does not choose.
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

    def differ(self, one: Candidate, other: Candidate) -> _Rule:
        """Return the first rule that tells two candidates apart."""
        if self.preference(one) != self.preference(other):
            return "wish"
        if self.seconds(one) != self.seconds(other):
            return "time"
        if self.unproven(one) != self.unproven(other):
            return "proof"
        return "score" if one.score != other.score else "name"

    def why(self, chosen: Candidate, others: Sequence[Candidate]) -> str:
        if self.policy.pin is not None:
            return "pinned by the configuration"
        preferred = self.preferred(chosen)
        if preferred:
            others = [c for c in others if self.differ(chosen, c) != "wish"]
            if not others:
                return preferred
        if not others:
            return "the only one accepted"
        match self.differ(chosen, others[0]):
            case "time":
                source = "" if self.measured is None else self.measured.source
                reason = f"fastest in {source} ({self.shown(chosen)})"
            case "proof":
                reason = f"the others were never measured on this device ({self.architecture})"
            case "score":
                reason = f"highest score ({chosen.score:g})"
                if self.seconds(chosen) != _UNMEASURED and self.measured is not None:
                    reason += f", equally fast in {self.measured.source}"
            case _:
                reason = f"tie at score {chosen.score:g}, decided by provider and name"
        return f"{preferred}, then {reason}" if preferred else reason

    def outranked(self, candidate: Candidate, chosen: Candidate) -> str:
        if self.policy.pin is not None:
            return f"accepted, but {chosen.name} is pinned"
        match self.differ(chosen, candidate):
            case "wish":
                return f"accepted, but {chosen.name} is preferred"
            case "time" if self.seconds(candidate) == _UNMEASURED:
                return f"accepted, but not measured, as {chosen.name} is"
            case "time":
                return f"accepted, but slower ({self.shown(candidate)} > {self.shown(chosen)})"
            case "proof":
                return f"accepted, but never measured on this device ({self.architecture})"
            case "score":
                return f"accepted, but outranked (score {candidate.score:g} < {chosen.score:g})"
            case "name":
                return (
                    f"accepted, but ties with {chosen.name} and stands behind by provider and name"
                )

    def notes(
        self, chosen: Candidate, refused: Iterable[tuple[Candidate, Verdict]]
    ) -> Iterator[str]:
        """Yield notes on unmet preferences, an emulation, lost accuracy and missing proof."""
        unmet = () if self.policy.pin is not None else self.policy.prefer[: self.preference(chosen)]
        for glob in unmet:
            reasons = [f"{c.name}: {v.reason}" for c, v in refused if _meant(glob, c)]
            if reasons:
                yield f"preferred, but refused: {glob!r} ({'; '.join(reasons)})"
            else:
                yield f"preferred, but not there: {glob!r}"
        if chosen.emulation:
            yield f"an emulation: it {chosen.emulation}"
        if extra := getattr(chosen.record, "extra_roundings", 0):
            yield f"may be off by {extra} roundings more than the op allows"
        if self.unproven(chosen):
            mend = "Try: interposer verify, then interposer tune"
            yield f"never measured on this device ({self.architecture}). {mend}"


def _told(
    request: Request, verdicts: Iterable[tuple[Candidate, Verdict]], chosen: Candidate
) -> tuple[str, ...]:
    """Return what the chosen one said of itself; a platform says it to whoever looks for it."""
    reasons = (verdict.reason for candidate, verdict in verdicts if candidate is chosen)
    return tuple(filter(None, reasons)) if request.kind != "platform" else ()


def _judge(candidate: Candidate, request: Request, policy: Policy) -> Verdict:
    excluded = _excluded(candidate, policy)
    return Verdict.refuse(excluded) if excluded else candidate.judge(request)


def _excluded(candidate: Candidate, policy: Policy) -> str:
    """Return why the policy rules a candidate out, or nothing."""
    for glob in sorted(policy.forbid):
        if _meant(glob, candidate):
            return f"forbidden by the configuration ({glob!r})"
    if candidate.emulation and not policy.emulation:
        return f"an emulation, which the configuration refuses: it {candidate.emulation}"
    missing = ", ".join(sorted(policy.require - candidate.properties))
    return f"does not promise {missing}" if missing else ""


def _meant(glob: str, candidate: Candidate) -> bool:
    return fnmatchcase(candidate.name, glob) or fnmatchcase(candidate.qualified_name, glob)


def _by_score(candidate: Candidate) -> tuple[float, str, str, str]:
    return -candidate.score, candidate.provider, candidate.name, candidate.version


def _find(request: Request, candidates: list[Candidate], pinned: str) -> Candidate:
    found = [c for c in candidates if pinned in (c.name, c.qualified_name)]
    if not found:
        names = [c.name for c in candidates]
        where = f"for {request.name!r}" if request.name else ""
        is_glob = set("*?[") & set(pinned)
        hint = f"A pin names one candidate. Try: Rule(prefer=[{pinned!r}])" if is_glob else ""
        raise UnknownNameError(request.kind, pinned, names, hint, where)
    if len(found) > 1:
        qualified = " or ".join(repr(c.qualified_name) for c in found)
        raise ConfigError(f"{pinned!r} is ambiguous for {request}. Try: {qualified}")
    return found[0]


def _none(
    request: Request,
    policy: Policy,
    ordered: Sequence[Candidate],
    accepted: Sequence[Candidate],
    refused: Sequence[tuple[Candidate, Verdict]],
) -> NoCandidateError:
    """Return the error that says why nothing that the policy allows can be chosen."""
    names = ", ".join(repr(c.name) for c in accepted) or "none"
    if policy.pin is not None:
        pinned = _find(request, list(ordered), policy.pin)
        return NoCandidateError(
            f"{policy.pin!r} for {request}, which the configuration pins",
            [_refusal(c, verdict) for c, verdict in refused if c is pinned],
            f"remove the pin; accepted here: {names}",
        )
    if policy.strict and policy.prefer:
        wanted = " or ".join(repr(glob) for glob in policy.prefer)
        return NoCandidateError(
            f"{wanted} for {request}, which the configuration strictly prefers",
            [_refusal(c, v) for c, v in refused if any(_meant(g, c) for g in policy.prefer)],
            f"strict=False, or prefer another; accepted here: {names}",
        )
    excluded = any(_excluded(c, policy) for c, _ in refused)
    action = "forbid or require less in the configuration" if excluded else ""
    return NoCandidateError(
        f"candidate for {request}", [_refusal(c, verdict) for c, verdict in refused], action
    )


def _refuse_tie(
    request: Request, ranking: _Ranking, chosen: Candidate, others: Sequence[Candidate]
) -> None:
    tied = [c for c in others if ranking.differ(chosen, c) == "name"]
    if tied:
        names = " or ".join(repr(c.qualified_name) for c in (chosen, *tied))
        raise NoCandidateError(
            f"best candidate for {request}, which strict=True wants to be one alone",
            [Refusal(c.name, c.origin, f"ties at score {c.score:g}") for c in (chosen, *tied)],
            f"pin or prefer {names}",
        )


def _refusal(candidate: Candidate, verdict: Verdict) -> Refusal:
    return Refusal(candidate.name, candidate.origin, verdict.reason, verdict.traceback)
