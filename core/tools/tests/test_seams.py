"""``interposer seams`` finds what other versions of a host break in a plugin, without imports."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from interposer_tools._cli import main

HOST_1 = {
    "engine/__init__.py": "__version__ = '1.0'\nfrom engine.config import Config as Config\n",
    "engine/config.py": """
from dataclasses import dataclass

@dataclass
class Cache:
    block: int = 16

@dataclass
class Config:
    cache: Cache
    name: str = ""
    depth: int = 1
""",
    "engine/worker.py": """
from engine.config import Config

class Worker:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.steps = 0

    def run(self, batch):
        return batch

    def warm_up(self):
        pass

def step(worker: Worker, batch, *, scale=1.0):
    return worker.run(batch)

def helper():
    pass
""",
    "engine/lazy.py": "def __getattr__(name):\n    return {'FLAG': 1, 'OLD_FLAG': 2}[name]\n",
}
HOST_2 = {
    "engine/__init__.py": "__version__ = '2.0'\nfrom engine.settings import Config as Config\n",
    "engine/settings.py": HOST_1["engine/config.py"]
    .replace("block", "block_size")
    .replace("    depth: int = 1\n", ""),
    "engine/worker.py": """
from abc import abstractmethod
from engine.settings import Config

class Worker:
    def __init__(self, config: Config) -> None:
        self.config = config

    def run(self, batch, stream=None):
        return batch

    @abstractmethod
    def stop(self):
        pass

def step(worker: Worker, batch):
    return worker.run(batch, stream=0)
""",
    "engine/lazy.py": "def __getattr__(name):\n    return {'FLAG': 1}[name]\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[str, str]:
    first, second = write(tmp_path / "one", HOST_1), write(tmp_path / "two", HOST_2)
    return str(first), str(second)


class Seams:
    """The command, with the output and the exit status of its last run."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["interposer", "seams", "engine", *arguments])
            try:
                main()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
        output = self.capsys.readouterr()
        return code, output.out, output.err

    def breakages(self, source: str, hosts: tuple[str, str], *options: str) -> list[dict[str, Any]]:
        plugin = write(self.folder / "plugin", {"acme/__init__.py": "", "acme/part.py": source})
        arguments = ["--of", str(plugin), "--json", "--works-with", hosts[0]]
        _, out, err = self.run(hosts[1], *arguments, *options)
        assert not err
        found: list[dict[str, Any]] = json.loads(out)["breakages"]
        return found


@pytest.fixture
def seams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Seams:
    return Seams(tmp_path, capsys)


BROKEN = {
    "import of a moved name": (
        "from engine.config import Cache",
        ("import", "Cache", "there is no module engine.config; now in engine.settings"),
    ),
    "attribute of a module": (
        "import engine.worker\nengine.worker.helper()",
        ("attribute", "helper", "engine.worker has no 'helper'"),
    ),
    "name that a module computes": (
        "from engine.lazy import OLD_FLAG",
        ("import", "OLD_FLAG", "engine.lazy has no 'OLD_FLAG'"),
    ),
    "attribute of an annotated argument": (
        "from engine import Config\ndef read(config: Config):\n    return config.cache.block",
        ("attribute", "block", "engine.settings:Cache has no 'block'"),
    ),
    "inherited attribute": (
        "from engine.worker import Worker\n"
        "class Mine(Worker):\n    def count(self):\n        return self.steps\n"
        "    def stop(self): ...",
        ("attribute", "steps", "acme.part:Mine has no 'steps'"),
    ),
    "call": (
        "from engine.worker import step\ndef go(worker):\n    step(worker, 1, scale=2.0)",
        ("call", "step", "engine.worker:step takes no argument 'scale'"),
    ),
    "constructor": (
        "from engine import Config\ndef go(cache):\n    Config(cache, 'a', depth=1)",
        ("call", "Config", "takes no argument 'depth'"),
    ),
    "override that the host calls with a new argument": (
        "from engine.worker import Worker\n"
        "class Mine(Worker):\n    def run(self, batch):\n        return batch\n"
        "    def stop(self): ...",
        ("override", "Mine.run", "takes no argument 'stream'; the host calls it so in engine/"),
    ),
    "override that the host no longer has": (
        "from engine.worker import Worker\n"
        "class Mine(Worker):\n    def warm_up(self): ...\n    def stop(self): ...",
        ("override", "Mine.warm_up", "no base class of the host has it"),
    ),
    "abstract method": (
        "from engine.worker import Worker\nclass Mine(Worker):\n    pass",
        ("abstract", "Mine.stop", "engine.worker:Worker.stop is abstract"),
    ),
    "patch of a removed method": (
        "from engine.worker import Worker\nWorker.warm_up = lambda self: None",
        ("patch", "warm_up", "so the host never reads the new value"),
    ),
    "patch with fewer arguments": (
        "import engine.worker\ndef run(self, batch): ...\n"
        "setattr(engine.worker.Worker, 'run', run)",
        ("patch", "run", "takes no argument 'stream'; the host calls it so in engine/worker.py:17"),
    ),
    "string": (
        "NAME = 'engine.config.Cache'",
        ("declared", "engine.config.Cache", "engine has no 'config'; now in engine.settings"),
    ),
    "declared signature": (
        "from interposer.tooling import HostMember\n_WORKER = 'engine.worker'\n"
        "MEMBER = HostMember(f'{_WORKER}:Worker.run', '(self, batch)')",
        ("declared", "engine.worker:Worker.run", "has the new stream=None"),
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_use_is_found(kind: str, seams: Seams, hosts: tuple[str, str]) -> None:
    source, (use, name, reason) = BROKEN[kind]
    (breakage,) = seams.breakages(source, hosts)
    assert (breakage["kind"], breakage["name"]) == (use, name)
    assert reason in breakage["reason"]
    assert breakage["file"] == "acme/part.py"
    assert breakage["since"] == "two 2.0"


WORKS = {
    "unchanged": "from engine.worker import step\nstep(None, 1)",
    "fallback": "try:\n    from engine.config import Cache\n"
    "except ImportError:\n    from engine.settings import Cache",
    "version": "import engine\nif engine.__version__ < '2':\n    from engine.config import Cache",
    "version function": "if engine_version_is('1.0'):\n    from engine.config import Cache",
    "hasattr": "import engine.worker\n"
    "if hasattr(engine.worker, 'helper'):\n    engine.worker.helper()",
    "type checking": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
    "    from engine.config import Cache",
    "getattr": "from engine.worker import Worker\n"
    "def go(worker: Worker):\n    return getattr(worker, 'steps', None) and worker.steps",
    "own subclass": "from engine.worker import Worker\n"
    "class Mine(Worker):\n    def warm_up(self): ...\n    def stop(self): ...\n"
    "def go(worker: Worker):\n    worker.warm_up()",
}


@pytest.mark.parametrize("kind", WORKS)
def test_a_use_that_works_is_not_reported(kind: str, seams: Seams, hosts: tuple[str, str]) -> None:
    assert seams.breakages(WORKS[kind], hosts) == []


def test_a_fallback_that_fails_too_is_reported(seams: Seams, hosts: tuple[str, str]) -> None:
    source = (
        "try:\n    from engine.config import Cache\n"
        "except ImportError:\n    from engine.worker import Cache"
    )
    (breakage,) = seams.breakages(source, hosts)
    assert breakage["line"] == 4


def wheel(path: Path, files: dict[str, str], version: str) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        metadata = f"Metadata-Version: 2.1\nName: engine\nVersion: {version}\n"
        archive.writestr(f"engine-{version}.dist-info/METADATA", metadata)
        archive.writestr("engine/_C.abi3.so", b"")
    return str(path)


def sdist(path: Path, files: dict[str, str], version: str) -> str:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            member = tarfile.TarInfo(f"engine-{version}/src/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return str(path)


def test_the_first_version_that_breaks_a_use_is_named(seams: Seams, tmp_path: Path) -> None:
    moved = {**HOST_1, "engine/lazy.py": HOST_2["engine/lazy.py"]}
    plugin = write(
        tmp_path / "plugin",
        {"src/acme/part.py": "from engine.lazy import OLD_FLAG\nfrom engine.config import Cache\n"},
    )
    one = wheel(tmp_path / "engine-1.0-py3-none-any.whl", HOST_1, "1.0")
    two = sdist(tmp_path / "engine-1.1.tar.gz", moved, "1.1")
    three = wheel(tmp_path / "engine-2.0-py3-none-any.whl", HOST_2, "2.0")
    report = tmp_path / "report.json"
    options = ["--of", str(plugin), "--works-with", one, "--output", str(report)]
    code, out, _ = seams.run(three, two, *options)
    assert code == 1
    assert out == (
        f"{plugin} uses 2 names of engine at 2 places.\n"
        "Compared with engine 1.0:\n"
        "engine 1.1: 1 breakage\n"
        "  acme/part.py:1: import of OLD_FLAG: engine.lazy has no 'OLD_FLAG'\n"
        "engine 2.0: 2 breakages, 1 of them new\n"
        "  acme/part.py:2: import of Cache: there is no module engine.config; "
        "now in engine.settings\n"
    )
    facts = json.loads(report.read_text())
    assert [b["since"] for b in facts["breakages"]] == ["engine 1.1", "engine 2.0"]
    assert facts["breakages"][0]["broken_in"] == ["engine 1.1", "engine 2.0"]


def test_without_a_version_that_works_only_certain_breakages_are_listed(
    seams: Seams, hosts: tuple[str, str], tmp_path: Path
) -> None:
    source = (
        "from engine.config import Cache\nfrom engine._C import op\n"
        "from engine.worker import Worker\nclass Mine(Worker):\n    def warm_up(self): ...\n"
    )
    plugin = write(tmp_path / "plugin", {"acme/part.py": source})
    code, out, _ = seams.run(hosts[1], "--of", str(plugin), "--uses")
    assert code == 1
    assert "two 2.0: 1 breakage\n  acme/part.py:1: import of Cache" in out
    assert "Try: --works-with VERSION" in out
    assert "acme/part.py:3: import of engine.worker:Worker" in out
    assert seams.run(hosts[0], "--of", str(plugin))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{one}"], "--of is missing. Try: --of with the name of your plugin's distribution"),
        (["{one}", "--of", "acme-nothing"], "'acme-nothing' is neither a path nor an installed"),
        (["{one}/a.whl", "--of", "{one}"], "a.whl: no such file or folder. Try: pip download"),
        (["--of", "{one}"], "No version of engine is given, and none is installed"),
        (["{empty}", "--of", "{one}"], "empty: contains no Python modules. Try: a wheel"),
        (["{other}", "--of", "{one}"], "contains no package 'engine', but acme. Try: a wheel"),
        (["{one}", "--of", "{other}"], "uses nothing of 'engine'"),
    ],
)
def test_a_usage_error_names_the_next_action(
    arguments: list[str], message: str, seams: Seams, hosts: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "other", {"acme/part.py": "import json\n"})
    paths = {"one": hosts[0], "empty": str(tmp_path / "empty"), "other": str(tmp_path / "other")}
    code, _, err = seams.run(*(argument.format(**paths) for argument in arguments))
    assert code == 2
    assert message in err
    assert "Try: " in err
