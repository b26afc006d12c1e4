"""The doctor finds what works and what does not, and never fails itself."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import importlib_metadata
import pytest
import torch
from rich.console import Console

from interposer import (
    Capability,
    Case,
    Config,
    Device,
    Kernel,
    OpEntry,
    Platform,
    PlatformEntry,
    Registration,
    Verdict,
    custom_op,
    register,
    use,
)
from interposer.errors import ConfigError
from interposer.hookspecs import GROUP
from interposer.tooling import Lock, Store, installed_distributions
from interposer_tools import Health, Problem, doctor
from interposer_tools._doctor.tables import health_tables

pytestmark = pytest.mark.process


class Host(Platform):
    name = "host"
    device_type = "cpu"

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.accept("there is always one")

    def devices(self) -> Sequence[Device]:
        return [Device("host", "cpu", "a device", self.capability("cpu"))]

    def capability(self, device: str) -> Capability:
        return Capability("any", units=2, memory_bytes=3 << 30)

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        return [torch.float32]


class Broken(Host):
    name = "broken"

    @classmethod
    def probe(cls) -> Verdict:
        raise OSError("the driver is gone")


class Board(Host):
    name = "board"


HOST = PlatformEntry("host", f"{__name__}:Host")
BROKEN = PlatformEntry("broken", f"{__name__}:Broken", score=50.0)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def host(make_plugin: Callable[..., ModuleType], cache: Path) -> Iterator[Registration]:
    """Register a platform, keep out what is installed, and remember nothing elsewhere."""
    with (
        register(make_plugin("host", HOST)) as registration,
        use(plugins="none", isolation="off", cache_dir=str(cache)),
    ):
        yield registration


def printed(health: Health) -> str:
    console = Console(file=io.StringIO(), width=250)
    console.print(*health_tables(health))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def problem(health: Health) -> Problem:
    (only,) = health.problems
    assert not health.healthy
    return only


@pytest.mark.usefixtures("host")
def test_a_healthy_installation_is_listed(cache: Path) -> None:
    health = doctor()
    assert health.problems == []
    assert health.healthy
    facts = json.loads(health.to_json())
    assert facts == health.to_dict()
    assert (facts["version"], facts["healthy"]) == (1, True)
    assert facts["versions"]["api"].startswith("1.")
    assert facts["torch"]["version"] == torch.__version__
    interpreter, host = sorted(facts["platforms"], key=lambda platform: platform["score"])
    assert not interpreter["accepted"]
    assert interpreter["reason"].startswith("is used only if you name it")
    assert host == {
        "name": "host",
        "provider": "host",
        "version": "in code",
        "score": 10.0,
        "accepted": True,
        "reason": "there is always one",
        "runs": [],
    }
    assert facts["device"]["name"] == "a device"
    in_use = {plugin["name"]: plugin["records"] for plugin in facts["plugins"]}
    assert in_use["host"] == {"PlatformEntry": 1}
    assert facts["sources"][0]["name"] == "use()"
    assert facts["sources"][0]["fields"]["plugins"] == []
    assert facts["cache"] == {"path": str(cache), "entries": {}}


# A build of torch for accelerators, which must not be asked how many there are: that may initialise
# their driver. Platforms know others to ask.
COUNTING = """
import torch

def counted(*_: object, **__: object) -> None:
    raise AssertionError("torch was asked for devices")

def built_for(check_available: bool = False) -> torch.device:
    assert not check_available, "torch was asked for devices"
    return torch.device("cuda")

for module in (torch.accelerator, torch.cuda, torch.xpu):
    for name in ("device_count", "is_available", "current_device_index", "init", "current_device"):
        if hasattr(module, name):
            setattr(module, name, counted)
torch.accelerator.current_accelerator = built_for

from interposer_tools import doctor

health = doctor()
assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized()
assert health.platforms and "built for cuda" in str(health)
print(health.to_json())
"""


@pytest.mark.slow
def test_doctor_does_not_count_devices_with_torch(tmp_path: Path) -> None:
    environment = {**os.environ, "INTERPOSER_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COUNTING]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert process.returncode == 0, process.stderr
    facts = json.loads(process.stdout)
    assert facts["torch"]["accelerator"] == "cuda"
    assert "torch was asked" not in process.stdout


@pytest.mark.usefixtures("host")
def test_text_and_tables_contain_the_same_facts(cache: Path) -> None:
    health = doctor()
    text, tables = str(health), printed(health)
    for words in (
        f"torch {torch.__version__}",
        "device: cpu (a device): any, 2 units, 3.0 GiB, float32",
        "accepted: there is always one",
        "1 PlatformEntry",
        "isolation = off",
        str(cache),
        "Nothing failed.",
    ):
        assert words in text
        assert words in tables
    assert "  host (host in code): 1 PlatformEntry" in text.splitlines()


@pytest.mark.usefixtures("host")
def test_a_platform_that_fails_is_a_problem_with_its_traceback(
    make_plugin: Callable[..., ModuleType],
) -> None:
    with register(make_plugin("worn", BROKEN)):
        health = doctor()
    platform, device = health.problems
    assert platform.subject == "platform 'broken' of worn in code"
    assert "OSError('the driver is gone')" in platform.reason
    assert platform.traceback.startswith("Traceback")
    assert platform.mend
    assert "would be a silent fallback" in device.reason
    accepted = {p.name: p.accepted for p in health.platforms}
    assert accepted == {"host": True, "broken": False, "interpreter": False}
    assert health.device is None
    text = str(health)
    assert "FAILED platform 'broken' of worn in code: its own code failed" in text
    assert "    Traceback (most recent call last)" in text
    assert "Nothing failed" not in text
    assert "FAILED platform 'broken'" in printed(health)


@pytest.mark.usefixtures("host")
def test_platforms_list_other_platforms_whose_kernels_they_run(
    make_plugin: Callable[..., ModuleType],
) -> None:
    board = PlatformEntry("board", f"{__name__}:Board", score=5.0, runs=("interpreter", "abacus"))
    with register(make_plugin("board", board)):
        health = doctor()
    assert health.healthy
    (board_facts,) = (platform for platform in health.platforms if platform.name == "board")
    assert board_facts.runs == ["abacus", "interpreter"]
    text = "runs the kernels of abacus, which is not installed; runs the kernels of interpreter"
    assert text in str(health)
    assert text in printed(health)


def test_no_platform_is_a_problem(cache: Path) -> None:
    with use(plugins="none", cache_dir=str(cache)):
        assert "pip install --find-links dist interposer-cpu" in problem(doctor()).reason


@pytest.mark.usefixtures("host")
def test_corrupt_entries_are_problems_and_fresh_forgets_the_verdicts(cache: Path) -> None:
    store = Store(cache)
    store.write("verdicts", {"a": 1}, True)
    store.write("verdicts", {"a": 2}, True)
    store.write("measurements", {"a": 1}, 1.0)
    spoilt = next(iter(store.entries("verdicts"))).path
    spoilt.write_text("{")
    health = doctor()
    assert problem(health).subject == f"cache entry {spoilt}"
    assert "corrupt" in problem(health).reason
    assert health.cache is not None
    assert health.cache.entries == {"measurements": 1, "verdicts": 2}
    renewed = doctor(fresh=True)
    assert renewed.healthy
    assert renewed.cache is not None
    assert renewed.cache.entries == {"measurements": 1}


def test_a_wrong_source_of_the_policy_is_the_only_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSER_STRICT", "perhaps")
    with pytest.raises(ConfigError):
        Config.refresh()
    health = doctor()
    assert problem(health).subject == "configuration"
    assert "INTERPOSER_STRICT is 'perhaps'" in problem(health).reason
    assert health.platforms == []
    assert "INTERPOSER_STRICT" in str(health)


@pytest.mark.usefixtures("host")
def test_an_argument_is_a_source_if_it_sets_a_field() -> None:
    sources = [(s.name, s.fields) for s in doctor(Config(tables=False)).sources]
    assert sources[0] == ("argument", {"tables": False})
    assert "argument" not in [s.name for s in doctor(Config()).sources]


@pytest.mark.usefixtures("host")
def test_a_missing_lock_is_a_problem_only_where_it_is_enforced(tmp_path: Path) -> None:
    assert doctor().lock == ""
    health = doctor(Config(locked=True))
    assert problem(health).subject == "lock"
    assert "interposer.lock does not exist" in problem(health).reason
    assert health.device is None  # nothing is run that nobody locked
    assert (len(health.platforms), len(health.plugins)) == (0, 0)
    assert "so no plugin was loaded" in str(health)
    assert health.cache is not None
    (tmp_path / "interposer.lock").write_text("{}")
    health = doctor()
    assert health.healthy
    assert "content and checksum differ" in health.warnings[0]
    assert health.lock == f"{tmp_path / 'interposer.lock'}: not as locked"
    assert "not as locked" in str(health)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that installs a distribution whose plugin is a module of the same name."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        files = (f"{name}.py", f"{name}-1.0.dist-info/METADATA", f"{name}-1.0.dist-info/RECORD")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{name}-norms = {name}\n")

    return install


def test_a_failed_plugin_is_a_problem_even_under_a_strict_policy(
    install: Callable[[str, str], None], make_plugin: Callable[..., ModuleType], cache: Path
) -> None:
    install("acmebroken", "import acme_of_nowhere\n")
    policy: dict[str, Any] = {"plugins": ["acmebroken"], "isolation": "off", "strict": True}
    with (
        register(make_plugin("host", HOST)),
        use(**policy, cache_dir=str(cache), disable=["opps"]),
    ):
        health = doctor()
    plugin_problem = problem(health)
    assert plugin_problem.subject == "plugin 'acmebroken-norms' of acmebroken 1.0"
    assert "No module named 'acme_of_nowhere'" in plugin_problem.reason
    assert "INTERPOSER_DISABLE=acmebroken-norms" in plugin_problem.mend
    assert "ModuleNotFoundError" in plugin_problem.traceback
    text = str(health)
    assert (
        f"FAILED {plugin_problem.subject}: {plugin_problem.reason}\n  Try: {plugin_problem.mend}\n"
        in text
    )
    (warning,) = health.warnings  # the failure itself is told once, as a problem
    assert warning.startswith("The configuration disables 'opps'")
    assert f"warning: {warning}" in text
    assert "warning: The configuration disables 'opps'" in printed(health)


@pytest.mark.usefixtures("host")
def test_excluded_plugins_are_listed_with_the_reason(
    install: Callable[[str, str], None],
) -> None:
    install("acmeidle", "raise AssertionError('imported')\n")
    health = doctor()
    assert health.healthy
    skipped = {plugin.name: plugin.reason for plugin in health.skipped}
    assert skipped["acmeidle-norms"] == "the configuration allows no plugins"
    assert "acmeidle-norms (acmeidle): not used: the configuration allows" in str(health)


def test_plugins_that_the_lock_refuses_are_not_loaded(
    install: Callable[[str, str], None], cache: Path, tmp_path: Path
) -> None:
    install("acmetorn", "INTERPOSER_API = '>=1.0,<2'\n")
    policy: dict[str, Any] = {"isolation": "off", "cache_dir": str(cache)}
    files = ("acmetorn.py", "acmetorn-1.0.dist-info/METADATA")
    digests = [hashlib.sha256((tmp_path / file).read_bytes()).digest() for file in files]
    sums = [base64.urlsafe_b64encode(digest).decode().rstrip("=") for digest in digests]
    lines = [f"{file},sha256={sum}," for file, sum in zip(files, sums, strict=True)]
    (tmp_path / "acmetorn-1.0.dist-info" / "RECORD").write_text("\n".join(lines) + "\n")
    Lock.of(installed_distributions()).write(tmp_path / "interposer.lock")
    trace = tmp_path / "was-run"
    (tmp_path / "acmetorn.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    with use(**policy):
        health = doctor(Config(locked=True))
        assert problem(health).subject == "lock"
        assert "acmetorn 1.0 was altered" in problem(health).reason
        assert not trace.exists()
        doctor()
    assert trace.exists()  # the lock alone kept it from being run


def double_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    yield Case("ones", {"x": torch.ones(2).to(dtype)})


@custom_op("double", cases=double_cases)
def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@pytest.mark.usefixtures("host")
def test_a_kernel_for_an_unknown_op_is_a_warning(
    make_plugin: Callable[..., ModuleType],
) -> None:
    kernel = Kernel("duoble", "double_fast", f"{__name__}:double")
    op = OpEntry("double", f"{__name__}:double")
    with register(make_plugin("fine", op, kernel)):
        health = doctor()
    assert health.healthy
    assert (
        "Kernel 'double_fast' of fine in code is for the op 'duoble', which no installed plugin "
        "defines; nearest: 'double'. Try: correct the name, or install the plugin that defines "
        "the op"
    ) in health.warnings


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        ({"duoble": "reference"}, "Unknown op 'duoble' in Config.kernels"),
        ({"double": {"forbid": ["fast"]}}, "Unknown candidate 'fast'"),
        ({"double@layers.*": "fast"}, "Unknown kernel 'fast' for 'double' in Config.kernels"),
        ({"*": "fast"}, "Unknown kernel 'fast' for '*' in Config.kernels"),
    ],
)
def test_a_rule_for_an_unknown_name_is_a_problem(
    kernels: dict[str, Any], reason: str, make_plugin: Callable[..., ModuleType]
) -> None:
    with register(make_plugin("fine", OpEntry("double", f"{__name__}:double"))):
        assert doctor(Config(kernels={"double": "reference", "*": "fine/reference"})).healthy
        health = doctor(Config(kernels=kernels))
    assert problem(health).subject == "configuration"
    assert reason in problem(health).reason
    assert problem(health).mend


@pytest.mark.usefixtures("host")
def test_a_cache_that_cannot_be_used_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/cache"):
        with use(cache_dir=str(tmp_path / folder)):
            health = doctor()
        assert problem(health).subject == f"cache {tmp_path / folder}"
        assert problem(health).reason == f"{tmp_path / 'file'} is no folder"
        assert "INTERPOSER_CACHE_DIR" in problem(health).mend


@pytest.mark.usefixtures("host")
def test_an_empty_allow_list_reads_as_none() -> None:
    assert "plugins = none" in str(doctor())


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("installed_version", "variables", "message"),
    [
        ("2.3.1", {}, "transformers 9.0 uses them through kernels 2.3.1 with use_kernels=True"),
        ("3.0", {}, "needs kernels >=2.3,<3.0, found 3.0, so no layer of a model is replaced"),
        (None, {}, "needs the package kernels >=2.3,<3.0, which is not installed, so no layer"),
        ("2.3.1", {"USE_HUB_KERNELS": "no"}, "USE_HUB_KERNELS is 'no', so in transformers 9.0 no"),
    ],
)
def test_kernels_package_that_transformers_ignores_is_reported(
    installed_version: str | None,
    variables: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an unsuitable version, transformers replaces no layer and gives no warning."""
    source = tmp_path / "transformers" / "utils" / "import_utils.py"
    source.parent.mkdir(parents=True)
    source.write_text('KERNELS_MIN_VERSION = "2.3"\nKERNELS_MAX_VERSION = "3.0"\nraise 1\n')
    versions = {
        "transformers": "9.0",
        **({"kernels": installed_version} if installed_version else {}),
    }
    for name, version in versions.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    if installed_version is None:
        lookup = importlib_metadata.version

        def version_of(name: str) -> str:
            if name == "kernels":
                raise importlib_metadata.PackageNotFoundError(name)
            return lookup(name)

        monkeypatch.setattr(importlib_metadata, "version", version_of)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("USE_HUB_KERNELS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert message in doctor().machine["kernels of the hub"]


@pytest.mark.slow
def test_without_transformers_its_layers_are_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers").mkdir()
    folder = tmp_path / "transformers-4.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "kernels of the hub" not in doctor().machine
