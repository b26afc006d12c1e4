"""Choice of one page size for the caches of all attention layers of a model."""

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
    """Return the page size in tokens that the best backend of every layer accepts.

    Each backend is tried with the page sizes of its record, in the record's order, or with
    ``usual`` if the record lists none. If the layers' best backends share no size, the result is a
    size that some backend of every layer accepts; if there is none either, ``usual``, so that the
    selection reports why each backend refuses.

    Args:
        layers: spec and site of each attention layer; the specs' page sizes are ignored.
        usual: size for backends without a preference.
    """
    offers: dict[tuple[object, ...], dict[str, list[int]]] = {}
    preferred: list[list[int]] = []  # sizes of the best backend of each kind of layer
    for spec, site in layers:
        request = _request(resolver, spec, usual, site.prefix)
        policy = policy_for(resolver.config, request)
        key = (request.key, policy)
        if key in offers:
            continue  # a layer with the same request and policy has the same answer
        candidates = resolver.registry.candidates("attention")
        accepted = {
            c.qualified_name: _accepted_sizes(resolver, c, spec, usual, site) for c in candidates
        }
        offers[key] = accepted
        # The page size is not chosen yet, so a backend counts as able if any of its sizes is.
        able = [_with_verdict(c, bool(accepted[c.qualified_name])) for c in candidates]
        try:
            best = select(request, able, policy).chosen
        except NoCandidateError:
            return usual
        preferred.append(accepted[best.qualified_name])
    candidate_sizes = list(dict.fromkeys(size for sizes in preferred for size in sizes))
    for size in candidate_sizes:
        if all(size in sizes for sizes in preferred):
            return size
    for size in candidate_sizes:
        if all(any(size in sizes for sizes in backends.values()) for backends in offers.values()):
            return size
    return usual


def _accepted_sizes(
    resolver: Resolver, candidate: Candidate, spec: AttentionSpec, usual: int, site: Site
) -> list[int]:
    """Return the page sizes with which a backend accepts a spec, the preferred size first."""
    sizes = getattr(candidate.record, "page_sizes", ()) or (usual,)
    return [s for s in sizes if candidate.judge(_request(resolver, spec, s, site.prefix))]


def _with_verdict(candidate: Candidate, accepts: bool) -> Candidate:
    verdict = Verdict.accept() if accepts else Verdict.refuse("takes none of its page sizes")
    return replace(candidate, judge=lambda _: verdict)


def _request(resolver: Resolver, spec: AttentionSpec, page_size: int, prefix: str) -> Request:
    spec = replace(spec, page_size=page_size)
    device, dtype = resolver.device, str(spec.dtype).removeprefix("torch.")
    target = device.platform, device.capability
    return Request("attention", spec.type, *target, dtype, spec.dims(), spec, prefix)
