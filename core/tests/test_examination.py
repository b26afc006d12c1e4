"""Code of plugins is examined in another process, by tasks whose findings are remembered."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from tests.waiting import WAIT_SECONDS

import interposer
import interposer_sandbox
from interposer import Config
from interposer._config.storage import default_store
from interposer._examination import examiner
from interposer._examination.examiner import (
    SANDBOX,
    VerdictWarning,
    examine,
    forget_verdicts,
    prepare,
)
from interposer._examination.task import Task
from interposer._validation.distribution import Distribution
from interposer_sandbox import Finding

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
]

# Limits for code that hangs. On a busy machine it may need one of the longer to come to that code.
LIMITS = (0.5, 5.0, 50.0)

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
    return Config(cache_dir=str(tmp_path / "cache"), probe_seconds=WAIT_SECONDS)


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
        text = _HEADER + textwrap.dedent(records) + textwrap.dedent(source)
        plugin = make(plugin=text, **more)
        return examine(plugin.distribution, plugin.task, config)

    yield examine_source
    # Whatever happened, the process lives and serves a healthy one.
    healthy = make(plugin=_HEALTHY)
    assert examine(healthy.distribution, healthy.task, config)


def refused_as_late(distribution: Distribution, task: Task, stage: str, config: Config) -> bool:
    """Return whether code that hangs in ``stage`` is refused there, by one of ``LIMITS``."""
    for seconds in LIMITS:
        limit = Config(cache_dir=config.cache_dir, probe_seconds=seconds)
        finding = examine(distribution, task, limit)
        assert not finding
        if re.match(f"did not return within {seconds:g} s while {stage}", finding.reason):
            return True
    return False


def test_a_healthy_plugin_is_accepted(examined: Examined) -> None:
    assert examined("") == Finding(True, facts={"platforms": []})


_HOOKS = [
    ("def interposer_records():\n    raise OSError('x')", r"interposer_records raised OSError"),
    ("def interposer_records():\n    return 3", "interposer_records raised RecordError"),
    ("def interposer_records():\n    return ['x']", "declares a 'str', which is not a record"),
    (
        "def interposer_records():\n    while True: yield 1",
        "declares more than 1,000 records",
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
    verdict = examined("", marker + hook)
    assert re.search(reason, verdict.reason, re.DOTALL), verdict.reason


def test_a_hook_that_does_not_return_is_refused(
    make: Callable[..., Plugin], config: Config
) -> None:
    hook = "@hookimpl\ndef interposer_records():\n    while True: pass\n"
    plugin = make(plugin=_HEADER + hook)
    stage = "calling interposer_records"
    assert refused_as_late(plugin.distribution, plugin.task, stage, config)
    healthy = make(plugin=_HEALTHY)
    assert examine(healthy.distribution, healthy.task, config)


def test_five_hundred_records_are_accepted(examined: Examined) -> None:
    records = """
    @hookimpl
    def interposer_records():
        return [Kernel("a", f"a_{n}", "{package}.kernels:fast") for n in range(500)]
    """
    assert examined("", records)


def test_a_plugin_must_state_its_api(make: Callable[..., Plugin], config: Config) -> None:
    plugin = make(plugin="")
    assert "INTERPOSER_API" in examine(plugin.distribution, plugin.task, config).reason


def test_platforms_are_known_even_if_their_class_crashes(examined: Examined) -> None:
    records = """
    @hookimpl
    def interposer_records():
        return [PlatformEntry("acme", "{package}.platform:Acme", score=7.0)]
    """
    finding = examined("", records, platform="import os\nAcme = 0\nos.abort()\n")
    assert finding.reason == "killed by SIGABRT while loading platform 'acme'"
    assert finding.facts["platforms"] == [{"name": "acme", "score": 7.0}]


def test_a_plugin_must_not_load_plugins_during_its_examination(examined: Examined) -> None:
    source = """
    from interposer import Config
    from interposer._examination.examiner import examine
    from interposer._examination.task import Task
    from interposer._validation.distribution import Distribution
    other = Distribution("other", "1.0", "f" * 64, (), "/", False)
    task = Task("target", {"targets": ["json:dumps"]})
    raise OSError(examine(other, task, Config(cache_dir="/nowhere")).reason)
    """
    reason = examined(source).reason
    assert "cannot be examined: the plugin requested other plugins while it was examined" in reason
    assert "Try: request them when the plugin is used" in reason


def test_targets_are_loaded(make: Callable[..., Plugin], config: Config) -> None:
    plugin = make(kernels="print('fine')\nfast = 1\n", crash="import os; os.abort()")
    distribution = plugin.distribution
    tasks = [plugin.target(name) for name in ("kernels:fast", "kernels:fsat", "crash:x")]
    good, missing, crash = (examine(distribution, task, config) for task in tasks)
    assert good
    assert "has no 'fsat'; nearest: fast" in missing.reason
    assert crash.reason == f"killed by SIGABRT while loading {plugin.package}.crash:x"


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
    ],
)
def test_platforms_are_probed(
    probe: str, reason: str, make: Callable[..., Plugin], config: Config
) -> None:
    plugin = make(platform="import torch\n" + _PLATFORM.replace("{probe}", probe))
    task = Task("platform", {"target": f"{plugin.package}.platform:Acme"})
    verdict = examine(plugin.distribution, task, config)
    assert verdict.accepted is not bool(reason)
    assert re.search(reason, verdict.reason), verdict.reason


def test_a_probe_that_does_not_return_is_refused(
    make: Callable[..., Plugin], config: Config
) -> None:
    probe = "import threading; threading.Barrier(2).wait()"
    plugin = make(platform="import torch\n" + _PLATFORM.replace("{probe}", probe))
    task = Task("platform", {"target": f"{plugin.package}.platform:Acme"})
    assert refused_as_late(plugin.distribution, task, "probing", config)


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


def test_the_examination_of_new_plugins_is_logged_once(
    make: Callable[..., Plugin],
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(examiner, "_is_announced", False)
    caplog.set_level("INFO", "interposer")
    plugins = [make(plugin=_HEALTHY), make(plugin=_HEALTHY)]
    tasks = [(plugin.distribution, plugin.task) for plugin in plugins]
    prepare(tasks, Config(cache_dir=config.cache_dir, isolation="off"))
    assert not caplog.messages
    for _ in range(2):
        prepare(tasks, config)
        assert all(examine(*task, config) for task in tasks)
    assert caplog.messages == ["Examining 2 plugins, once; the verdicts are remembered"]
    monkeypatch.setattr(examiner, "_is_announced", False)
    forget_verdicts()
    prepare(tasks, config)
    assert len(caplog.messages) == 1


def test_a_corrupt_verdict_is_replaced(make: Callable[..., Plugin], config: Config) -> None:
    plugin = make(plugin=_HEALTHY)
    examine(plugin.distribution, plugin.task, config)
    (entry,) = default_store(config).entries("verdicts")
    entry.path.write_text("{}")
    forget_verdicts()
    with pytest.warns(VerdictWarning, match=re.escape(str(entry.path))):
        assert examine(plugin.distribution, plugin.task, config)
    (entry,) = default_store(config).entries("verdicts")
    assert not entry.problem


def test_an_unwritable_cache_only_warns(make: Callable[..., Plugin], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = Config(cache_dir=str(tmp_path / "file"), probe_seconds=WAIT_SECONDS)
    plugin = make(plugin=_HEALTHY)
    forget_verdicts()
    writing = pytest.warns(VerdictWarning, match="cannot be written")
    with pytest.warns(VerdictWarning, match="cannot be read"), writing:
        assert examine(plugin.distribution, plugin.task, config)


def waits_while_it_exists(file: Path) -> str:
    """Return source that waits for the end of ``file``."""
    return f"import time, pathlib\nwhile pathlib.Path({str(file)!r}).exists(): time.sleep(0.01)\n"


def test_a_higher_limit_allows_another_examination(
    make: Callable[..., Plugin], config: Config, tmp_path: Path
) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    plugin = make(plugin=_HEALTHY + waits_while_it_exists(busy))
    short = Config(cache_dir=config.cache_dir, probe_seconds=0.3)
    assert not examine(plugin.distribution, plugin.task, short)
    busy.unlink()
    assert not examine(plugin.distribution, plugin.task, short)
    assert examine(plugin.distribution, plugin.task, config)


def test_installing_a_missing_module_allows_another_examination(
    make: Callable[..., Plugin], config: Config, tmp_path: Path
) -> None:
    plugin = make(plugin=_HEALTHY + "import {package}_needs")
    finding = examine(plugin.distribution, plugin.task, config)
    assert finding.facts["missing"] == f"{plugin.package}_needs"
    (tmp_path / f"{plugin.package}_needs.py").write_text("")
    importlib.invalidate_caches()
    assert examine(plugin.distribution, plugin.task, config)


def test_code_that_took_too_long_is_examined_once_more_by_the_next_process(
    make: Callable[..., Plugin], config: Config, tmp_path: Path
) -> None:
    busy = tmp_path / "busy"

    def accepted_in_the_next_process(seconds: float, freed: bool) -> bool:
        short = Config(cache_dir=config.cache_dir, probe_seconds=seconds)
        plugin = make(plugin=_HEALTHY + waits_while_it_exists(busy))
        busy.touch()
        assert not examine(plugin.distribution, plugin.task, short)
        assert examine(plugin.distribution, plugin.task, short).span is None
        forget_verdicts()
        if freed:
            busy.unlink()
        again = examine(plugin.distribution, plugin.task, short)
        assert again.span is not None
        forget_verdicts()
        last = examine(plugin.distribution, plugin.task, short)
        assert (last.span is None, last.accepted) == (True, again.accepted)
        return again.accepted

    # On a busy machine a healthy plugin may need one of the longer limits.
    assert any(accepted_in_the_next_process(seconds, freed=True) for seconds in LIMITS)
    assert not accepted_in_the_next_process(LIMITS[0], freed=False)


def test_without_isolation_this_process_examines(
    make: Callable[..., Plugin], config: Config
) -> None:
    plugin = make(plugin=_HEADER + "import builtins; builtins.len = None")
    local_config = Config(cache_dir=config.cache_dir, isolation="off")
    finding = examine(plugin.distribution, plugin.task, local_config)
    assert "replaces builtins.len" in finding.reason
    assert f"{plugin.package}.plugin" in sys.modules
    assert len("abc") == 3


def test_a_process_that_cannot_start_causes_a_temporary_refusal(
    make: Callable[..., Plugin], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = make(plugin=_HEALTHY)
    SANDBOX.stop()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        reason = examine(plugin.distribution, plugin.task, config).reason
    assert reason.startswith("cannot be examined: /nowhere/python cannot be started")
    assert "isolation='off'" in reason
    assert examine(plugin.distribution, plugin.task, config)


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
from interposer._examination.task import Task
from interposer._examination.examiner import examine, forget_verdicts
for _ in range(2):
    found = examine(
        Distribution("acme", "1.0", "f" * 64, (), sys.argv[1], False),
        Task("target", {"targets": ["json:dumps"]}),
        Config(cache_dir=sys.argv[1] + "/cache"),
    )
    print(found.accepted, found.span is None)
    forget_verdicts()
"""


def test_packages_without_metadata_can_be_examined(tmp_path: Path) -> None:
    standard = sysconfig.get_path("stdlib")
    for installed in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        for entry in Path(installed).iterdir():
            link = tmp_path / entry.name
            if not (entry.suffix in (".dist-info", ".pth") or link.exists()):
                link.symlink_to(entry)
    for file in (interposer.__file__, interposer_sandbox.__file__):
        folder = Path(file).parent
        if not (tmp_path / folder.name).exists():
            (tmp_path / folder.name).symlink_to(folder)
    path = [str(tmp_path), standard, str(Path(standard) / "lib-dynload")]
    command = [sys.executable, "-S", "-c", _WITHOUT_METADATA, *path]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.stdout == "interposer\ntorch\nTrue False\nTrue True\n", completed.stderr


def test_importing_the_examination_does_not_import_torch() -> None:
    program = "import sys, interposer._examination.examiner; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
