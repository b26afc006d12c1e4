"""The trials that compare model families with transformers on example configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from interposer import Candidate, Device, Registry, Request, Verdict
from interposer.errors import foreign_errors
from interposer.records import ModelEntry, load_target
from interposer_testing._checks.family import check_family, peer_of
from interposer_testing._checks.fault import Fault
from interposer_testing._trials.layers_and_schemes import failed_trial, skipped_trial, with_dtype
from interposer_testing._trials.trial import Trial


def family_trials(
    registry: Registry, device: Device, distribution: str, seed: int
) -> Iterator[Trial]:
    """Yield one trial for each example config in the record of each model family."""
    for architecture in registry.subjects("model"):
        request = Request("model", architecture, device.platform, device.capability)
        for candidate in registry.candidates("model", architecture):
            if distribution in ("", candidate.provider):
                try:
                    yield from _trials_of_family(device, candidate, request, seed)
                except foreign_errors() as error:
                    fault = Fault.raised("model", "examples", error)
                    yield failed_trial(candidate, request, "model", fault)


def _trials_of_family(
    device: Device, candidate: Candidate, request: Request, seed: int
) -> Iterator[Trial]:
    assert isinstance(candidate.record, ModelEntry)
    if not candidate.record.examples:
        yield skipped_trial(candidate, request, "model", "the record names no examples of configs")
        return
    examples: Callable[[], Mapping[str, Mapping[str, Any]]] = load_target(candidate.record.examples)
    configs = {
        label: config
        for label, config in examples().items()
        if request.name in config["architectures"]
    }
    peer, reason = peer_of(request.name, candidate.record.architectures)
    if not configs:
        reason = f"no example is of {request.name}"
    if reason:
        yield skipped_trial(candidate, request, "model", reason)
        return
    float32_request = with_dtype(request, torch.float32)
    for label, config in configs.items():
        check = partial(check_family, candidate, request.name, peer, config, device, seed)
        yield Trial(candidate, float32_request, label, Verdict.accept(), check, "model")
