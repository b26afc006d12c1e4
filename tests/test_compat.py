"""Plugins that were published for an old version of the API still do what they did.

They are built into wheels, installed into a folder and used in a process of its own, see
``compat/README.md``.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

COMPAT = Path(__file__).parent / "compat"
VERSIONS = sorted(path for path in COMPAT.glob("v*") if path.is_dir())
PROJECTS = [path.parent for version in VERSIONS for path in version.glob("*/pyproject.toml")]
NAMES = {project.name for project in PROJECTS}

# Not frozen: it breaks, and by its name after the others, so that there is something to observe.
BROKEN = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "broken-plugin"
version = "1.0"

[project.entry-points."interposer.plugins"]
broken = "broken_plugin"
"""

Exercise = Callable[[str], dict[str, Any]]

# One worker builds and uses the plugins once for all tests.
pytestmark = [pytest.mark.xdist_group("compat"), pytest.mark.process]


@pytest.fixture(scope="module")
def exercise(tmp_path_factory: pytest.TempPathFactory) -> Exercise:
    """Return a function that uses the installed plugins and returns what came of it."""
    folder = tmp_path_factory.mktemp("compat")
    installed, wheels = folder / "installed", folder / "wheels"
    broken = folder / "broken"
    broken.mkdir()
    (broken / "pyproject.toml").write_text(BROKEN)
    (broken / "broken_plugin.py").write_text("raise OSError('no such library')\n")
    for project in (*PROJECTS, broken):
        list(WheelBuilder(str(project)).build(directory=str(wheels)))
    for wheel in wheels.iterdir():  # of pure Python, so that unpacking installs them
        with zipfile.ZipFile(wheel) as file:
            file.extractall(installed)
    variables = {
        "PYTHONPATH": str(installed),
        "PYTHONWARNINGS": "error,default::UserWarning",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }

    @cache
    def run(hooks: str) -> dict[str, Any]:
        own = folder / hooks
        own.mkdir()
        program = [sys.executable, str(COMPAT / "exercise.py"), hooks, str(own)]
        environment = {**os.environ, **variables}
        done = subprocess.run(
            program, env=environment, cwd=own, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    return run


each_core = pytest.mark.parametrize("hooks", ["same", "grown"])


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_no_frozen_file_was_edited(version: Path) -> None:
    files = [path for path in version.rglob("*") if path.is_file()]
    digests = {
        path.relative_to(COMPAT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if "__pycache__" not in path.parts
    }
    lines = (COMPAT / f"{version.name}.sha256").read_text().splitlines()
    frozen = {path: digest for digest, path in (line.split("  ") for line in lines)}
    assert digests == frozen, "frozen for good, see tests/compat/README.md"


def test_the_first_version_is_there() -> None:
    assert {path.name for path in VERSIONS} >= {"v1_0", "v1_1"}
    assert len(NAMES) == len(PROJECTS), "two versions share the name of a plugin"


@each_core
def test_each_is_loaded(exercise: Exercise, hooks: str) -> None:
    report = exercise(hooks)
    assert set(report["loaded"]) >= NAMES
    assert NAMES.isdisjoint(report["failed"])


@each_core
@pytest.mark.parametrize(
    ("plugin", "chosen"),
    [
        ("kernel", {f"kernel {op}": f"{op}_acme" for op in ("rms_norm", "linear", "silu_and_mul")}),
        ("layer", {"layer rms_norm": "acme_norm"}),
        ("attention", {"attention decoder": "rows"}),
        ("platform", {"platform": "acme", "kernel rms_norm": "rms_norm_board"}),
        ("scheme", {"scheme acme": "acme_steps"}),
        ("object", {"kernel embedding": "embedding_acme"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_plugin_is_chosen_and_computes_right_results(
    exercise: Exercise, hooks: str, plugin: str, chosen: dict[str, str]
) -> None:
    outcome = exercise(hooks)[plugin]
    for request, name in chosen.items():
        assert outcome["chosen"][request] == [f"acme-{plugin}/{name}"]
    assert outcome["difference"] < 1e-3
    assert outcome["generated"]


@each_core
@pytest.mark.parametrize(
    ("family", "architecture"),
    [("frame", "AcmeForCausalLM"), ("derived", "AcmeDerivedForCausalLM")],
)
def test_a_family_builds_a_model_that_is_right(
    exercise: Exercise, hooks: str, family: str, architecture: str
) -> None:
    outcome = exercise(hooks)[family]
    assert outcome["chosen"][f"model {architecture}"] == [f"acme-model/acme_{family}"]
    assert outcome["difference"] < 1e-3
    assert outcome["generated"]


@each_core
def test_a_family_refuses_in_its_own_words(exercise: Exercise, hooks: str) -> None:
    said = exercise(hooks)["refused"]
    assert said.startswith("UnsupportedModelError: ")
    assert "acme_flag is not computed" in said


@each_core
def test_a_platform_places_the_model_and_names_its_kernels(exercise: Exercise, hooks: str) -> None:
    outcome = exercise(hooks)["platform"]
    assert outcome["device"] == "Acme board"
    assert outcome["chosen"]["kernel silu_and_mul"] == ["interposer-ops/reference"]


@each_core
def test_a_replaced_layer_computes_its_addition(exercise: Exercise, hooks: str) -> None:
    assert exercise(hooks)["num_rows"] == 5


@each_core
def test_an_op_of_its_own_is_computed(exercise: Exercise, hooks: str) -> None:
    op = exercise(hooks)["op"]
    assert (op["equal"], op["module"]) == (True, "acme_op.kernels")


@each_core
def test_a_table_decides_on_the_device_that_it_is_for(exercise: Exercise, hooks: str) -> None:
    op = exercise(hooks)["table"]
    assert (op["equal"], op["module"]) == (True, "acme_op.shift")
    assert "the table 'board' of acme-data 1.0.0" in op["why"]


@each_core
def test_a_described_device_gets_kernels_that_fit(exercise: Exercise, hooks: str) -> None:
    chosen = exercise(hooks)["described"]
    assert chosen["platform"] == ["acme-platform/acme"]
    assert chosen["kernel silu_and_mul"] == ["interposer-ops/reference"]
    # The kernel for the board needs what this device lacks.
    assert "acme-platform/rms_norm_board" not in chosen["kernel rms_norm"]


@each_core
def test_a_predicate_refuses_with_its_reason(exercise: Exercise, hooks: str) -> None:
    assert "hidden_size 63 is odd" in exercise(hooks)["refusal"]


@each_core
def test_observers_are_notified(exercise: Exercise, hooks: str) -> None:
    report = exercise(hooks)
    seen = [tuple(event) for event in report["seen"]]
    assert ("selected", "kernel", "rms_norm", "rms_norm_acme") in seen
    assert "broken" in {event[1] for event in seen if event[0] == "failed"}
    assert any(event[0] == "refused" and "rms_norm" in event[1] for event in seen)
    assert {event[1] for event in seen if event[0] == "finished"} >= {"discovery", "load"}
    assert report["num_choices"] == sum(event[0] == "selected" for event in seen) > 0


@pytest.mark.slow
def test_a_core_that_takes_an_argument_away_is_noticed(exercise: Exercise) -> None:
    failed = exercise("shrunk")["failed"]
    assert NAMES.intersection(failed) == {"acme-observer"}
    assert "reason" in failed["acme-observer"]
