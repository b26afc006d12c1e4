"""Foreign code runs in a fork: whatever it does costs a refusal there."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from tests.waiting import WAIT_SECONDS, wait_until

from interposer_sandbox import (
    Finding,
    Function,
    Guarded,
    Host,
    Reporter,
    Sandbox,
    SandboxError,
    UnavailableError,
    run_here,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
]

# Limits for code that hangs. On a busy machine it may need one of the longer to come to that code.
LIMITS = (0.5, 5.0, 50.0)

# What the tests run in forks: each loads modules as stages of their own.
VISITS = """
import os, time
from importlib import import_module
from interposer_sandbox import Finding, Guarded, Host, SideEffects

HOST = Host(environment=lambda: os.environ)

def visit(arguments, reporter):
    module = arguments["module"]
    watch = SideEffects(HOST, alone=reporter.alone, package=module)
    reporter.run(f"importing {module}", watch, import_module, module)
    return Finding.accept()

def load(arguments, reporter):
    reporter.unmute()
    module = arguments["module"]
    watch = SideEffects(HOST, light=False, alone=reporter.alone, package=module)
    reporter.note(module=module)
    reporter.run(f"loading {module}", watch, import_module, module)
    return Finding.accept("is loaded")

def fork(arguments, reporter):
    def work():
        exec(arguments["source"], {**globals(), "reporter": reporter})
        return True
    pid = reporter.fork(work)
    reporter.begin("forking")
    reporter.join(pid)
    return Finding.accept()

def work(arguments, reporter):
    reporter.begin("working", patience=100.0)
    deadline = time.monotonic() + arguments["seconds"]
    while time.monotonic() < deadline:
        pass
    return Finding.accept()
"""
HOST = Host(environment=lambda: os.environ, slow_modules=("torch",))

_numbers = count()

Visited = Callable[..., Finding]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(HOST) as sandbox:
        yield sandbox


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder on the path with the functions of these tests."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "acme_visits.py").write_text(VISITS, encoding="utf-8")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


def function(name: str) -> Function:
    loaded_function: Function = getattr(importlib.import_module("acme_visits"), name)
    return loaded_function


def write(folder: Path, source: str) -> str:
    """Return the name of a new module."""
    name = f"acme_{next(_numbers)}"
    (folder / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    return name


@pytest.fixture
def visited(folder: Path, sandbox: Sandbox) -> Iterator[Visited]:
    """Return a visit to a module of the given source; afterwards a healthy one is visited."""

    def visit(source: str, seconds: float = WAIT_SECONDS, name: str = "visit") -> Finding:
        return sandbox.run(function(name), {"module": write(folder, source)}, seconds)

    yield visit
    assert visit("")


def test_healthy_code_is_accepted(visited: Visited) -> None:
    assert visited("") == Finding.accept()


def test_facts_and_reasons_are_returned(folder: Path, visited: Visited) -> None:
    finding = visited("print('fine')", name="load")
    assert finding == Finding(True, "is loaded", facts={"module": finding.facts["module"]})
    assert visited("import os; os.abort()", name="load").facts["module"].startswith("acme_")


# What a module does when it is imported, and the reason that it is refused with.
_RAISED = [
    ("import nowhere_at_all", r"importing acme_\d+ raised ModuleNotFoundError\(.*nowhere"),
    ("raise RuntimeError('on purpose')", r"raised RuntimeError\('on purpose'\)"),
    ("def", r"importing acme_\d+ raised SyntaxError"),
    ("import sys; sys.exit(3)", r"raised SystemExit\(3\)"),
    ("raise KeyboardInterrupt", r"raised KeyboardInterrupt\(\)"),
    ("raise GeneratorExit", r"raised GeneratorExit\(\)"),
    ("class Own(BaseException): pass\nraise Own('x')", r"raised Own\('x'\)"),
    ("def down(): down()\ndown()", r"raised RecursionError"),
    ("bytearray(1 << 62)", r"raised MemoryError"),
    (
        "class Own(Exception):\n    def __repr__(self): raise ValueError\nraise Own",
        r"raised Own\(\.\.\.\)",
    ),
    ("raise RuntimeError('\\ud800\\x1b[31m' + 'é' * 5000)", r"raised RuntimeError\('\\\\?ud800"),
]
_ENDED = [
    ("import os; os._exit(3)", r"exited with code 3 while importing acme_\d+"),
    ("import os; os._exit(0)", "exited with code 0 while importing"),
    ("import os; os.abort()", "killed by SIGABRT while importing"),
    ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV while importing"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "killed by SIGILL while importing"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL while"),
    ("import os; os.closerange(0, 1024)", "closed the pipe of its examination while importing"),
    ("import os; os._exit = None; os.write = None; raise OSError", r"raised OSError\(\)"),
]
_EFFECTS = [
    ("print('hello')", r"importing acme_\d+ prints 'hello\\n'"),
    ("import sys; sys.stderr.write('hello')", "prints 'hello'"),
    ("print('x' * 10_000_000)", "prints 'x{200}'$"),
    ("import os; os.write(1, b'from below')", "prints 'from below'"),
    ("import ctypes; ctypes.CDLL(None).printf(b'native')", "prints 'native'"),
    ("import os; os.environ['ACME'] = '1'", "changes the environment: ACME"),
    ("import os; os.environ = {'ACME': '1'}", "replaces os.environ"),
    ("import builtins; builtins.print = None", "replaces builtins.print"),
    (
        "import builtins; builtins.len = None; builtins.isinstance = 3",
        "replaces builtins.isinstance; .* replaces builtins.len",
    ),
    ("import builtins; builtins.__import__ = None", "replaces builtins.__import__"),
    ("import builtins; builtins.acme = 1", "adds builtins.acme"),
    ("import builtins; del builtins.sorted", "replaces builtins.sorted"),
    ("import sys; sys.modules['json'] = None", "replaces the module 'json'"),
    ("import sys; del sys.modules['json']", "removes the module 'json'"),
    ("import os; os.chdir('/')", "changes the working directory"),
    ("import sys; sys.path.append('/acme')", "changes sys.path"),
    ("import sys; sys.excepthook = print", "replaces sys.excepthook"),
    (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "installs a handler for SIGTERM",
    ),
    (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,), name='mine', daemon=True).start()",
        "leaves the thread 'mine' running",
    ),
    (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,), name='mine').start()",
        "leaves the thread 'mine' running",
    ),
    (
        "import _thread, time; _thread.start_new_thread(time.sleep, (99,))",
        r"leaves 1 thread\(s\) without a name running",
    ),
    ("import atexit, os; atexit.register(os.abort)", "registers a function for the end of the"),
    ("import os; os.closerange(3, 100)", "closes the file descriptor"),
    ("import os\nif os.fork() == 0: os._exit(0)", "forks the process"),
    ("import os; os.fork()", "forks the process"),
]
_SLEEPS = "import time\nwhile True: time.sleep(99)"
_HANGS = [
    "while True: pass",
    _SLEEPS,
    "import os\nwhile True: os.write(1, b'x' * 65536)",
    "import signal\n"
    "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):\n"
    "    signal.signal(number, signal.SIG_IGN)\n" + _SLEEPS,
]
_HARMLESS = [
    "import warnings; warnings.warn('old', DeprecationWarning)",
    "import threading; t = threading.Thread(target=int); t.start(); t.join()",
]


@pytest.mark.landing(10)
@pytest.mark.parametrize(("source", "reason"), [*_RAISED, *_ENDED, *_EFFECTS])
def test_side_effects_at_import_are_refused(source: str, reason: str, visited: Visited) -> None:
    finding = visited(source)
    assert not finding
    assert re.search(reason, finding.reason), finding.reason
    assert len(finding.reason) < 2_100
    assert finding.reason.isprintable()


def hung(visited: Visited, source: str, tmp_path: Path) -> tuple[Finding, float]:
    """Return the refusal of code that hangs and the limit, which let the code come that far."""
    note = tmp_path / "hangs"
    for seconds in LIMITS:
        finding = visited(f"open({str(note)!r}, 'w').close()\n{source}", seconds=seconds)
        if note.exists():
            return finding, seconds
        assert not finding
    pytest.fail(f"the code was never run: {finding.reason}")


@pytest.mark.landing(1)
@pytest.mark.parametrize("source", _HANGS)
def test_a_stage_that_takes_too_long_is_ended(
    source: str, visited: Visited, tmp_path: Path
) -> None:
    finding, seconds = hung(visited, source, tmp_path)
    reason = rf"did not return within {seconds:g} s while importing acme_\d+"
    assert re.fullmatch(reason, finding.reason), finding.reason
    assert finding.facts["limit_seconds"] == seconds


@pytest.mark.parametrize("source", _HARMLESS)
def test_harmless_effects_are_accepted(source: str, visited: Visited) -> None:
    assert visited(source)


@pytest.mark.slow
def test_a_patient_stage_may_work_for_longer(folder: Path, sandbox: Sandbox) -> None:
    assert sandbox.run(function("work"), {"seconds": 3.5}, 3.0)


def test_the_traceback_of_an_exception_is_returned(visited: Visited) -> None:
    trace = visited("def broken():\n    raise OSError('x')\nbroken()").traceback
    assert re.search(r"acme_\d+.py", trace)
    assert "in broken" in trace


def test_a_missing_module_is_named(visited: Visited) -> None:
    assert visited("import acme_needs").facts == {"missing": "acme_needs"}
    assert visited("import json.acme").facts == {}


def test_the_place_of_a_crash_is_returned(visited: Visited) -> None:
    trace = visited("import ctypes\ndef broken():\n    ctypes.string_at(0)\nbroken()").traceback
    assert re.search(r'File ".*acme_\d+.py", line \d+', trace), trace


def test_the_place_of_a_hang_is_returned(visited: Visited, tmp_path: Path) -> None:
    finding, _ = hung(visited, _SLEEPS, tmp_path)
    assert re.search(r'File ".*acme_\d+.py", line \d+', finding.traceback), finding.traceback


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("body", "reason"),
    [("*(volatile int *)0 = 1;", "SIGSEGV"), ("__builtin_trap();", "SIGILL"), ("_exit(9);", "9")],
)
def test_a_native_library_that_crashes_at_loading_is_refused(
    body: str, reason: str, visited: Visited, tmp_path: Path
) -> None:
    source, library = tmp_path / "crash.c", tmp_path / "crash.so"
    source.write_text(
        f"#include <unistd.h>\n__attribute__((constructor)) void load(void) {{ {body} }}"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    finding = visited(f"import ctypes; ctypes.CDLL({str(library)!r})")
    assert re.match(rf"(killed by|exited with code) {reason} while importing", finding.reason)


def test_forged_answers_are_refused(visited: Visited) -> None:
    forged = """
    import json, os
    finding = {"accepted": True, "reason": "", "traceback": "", "facts": {}}
    for token in ("", "0" * 32, None):
        line = json.dumps({"token": token, "finding": finding, "id": 1}).encode() + b"\\n"
        for number in range(3, 300):
            try:
                os.write(number, line)
            except OSError:
                pass
    os._exit(5)
    """
    assert visited(forged).reason.startswith("exited with code 5 while importing")


@pytest.mark.landing(2)
@pytest.mark.parametrize("ending", ["", "os._exit(1)", _SLEEPS])
def test_processes_that_a_plugin_started_end_with_it(
    ending: str, visited: Visited, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    source = (
        "import os, pathlib, subprocess\n"
        'child = subprocess.Popen(["sleep", "1000"])\n'
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
    )
    for seconds in LIMITS if ending == _SLEEPS else [WAIT_SECONDS]:
        visited(source + ending, seconds)
        if note.exists():
            break
    child = int(note.read_text())
    wait_until(lambda: has_ended(child), f"the end of process {child}")


_NESTED = """
import acme_visits
from interposer_sandbox import Sandbox
Sandbox(acme_visits.HOST).run(acme_visits.visit, {"module": "json"}, 1.0)
"""


def test_code_must_not_use_the_sandbox_itself(visited: Visited) -> None:
    assert "raised NestedError" in visited(_NESTED).reason


def test_slow_modules_are_imported_before_any_limit_applies(folder: Path) -> None:
    """The process that forks imports them: limits apply to its forks alone."""
    (folder / "acme_slow.py").write_text("import os; PID = os.getpid()")
    (folder / "acme_beside.py").write_text("")
    visit = function("visit")
    with Sandbox(Host(slow_modules=("acme_slow", "acme_beside"))) as sandbox:
        quick = write(folder, "import sys; assert 'acme_slow' not in sys.modules")
        assert sandbox.run(visit, {"module": quick}, WAIT_SECONDS)
        source = "import acme_slow, os, sys\nassert acme_slow.PID == os.getppid()\n"
        name = write(folder, source + "assert 'acme_beside' in sys.modules")
        assert sandbox.run(visit, {"module": name}, WAIT_SECONDS)
        later = write(folder, "import sys; assert 'acme_slow' in sys.modules")
        assert sandbox.run(visit, {"module": later}, WAIT_SECONDS)


def test_a_server_that_is_started_early_imports_the_slow_modules(folder: Path) -> None:
    (folder / "acme_slow.py").write_text("")
    starts: list[int] = []
    host = Host(slow_modules=("acme_slow",))
    with Sandbox(host, lambda: starts.append(1)) as sandbox:
        sandbox.start()
        sandbox.start()
        assert sandbox.pid is not None
        name = write(folder, "import sys; assert 'acme_slow' in sys.modules")
        assert sandbox.run(function("visit"), {"module": name}, WAIT_SECONDS)
    assert len(starts) == 1


def test_a_process_that_cannot_start_early_is_reported_by_the_first_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Sandbox(HOST) as sandbox:
        sandbox.start()
        with pytest.raises(UnavailableError, match="/nowhere/python cannot be started"):
            sandbox.run(function("visit"), {"module": write(folder, "")}, WAIT_SECONDS)


def test_requested_modules_are_imported_before_the_fork(folder: Path) -> None:
    name = write(folder, "import sys; assert 'acme_late' in sys.modules")
    (folder / "acme_late.py").write_text("")
    with Sandbox(Host()) as sandbox:
        late = {"modules": ["acme_late"]}
        assert sandbox.run(function("visit"), {"module": name}, WAIT_SECONDS, **late)
        module = write(folder, "import sys; assert 'acme_late' in sys.modules")
        assert sandbox.run(function("visit"), {"module": module}, WAIT_SECONDS)


def test_modules_of_the_host_are_imported_at_the_start(folder: Path) -> None:
    (folder / "acme_early.py").write_text("")
    source = "import sys; assert 'acme_early' in sys.modules"
    with Sandbox(Host(modules=("acme_early",))) as sandbox:
        assert sandbox.run(function("visit"), {"module": write(folder, source)}, WAIT_SECONDS)


def test_a_fork_of_the_process_ends_the_process_unless_it_is_done(
    folder: Path, sandbox: Sandbox
) -> None:
    reasons = {
        "pass": "",
        "os._exit(0)": "exited with code 0 while forking",
        "os._exit(3)": "exited with code 3 while forking",
        "os.abort()": "killed by SIGABRT while forking",
        "raise OSError": "closed the pipe of its examination while forking",
        "import atexit; atexit.register(os._exit, 0)": "exited with code 0 while forking",
        "reporter._pid = os.getpid(); reporter.end(Finding.accept())": (
            "closed the pipe of its examination while forking"
        ),
    }
    for source, reason in reasons.items():
        finding = sandbox.run(function("fork"), {"source": source}, WAIT_SECONDS)
        assert (finding.accepted, finding.reason) == (source == "pass", reason)


@pytest.mark.parametrize("here", [True, False])
def test_functions_of_the_host_must_not_be_replaced(here: bool, folder: Path) -> None:
    (folder / "acme_own.py").write_text(
        "def own(): return 1\nclass Own:\n    def get(self): pass\n"
    )
    (folder / "acme_guarded.py").write_text(
        VISITS.replace("Host(env", "Host(guarded=Guarded(packages=('acme_own',)), env")
        + "import acme_own\n"
    )
    source = "import acme_own\nacme_own.own = None\nacme_own.Own.get = len\n"
    guarded: Function = importlib.import_module("acme_guarded").visit
    arguments = {"module": write(folder, source)}
    host = Host(guarded=Guarded(packages=("acme_own",)), modules=("acme_guarded",))
    if here:
        finding = run_here(guarded, arguments)
    else:
        with Sandbox(host) as sandbox:
            finding = sandbox.run(guarded, arguments, WAIT_SECONDS)
    assert finding.reason.endswith("replaces acme_own.own, acme_own.Own.get"), finding.reason
    assert importlib.import_module("acme_own").own() == 1


@pytest.mark.parametrize(
    ("guarded", "source", "replaced"),
    [
        ("bases=('acme_base',)", "acme_base.load = print", "acme_base.load"),
        ("bases=('acme_base',)", "acme_base.Base.get = len", "acme_base.Base.get"),
        ("bases=('acme_base',)", "acme_base.later = json", ""),
        ("classes=('acme_base:Base',)", "acme_base.Base.get = len", "acme_base.Base.get"),
        (
            "packages=('acme_base',), members=('Base.get',)",
            "acme_base.given.get = mine",
            "acme_base.given.get",
        ),
        (
            "packages=('acme_base',), members=('Base.get',)",
            "acme_base.given.get = json.loads",
            "",
        ),
    ],
)
def test_names_that_the_host_guards_are_guarded(
    guarded: str, source: str, replaced: str, folder: Path
) -> None:
    base = write(  # of a name of its own: what a process knows of a module stays
        folder,
        "def load(): pass\nlater = object()\nclass Base:\n    def get(self): pass\n"
        "given = Base()\n",
    )
    (folder / "acme_watching.py").write_text(
        VISITS.replace("Host(env", f"Host(guarded=Guarded({guarded}), env").replace(
            "acme_base", base
        )
        + f"import {base}\n"
    )
    visited = write(folder, f"import {base} as acme_base, json\ndef mine(): pass\n{source}\n")
    finding = run_here(importlib.import_module("acme_watching").visit, {"module": visited})
    assert finding.accepted == (not replaced), finding.reason
    assert finding.reason.endswith(
        f"replaces {replaced.replace('acme_base', base)}" if replaced else ""
    ), finding.reason


def test_a_function_must_be_importable(sandbox: Sandbox) -> None:
    def accept(_arguments: Mapping[str, Any], _reporter: Reporter) -> Finding:
        return Finding.accept()

    for nameless in (accept, partial(accept)):
        with pytest.raises(ValueError, match="Try: define it at the top of a module"):
            sandbox.run(nameless, {}, 1.0)


def test_run_here_finds_the_same_in_this_process(folder: Path) -> None:
    name = write(folder, "import builtins; builtins.len = None")
    finding = run_here(function("visit"), {"module": name})
    assert finding.reason == f"importing {name} replaces builtins.len"
    assert name in sys.modules
    assert len("abc") == 3
    broken = run_here(function("load"), {"module": write(folder, "raise OSError('x')")})
    assert broken.reason.endswith("raised OSError('x')")
    assert "module" in broken.facts


@pytest.mark.parametrize("value", [None, {}, {"accepted": 1, "reason": "", "traceback": ""}])
def test_only_valid_findings_are_restored(value: Any) -> None:
    finding = Finding.refuse("no \x1b[31m", "trace", missing="acme")
    assert finding.reason == "no \\x1b[31m"
    assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding
    with pytest.raises(ValueError, match="no finding"):
        Finding.from_json(value)


@pytest.mark.parametrize(
    ("finding", "stands"),
    [
        (Finding.accept(), True),
        (Finding.refuse("no"), True),
        (Finding.refuse("late", limit_seconds=1.0), False),
        (Finding.refuse("late", limit_seconds=2.0), True),
        (Finding.refuse("missing", missing="acme_needs"), True),
        (Finding.refuse("missing", missing="json"), False),
        (Finding.refuse("missing", missing=""), True),
    ],
)
def test_a_refusal_is_valid_while_its_cause_can_persist(finding: Finding, stands: bool) -> None:
    assert finding.stands(2.0) is stands


def test_threads_share_the_process(folder: Path, sandbox: Sandbox) -> None:
    names = [write(folder, f"raise OSError({n})") for n in range(6)]
    visit, barrier = function("visit"), Barrier(6)

    def ask(name: str) -> str:
        barrier.wait()
        return sandbox.run(visit, {"module": name}, WAIT_SECONDS).reason

    with ThreadPoolExecutor(6) as pool:
        reasons = [*pool.map(ask, names)]
    assert all(reason.endswith(f"raised OSError({n})") for n, reason in enumerate(reasons))


def test_a_fork_has_its_own_process(folder: Path, sandbox: Sandbox, visited: Visited) -> None:
    assert visited("")
    before = sandbox.pid
    child = os.fork()
    if child == 0:
        code = 9
        with suppress(BaseException):
            code = 0 if sandbox.pid is None and visited("") and sandbox.pid != before else 1
            sandbox.stop()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert visited("")
    assert sandbox.pid == before


def test_a_process_that_was_killed_is_replaced(sandbox: Sandbox, visited: Visited) -> None:
    assert visited("")
    os.killpg(group(sandbox), signal.SIGKILL)
    assert visited("")


def test_a_process_that_cannot_start_raises(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    with Sandbox(HOST, lambda: starts.append(1)) as sandbox:
        visit, arguments = function("visit"), {"module": write(folder, "")}
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere/python")
            with pytest.raises(UnavailableError, match="/nowhere/python cannot be started"):
                sandbox.run(visit, arguments, WAIT_SECONDS)
        assert sandbox.run(visit, arguments, WAIT_SECONDS)
        assert sandbox.run(visit, arguments, WAIT_SECONDS)
    assert len(starts) == 2
    assert issubclass(UnavailableError, SandboxError)


_PROGRAM = """
import os, sys, time
sys.path.append(sys.argv[1])
from acme_visits import load
from interposer_sandbox import Host, Sandbox
sandbox = Sandbox(Host())
print(sandbox.run(load, {"module": "json"}, 300.0).accepted)
print(sandbox.pid, flush=True)
"""


# ``acme_t`` notes that it runs, and never ends.
_SLOW = "sandbox.run(load, {'module': 'acme_t'}, 600)"
_THREAD = f"""
import threading
threading.excepthook = lambda *_: None  # it may be told that the process ends
threading.Thread(target=lambda: {_SLOW}, daemon=True).start()
while not os.path.exists(os.path.join(sys.argv[1], "runs")): time.sleep(0.01)
"""


@pytest.mark.landing(1)
@pytest.mark.parametrize("ending", ["", "os._exit(0)", "os.abort()", _SLOW, _THREAD])
def test_no_process_is_left_behind(ending: str, folder: Path) -> None:
    note = folder / "runs"
    (folder / "acme_t.py").write_text(f"open({str(note)!r}, 'w').close()\n{_SLEEPS}")
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", _PROGRAM + ending, str(folder)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    with program:
        assert program.stdout.readline() == "True\n"
        child = int(program.stdout.readline())
        if ending == _SLOW:
            wait_until(note.exists, "the module that never ends")
            program.kill()
        program.wait(WAIT_SECONDS)
        assert program.stderr is not None
        printed = program.stderr.read()
    assert printed == "" or ending == "os.abort()"
    wait_until(lambda: not members(child), lambda: f"the end of processes {members(child)}")


def test_a_process_that_ended_leaves_nothing_in_this_process(folder: Path) -> None:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("needs a /proc as of Linux")
    before = len([*descriptors.iterdir()])
    sandbox = Sandbox(HOST)
    assert sandbox.run(function("visit"), {"module": write(folder, "")}, WAIT_SECONDS)
    number = group(sandbox)
    with pytest.raises(ChildProcessError):  # so it cannot become a zombie of this process
        os.waitpid(-number, os.WNOHANG)
    sandbox.release()
    assert sandbox.pid == number
    os.killpg(number, signal.SIGKILL)
    wait_until(lambda: not members(number), lambda: f"the end of processes {members(number)}")
    sandbox.release()
    assert sandbox.pid is None
    assert len([*descriptors.iterdir()]) == before


_STRANGE = """
import os, signal, sys
sys.path.append({folder!r})
from interposer_sandbox import Host, Sandbox
from acme_visits import visit
{before}
sandbox = Sandbox(Host())
for module in ("acme_sound", "acme_crash"):
    print(sandbox.run(visit, {{"module": module}}, 300.0).reason)
"""
_IGNORING = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGALRM, signal.SIGABRT})
"""


@pytest.mark.landing(2)
@pytest.mark.parametrize("before", ["", "sys.path.insert(0, '')", _IGNORING])
@pytest.mark.parametrize("flags", [[], ["-I"]])
def test_the_surroundings_do_not_matter(before: str, flags: list[str], folder: Path) -> None:
    start_folder = folder / "here"
    start_folder.mkdir()
    for module in ("json", "secrets", "resource", "signal"):
        (start_folder / f"{module}.py").write_text("import os; os._exit(7)")
    (folder / "acme_sound.py").write_text("x = 1")
    (folder / "acme_crash.py").write_text("import os; os.abort()")
    script = folder / "script.py"
    script.write_text(_STRANGE.format(before=before, folder=str(folder)))
    command = [sys.executable, *flags, str(script)]
    completed = subprocess.run(
        command, cwd=start_folder, capture_output=True, text=True, check=True
    )
    assert completed.stdout == "\nkilled by SIGABRT while importing acme_crash\n"
    assert completed.stderr == ""


def test_importing_the_package_imports_nothing_else() -> None:
    program = (
        "import sys, interposer_sandbox; "
        "print(sorted({'torch', 'subprocess', 'ctypes', 'interposer'} & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True
    )
    assert completed.stdout == "[]\n", completed.stderr


def group(sandbox: Sandbox) -> int:
    """Return the number of the process group that a sandbox runs functions in."""
    assert sandbox.pid is not None
    return sandbox.pid


def members(number: int) -> list[int]:
    """Return the processes of a group that run."""
    loaded_function = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, its_group = (folder / "stat").read_text().rpartition(") ")[2].split()[:3]
            if int(its_group) == number and state != "Z":
                loaded_function.append(int(folder.name))
    return loaded_function


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, be it as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except OSError:
        return True
