"""The command ends with 0, or with one message and 1; what others add to it cannot break it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.forks import forks

pytestmark = pytest.mark.process

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables of a process that finds what is in ``tmp_path`` first."""
    return {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Run:
    """Return a runner of the command, in an empty folder that is first on the path."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        options = {"cwd": tmp_path, "env": {**environment, **variables}}
        return forks().run("-m", "interposer_tools", *arguments, **options)

    return run


@pytest.fixture
def run_new(tmp_path: Path, environment: dict[str, str]) -> Run:
    """Return a runner of the same in a new interpreter, which has imported nothing."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "interposer_tools", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    return run


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., None]:
    """Return a function that installs a distribution with the given entry points and modules."""

    def install(name: str, entry_points: str, **modules: str) -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(entry_points)
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source)

    return install


def test_help_names_the_commands(run: Run) -> None:
    for option in ("--help", "-h"):
        process = run(option)
        assert process.returncode == 0, process.stderr
        for name in ("doctor", "explain", "lock", "tune"):
            assert name in process.stdout


def test_version(run: Run) -> None:
    process = run("--version")
    assert (process.returncode, process.stdout) == (0, f"interposer {version('interposer')}\n")


def test_an_expected_error_is_one_message_without_a_traceback(run: Run) -> None:
    process = run("lock", INTERPOSER_PLATFROM="cpu")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: Unknown environment variable 'INTERPOSER_PLATFROM'")
    assert "Traceback" not in process.stderr
    assert len(process.stderr.splitlines()) == 1


def test_an_unknown_command_or_option_is_a_usage_error(run: Run) -> None:
    for wrong in (["docter"], ["doctor", "--jsno"]):
        process = run(*wrong)
        assert process.returncode == 2
        assert "Traceback" not in process.stderr


BROKEN = {
    "raises": "raise OSError('[/bold] no such library')\n",
    "leaves": "raise SystemExit(7)\n",
    "lacks": "",
}
FATAL = "import os\nos.abort()\n"


@pytest.mark.landing(1)
@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
def test_a_broken_command_does_not_break_the_others_and_says_why_when_run(
    source: str, run: Run, install: Callable[..., None]
) -> None:
    install("acme", "[interposer.commands]\nhum = acme_commands:hum\n", acme_commands=source)
    overview = run("--help")
    assert overview.returncode == 0, overview.stderr
    assert "hum" in overview.stdout
    assert "Command of acme; `interposer hum --help` describes it." in overview.stdout
    process = run("hum", "--fast", "model")
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("error: The command 'hum' cannot be loaded: ")
    assert process.stderr.splitlines()[1:] == [
        "Try: interposer doctor, which names each faulty package"
    ]


@pytest.mark.slow
def test_only_the_requested_command_is_imported(run: Run, install: Callable[..., None]) -> None:
    install("acme", "[interposer.commands]\nhum = acme_commands:hum\n", acme_commands=FATAL)
    for arguments in (("--help",), ("ops",), ("lock", "--help")):
        process = run(*arguments)
        assert process.returncode == 0, process.stderr
    assert run("hum").returncode < 0


def test_unreadable_entry_points_are_reported_with_their_folder(
    run_new: Run, install: Callable[..., None], tmp_path: Path
) -> None:
    install("acme", "[acme]\n")
    (tmp_path / "acme-1.0.dist-info" / "entry_points.txt").write_bytes(b"[acme]\nx\xff = y\n")
    for arguments in (("doctor",), ("explain", "model"), ("run", "model", "prompt")):
        process = run_new(*arguments)
        assert (process.returncode, process.stdout) == (1, "")
        assert "acme-1.0.dist-info: entry_points.txt: 'utf-8' codec" in process.stderr
        assert process.stderr.endswith("Try: reinstall or uninstall it\n")
        assert "Traceback" not in process.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell of Unix")
@pytest.mark.parametrize(
    ("closed", "code", "message"),
    [
        (">&-", 1, "error: standard output is closed.\nTry: > /dev/null\n"),
        (">&- 2>&-", 1, ""),
        ("2>&- <&- >/dev/null", 0, ""),
    ],
)
def test_closed_streams_are_handled(
    closed: str, code: int, message: str, environment: dict[str, str]
) -> None:
    script = f'"$0" -m interposer_tools ops {closed}'
    process = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable], env=environment, capture_output=True, text=True
    )
    assert (process.returncode, process.stdout, process.stderr) == (code, "", message)


HUM = 'def hum():\n    """Hum it."""\n    print("hmm")\n'


def test_a_command_of_another_distribution_runs(run: Run, install: Callable[..., None]) -> None:
    install("acme", "[interposer.commands]\nhum = acme_commands:hum\n", acme_commands=HUM)
    assert "Hum it." in run("hum", "--help").stdout
    assert run("hum").stdout == "hmm\n"


def test_a_command_claimed_twice_is_refused(run: Run, install: Callable[..., None]) -> None:
    install("acme", "[interposer.commands]\nhum = acme_commands:hum\n", acme_commands=HUM)
    install("zeta", "[interposer.commands]\nhum = zeta_commands:hum\n", zeta_commands=HUM)
    process = run("hum")
    assert process.returncode == 1
    assert "it is claimed by acme_commands:hum and by zeta_commands:hum" in process.stderr


def test_plugins_cannot_replace_built_in_commands(run: Run, install: Callable[..., None]) -> None:
    install("acme", "[interposer.commands]\nlock = acme_commands:hum\n", acme_commands=HUM)
    overview = run("--help").stdout
    assert "Hum it." not in overview
    assert "Record the installed plugin distributions" in overview


def test_the_commands_start_without_torch(run_new: Run, install: Callable[..., None]) -> None:
    source = "def hum():\n    import sys\n    print('torch' in sys.modules)\n"
    install("acme", "[interposer.commands]\nhum = acme_commands:hum\n", acme_commands=source)
    assert run_new("hum").stdout == "False\n"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs terminals as of POSIX")
def test_slow_steps_are_logged_on_a_terminal(tmp_path: Path) -> None:
    command = forks().command("-m", "interposer_tools", "explain", "--why", "platform")
    environment = {**os.environ, "INTERPOSER_CACHE_DIR": str(tmp_path)}
    master, slave = os.openpty()
    quiet = subprocess.DEVNULL
    subprocess.run(command, env=environment, stdout=quiet, stderr=slave, check=True, timeout=120)
    os.close(slave)
    assert b" plugins, once; the verdicts are remembered" in os.read(master, 10_000)
    os.close(master)
    again = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120)
    assert again.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["hum"]])
def test_unwritable_output_is_one_message(
    arguments: list[str], tmp_path: Path, install: Callable[..., None]
) -> None:
    source = "def hum():\n    for _ in range(9999):\n        print('hmm')\n"
    install("acme", "[interposer.commands]\nhum = acme_commands:hum\n", acme_commands=source)
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "interposer_tools", *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    message = "error: cannot write the output: No space left on device\n"
    assert (process.returncode, process.stderr) == (1, message)


@pytest.mark.landing(1)
@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell of Unix")
@pytest.mark.parametrize("arguments", ["--help", "hum"])
def test_a_closed_pipe_ends_the_command_quietly(
    arguments: str, environment: dict[str, str], install: Callable[..., None]
) -> None:
    source = "def hum():\n    for _ in range(99999):\n        print('hmm')\n"
    install("acme", "[interposer.commands]\nhum = acme_commands:hum\n", acme_commands=source)
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "interposer_tools", arguments],
            env=environment,
            stdout=writing_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writing_end)
    assert (process.returncode, process.stderr) == (141, "")


COMPLETE = """
import sys
from interposer_tools._cli import main
sys.argv[0] = "interposer"
try:
    main()
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("line", "completion"),
    [
        ("interposer ver", "verify"),
        ("interposer verify --qu", "--quick"),
        ("interposer hu", "hum\nhub-kernels"),
    ],
)
def test_bash_completes_commands_and_options_without_torch(
    line: str, completion: str, environment: dict[str, str], install: Callable[..., None]
) -> None:
    install("acme", "[interposer.commands]\nhum = acme_commands:hum\n", acme_commands=FATAL)
    process = subprocess.run(
        [sys.executable, "-P", "-c", COMPLETE],
        env={
            **environment,
            "_INTERPOSER_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    *completions, has_torch = process.stdout.split()
    assert sorted(completions) == sorted(completion.split()), process.stderr
    assert has_torch == "False"


def test_an_interrupted_command_exits_with_130(run: Run, install: Callable[..., None]) -> None:
    source = "def hum():\n    raise KeyboardInterrupt\n"
    install("acme", "[interposer.commands]\nhum = acme_commands:hum\n", acme_commands=source)
    process = run("hum")
    assert (process.returncode, process.stderr) == (130, "")
