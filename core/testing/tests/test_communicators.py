"""The kit tries communicators in processes of their own, and finds what is wrong with one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import rms_norm

from interposer import Capability, CommunicatorEntry, Device, Registry, hookimpl
from interposer.requires import Dim, Requires
from interposer.tooling import Plugins
from interposer_testing import Fault, Trial, verify
from interposer_testing._checks.collective import EPS, FUSED, SUMS, CollectiveCase, collective_cases
from interposer_testing._trials.communicators import communicator_trials

HERE = Device("cpu", "cpu", "test", Capability("any"))
PORTABLE = "interposer_ops.communicators:TorchCommunicator"
COLLECTIVES = CommunicatorEntry("all", PORTABLE).collectives
# One worker starts each group of processes once.
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.process]


def registered(*records: CommunicatorEntry) -> Registry:
    test = SimpleNamespace(__name__="test", interposer_records=hookimpl(lambda: list(records)))
    return Registry(Plugins.of(test))


def trials(
    record: CommunicatorEntry, device: Device = HERE, sizes: tuple[int, ...] = (2,)
) -> list[Trial]:
    return list(communicator_trials(registered(record), device, sizes=sizes))


@cache
def faults_of(name: str) -> dict[str, list[Fault]]:
    record = CommunicatorEntry(
        name.lower(),
        f"wrong_communicators:{name}",
        (*COLLECTIVES, FUSED),
        requires=Requires(dtypes=("float32", "bfloat16")),
    )
    try:
        return run(record)
    finally:
        for path in Path("/dev/shm").glob("interposer-wrong-*"):
            path.unlink()


def run(record: CommunicatorEntry) -> dict[str, list[Fault]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        return {trial.label: trial.run() for trial in trials(record)}


@pytest.mark.parametrize(
    ("label", "check", "reason"),
    [
        ("all_reduce on 2 ranks", "determinism", "the ranks got different bits"),
        (f"{FUSED} on 2 ranks", "value", "96 of 192 elements are wrong"),
        ("all_gather on 2 ranks", "value", "elements are wrong; element 0 is"),
        ("reduce_scatter on 2 ranks", "value", "of 21 elements are wrong"),
        ("all_to_all on 2 ranks", "mutation", "x was written"),
        ("broadcast on 2 ranks", "alias", "must be the tensor x, but is another one"),
        ("all collectives on 2 ranks", "ranks", "raised RuntimeError('closed before')"),
        ("what is left", "ranks", "/dev/shm/interposer-wrong-"),
    ],
)
def test_each_faulty_communicator_is_found(label: str, check: str, reason: str) -> None:
    faults = faults_of("Wrong")[label]
    assert [fault for fault in faults if fault.check == check and reason in fault.reason], faults


@pytest.mark.parametrize("label", ["a rank that hangs", "a rank that exits"])
def test_a_lost_rank_must_raise_rank_error(label: str) -> None:
    reasons = {fault.reason for fault in faults_of("Wrong")[label]}
    assert "raised ValueError('something went wrong'), not RankError" in reasons


def test_later_calls_must_not_overwrite_results() -> None:
    faults_by_reason = {
        fault.reason: fault for fault in faults_of("Wrong")["all collectives on 2 ranks"]
    }
    fault = faults_by_reason["later calls overwrote an earlier result"]
    assert fault.where.startswith("repeated: all_reduce")


@pytest.mark.slow
def test_a_crashed_rank_fails_every_check() -> None:
    record = CommunicatorEntry("dead", "wrong_communicators:Dead", ("all_reduce",))
    faults_by_label = run(record)
    assert len(faults_by_label) == 5
    for faults in faults_by_label.values():
        assert "its process left with exit code 3" in {fault.reason for fault in faults}


def test_refused_collectives_are_not_tested() -> None:
    requires = Requires(dtypes=("float32",), dims={"ranks": Dim(at_least=8)})
    record = CommunicatorEntry("many", PORTABLE, ("all_reduce",), requires=requires)
    (trial,) = trials(record)
    assert trial.label == "2 ranks"
    assert not trial.verdict
    assert "ranks" in trial.verdict.reason


def test_too_few_devices_are_reported() -> None:
    record = CommunicatorEntry("far", PORTABLE, ("all_reduce",))
    (trial,) = trials(record, Device("acme", "acme:0", "test", Capability("any")), (4,))
    count = torch.accelerator.device_count()
    assert trial.not_run == f"4 ranks need 4 devices of acme, this machine has {count}"


@pytest.mark.parametrize("collective", [*COLLECTIVES, FUSED])
@pytest.mark.parametrize("num", [2, 4])
def test_expected_results_match_a_simulation(collective: str, num: int) -> None:
    """A communicator that one process plays gets every case right, and a wrong one does not."""
    for case in collective_cases(collective, num, ("bfloat16",)):
        results = played(case)
        for rank, result in enumerate(results):
            assert not list(case.faults(rank, result)), str(case)
            if result.numel():
                step = 8 if case.collective in SUMS and not case.exact else 1
                assert list(case.faults(rank, result + step * (result.abs() + 1))), str(case)


def played(case: CollectiveCase) -> list[torch.Tensor]:
    inputs = case.inputs
    ranks = range(len(inputs))
    match case.collective:
        case "all_gather":
            return [torch.cat(inputs)] * len(inputs)
        case "broadcast":
            return [inputs[case.source]] * len(inputs)
        case "all_to_all":
            return [
                torch.cat([x.split(case.sent(sender))[rank] for sender, x in enumerate(inputs)])
                for rank in ranks
            ]
    total = inputs[0].clone()
    for x in inputs[1:]:
        total += x  # rounded each time
    if case.collective == FUSED:
        residual, weight = case.stream
        stream = residual + total
        normed = rms_norm(stream, weight.shape, weight.float(), EPS).to(total.dtype)
        return [torch.stack([normed.float(), stream])] * len(inputs)
    if case.collective == "all_reduce":
        return [total] * len(inputs)
    return list(total.split(case.sizes))


@pytest.mark.slow
def test_verify_reports_communicators() -> None:
    requires = Requires(dtypes=("float32",), dims={"ranks": Dim(at_most=2)})
    record = CommunicatorEntry("torch", PORTABLE, ("all_reduce",), requires=requires)
    elsewhere = CommunicatorEntry("far", PORTABLE, ("all_reduce",), "cuda")
    report = verify("test", registry=registered(record, elsewhere), device=HERE)
    (correct,) = report.in_state("correct")
    assert (correct.kind, correct.subject, correct.name) == ("communicator", "", "torch")
    tallies = {tally.aspect: tally for tally in correct.tallies}
    assert tallies["communicator"].passed == 5
    (reason,) = tallies["communicator"].refused
    assert "ranks" in reason
    assert "far" in {candidate.name for candidate in report.in_state("not run")}
