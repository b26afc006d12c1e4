"""Communicators as trials, in two and in four processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch

from interposer import Candidate, Device, Ranks, Registry, Request, Verdict
from interposer.records import COLLECTIVES, CommunicatorEntry
from interposer.tooling import Kind
from interposer_testing._checks.collective import DTYPES, CollectiveCase, collective_cases
from interposer_testing._trials.crew import LEFT, Crew
from interposer_testing._trials.layers_and_schemes import not_tried
from interposer_testing._trials.trial import Aspect, Trial

_NUMBERS = (2, 4)
_KIND: Kind = "communicator"


def communicator_trials(
    registry: Registry, device: Device, distribution: str = "", sizes: Sequence[int] = _NUMBERS
) -> Iterator[Trial]:
    """Yield the communicators of a distribution in processes of this machine.

    Each takes part in the collectives and sizes that its record accepts. Then a rank hangs, and
    one exits, and the others must miss it; at last nothing of the communicator may be left.

    Args:
        distribution: name of the only one to try; empty tries all.
        sizes: numbers of processes, at most four.
    """
    everyone = {
        candidate.qualified_name: candidate
        for collective in registry.subjects(_KIND)
        for candidate in registry.candidates(_KIND, collective)
        if distribution in ("", candidate.provider)
        and getattr(candidate.record, "platform", "") in registry.runs(device.platform)
    }
    for candidate in everyone.values():
        yield from _one(candidate, device, sizes)


def _one(candidate: Candidate, device: Device, sizes: Sequence[int]) -> Iterator[Trial]:
    record = candidate.record
    assert isinstance(record, CommunicatorEntry)
    request = Request(_KIND, "", device.platform, device.capability)
    here = device.torch_device == "cpu" or torch.accelerator.device_count()
    stages = dict[int, dict[str, list[CollectiveCase]]]()
    refused = Verdict.refuse("no case was tried")
    for num in sizes:
        if here is not True and here < num:
            reason = f"{num} ranks need {num} devices of {device.platform}, this machine has {here}"
            trial = not_tried(candidate, request, "communicator", reason)
            yield Trial(
                candidate, request, f"{num} ranks", trial.verdict, list, "communicator", reason
            )
            continue
        for collective in [name for name in COLLECTIVES if name in record.collectives]:
            dtypes = record.requires.dtypes or DTYPES
            for case in collective_cases(collective, num, dtypes):
                verdict = _judged(candidate, device, case)
                if verdict:
                    stages.setdefault(num, {}).setdefault(collective, []).append(case)
                elif not refused.reason or num not in stages:
                    refused = verdict
        if num not in stages:
            yield Trial(candidate, request, f"{num} ranks", refused, list, "communicator")
    if not stages:
        return
    labels = list(_labels(stages, candidate.properties))
    most = stages[max(stages)]
    lost = next(case for some in most.values() for case in some if case.rows(0))
    crew = Crew(
        {
            "target": record.target,
            "platform": device.platform,
            "devices": _devices(device, max(stages)),
            "properties": sorted(candidate.properties),
            "stages": {
                num: {name: [asdict(case) for case in some] for name, some in stage.items()}
                for num, stage in stages.items()
            },
            "lost": asdict(lost),
            "labels": [label for label, _ in labels],
        }
    )
    for label, aspect in labels:
        check = partial(crew.faults, label)
        yield Trial(candidate, request, label, Verdict.accept(), check, aspect)


def _labels(
    stages: dict[int, dict[str, list[CollectiveCase]]], properties: frozenset[str]
) -> Iterator[tuple[str, Aspect]]:
    """Yield what is checked, and as which aspect."""
    for num, stage in stages.items():
        on = f"on {num} ranks"
        for collective in (*stage, "all collectives"):
            yield f"{collective} {on}", "communicator"
        if any(not (case.exact or case.strided) for case in stage.get("all_reduce", ())):
            if "deterministic" in properties:
                yield f"repeated sums {on}", "determinism"
            if "batch_invariant" in properties:
                yield f"sums of parts {on}", "batch invariance"
        if "graph_safe" in properties:
            yield f"replays {on}", "graph capture"
    for label in ("a rank that hangs", "a rank that exits", LEFT):
        yield label, "communicator"


def _judged(candidate: Candidate, device: Device, case: CollectiveCase) -> Verdict:
    """Return whether the record takes the case on every rank; the bytes of ranks may differ."""
    num = len(case.sizes)
    ranks = Ranks(0, num, (0,) * num, (device.platform,) * num)
    place = device.platform, device.capability
    verdict = Verdict.accept()
    for num_bytes in dict.fromkeys(map(case.num_bytes, range(num))):
        asked = Request(_KIND, case.collective, *place, case.dtype, ranks.dims(num_bytes))
        verdict = candidate.judge(asked)
        if not verdict:
            break
    return verdict


def _devices(device: Device, num: int) -> list[str]:
    if device.torch_device == "cpu":
        return ["cpu"] * num
    kind = device.torch_device.partition(":")[0]
    return [f"{kind}:{rank}" for rank in range(num)]
