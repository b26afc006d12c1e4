"""A tuning table of the package is used for devices of its name only."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from tests.forks import forks

import interposer_cuda
from interposer import Config, Request, current_registry, planned
from interposer.tooling import Measurements, checksum
from interposer.tuning import Entry, Figures, Measurement
from interposer_cuda._tables import shipped_tables
from interposer_testing.described import described_placement

MODEL = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
# The registry of a process that finds the copy of the package before the installed one.
PROGRAM = """
import json, sys
import interposer_cuda
from interposer import explain
chosen = explain(sys.argv[1], sys.argv[2]).why("silu_and_mul").rows[0].choice
print(json.dumps([interposer_cuda.__file__, chosen.chosen.name, chosen.why]))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    copy = tmp_path / "interposer_cuda"
    shutil.copytree(Path(interposer_cuda.__file__).parent, copy)
    (copy / "tables").mkdir(exist_ok=True)
    return copy


def test_every_table_that_is_shipped_is_for_a_device_that_is_described() -> None:
    registry = current_registry(Config())
    names = [described_placement(registry, n).device.name for n in ("h100", "h200", "a100", "b200")]
    for record in shipped_tables():
        assert any(fnmatchcase(name, record.device) for name in names), record


def test_a_file_is_for_the_device_of_its_name(package: Path) -> None:
    shutil.rmtree(package / "tables")
    assert shipped_tables(package) == []
    (package / "tables").mkdir()
    for name in ("NVIDIA_H200", "NVIDIA_H100_80GB_HBM3"):
        (package / "tables" / f"{name}.json").write_text("{}")
    found = {record.name: record for record in shipped_tables(package)}
    assert fnmatchcase("NVIDIA H200", found["NVIDIA_H200"].device)
    assert not fnmatchcase("NVIDIA H200 NVL", found["NVIDIA_H200"].device)
    assert fnmatchcase("NVIDIA H100 80GB HBM3", found["NVIDIA_H100_80GB_HBM3"].device)
    assert found["NVIDIA_H200"].resource == "interposer_cuda:tables/NVIDIA_H200.json"


def entries(device: str, slow: str) -> Iterator[dict[str, Any]]:
    """Yield an entry per request for silu_and_mul: the reference wins, and ``slow`` is last."""
    registry = current_registry(Config())
    plan = planned(MODEL, Config(), "auto", described_placement(registry, device))
    measurements = Measurements(registry, plan.resolver.device, Config())
    for choice, _ in plan.resolver.choices.values():
        request: Request = choice.request
        if request.name != "silu_and_mul":
            continue
        figures = {
            candidate.qualified_name: Figures(
                version=candidate.version,
                seconds=seconds,
                low=seconds * 0.99,
                high=seconds * 1.01,
                per_tokens={"1": seconds},
            )
            for candidate in plan.resolver.accepted(request)
            for seconds in [{slow: 9e-5, "reference": 1e-6}.get(candidate.name, 5e-6)]
        }
        value = Measurement(
            driver="", torch="", interposer="", measured=datetime.now(UTC), candidates=figures
        )
        yield Entry(key=measurements.key(request), value=value).model_dump(mode="json")


@pytest.mark.process
def test_a_shipped_table_decides_on_its_device_alone(package: Path) -> None:
    measured = list(entries("h200", "silu_and_mul_triton"))
    assert measured
    facts = {"version": 1, "entries": measured, "checksum": checksum(measured)}
    (package / "tables" / "NVIDIA_H200.json").write_text(json.dumps(facts))
    found = {}
    for device in ("h200", "h100"):
        environment = {**os.environ, "PYTHONPATH": str(package.parent)}
        done = forks().run("-c", PROGRAM, MODEL, device, env=environment)
        assert done.returncode == 0, done.stderr
        file, *found[device] = json.loads(done.stdout)
        assert Path(file).parent == package
    name, why = found["h200"]
    assert name == "reference"
    assert "the table 'NVIDIA_H200' of interposer-cuda" in why
    assert found["h100"][0] == "silu_and_mul_triton"
