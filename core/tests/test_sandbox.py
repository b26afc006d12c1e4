"""Code of plugins is examined in another process: whatever it does costs a refusal there."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Barrier

import pytest

import interposer
from interposer import Config, Verdict
from interposer._config.storage import default_store
from interposer_sandbox import _client as client
from interposer._examination.examiner import VerdictWarning, examine, examine_all, forget_verdicts
from interposer_sandbox._task import Finding, Task
from interposer._validation.distribution import Distribution

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

Examined = Callable[..., Finding]

_numbers = count()
_HEADER = """
from interposer.hookspecs import hookimpl
from interposer.records import Kernel, LayerEntry, PlatformEntry
INTERPOSER_API = ">=1.0,<2"
"""
_RECORDS = """
@hookimpl
def interposer_records():
    return [Kernel("rms_norm", "rms_norm_acme", "{package}.kernels:fast")]
"""
_HEALTHY = _HEADER + _RECORDS


class Plugin:
    """A package on ``sys.path`` with a plugin module, and the distribution that it stands for."""

    def __init__(self, folder: Path, modules: dict[str, str]) -> None:
        self.package = f"acme_{next(_numbers)}"
        self.folder = folder / self.package
        self.folder.mkdir()
        sources = {"__init__": "", "kernels": "def fast():\n    pass\n", **modules}
        for name, source in sources.items():
            text = textwrap.dedent(source).replace("{package}", self.package)
            (self.folder / f"{name}.py").write_text(text, encoding="utf-8")
        self.distribution = self.distributed("1.0")

    def distributed(self, version: str) -> Distribution:
        return Distribution(self.package, version, "f" * 64, (), str(self.folder.parent), False)

    @property
    def task(self) -> Task:
        return Task("plugin", {"value": f"{self.package}.plugin", "name": "acme"})

    def target(self, name: str) -> Task:
        return Task("target", {"targets": [f"{self.package}.{name}"]})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(cache_dir=str(tmp_path / "cache"), probe_seconds=20.0)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Plugin]]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield lambda **modules: Plugin(tmp_path, modules)
    # What was imported here would be found by tests that ask which names are free.
    for name in set(sys.modules) - before:
        if name.startswith("acme_"):
            del sys.modules[name]


@pytest.fixture
def examined(make: Callable[..., Plugin], config: Config) -> Iterator[Examined]:
    """Return an examination of a plugin module whose last lines are given."""

    def examine_source(source: str, records: str = _RECORDS, **more: str) -> Finding:
        seconds = 0.5 if more.pop("hurry", "") else 20.0
        text = _HEADER + textwrap.dedent(records) + textwrap.dedent(source)
        plugin = make(plugin=text, **more)
        patient = Config(cache_dir=config.cache_dir, probe_seconds=seconds)
        return examine(plugin.distribution, plugin.task, patient)

    yield examine_source
    # Whatever happened, the process lives and serves a healthy one.
    healthy = make(plugin=_HEALTHY)
    assert examine(healthy.distribution, healthy.task, config).verdict


def test_a_healthy_plugin_is_accepted(examined: Examined) -> None:
    assert examined("") == Finding(Verdict.accept(), {"platforms": []})


# What a plugin does, and the reason that it is refused with.
_RAISED = [
    ("import nowhere_at_all", r"importing acme_\d+.plugin raised ModuleNotFoundError\(.*nowhere"),
    ("raise RuntimeError('on purpose')", r"raised RuntimeError\('on purpose'\)"),
    ("def", r"importing acme_\d+.plugin raised SyntaxError"),
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
    ("import os; os._exit(3)", r"exited with code 3 while importing acme_\d+.plugin"),
    ("import os; os._exit(0)", "exited with code 0 while importing"),
    ("import os; os.abort()", "killed by SIGABRT while importing"),
    ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV while importing"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "killed by SIGILL while importing"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL while"),
    ("import os; os.closerange(0, 1024)", "closed the pipe of its examination while importing"),
    ("import os; os._exit = None; os.write = None; raise OSError", r"raised OSError\(\)"),
]
_EFFECTS = [
    ("print('hello')", r"importing acme_\d+.plugin prints 'hello\\n'"),
    ("import sys; sys.stderr.write('hello')", "prints 'hello'"),
    ("print('x' * 10_000_000)", "prints 'x{200}'$"),
    ("import os; os.write(1, b'from below')", "prints 'from below'"),
    ("import ctypes; ctypes.CDLL(None).printf(b'native')", "prints 'native'"),
    ("import os; os.environ['ACME'] = '1'", "changes the environment: ACME"),
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
_HANGS = [
    "while True: pass",
    "import time; time.sleep(10)",
    "import os\nwhile True: os.write(1, b'x' * 65536)",
    "import signal, time\n"
    "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):\n"
    "    signal.signal(number, signal.SIG_IGN)\n"
    "time.sleep(10)",
]
_HARMLESS = [
    "import warnings; warnings.warn('old', DeprecationWarning)",
    "import threading; t = threading.Thread(target=int); t.start(); t.join()",
]


@pytest.mark.parametrize(("source", "reason"), [*_RAISED, *_ENDED, *_EFFECTS])
def test_what_a_plugin_does_at_import_costs_a_refusal(
    source: str, reason: str, examined: Examined
) -> None:
    verdict = examined(source).verdict
    assert not verdict
    assert re.search(reason, verdict.reason), verdict.reason
    assert len(verdict.reason) < 2_100
    assert verdict.reason.isprintable()


@pytest.mark.parametrize("source", _HANGS)
def test_what_takes_too_long_is_ended(source: str, examined: Examined) -> None:
    start = time.monotonic()
    finding = examined(source, hurry="yes")
    assert time.monotonic() - start < 8
    reason = finding.verdict.reason
    assert re.fullmatch(r"did not return within 0.5 s while importing acme_\d+\.plugin", reason)
    assert finding.facts["limit_seconds"] == 0.5


@pytest.mark.parametrize("source", _HARMLESS)
def test_what_harms_nobody_is_accepted(source: str, examined: Examined) -> None:
    assert examined(source).verdict


def test_the_traceback_of_what_was_raised_is_kept(examined: Examined) -> None:
    trace = examined("def broken():\n    raise OSError('x')\nbroken()").verdict.traceback
    assert "plugin.py" in trace
    assert "in broken" in trace


@pytest.mark.parametrize(
    ("source", "hurry"),
    [("import ctypes\ndef broken():\n    ctypes.string_at(0)\nbroken()", ""), (_HANGS[1], "yes")],
)
def test_the_place_of_a_crash_or_a_hang_is_kept(
    source: str, hurry: str, examined: Examined
) -> None:
    trace = examined(source, hurry=hurry).verdict.traceback
    assert re.search(r'File ".*plugin.py", line \d+', trace), trace


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("body", "reason"),
    [("*(volatile int *)0 = 1;", "SIGSEGV"), ("__builtin_trap();", "SIGILL"), ("_exit(9);", "9")],
)
def test_a_native_library_that_crashes_when_it_is_loaded(
    body: str, reason: str, examined: Examined, tmp_path: Path
) -> None:
    source, library = tmp_path / "crash.c", tmp_path / "crash.so"
    source.write_text(
        f"#include <unistd.h>\n__attribute__((constructor)) void load(void) {{ {body} }}"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    verdict = examined(f"import ctypes; ctypes.CDLL({str(library)!r})").verdict
    assert re.match(rf"(killed by|exited with code) {reason} while importing", verdict.reason)


_HOOKS = [
    ("def interposer_records():\n    raise OSError('x')", r"interposer_records raised OSError"),
    ("def interposer_records():\n    return 3", "interposer_records raised RecordError"),
    ("def interposer_records():\n    return ['x']", "declares a 'str', which is not a record"),
    (
        "def interposer_records():\n    while True: yield 1",
        "declares more than 1,000 records",
    ),
    (
        "def interposer_records():\n    while True: pass",
        "did not return within 0.5 s while calling interposer_records",
    ),
    ("def interposer_records():\n    print('x')\n    return []", r"interposer_records prints 'x"),
    ("def interposer_recrods():\n    return []", "hooks are not valid: .*interposer_recrods"),
    ("def interposer_selected(choise): pass", "hooks are not valid: .*choise"),
    (
        "def interposer_records():\n    return [Kernel('a', 'a_b', '{package}.kernels:fsat')]",
        "'a_b' names .*: .* has no 'fsat'; nearest: fast",
    ),
    (
        "def interposer_records():\n    return [Kernel('a', 'a_' + 'ü' * 5000, 'a.b:c')]",
        "a name of 5,002 characters; 100 are allowed",
    ),
    (
        "class Mine(Kernel):\n"
        "    def __eq__(self, other): raise OSError\n"
        "    def __hash__(self): raise OSError\n"
        "    def __repr__(self): raise OSError\n"
        "@hookimpl\n"
        "def interposer_records():\n    return [Mine('a', 'a_b', 'a.b:c')] * 2",
        "declares a 'Mine', which is not a record",
    ),
]


@pytest.mark.parametrize(("hook", "reason"), _HOOKS)
def test_hooks_and_records_are_checked(hook: str, reason: str, examined: Examined) -> None:
    marker = "" if "@hookimpl" in hook else "@hookimpl\n"
    hurry = "yes" if "did not return" in reason else ""
    verdict = examined("", marker + hook, hurry=hurry).verdict
    assert re.search(reason, verdict.reason, re.DOTALL), verdict.reason


def test_five_hundred_records_are_no_fault(examined: Examined) -> None:
    records = """
    @hookimpl
    def interposer_records():
        return [Kernel("a", f"a_{n}", "{package}.kernels:fast") for n in range(500)]
    """
    assert examined("", records).verdict


def test_a_plugin_has_to_state_its_api(make: Callable[..., Plugin], config: Config) -> None:
    plugin = make(plugin="")
    assert "INTERPOSER_API" in examine(plugin.distribution, plugin.task, config).verdict.reason


def test_forged_answers_are_refused(examined: Examined) -> None:
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
    assert examined(forged).verdict.reason.startswith("exited with code 5 while importing")


@pytest.mark.parametrize("ending", ["", "os._exit(1)", "time.sleep(99)"])
def test_what_a_plugin_started_ends_with_it(
    ending: str, examined: Examined, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    examined(
        f"""
        import os, pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path({str(note)!r}).write_text(str(child.pid))
        {ending}
        """,
        hurry="yes" if "sleep" in ending else "",
    )
    assert is_gone(int(note.read_text()))


def test_platforms_are_known_though_their_class_crashes(examined: Examined) -> None:
    records = """
    @hookimpl
    def interposer_records():
        return [PlatformEntry("acme", "{package}.platform:Acme", score=7.0)]
    """
    finding = examined("", records, platform="import os\nAcme = 0\nos.abort()\n")
    assert finding.verdict.reason == "killed by SIGABRT while loading platform 'acme'"
    assert finding.facts["platforms"] == [{"name": "acme", "score": 7.0}]


def test_a_plugin_may_not_ask_for_plugins_while_it_is_examined(examined: Examined) -> None:
    source = "from interposer_sandbox import _client as client; client.ask('target', {}, 1.0)"
    assert "ExaminationError" in examined(source).verdict.reason


def test_targets_are_loaded(make: Callable[..., Plugin], config: Config) -> None:
    plugin = make(kernels="print('fine')\nfast = 1\n", crash="import os; os.abort()")
    distribution = plugin.distribution
    tasks = [plugin.target(name) for name in ("kernels:fast", "kernels:fsat", "crash:x")]
    good, missing, crash = examine_all([(distribution, task) for task in tasks], config)
    assert good.verdict
    assert "has no 'fsat'; nearest: fast" in missing.verdict.reason
    assert crash.verdict.reason == f"killed by SIGABRT while loading {plugin.package}.crash:x"


_PLATFORM = """
import sys
assert "torch" in sys.modules, "torch is to be imported before any limit applies"
from interposer import Platform, Verdict

class Acme(Platform):
    name, device_type = "acme", "cpu"

    @classmethod
    def probe(cls):
        {probe}

    def devices(self): return []
    def capability(self, device): raise NotImplementedError
    def dtypes(self, device): return []
"""


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("return Verdict.accept()", ""),
        ("return Verdict.refuse('no such device')", ""),
        ("return True", "probing .*:Acme returned True, not a Verdict"),
        ("raise OSError('x')", "probing .*:Acme raised OSError"),
        ("import os; os.abort()", "killed by SIGABRT while probing .*:Acme"),
        ("import torch; torch.set_num_threads(97)", "changes torch's number of threads"),
        (
            "import threading; threading.Barrier(2).wait()",
            "did not return within 2 s while probing",
        ),
    ],
)
def test_platforms_are_probed(
    probe: str, reason: str, make: Callable[..., Plugin], config: Config
) -> None:
    source = "import torch\n" + _PLATFORM.replace("{probe}", probe)
    plugin = make(platform=source)
    limit = Config(cache_dir=config.cache_dir, probe_seconds=2.0)
    task = Task("platform", {"target": f"{plugin.package}.platform:Acme"})
    verdict = examine(
        plugin.distribution, task, limit if "did not return" in reason else config
    ).verdict
    assert verdict.accepted is not bool(reason)
    assert re.search(reason, verdict.reason), verdict.reason


def test_a_verdict_is_remembered_in_memory_and_on_disk(
    make: Callable[..., Plugin], config: Config, tmp_path: Path
) -> None:
    note = tmp_path / "runs"
    source = f"from pathlib import Path\nwith Path({str(note)!r}).open('a') as f: f.write('x')\n"
    plugin = make(plugin=source + _HEADER + "raise OSError('x')")
    first = examine(plugin.distribution, plugin.task, config)
    assert first.span is not None
    assert examine(plugin.distribution, plugin.task, config) == replace(first, span=None)
    assert examine(plugin.distribution, plugin.task, config).span is None
    forget_verdicts()
    assert examine(plugin.distribution, plugin.task, config) == first
    assert note.read_text() == "x"
    assert len([*default_store(config).entries("verdicts")]) == 1
    # Another version, another driver: other verdicts.
    examine(plugin.distributed("1.1"), plugin.task, config)
    examine(plugin.distribution, plugin.task, config, driver="2")
    assert note.read_text() == "xxx"


def test_a_corrupt_verdict_is_made_anew(make: Callable[..., Plugin], config: Config) -> None:
    plugin = make(plugin=_HEALTHY)
    examine(plugin.distribution, plugin.task, config)
    (entry,) = default_store(config).entries("verdicts")
    entry.path.write_text("{}")
    forget_verdicts()
    with pytest.warns(VerdictWarning, match=re.escape(str(entry.path))):
        assert examine(plugin.distribution, plugin.task, config).verdict
    (entry,) = default_store(config).entries("verdicts")
    assert not entry.problem


def test_a_cache_that_cannot_be_written_costs_a_warning(
    make: Callable[..., Plugin], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    config = Config(cache_dir=str(tmp_path / "file"), probe_seconds=20.0)
    plugin = make(plugin=_HEALTHY)
    forget_verdicts()
    writing = pytest.warns(VerdictWarning, match="cannot be written")
    with pytest.warns(VerdictWarning, match="cannot be read"), writing:
        assert examine(plugin.distribution, plugin.task, config).verdict


def test_a_higher_limit_is_another_chance(make: Callable[..., Plugin], config: Config) -> None:
    plugin = make(plugin=_HEALTHY + "import time; time.sleep(1)")
    short = Config(cache_dir=config.cache_dir, probe_seconds=0.3)
    assert not examine(plugin.distribution, plugin.task, short).verdict
    assert not examine(plugin.distribution, plugin.task, short).verdict
    assert examine(plugin.distribution, plugin.task, config).verdict


def test_a_missing_module_that_comes_is_another_chance(
    make: Callable[..., Plugin], config: Config, tmp_path: Path
) -> None:
    plugin = make(plugin=_HEALTHY + "import {package}_needs")
    finding = examine(plugin.distribution, plugin.task, config)
    assert finding.facts["missing"] == f"{plugin.package}_needs"
    (tmp_path / f"{plugin.package}_needs.py").write_text("")
    importlib.invalidate_caches()
    assert examine(plugin.distribution, plugin.task, config).verdict


def test_who_took_too_long_gets_one_more_chance_in_the_next_process(
    make: Callable[..., Plugin], config: Config, tmp_path: Path
) -> None:
    busy = tmp_path / "busy"
    waits = f"import time, pathlib\nwhile pathlib.Path({str(busy)!r}).exists(): time.sleep(0.1)\n"
    short = Config(cache_dir=config.cache_dir, probe_seconds=1.0)
    for freed in (True, False):
        plugin = make(plugin=_HEALTHY + waits)
        busy.touch()
        assert not examine(plugin.distribution, plugin.task, short).verdict
        assert examine(plugin.distribution, plugin.task, short).span is None
        forget_verdicts()
        if freed:
            busy.unlink()
        again = examine(plugin.distribution, plugin.task, short)
        assert (again.span is not None, again.verdict.accepted) == (True, freed)
        forget_verdicts()
        last = examine(plugin.distribution, plugin.task, short)
        assert (last.span is None, last.verdict.accepted) == (True, freed)


def test_without_isolation_this_process_does_it(
    make: Callable[..., Plugin], config: Config
) -> None:
    plugin = make(plugin=_HEADER + "import builtins; builtins.len = None")
    here = Config(cache_dir=config.cache_dir, isolation="off")
    finding = examine(plugin.distribution, plugin.task, here)
    assert "replaces builtins.len" in finding.verdict.reason
    assert f"{plugin.package}.plugin" in sys.modules
    assert len("abc") == 3


def test_threads_share_the_process(make: Callable[..., Plugin], config: Config) -> None:
    plugins = [make(plugin=_HEADER + f"raise OSError({n})") for n in range(6)]
    barrier = Barrier(6)

    def ask(plugin: Plugin) -> str:
        barrier.wait()
        return examine(plugin.distribution, plugin.task, config).verdict.reason

    with ThreadPoolExecutor(6) as pool:
        reasons = [*pool.map(ask, plugins)]
    assert all(reason.endswith(f"raised OSError({n})") for n, reason in enumerate(reasons))


def test_a_fork_has_a_process_of_its_own(make: Callable[..., Plugin], config: Config) -> None:
    plugins = [make(plugin=_HEALTHY) for _ in range(3)]
    examine(plugins[0].distribution, plugins[0].task, config)
    child = os.fork()
    if child == 0:
        code = 9
        with suppress(BaseException):
            code = 0 if examine(plugins[1].distribution, plugins[1].task, config).verdict else 1
            client.stop()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert examine(plugins[2].distribution, plugins[2].task, config).verdict


def test_an_examining_process_that_was_killed_is_replaced(
    make: Callable[..., Plugin], config: Config
) -> None:
    plugins = [make(plugin=_HEALTHY) for _ in range(2)]
    examine(plugins[0].distribution, plugins[0].task, config)
    os.killpg(group(), signal.SIGKILL)
    assert examine(plugins[1].distribution, plugins[1].task, config).verdict


def test_a_process_that_cannot_start_is_a_refusal_for_this_time(
    make: Callable[..., Plugin], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = make(plugin=_HEALTHY)
    client.stop()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        reason = examine(plugin.distribution, plugin.task, config).verdict.reason
    assert reason.startswith("cannot be examined: /nowhere/python cannot be started")
    assert "isolation='off'" in reason
    assert examine(plugin.distribution, plugin.task, config).verdict


_PROGRAM = """
import os, sys, time
from interposer_sandbox import _client as client
print(client.ask("target", {"targets": []}, 20.0)["accepted"])
print(client._process._process.pid, flush=True)
"""


_SLOW = "client.ask('target', {'targets': ['t:x']}, 99)"
_THREAD = f"""
import threading
threading.excepthook = lambda *_: None  # it may be told that the process ends
threading.Thread(target=lambda: {_SLOW}, daemon=True).start()
time.sleep(0.5)
"""


@pytest.mark.parametrize("ending", ["", "os._exit(0)", "os.abort()", _SLOW, _THREAD])
def test_no_process_is_left_behind(ending: str, tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import time; time.sleep(99)")
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", _PROGRAM + ending]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert program.stdout is not None
    with program:
        assert program.stdout.readline() == "True\n"
        child = int(program.stdout.readline())
        if ending == _SLOW:
            time.sleep(1)
            program.kill()
        program.wait(60)
        assert program.stderr is not None
        printed = program.stderr.read()
    assert printed == "" or ending == "os.abort()"
    assert soon(lambda: not members(child))


def test_an_examining_process_that_ended_leaves_nothing_here(
    make: Callable[..., Plugin], config: Config
) -> None:
    client.stop()
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("needs a /proc as of Linux")
    before = len([*descriptors.iterdir()])
    plugin = make(plugin=_HEALTHY)
    assert examine(plugin.distribution, plugin.task, config).verdict
    number = group()
    with pytest.raises(ChildProcessError):  # so it cannot become a zombie of this process
        os.waitpid(-number, os.WNOHANG)
    os.killpg(number, signal.SIGKILL)
    assert soon(lambda: not members(number))
    assert examine(plugin.distribution, plugin.task, config).span is None  # from memory
    assert client._process is None
    assert len([*descriptors.iterdir()]) == before


_STRANGE = """
import os, signal, sys
from interposer_sandbox import _client as client
{before}
for target in ("a_sound:x", "a_crash:x"):
    finding = client.ask("target", {{"targets": [target]}}, 20.0)
    print(finding["reason"])
"""
_IGNORING = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGALRM, signal.SIGABRT})
"""


@pytest.mark.parametrize("before", ["", "sys.path.insert(0, '')", _IGNORING])
@pytest.mark.parametrize("flags", [[], ["-I"]])
def test_the_surroundings_do_not_matter(before: str, flags: list[str], tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for module in ("json", "secrets", "resource", "signal"):
        (here / f"{module}.py").write_text("import os; os._exit(7)")
    (tmp_path / "a_sound.py").write_text("x = 1")
    (tmp_path / "a_crash.py").write_text("import os; os.abort()")
    before = f"sys.path.append({str(tmp_path)!r})\n{before}"
    script = tmp_path / "script.py"
    script.write_text(_STRANGE.format(before=before))
    command = [sys.executable, *flags, str(script)]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    assert done.stdout == "\nkilled by SIGABRT while loading a_crash:x\n"
    assert done.stderr == ""


_WITHOUT_METADATA = """
import sys
sys.path[:] = sys.argv[1:]
from importlib.metadata import PackageNotFoundError, version
for name in ("interposer", "torch"):
    try:
        version(name)
    except PackageNotFoundError:
        print(name)
from interposer import Config
from interposer._validation.distribution import Distribution
from interposer_sandbox._task import Task
from interposer._examination.examiner import examine, forget_verdicts
for _ in range(2):
    found = examine(
        Distribution("acme", "1.0", "f" * 64, (), sys.argv[1], False),
        Task("target", {"targets": ["json:dumps"]}),
        Config(cache_dir=sys.argv[1] + "/cache"),
    )
    print(found.verdict.accepted, found.span is None)
    forget_verdicts()
"""


def test_packages_without_metadata_are_no_obstacle(tmp_path: Path) -> None:
    standard = sysconfig.get_path("stdlib")
    for installed in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        for entry in Path(installed).iterdir():
            link = tmp_path / entry.name
            if not (entry.suffix in (".dist-info", ".pth") or link.exists()):
                link.symlink_to(entry)
    folder = Path(interposer.__file__).parent
    if not (tmp_path / "interposer").exists():
        (tmp_path / "interposer").symlink_to(folder)
    path = [str(tmp_path), standard, str(Path(standard) / "lib-dynload")]
    command = [sys.executable, "-S", "-c", _WITHOUT_METADATA, *path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "interposer\ntorch\nTrue False\nTrue True\n", done.stderr


def test_importing_the_examination_does_not_import_torch() -> None:
    program = "import sys, interposer._examination; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def group() -> int:
    """Return the number of the process group that the examining process is in."""
    assert client._process is not None
    return client._process._process.pid


def members(number: int) -> list[int]:
    """Return the processes of a group that run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, its_group = (folder / "stat").read_text().rpartition(") ")[2].split()[:3]
            if int(its_group) == number and state != "Z":
                found.append(int(folder.name))
    return found


def soon(condition: Callable[[], bool]) -> bool:
    """Say whether a condition holds, or does so within seconds."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def is_gone(pid: int) -> bool:
    """Say whether a process has ended, or does so within seconds; a zombie has."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
