"""A plan finds the records that are wrong, and describes those that are not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forks import forks

from interposer import (
    AttentionEntry,
    Case,
    Dim,
    Kernel,
    OpEntry,
    Registry,
    Request,
    Requires,
    Tolerance,
    Verdict,
    custom_op,
)
from interposer.errors import UnknownNameError
from interposer.records import DeviceEntry, Record
from interposer_testing._plan.plan import plan
from interposer_testing._plan.plan_report import PlannedRecord, PlanReport

HERE = __name__
DEVICE: dict[str, Any] = {
    "version": 1,
    "platform": "abacus",
    "torch_device": "cpu",
    "units": 1,
    "memory_bytes": 2**30,
    "caches_bytes": {},
}
SMALL = {"architecture": "wood", "features": ["beads"], "formats": ["int8"], "dtypes": ["float32"]}
LARGE = {
    "architecture": "brass",
    "features": ["beads", "wheels"],
    "formats": ["int8", "float8_e4m3fn"],
    "dtypes": ["bfloat16", "float32"],
}


def cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    for width in (8, 64):
        yield Case(f"{width}", {"x": torch.ones(2, width, dtype=dtype)}, {"width": width})


@custom_op("planned_double", cases=cases, tolerance=Tolerance(roundings=1))
def double(x: torch.Tensor) -> torch.Tensor:
    """Return twice ``x``."""
    return x * 2


def twice(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a plan runs nothing")


def other_arguments(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def wants_fp8(request: Request) -> Verdict:
    if "float8_e4m3fn" in request.capability.formats:
        return Verdict.accept()
    return Verdict.refuse("needs fp8")


def wants_fp9(request: Request) -> Verdict:
    if {"float9"} <= request.capability.formats:
        return Verdict.accept()
    return Verdict.refuse("needs float9")


def wants_either(request: Request) -> Verdict:
    if {"gears", "wheels"} & request.capability.features:
        return Verdict.accept()
    return Verdict.refuse("needs gears or wheels")


def raises(request: Request) -> Verdict:
    raise KeyError("no such thing")


def kernel(name: str, target: str = "twice", predicate: str = "", **requires: Any) -> Kernel:
    predicate_target = f"{HERE}:{predicate}" if predicate else ""
    return Kernel(
        "planned_double", name, f"{HERE}:{target}", "abacus", Requires(**requires), predicate_target
    )


@pytest.fixture
def planned(
    registered: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PlanReport]:
    """Return a planner of records beside two described devices and one op."""
    folder = tmp_path / "planned_devices"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name, facts in (("small", SMALL), ("large", LARGE)):
        (folder / f"{name}.json").write_text(json.dumps({**DEVICE, **facts, "name": name}))
    monkeypatch.syspath_prepend(tmp_path)
    devices = [DeviceEntry(n, "abacus", f"planned_devices:{n}.json") for n in ("small", "large")]

    def planned(*records: Record, op: str = "") -> PlanReport:
        entry = OpEntry("planned_double", f"{HERE}:double")
        return plan("acme", registered(entry, *devices, *records), op)

    return planned


def only(report: PlanReport, name: str) -> PlannedRecord:
    return next(record for record in report.records if record.name == name)


@pytest.mark.parametrize(
    ("record", "fits"),
    [
        (kernel("any"), ("small", "large")),
        (kernel("wheels", features=frozenset({"wheels"})), ("large",)),
        (kernel("wood", architectures=frozenset({"wood"})), ("small",)),
        (kernel("half", dtypes=("bfloat16",)), ("small", "large")),
        (kernel("wide", dims={"width": Dim(multiple_of=64)}), ("small", "large")),
        (kernel("fp8", predicate="wants_fp8"), ("large",)),
        (kernel("either", predicate="wants_either"), ("large",)),
    ],
)
def test_correct_records_fit_a_device(
    planned: Callable[..., PlanReport], record: Kernel, fits: tuple[str, ...]
) -> None:
    report = planned(record)
    planned_record = only(report, record.name)
    assert (planned_record.state, planned_record.faults, planned_record.fits) == ("sound", (), fits)
    assert report.sound
    assert report.devices == ("small", "large")


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (kernel("a", predicate="wants_fp9"), "needs the format 'float9', which no described"),
        (
            kernel("a", dims={"hidden_size": Dim(at_least=1)}),
            "requires the dim 'hidden_size', which the op 'planned_double' does not have; "
            "nearest: 'width'",
        ),
        (kernel("a", target="other_arguments"), "target: it takes (x: 'torch.Tensor', factor:"),
        (kernel("a", predicate="raises"), "on small: its own code failed: KeyError"),
        (
            AttentionEntry("a", f"{HERE}:double", "abacus"),
            "AttentionEntry 'a': attention backend 'a' is CustomOp(",
        ),
    ],
)
def test_faults_of_records_are_found(
    planned: Callable[..., PlanReport], record: Record, fault: str
) -> None:
    report = planned(record)
    planned_record = only(report, "a")
    assert planned_record.state == "wrong"
    assert any(text.startswith(fault) for text in planned_record.faults), planned_record.faults
    assert not report.sound
    assert f"WRONG {planned_record.title}" in str(report)


@pytest.mark.parametrize(
    ("record", "fits", "note"),
    [
        (
            kernel("a", architectures=frozenset({"gold"}), features=frozenset({"wheels"})),
            (),
            "needs the architecture 'gold' (nearest: 'wood', 'brass'); its other requirements fit "
            "large",
        ),
        (
            kernel("a", features=frozenset({"wheel"}), predicate="wants_fp8"),
            (),
            "needs the feature 'wheel' (nearest: 'wheels', 'beads'); its other requirements fit "
            "large",
        ),
        (
            kernel("a", architectures=frozenset({"brass", "gold"})),
            ("large",),
            "needs the architecture 'gold' (nearest: 'wood', 'brass')",
        ),
        (
            kernel("a", architectures=frozenset({"gold"}), dims={"width": Dim(at_most=4)}),
            (),
            "needs the architecture 'gold' (nearest: 'wood', 'brass')",
        ),
    ],
)
def test_requirements_of_no_described_device_are_noted(
    planned: Callable[..., PlanReport], record: Kernel, fits: tuple[str, ...], note: str
) -> None:
    report = planned(record)
    planned_record = only(report, "a")
    assert (planned_record.state, planned_record.fits) == (
        "sound" if fits else "fits nowhere",
        fits,
    )
    assert planned_record.notes == (f"not coherent with any description: {note}",)
    assert planned_record.notes[0] in str(report)
    assert report.sound


def test_other_faults_are_found_for_undescribed_hardware(
    planned: Callable[..., PlanReport],
) -> None:
    gold = frozenset({"gold"})
    failing = kernel("failing", architectures=gold, predicate="raises")
    unstated = kernel("unstated", architectures=gold, dims={"hidden_size": Dim(at_least=1)})
    searching = kernel("searching", architectures=gold, predicate="wants_fp9")
    report = planned(failing, unstated, searching)
    assert only(report, "failing").faults[0].startswith("on small: its own code failed: KeyError")
    assert only(report, "unstated").faults[0].startswith("requires the dim 'hidden_size', which")
    assert only(report, "searching").faults[0].startswith("needs the format 'float9', which no")


def test_a_record_that_fits_nowhere_states_the_reasons(planned: Callable[..., PlanReport]) -> None:
    both = kernel("both", features=frozenset({"wheels"}), architectures=frozenset({"wood"}))
    narrow = kernel("narrow", dims={"width": Dim(at_most=4)})
    report = planned(both, narrow)
    assert report.sound
    assert only(report, "both").refusals == (
        ("small", "needs wheels, which the device lacks"),
        ("large", "needs wood, the device is brass"),
    )
    assert "Kernel 'narrow' for 'planned_double' fits no described device:" in str(report)
    assert "  small, large: width is 8, must be at most 4" in str(report)
    assert str(report).endswith("4 sound, 2 fits nowhere") or "2 fits nowhere" in str(report)


def test_a_missing_third_party_package_is_no_fault(
    planned: Callable[..., PlanReport], tmp_path: Path
) -> None:
    (tmp_path / "acme_of_vendor.py").write_text("import vendor_of_nowhere\n")
    needs = Kernel("planned_double", "vendor", "acme_of_vendor:twice", "abacus")
    report = planned(needs)
    assert only(report, "vendor").unresolved == (
        "target 'acme_of_vendor:twice' needs the package 'vendor_of_nowhere', which is not "
        "installed"
    )
    assert report.sound


def test_limiting_to_an_op_plans_only_its_kernels(planned: Callable[..., PlanReport]) -> None:
    report = planned(kernel("any"), op="planned_double")
    assert [record.name for record in report.records] == ["any"]
    with pytest.raises(UnknownNameError, match="op 'planned_duble'"):
        planned(op="planned_duble")


def test_the_plan_converts_to_json(planned: Callable[..., PlanReport]) -> None:
    facts = json.loads(planned(kernel("wood", architectures=frozenset({"wood"}))).to_json())
    assert (facts["version"], facts["distribution"], facts["sound"]) == (1, "acme", True)
    record = next(r for r in facts["records"] if r["name"] == "wood")
    assert (record["fits"], record["refusals"]) == (
        ["small"],
        {"large": "needs wood, the device is brass"},
    )


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forks().run("-m", "interposer_tools", "verify", *arguments, timeout=600)


@pytest.mark.process
def test_the_command_plans(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    process = command("interposer-example-norm", "--plan", "--json", str(file))
    assert process.returncode == 0, process.stderr
    assert "planned, nothing was run" in process.stdout
    assert json.loads(file.read_text())["sound"]
    refused = command("interposer-example-norm", "--plan", "--quick", "--jobs", "2")
    assert refused.returncode == 2
    assert "--plan runs nothing, so --quick, --jobs has no effect" in refused.stderr
