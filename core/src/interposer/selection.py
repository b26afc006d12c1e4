"""The one selection mechanism: request + candidates + policy -> choice.

Order: what the user pinned, then the score, then the provider's name. Every caller in the SDK
goes through ``select``, whether it wants a platform, a kernel, a layer or a backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from interposer.choice import Candidate, Choice
from interposer.errors import ConfigError, NoCandidateError, UnknownNameError
from interposer.request import Request
from interposer.verdict import Refusal

__all__ = ["pin_matches", "pinned_name", "select"]


def select(request: Request, candidates: Iterable[Candidate], pinned: str | None = None) -> Choice:
    """Return the best candidate for ``request``, the same for any order of ``candidates``.

    Args:
        pinned: name or ``provider/name`` of the only candidate that the user wants.
    Raises:
        UnknownNameError: ``pinned`` names no candidate.
        ConfigError: ``pinned`` names candidates of several providers.
        NoCandidateError: all are refused, or the pinned one is.
    """
    ordered = sorted(candidates, key=lambda c: (-c.score, c.provider, c.name))
    verdicts = [(candidate, candidate.judge(request)) for candidate in ordered]
    refused = [
        Refusal(c.name, c.origin, v.reason, v.traceback) for c, v in verdicts if not v.accepted
    ]
    accepted = [candidate for candidate, verdict in verdicts if verdict]
    if pinned is not None:
        chosen = _find(request, ordered, pinned)
        if chosen not in accepted:
            own = [r for r in refused if r.candidate == chosen.name and r.provider == chosen.origin]
            others = ", ".join(repr(c.name) for c in accepted) or "none"
            raise NoCandidateError(
                f"{pinned!r} for {request}, which the configuration pins",
                own,
                f"remove the pin; accepted here: {others}",
            )
        why = "pinned by the configuration"
    elif accepted:
        chosen = accepted[0]
        why = _reason(accepted)
    else:
        raise NoCandidateError(f"candidate for {request}", refused)
    outranked = [
        Refusal(c.name, c.origin, _outranked(c, chosen, pinned))
        for c in accepted
        if c is not chosen
    ]
    return Choice(request, chosen, why, (*outranked, *refused))


def pinned_name(pins: Mapping[str, str], request: Request) -> str | None:
    """Return the value that ``pins`` holds for ``request``, or None.

    A key is a name, or ``name@glob`` for the places whose dotted prefix matches the glob. A key
    with a glob goes before one without, and of several globs the longest wins.
    """
    matching = []
    for key, value in pins.items():
        if pin_matches(key, request.name, request.prefix):
            glob = key.partition("@")[2]
            matching.append((len(glob), glob, value))
    return max(matching)[2] if matching else None


def pin_matches(key: str, name: str, prefix: str) -> bool:
    """Say whether the key of a pin speaks of ``name`` at the place ``prefix``."""
    pinned, at, glob = key.partition("@")
    return pinned == name and (not at or fnmatchcase(prefix, glob))


def _find(request: Request, candidates: list[Candidate], pinned: str) -> Candidate:
    found = [c for c in candidates if pinned in (c.name, c.qualified_name)]
    if not found:
        names = [c.name for c in candidates]
        where = f"for {request.name!r}" if request.name else ""
        raise UnknownNameError(request.kind, pinned, names, where=where)
    if len(found) > 1:
        qualified = " or ".join(repr(c.qualified_name) for c in found)
        raise ConfigError(f"{pinned!r} is ambiguous for {request}. Try: {qualified}")
    return found[0]


def _reason(accepted: list[Candidate]) -> str:
    best = accepted[0]
    if len(accepted) == 1:
        return "the only one accepted"
    if accepted[1].score < best.score:
        return f"highest score ({best.score:g})"
    return f"tie at score {best.score:g}, decided by provider and name"


def _outranked(candidate: Candidate, chosen: Candidate, pinned: str | None) -> str:
    if pinned is not None:
        return f"accepted, but {chosen.name} is pinned"
    if candidate.score == chosen.score:
        return f"accepted, but ties with {chosen.name} and stands behind by provider and name"
    return f"accepted, but outranked (score {candidate.score:g} < {chosen.score:g})"
