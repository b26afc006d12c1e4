"""Layers and quantization schemes as trials."""

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
    """Yield the standard layers and their replacements on the cases of the standard ones.

    Args:
        only: the id of one layer, or "" for all.
    """
    for layer_id in [only] if only else registry.subjects("layer"):
        everyone = registry.candidates("layer", layer_id)
        tried = [
            candidate
            for candidate in everyone
            if distribution in ("", candidate.provider)
            and getattr(candidate.record, "platform", "") in registry.runs(device.platform)
        ]
        request = Request("layer", layer_id, device.platform, device.capability)
        if not tried:
            continue
        try:
            yield from _one_layer(registry, device, everyone, tried, request, seed)
        except foreign_errors() as error:
            fault = Fault.raised("layer", f"cases of the standard layer {layer_id!r}", error)
            yield failed(tried[0], request, "layer", fault)


def _one_layer(
    registry: Registry,
    device: Device,
    everyone: list[Candidate],
    tried: list[Candidate],
    request: Request,
    seed: int,
) -> Iterator[Trial]:
    standard = next((c for c in everyone if _is_standard(registry, c)), None)
    cases = "" if standard is None else _layer_entry(standard).cases
    if standard is None or not cases:
        reason = "the standard layer is not installed"
        if standard is not None:
            reason = f"the standard layer, {standard.qualified_name}, declares no cases"
        for candidate in tried:
            yield not_tried(candidate, request, "layer", reason)
        return
    generate: LayerCaseGenerator = load_target(cases)
    for dtype in _DTYPES:
        asked = with_dtype(request, dtype)
        for case in generate(dtype, seed):
            for candidate in tried:
                check = partial(check_layer, registry, device, standard, candidate, case, dtype)
                verdict = candidate.judge(asked)
                yield Trial(candidate, asked, case.label, verdict, check, "layer")


def scheme_trials(
    registry: Registry, device: Device, distribution: str, seed: int
) -> Iterator[Trial]:
    """Yield the quantization schemes on the settings that their records name."""
    for method in registry.subjects("scheme"):
        request = Request("scheme", method, device.platform, device.capability)
        for candidate in registry.candidates("scheme", method):
            if distribution in ("", candidate.provider):
                try:
                    yield from _one_scheme(registry, device, candidate, request, seed)
                except foreign_errors() as error:
                    fault = Fault.raised("scheme", "examples", error)
                    yield failed(candidate, request, "scheme", fault)


def _one_scheme(
    registry: Registry, device: Device, candidate: Candidate, request: Request, seed: int
) -> Iterator[Trial]:
    assert isinstance(candidate.record, SchemeEntry)
    if not candidate.record.examples:
        yield not_tried(candidate, request, "scheme", "the record names no examples of settings")
        return
    examples: Callable[[], Mapping[str, Mapping[str, Any]]] = load_target(candidate.record.examples)
    for label, settings in examples().items():
        for dtype in _DTYPES:
            check = partial(
                _check_scheme, candidate.record, settings, registry, device, dtype, seed
            )
            asked = with_dtype(request, dtype)
            yield Trial(candidate, asked, label, candidate.judge(asked), check, "scheme")


def _check_scheme(record: SchemeEntry, settings: Mapping[str, Any], *rest: Any) -> list[Fault]:
    return check_scheme(load_target(record.target), settings, *rest)


def _is_standard(registry: Registry, candidate: Candidate) -> bool:
    record = _layer_entry(candidate)
    own: object = vars(load_target(record.target)).get("layer_id")
    return own == record.layer_id


def _layer_entry(candidate: Candidate) -> LayerEntry:
    assert isinstance(candidate.record, LayerEntry)
    return candidate.record


def with_dtype(request: Request, dtype: torch.dtype) -> Request:
    """Return a request for a dtype."""
    name = str(dtype).removeprefix("torch.")
    return Request(request.kind, request.name, request.platform, request.capability, name)


def failed(candidate: Candidate, request: Request, aspect: Aspect, fault: Fault) -> Trial:
    """Return the trial of what has no cases, as making them raised."""
    return Trial(candidate, request, "cases", Verdict.accept(), lambda: [fault], aspect)


def not_tried(candidate: Candidate, request: Request, aspect: Aspect, reason: str) -> Trial:
    """Return the trial of what has no cases, with the reason."""
    return Trial(candidate, request, "cases", Verdict.accept(), list, aspect, reason)
