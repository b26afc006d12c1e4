"""The trials of layers and quantization schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from interposer import Candidate, Device, Registry, Request, Verdict
from interposer.errors import foreign_errors
from interposer.records import LayerEntry, SchemeEntry, load_target
from interposer_testing._checks.fault import Fault
from interposer_testing._checks.layer import check_layer
from interposer_testing._checks.scheme import check_scheme
from interposer_testing._trials.trial import Aspect, Trial
from interposer_testing.cases._layer import LayerCaseGenerator

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_trials(
    registry: Registry, device: Device, distribution: str, seed: int, only: str = ""
) -> Iterator[Trial]:
    """Yield the trials of standard layers and of replacements, on the standard layers' cases.

    Args:
        only: id of one layer; empty for all.
    """
    for layer_id in [only] if only else registry.subjects("layer"):
        all_candidates = registry.candidates("layer", layer_id)
        candidates = [
            candidate
            for candidate in all_candidates
            if distribution in ("", candidate.provider)
            and getattr(candidate.record, "platform", "") in registry.runs(device.platform)
        ]
        # The request's dtype is set per case.
        request = Request("layer", layer_id, device.platform, device.capability)
        if not candidates:
            continue
        try:
            yield from _trials_of_layer(registry, device, all_candidates, candidates, request, seed)
        except foreign_errors() as error:
            fault = Fault.raised("layer", f"cases of the standard layer {layer_id!r}", error)
            yield failed_trial(candidates[0], request, "layer", fault)


def _trials_of_layer(
    registry: Registry,
    device: Device,
    all_candidates: list[Candidate],
    candidates: list[Candidate],
    request: Request,
    seed: int,
) -> Iterator[Trial]:
    standard = next((c for c in all_candidates if _is_standard(c)), None)
    cases = "" if standard is None else _layer_entry(standard).cases
    if standard is None or not cases:
        reason = "the standard layer is not installed"
        if standard is not None:
            reason = f"the standard layer, {standard.qualified_name}, declares no cases"
        for candidate in candidates:
            yield skipped_trial(candidate, request, "layer", reason)
        return
    generate: LayerCaseGenerator = load_target(cases)
    for dtype in _DTYPES:
        dtype_request = with_dtype(request, dtype)
        for case in generate(dtype, seed):
            for candidate in candidates:
                check = partial(check_layer, registry, device, standard, candidate, case, dtype)
                verdict = candidate.judge(dtype_request)
                yield Trial(candidate, dtype_request, case.label, verdict, check, "layer")


def scheme_trials(
    registry: Registry, device: Device, distribution: str, seed: int
) -> Iterator[Trial]:
    """Yield the trials of each quantization scheme, on the example settings in the record."""
    for method in registry.subjects("scheme"):
        request = Request("scheme", method, device.platform, device.capability)
        for candidate in registry.candidates("scheme", method):
            if distribution in ("", candidate.provider):
                try:
                    yield from _trials_of_scheme(registry, device, candidate, request, seed)
                except foreign_errors() as error:
                    fault = Fault.raised("scheme", "examples", error)
                    yield failed_trial(candidate, request, "scheme", fault)


def _trials_of_scheme(
    registry: Registry, device: Device, candidate: Candidate, request: Request, seed: int
) -> Iterator[Trial]:
    assert isinstance(candidate.record, SchemeEntry)
    if not candidate.record.examples:
        yield skipped_trial(
            candidate, request, "scheme", "the record names no examples of settings"
        )
        return
    examples: Callable[[], Mapping[str, Mapping[str, Any]]] = load_target(candidate.record.examples)
    for label, settings in examples().items():
        for dtype in _DTYPES:
            check = partial(
                _check_scheme, candidate.record, settings, registry, device, dtype, seed
            )
            dtype_request = with_dtype(request, dtype)
            verdict = candidate.judge(dtype_request)
            yield Trial(candidate, dtype_request, label, verdict, check, "scheme")


def _check_scheme(record: SchemeEntry, settings: Mapping[str, Any], *args: Any) -> list[Fault]:
    return check_scheme(load_target(record.target), settings, *args)


def _is_standard(candidate: Candidate) -> bool:
    record = _layer_entry(candidate)
    # Only the standard class defines ``layer_id``; a replacement inherits it.
    layer_id: object = vars(load_target(record.target)).get("layer_id")
    return layer_id == record.layer_id


def _layer_entry(candidate: Candidate) -> LayerEntry:
    assert isinstance(candidate.record, LayerEntry)
    return candidate.record


def with_dtype(request: Request, dtype: torch.dtype) -> Request:
    """Return a copy of ``request`` with a dtype and without dims."""
    name = str(dtype).removeprefix("torch.")
    return Request(request.kind, request.name, request.platform, request.capability, name)


def failed_trial(candidate: Candidate, request: Request, aspect: Aspect, fault: Fault) -> Trial:
    """Create a trial with the fault that prevented the cases of a candidate from being built."""
    return Trial(candidate, request, "cases", Verdict.accept(), lambda: [fault], aspect)


def skipped_trial(candidate: Candidate, request: Request, aspect: Aspect, reason: str) -> Trial:
    """Create the trial of a candidate without cases, with the reason."""
    return Trial(candidate, request, "cases", Verdict.accept(), list, aspect, reason)
