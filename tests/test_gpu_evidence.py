"""Evidence from an accelerator: what is kept of stages that fail, hang or have no time."""

from __future__ import annotations

import importlib
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.forks import forks
from tests.waiting import WAIT_SECONDS, wait_until

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Limits for a program that hangs. On a busy machine it may need one of the longer to come so far.
LIMITS_S = (2.0, 20.0, 100.0)


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(name)


def python(source: str) -> list[str]:
    return [sys.executable, "-ISX", "faulthandler", "-c", source]


def test_results_have_names_of_their_own() -> None:
    steps = [step for stage in module("evidence.stages").STAGES for step in stage.steps]
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        assert (BENCHMARKS / step.script).is_file()


def test_a_hanging_program_prints_its_stack_and_ends_with_its_children(tmp_path: Path) -> None:
    run = module("evidence.process").run
    log = tmp_path / "log"
    source = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
    for limit_s in LIMITS_S:
        ended = run(python(source), os.environ, log, limit_s)
        assert ended.status is None
        if 'File "<string>", line 5' in log.read_text():
            break
    child, *said = log.read_text().splitlines()
    assert any('File "<string>", line 5' in line for line in said)
    wait_until(lambda: has_ended(child), f"the end of process {child}")


def has_ended(process: str) -> bool:
    try:
        return "Z (zombie)" in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return True


@pytest.mark.parametrize(
    ("source", "state", "told"),
    [
        ('record.headline = "fine"; record.say()', "held", "fine"),
        ('record.fault("off by one"); record.headline = "ran"; record.say()', "faults", "off by"),
        (
            'record.skip("no time"); record.headline = "half"; record.say()',
            "cut",
            "1 parts skipped",
        ),
        ('record.row("first", x=1); raise ValueError("broken")', "failed", "left no result"),
        ('record.headline = "begun"; record.row(x=1); time.sleep(600)', "killed", "begun"),
    ],
)
def test_the_result_of_a_step_is_kept(source: str, state: str, told: str, tmp_path: Path) -> None:
    ledgers, process = module("evidence.ledger"), module("evidence.process")
    ledger = ledgers.Ledger(tmp_path / "out")
    program = (
        f"import sys, time; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from pathlib import Path\nfrom evidence.record import Record\n"
        f"record = Record(Path({str(ledger.record('step'))!r}))\n{source}\n"
    )
    for limit_s in LIMITS_S if state == "killed" else [WAIT_SECONDS]:
        ledger.begin("step")
        ended = process.run(python(program), os.environ, ledger.log("step"), limit_s)
        entry = ledger.end("step", ended, limit_s, "2026-01-01T00:00:00Z", False)
        if entry.record:
            break
    assert entry.state == state
    assert ledger.entry("step") == entry
    stages, stage = module("evidence.stages").STAGES, module("evidence.stage")
    text = module("evidence.summary").summary(
        [stage.Stage("a", "a", "", (stage.Step("step", "x.py"), stage.Step("other", "y.py")))],
        ledger,
        False,
    )
    assert told in text
    assert "other            not run" in text
    assert f"{int(state in ('held', 'cut'))} of 1 steps passed" in text
    assert stages


def test_items_that_there_is_no_time_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    records = module("evidence.record")
    seconds = 0.0
    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=lambda: seconds))
    record = records.Record()
    done = []
    for item in record.within(["one", "two", "three"], records.Deadline(20.0), "items"):
        done.append(item)
        seconds += 15.0
    assert done == ["one"]
    assert record.skipped == ["no time for 2 more items: two, three"]


def wheel(folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any") -> Path:
    """Write a wheel of one module, in which its version stands."""
    file = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *metadata, ""]))
        archive.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


def bundle_of(folder: Path, *wheels: Any) -> Any:
    manifests = module("evidence.manifest")
    running = "{}.{}".format(*sys.version_info)
    bundle = manifests.Bundle(folder, running, "here", wheels)
    bundle.write()
    return manifests.Bundle.read(folder)


def test_only_the_missing_packages_of_a_bundle_are_installed(tmp_path: Path) -> None:
    manifests, installation = module("evidence.manifest"), module("evidence.installation")
    folder = tmp_path / "bundle"
    folder.mkdir()

    def listed(name: str, version: str, wanted: str, ours: bool = False) -> Any:
        file = wheel(folder, name, version)
        return manifests.Wheel(file.name, name, version, manifests.sha256(file), wanted, ours)

    import packaging

    # Its wheel has to be real, as it reads specifiers.
    home = Path(packaging.__file__).parent
    real = folder / "packaging-99.0-py3-none-any.whl"
    with zipfile.ZipFile(real, "w") as archive:
        for file in home.rglob("*.py"):
            archive.write(file, f"packaging/{file.relative_to(home)}")
        archive.writestr(
            "packaging-99.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: packaging\nVersion: 99.0\n",
        )
        archive.writestr(
            "packaging-99.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("packaging-99.0.dist-info/RECORD", "")
    bundle = bundle_of(
        folder,
        manifests.Wheel(real.name, "packaging", "99.0", manifests.sha256(real), ">=20"),
        listed("pluggy", "99.0", ">=1"),  # here, and good enough
        listed("rich", "99.0", ">=98"),  # here, and too old
        listed("nobody_has_this", "1.0", ""),
        listed("interposer", "99.0", "", ours=True),
    )
    site = installation.Installation(tmp_path / "site")
    assert site.install(bundle) == ["rich 99.0", "nobody_has_this 1.0", "interposer 99.0"]
    assert sorted(file.name for file in site.folder.glob("*.py")) == [
        "interposer.py",
        "nobody_has_this.py",
        "rich.py",
    ]
    assert site.install(bundle) == []
    (folder / bundle.wheels[-1].file).write_bytes(b"")
    with pytest.raises(installation.InstallationError, match="its checksum differs"):
        installation.Installation(tmp_path / "other").install(bundle)


def test_a_bundle_is_for_one_python(tmp_path: Path) -> None:
    manifests, installation = module("evidence.manifest"), module("evidence.installation")
    bundle = manifests.Bundle(tmp_path, "2.7", "here", ())
    with pytest.raises(installation.InstallationError, match=r"for Python 2\.7, this is 3\."):
        installation.Installation(tmp_path / "site").install(bundle)


def test_what_the_target_has_must_serve() -> None:
    packing, targets = module("evidence.packing"), module("evidence.target")
    target = targets.read_target()
    packer = packing.Packer(target, Path("nowhere"))
    requirement = packing.Requirement
    assert packer._noted([requirement("torch>=2.11,<2.16"), requirement("pydantic>=2.7")]) == [
        "pydantic"
    ]
    with pytest.raises(packing.PackingError, match=r"the target has torch 2\.11\.0"):
        packer._noted([requirement("torch>=2.12")])


def test_the_bundle_finds_the_distributions_that_the_makefile_finds() -> None:
    packing, targets = module("evidence.packing"), module("evidence.target")
    found = packing.distributions()
    patterns = ("*/pyproject.toml", "*/*/pyproject.toml")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"$(wildcard {' '.join(patterns)})" in makefile
    assert {"core", "platforms/cuda", "plugins/gguf"} <= {*found}
    assert {*targets.read_target().left_out} <= {*found}


TESTS = """
import pytest

pytestmark = pytest.mark.gpu


def test_right():
    pass


def test_wrong():
    assert 1 + 1 == 3


@pytest.mark.skip(reason="needs more")
def test_skipped():
    pass
"""


def test_gpu_tests_are_recorded_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_acme.py").write_text(TESTS)
    (tmp_path / "tests" / "test_other.py").write_text("raise ImportError('is not wanted here')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs an accelerator\n")
    file = tmp_path / "record.json"
    options = ("--root", tmp_path, "--json", file)
    done = forks().run(BENCHMARKS / "gpu_tests.py", *map(str, options))
    record = json.loads(file.read_text())
    assert record["headline"] == "of 3 tests 1 failed, 1 passed, 1 skipped", done.stdout
    (fault,) = record["faults"]
    assert "test_wrong: assert (1 + 1) == 3" in fault
    assert [row["outcome"] for row in record["rows"]] == ["passed", "failed", "skipped"]


def test_gpu_tests_end_in_time() -> None:
    records = module("evidence.record")
    record = records.Record()
    watcher = module("gpu_tests").Watcher(record, records.Deadline(1e-9))
    watcher.collected = 3
    watcher.pytest_runtest_logfinish("test_first")
    assert record.skipped == ["no time for 3 more tests, those after test_first"]
    session = SimpleNamespace(shouldstop=False)
    assert watcher.pytest_runtest_protocol(SimpleNamespace(session=session)) is True
    assert session.shouldstop == "the time is over"


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    if line == "crash\\n":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    if line == "hang\\n":
        time.sleep(600)
    state = line.strip()
    answer = {"state": state, "candidates": [], "faults": ["bad"] if state == "wrong" else []}
    print(json.dumps(answer), flush=True)
"""


def test_a_part_that_crashes_or_hangs_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    conformance, records = module("gpu_conformance"), module("evidence.record")
    monkeypatch.setattr(conformance, "_LONGEST_S", 15.0)
    record = records.Record()
    found = conformance.Conformance("acme", "", record, records.Deadline(WAIT_SECONDS))
    found.command = python(WORKER)
    found.run(["correct", "crash", "refused", "hang", "wrong"], 1)
    states = {row["part"]: row["state"] for row in record.rows}
    assert states == {
        "correct": "correct",
        "crash": "ended",
        "refused": "refused",
        "hang": "ended",
        "wrong": "wrong",
    }
    crash, hang, wrong = record.faults
    assert "crash: its process ended with 3 and said: last words" in crash
    assert hang == "hang: its process took more than 15 s"
    assert wrong == "wrong: bad"


def test_results_come_home_under_the_name_of_the_device(tmp_path: Path) -> None:
    results = module("gpu_results")
    found = tmp_path / "found"
    ledger = module("evidence.ledger").Ledger(found)
    record = {"headline": "fine", "facts": {"device": "ACME X/1", "platform": "acme"}}
    ledger.record("doctor").write_text(json.dumps(record))
    ledger.log("doctor").write_text("said\n")
    ended = module("evidence.process").Ended(0, 1.0)
    ledger.end("doctor", ended, 9, "2026-01-01T00:00:00Z", False)
    ledger.archive(tmp_path / "all.tar.gz")
    done = forks().run(
        BENCHMARKS / "gpu_results.py", tmp_path / "all.tar.gz", "--results", tmp_path / "results"
    )
    assert done.returncode == 0, done.stderr
    home = tmp_path / "results" / "ACME_X_1"
    assert sorted(file.name for file in home.iterdir()) == [
        "doctor.json",
        "doctor.txt",
        "summary.txt",
    ]
    assert "fine" in (home / "summary.txt").read_text()
    ledger.record("doctor").write_text(json.dumps(record))
    ledger.end("doctor", ended, 9, "2026-01-01T00:00:00Z", True)
    with pytest.raises(SystemExit, match="of a rehearsal"):
        results.bring(found, tmp_path / "results", tmp_path)


@pytest.mark.timeout(1800)
def test_all_stages_are_rehearsed(tmp_path: Path) -> None:
    """Run every stage with the least sizes, on Triton's interpreter."""
    out, archive = tmp_path / "out", tmp_path / "all.tar.gz"
    command = [
        *(sys.executable, str(BENCHMARKS / "gpu_evidence.py"), "--tiny", "--forks"),
        *("--out", str(out), "--work", str(tmp_path / "work"), "--archive", str(archive)),
        # Other tests run meanwhile.
        *("--patience", "6", "--limit", "1700"),
    ]
    process = module("evidence.process")
    ended = process.run(command, os.environ, tmp_path / "log", 1750)
    said = (tmp_path / "log").read_text()
    assert ended.status == 0, said
    stages, ledger = module("evidence.stages").STAGES, module("evidence.ledger").Ledger(out)
    entries = {stage.letter: ledger.entry(stage.steps[0].name) for stage in stages}
    for entry in entries.values():
        assert entry.state in ("held", "cut"), said
        assert entry.tiny
    assert archive.is_file()
    # What was run is not run again.
    again = process.run([*command, "--limit", "20"], os.environ, tmp_path / "log", 300)
    assert again.status == 0
    assert entries == {stage.letter: ledger.entry(stage.steps[0].name) for stage in stages}
