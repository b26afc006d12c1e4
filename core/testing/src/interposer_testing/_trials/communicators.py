"""The trials of communicators, in two and in four processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

import torch

from interposer import Candidate, Device, Ranks, Registry, Request, Verdict
from interposer.records import CommunicatorEntry
from interposer.tooling import Kind
from interposer_testing._checks.collective import DTYPES, CollectiveCase, collective_cases
from interposer_testing._trials.rank_processes import LEFT, RankProcesses
from interposer_testing._trials.trial import Aspect, Trial

_NUM_RANKS = (2, 4)
_KIND: Kind = "communicator"


def communicator_trials(
    registry: Registry,
    device: Device,
    distribution: str = "",
    sizes: Sequence[int] = _NUM_RANKS,
    *,
    quick: bool = False,
) -> Iterator[Trial]:
    """Yield the trials of a distribution's communicators, in several processes of this machine.

    Every communicator runs the collectives and sizes that the record accepts. Then one rank hangs,
    and one rank exits; the other ranks must detect this. Finally, no process and no file of the
    communicator may remain.

    Args:
        distribution: name of the distribution; empty for all.
        sizes: numbers of processes, at most four.
        quick: use only the first number of processes.
    """
    candidates = {
        candidate.qualified_name: candidate
        for collective in registry.subjects(_KIND)
        for candidate in registry.candidates(_KIND, collective)
        if distribution in ("", candidate.provider)
        and getattr(candidate.record, "platform", "") in registry.runs(device.platform)
    }
    for candidate in candidates.values():
        yield from _trials(candidate, device, sizes[:1] if quick else sizes)


def _trials(candidate: Candidate, device: Device, sizes: Sequence[int]) -> Iterator[Trial]:
    record = candidate.record
    assert isinstance(record, CommunicatorEntry)
    request = Request(_KIND, "", device.platform, device.capability)
    is_cpu = device.torch_device == "cpu"
    num_devices = 0 if is_cpu else torch.accelerator.device_count()
    stages = dict[int, dict[str, list[CollectiveCase]]]()
    refusal = Verdict.refuse("no case was tried")
    for num in sizes:
        if not is_cpu and num_devices < num:
            reason = (
                f"{num} ranks need {num} devices of {device.platform}, "
                f"this machine has {num_devices}"
            )
            accepted = Verdict.accept()
            yield Trial(candidate, request, f"{num} ranks", accepted, list, "communicator", reason)
            continue
        # Refused cases are skipped; a size without any accepted case is one refused trial.
        for collective in record.collectives:
            dtypes = record.requires.dtypes or DTYPES
            for case in collective_cases(collective, num, dtypes):
                verdict = _judge(candidate, device, case)
                if verdict:
                    stages.setdefault(num, {}).setdefault(collective, []).append(case)
                elif not refusal.reason or num not in stages:
                    refusal = verdict
        if num not in stages:
            yield Trial(candidate, request, f"{num} ranks", refusal, list, "communicator")
    if not stages:
        return
    labels = list(_labels(stages, candidate.properties))
    largest_stage = stages[max(stages)]
    # The collective that one rank does not join; empty inputs may need no communication.
    lost = next(case for cases in largest_stage.values() for case in cases if case.rows(0))
    rank_processes = RankProcesses(
        {
            "target": record.target,
            "platform": device.platform,
            "devices": _devices(device, max(stages)),
            "properties": sorted(candidate.properties),
            "stages": {
                num: {name: [asdict(case) for case in cases] for name, cases in stage.items()}
                for num, stage in stages.items()
            },
            "lost": asdict(lost),
            "labels": [label for label, _ in labels],
        }
    )
    for label, aspect in labels:
        check = partial(rank_processes.faults, label)
        yield Trial(candidate, request, label, Verdict.accept(), check, aspect)


def _labels(
    stages: dict[int, dict[str, list[CollectiveCase]]], properties: frozenset[str]
) -> Iterator[tuple[str, Aspect]]:
    """Yield the label and the aspect of every check."""
    for num, stage in stages.items():
        suffix = f"on {num} ranks"
        for collective in (*stage, "all collectives"):
            yield f"{collective} {suffix}", "communicator"
        if any(not (case.exact or case.strided) for case in stage.get("all_reduce", ())):
            if "deterministic" in properties:
                yield f"repeated sums {suffix}", "determinism"
            if "batch_invariant" in properties:
                yield f"sums of parts {suffix}", "batch invariance"
        if "graph_safe" in properties:
            yield f"replays {suffix}", "graph capture"
    for label in ("a rank that hangs", "a rank that exits", LEFT):
        yield label, "communicator"


def _judge(candidate: Candidate, device: Device, case: CollectiveCase) -> Verdict:
    """Judge a case for the input size of every rank; the candidate must accept every size."""
    num = len(case.sizes)
    ranks = Ranks(0, num, (0,) * num, (device.platform,) * num)
    verdict = Verdict.accept()
    for num_bytes in dict.fromkeys(map(case.num_bytes, range(num))):
        request = Request(
            _KIND,
            case.collective,
            device.platform,
            device.capability,
            case.dtype,
            ranks.dims(num_bytes),
        )
        verdict = candidate.judge(request)
        if not verdict:
            break
    return verdict


def _devices(device: Device, num: int) -> list[str]:
    if device.torch_device == "cpu":
        return ["cpu"] * num
    kind = device.torch_device.partition(":")[0]
    return [f"{kind}:{rank}" for rank in range(num)]
