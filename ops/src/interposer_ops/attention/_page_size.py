"""The size of the pages of a cache, which all backends of a model have to take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from interposer import AttentionSpec, Candidate, Request, Resolver, Site, Verdict, select
from interposer.errors import NoCandidateError
from interposer.tooling import policy_for

_USUAL = 16


def common_page_size(
    resolver: Resolver, layers: Iterable[tuple[AttentionSpec, Site]], usual: int = _USUAL
) -> int:
    """Return the number of tokens in a page that the best backend of every layer takes.

    A backend is asked about the sizes of its record in their order, or about ``usual`` where that
    names none. Where the best backends of the layers have none in common, a size is returned that
    some backend of each layer takes; where there is none either, ``usual``, with which the
    selection says what each backend refuses.

    Args:
        layers: spec and site of each attention layer; the page size in a spec counts for nothing.
        usual: size for backends that have no wish.
    """
    offers: dict[tuple[object, ...], dict[str, list[int]]] = {}
    wanted: list[list[int]] = []
    for spec, site in layers:
        request = _request(resolver, spec, usual, site.prefix)
        policy = policy_for(resolver.config, request)
        key = (request.key, policy)
        if key in offers:
            continue
        candidates = resolver.registry.candidates("attention")
        taken = {c.qualified_name: _taken(resolver, c, spec, usual, site) for c in candidates}
        offers[key] = taken
        able = [_answering(c, bool(taken[c.qualified_name])) for c in candidates]
        try:
            best = select(request, able, policy).chosen
        except NoCandidateError:
            return usual
        wanted.append(taken[best.qualified_name])
    sizes = list(dict.fromkeys(size for some in wanted for size in some))
    for size in sizes:
        if all(size in some for some in wanted):
            return size
    for size in sizes:
        if all(any(size in some for some in taken.values()) for taken in offers.values()):
            return size
    return usual


def _taken(
    resolver: Resolver, candidate: Candidate, spec: AttentionSpec, usual: int, site: Site
) -> list[int]:
    """Return the sizes with which a backend accepts a spec, the preferred one first."""
    named = getattr(candidate.record, "page_sizes", ()) or (usual,)
    return [s for s in named if candidate.judge(_request(resolver, spec, s, site.prefix))]


def _answering(candidate: Candidate, accepts: bool) -> Candidate:
    verdict = Verdict.accept() if accepts else Verdict.refuse("takes none of its page sizes")
    return replace(candidate, judge=lambda _: verdict)


def _request(resolver: Resolver, spec: AttentionSpec, page_size: int, prefix: str) -> Request:
    spec = replace(spec, page_size=page_size)
    device, dtype = resolver.device, str(spec.dtype).removeprefix("torch.")
    place = device.platform, device.capability
    return Request("attention", spec.type, *place, dtype, spec.dims(), spec, prefix)
