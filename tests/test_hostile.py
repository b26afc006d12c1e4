"""Plugins that are broken or do harm cost a refusal with a reason, and nothing else.

Every case is a wheel that pip installs into one folder. Processes of their own then use the cases
as a program would, each beside a healthy plugin, and report what they saw, see ``hostile/visit``.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.forks import forks
from tests.hostile.case import Hostile
from tests.hostile.native import NEEDS, has_compiler
from tests.hostile.pack import CASES, HEALTHY, install, wheel
from tests.waiting import WAIT_SECONDS, wait_until

# The processes are shared by all tests of this module.
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("hostile"),
]

PARTS = ("interposer-ops", "interposer-quantization", "interposer-models", "interposer-cpu")
# Seconds that a stage may take, and a call of a kernel that does not show that it works.
SHORT, SHORT_CALL = 1.5, 1.0
VISIT = Path(__file__).parent / "hostile" / "visit.py"
MODEL = Path(__file__).parents[1] / "examples" / "models" / "stdlib-lm"
Report = dict[str, Any]

each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=[
                pytest.mark.skipif(case.needs_compiler and not has_compiler(), reason=NEEDS),
                # A landing visits one of 20, `make test-all` all of them.
                *([pytest.mark.slow] if number % 20 else []),
            ],
        )
        for number, case in enumerate(CASES)
    ],
    ids=str,
)


def task(case: Hostile) -> dict[str, Any]:
    """Return the visit in which the plugin of ``case`` takes part, a healthy one and the SDK."""
    beside = [f"hostile-{name}" for name in case.beside]
    listed = [case.listed_as, *beside, HEALTHY.name, *PARTS]
    config: dict[str, Any] = {"platform": "cpu", "plugins": listed, "probe_seconds": WAIT_SECONDS}
    calls = SHORT_CALL if any("within 1 s" in word for word in case.words) else 0
    if any("within 1.5 s" in word for word in case.words):
        config["probe_seconds"] = SHORT
    return {"name": case.name, "use": case.stage, "config": config, "calls": calls}


def marked(mark: str) -> list[int]:
    """Return the processes that have a variable of the environment; none where nobody tells."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:  # it has just ended, or is not ours
            continue
    return found


class Visits:
    """A process that works through visits; where one ends it, another does the rest.

    Attributes:
        codes: exit codes of the processes that have ended.
        tasks: all visits.
        reports: of the visits that have ended, by name.
    """

    def __init__(self, site: Path, folder: Path, name: str, tasks: list[dict[str, Any]]) -> None:
        self.codes: list[int] = []
        self.reports: dict[str, Report] = {}
        self.tasks = self._tasks = tasks
        self._folder = folder
        self._files = {end: folder / f"{name}.{end}" for end in ("json", "jsonl", "out", "err")}
        self._mark = f"HOSTILE_VISITS={folder / name}"
        variables = {
            "PYTHONPATH": str(site),
            "INTERPOSER_CACHE_DIR": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            **dict([self._mark.split("=", 1)]),
        }
        kept = {key: value for key, value in os.environ.items() if "INTERPOSER" not in key}
        self._environment = {**kept, **variables}
        self.start()

    def start(self) -> None:
        """Start a process that visits what is left."""
        files = self._files
        files["json"].write_text(json.dumps(self._tasks), encoding="utf-8")
        # Files, because a pipe would not end before the last process that holds it.
        with (
            files["json"].open("rb") as stdin,
            files["out"].open("ab") as out,
            files["err"].open("ab") as errors,
        ):
            self.process = subprocess.Popen(
                [sys.executable, "-P", VISIT, files["jsonl"]],
                env=self._environment,
                cwd=self._folder,
                stdin=stdin,
                stdout=out,
                stderr=errors,
            )

    def finish(self) -> None:
        """Return when every visit has ended."""
        while True:
            self.codes.append(self.process.wait())  # ``visit.py`` ends itself if a visit hangs
            lines = self._files["jsonl"].read_text("utf-8").splitlines()
            self.reports = {report["name"]: report for report in map(json.loads, lines)}
            left = [task for task in self._tasks if task["name"] not in self.reports]
            # The first of them has ended the process.
            self._tasks = left[1:]
            if not self._tasks:
                return
            self.start()

    def text(self, end: str) -> str:
        """Return the text that was written to ``out`` or ``err``."""
        return self._files[end].read_text(encoding="utf-8")

    def survivors(self) -> list[int]:
        """Return the processes that it started, directly or not, and that are still there."""
        return marked(self._mark)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def site(folder: Path) -> Path:
    return install(folder)


@pytest.fixture(scope="module")
def visits(site: Path, folder: Path, request: pytest.FixtureRequest) -> Iterator[list[Visits]]:
    """Return two lines of processes, finished, that have visited one half of the cases each."""
    params = [getattr(item, "callspec", None) for item in request.session.items]
    asserted = [spec.params.get("case") for spec in params if spec]  # of other modules, too
    cases = [case for case in CASES if case in asserted]
    control: dict[str, Any] = {"name": "control", "use": "kernel", "calls": 0}
    # Its verdicts are remembered, so no short limit applies to the healthy plugin later.
    control["config"] = {
        "platform": "cpu",
        "plugins": [HEALTHY.name, *PARTS],
        "probe_seconds": WAIT_SECONDS,
    }
    halves = [[control, *map(task, cases[start::2])] for start in (0, 1)]
    started = [Visits(site, folder, f"half{n}", tasks) for n, tasks in enumerate(halves)]
    try:
        for one in started:
            one.finish()
        yield started
    finally:
        for one in started:
            one.process.kill()


@pytest.fixture(scope="module")
def reports(visits: list[Visits]) -> dict[str, Report]:
    return {name: report for one in visits for name, report in one.reports.items()}


def reasons(case: Hostile, report: Report) -> list[str]:
    """Return the reasons that were reported about the case's plugin at its stage."""
    stage = "discovery" if case.stage == "observer" else case.stage
    unsaid = case.stage in ("lock", "platform", "tie", "tuning")
    return [
        text
        for at, name, provider, text in report["reasons"]
        if at == stage
        and (unsaid or name == case.plugin_name or provider.startswith(case.distribution))
    ]


def says(text: str, case: Hostile) -> bool:
    return all(case.filled(word).casefold() in text.casefold() for word in case.words)


def test_pack_is_what_it_promises() -> None:
    assert len(CASES) >= 270
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.words for case in CASES)


@pytest.mark.parametrize("case", [c for c in CASES if not c.altered][::60], ids=str)
def test_wheels_are_real(case: Hostile, tmp_path: Path, site: Path) -> None:
    made = wheel(case, tmp_path)
    record = (site / made.info / "RECORD").read_text(encoding="utf-8")
    hashed = {path: digest for path, digest, _ in csv.reader(record.splitlines()) if digest}
    assert set(made.files) < set(hashed)
    for path, digest in hashed.items():
        found = hashlib.sha256((site / path).read_bytes()).digest()
        expected = base64.urlsafe_b64encode(found).decode().rstrip("=")
        assert digest == f"sha256={expected}", path


def test_processes_live(visits: list[Visits], reports: dict[str, Report]) -> None:
    ended = {task["name"] for one in visits for task in one.tasks} - set(reports)
    assert [one.codes for one in visits] == [[0], [0]], f"ended by {sorted(ended)}"
    assert [one.text("out") for one in visits] == ["", ""]
    assert not any("HOSTILE OUTPUT" in one.text("err") for one in visits)


def test_control_refuses_nothing(reports: dict[str, Report]) -> None:
    report = reports["control"]
    assert report["error"] == ""
    assert report["kernel"] == "healthy_norm.kernels"
    assert not [stage for stage, *_ in report["reasons"] if stage == "discovery"]


@each_case
def test_it_is_refused(case: Hostile, reports: dict[str, Report]) -> None:
    assert case.name in reports, "it has ended the process"
    said = reasons(case, reports[case.name])
    assert any(says(text, case) for text in said), said or reports[case.name]
    # Whoever crashes or hangs would do so in the process that follows such advice.
    assert not any("isolation='off'" in text for text in said)


@each_case
def test_the_hostile_plugin_harms_no_other_plugin(
    case: Hostile, reports: dict[str, Report]
) -> None:
    assert case.name in reports, "it has ended the process"
    report = reports[case.name]
    assert report["error"] == ""
    assert (report["kernel"], report["right"]) == ("healthy_norm.kernels", True)
    assert report["changes"] == []
    imported = {name for name in report["imported"] if name.partition(".")[0] == case.package}
    if case.stage in ("discovery", "kernel"):
        loads = case.loads or case.stage == "kernel"
        assert imported <= ({case.package, f"{case.package}.plugin"} if loads else set())


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs a /proc as of Linux")
def test_no_process_is_left(visits: list[Visits]) -> None:
    def survivors() -> list[int]:
        return [process for one in visits for process in one.survivors()]

    wait_until(lambda: not survivors(), lambda: f"the end of processes {survivors()}")


@pytest.mark.slow  # a command below sees everything as well
def test_all_at_once(site: Path, folder: Path, visits: list[Visits]) -> None:
    """Everything is installed and nothing is left out by the policy, as on a real machine."""
    ours = ["example-norm", "gguf", "nf4", "otel"]
    config = {"platform": "cpu", "disable": ours, "probe_seconds": SHORT}
    everything = {"name": "everything", "use": "everything", "config": config, "calls": SHORT_CALL}
    visit = Visits(site, folder, "everything", [everything])
    visit.finish()
    assert (visit.codes, visit.text("out")) == ([0], ""), visit.text("err")
    report = visit.reports["everything"]
    assert report["error"] == ""
    assert (report["kernel"], report["right"]) == ("healthy_norm.kernels", True)
    assert report["changes"] == []
    missed = [
        case.name
        for case in CASES
        if case.stage not in ("lock", "platform")
        and not (case.needs_compiler and not has_compiler())
        and not any(says(text, case) for text in reasons(case, report))
    ]
    assert not missed


COMMANDS = {
    "explain": ("explain", "MODEL"),
    "run": ("run", "MODEL", "--prompt", "def read(", "--max-new-tokens", "2"),
}


# Each package is visited alone above, and the command below sees all of them.
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_survive(
    command: tuple[str, ...], site: Path, folder: Path, visits: list[Visits]
) -> None:
    """They end as they should though everything is installed, and leave no process."""
    project = folder / f"of {command[0]}"
    project.mkdir()
    ours = ["example-norm", "gguf", "nf4", "otel"]
    text = f'platform = "cpu"\nprobe_seconds = {SHORT}\ncache_dir = "{folder / "cache"}"\n'
    (project / "interposer.toml").write_text(f"{text}disable = {ours}\n", encoding="utf-8")
    mark = f"HOSTILE_COMMAND={project}"
    kept = {key: value for key, value in os.environ.items() if "INTERPOSER" not in key}
    environment = {**kept, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    environment |= dict([mark.split("=", 1)])
    words = [str(MODEL) if word == "MODEL" else word for word in command]
    with (project / "out").open("wb") as out, (project / "err").open("wb") as errors:
        arguments = [sys.executable, "-P", "-m", "interposer_tools", *words]
        done = subprocess.run(arguments, env=environment, cwd=project, stdout=out, stderr=errors)
    said = (project / "err").read_text(encoding="utf-8")
    assert done.returncode == 0, said
    assert "Traceback" not in said
    assert (project / "out").read_text(encoding="utf-8").strip()
    wait_until(lambda: not marked(mark), lambda: f"the end of processes {marked(mark)}")


@pytest.mark.slow
def test_doctor_names_all(site: Path, folder: Path, visits: list[Visits]) -> None:
    """The command ends with 1 and gives every plugin's reason, from the remembered verdicts."""
    project = folder / "project"
    project.mkdir()
    text = f'platform = "cpu"\nprobe_seconds = {SHORT}\ncache_dir = "{folder / "cache"}"\n'
    (project / "interposer.toml").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = ("-m", "interposer_tools", "doctor", "--json")
    done = forks().run(*command, env=environment, cwd=project)
    assert done.returncode == 1, done.stderr
    problems = {
        (problem["subject"], problem["reason"]) for problem in json.loads(done.stdout)["problems"]
    }
    missed = [
        case.name
        for case in CASES
        if case.stage == "discovery"
        and not (case.needs_compiler and not has_compiler())
        and not any(
            repr(case.plugin_name)[1:-1] in what and says(why, case) for what, why in problems
        )
    ]
    assert not missed
