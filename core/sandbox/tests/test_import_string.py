"""Whether an import string points at something is told without importing anything."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from tests.waiting import WAIT_SECONDS

from interposer_sandbox import check_import_string, is_loaded

Package = Callable[..., None]

_SOURCE = '''
"""Names of all kinds."""
import os.path
import json as renamed
from sys import argv as arguments, path
first = second = 1
(third, [fourth, *fifth]) = 1, [2]
annotated: int = 3
if first:
    conditional = 1
else:
    otherwise = 2
try:
    tried = 1
except ImportError as error:
    fallback = 2
with open(__file__) as file:
    opened = 1
for loop in ():
    pass
while (walrus := False):
    pass
match first:
    case [captured, *rest]:
        pass
def function(parameter):
    local = 1
    global declared
    declared = 2
async def coroutine(): ...
class Class:
    member = 1
raise SystemExit("this must never run")
'''
_DEFINED = [
    *("os", "renamed", "arguments", "path", "first", "second", "third", "fourth", "fifth"),
    *("annotated", "conditional", "otherwise", "tried", "fallback", "file", "opened", "loop"),
    *("walrus", "captured", "rest", "function", "declared", "coroutine", "Class", "__name__"),
]
_UNDEFINED = ["json", "argv", "error", "parameter", "local", "member", "fast"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Yield a maker of modules in the package ``acme_named``; a name may hold slashes."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(**sources: str) -> None:
        for name, source in {"__init__": "", **sources}.items():
            file = tmp_path / "acme_named" / f"{name.replace('__in__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_named"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", _DEFINED)
def test_names_that_a_module_defines_are_found(name: str, package: Package) -> None:
    package(names=_SOURCE)
    assert check_import_string(f"acme_named.names:{name}") == ""
    assert "acme_named" not in sys.modules


@pytest.mark.parametrize("name", _UNDEFINED)
def test_names_that_a_module_does_not_define_are_refused(name: str, package: Package) -> None:
    package(names=_SOURCE)
    assert f"acme_named.names has no {name!r}; nearest: " in check_import_string(
        f"acme_named.names:{name}"
    )


def test_missing_modules_are_refused(package: Package) -> None:
    package(names="", sub__in____init__="", sub__in__deep="x = 1")
    for target, reason in {
        "acme_nowhere.kernels:x": "there is no module 'acme_nowhere'",
        "acme_named.nmaes:x": "there is no module 'acme_named.nmaes'; nearest: names",
        "acme_named.names.sub:x": "there is no module 'acme_named.names.sub'",
        "acme_named.sub.dep:x": "there is no module 'acme_named.sub.dep'; nearest: deep",
        "acme_named.sub.deep:x": "",
        "acme_named.sub:deep": "",
    }.items():
        fault = check_import_string(target)
        assert fault.startswith(reason), target
        assert bool(fault) is bool(reason), target


@pytest.mark.parametrize(
    "source",
    [
        "from os.path import *",
        "from os.path import \\\n *",
        "ｇlobals()['x'] = 1",  # noqa: RUF001 - Python reads it as the plain name
        "def f():\n    global x\n    x = 1",
        "def __getattr__(name): return 1",
        "from acme_named import __getattr__",
        "globals()['x'] = 1",
        "exec('x = 1')",
        "import sys\nsetattr(sys.modules[__name__], 'x', 1)",
        "def",
        f"y = {'-' * 5_000}1",
    ],
    ids=lambda source: source[:20],
)
def test_names_that_the_source_cannot_decide_pass(source: str, package: Package) -> None:
    package(names=source)
    assert check_import_string("acme_named.names:x") == ""


def test_packages_with_their_own_path_pass(package: Package) -> None:
    package(__init__="__path__.append('/elsewhere')")
    assert check_import_string("acme_named.elsewhere:x") == ""


IMPORTED = """
import math
from math import pi as fastener
from json import JSONDecoder as FastDecoder, dumps as fast_dumps

def fast(): ...
def slow(): ...
"""


@pytest.mark.parametrize("loaded", [False, True], ids=["source", "loaded"])
def test_imported_names_exist_but_are_not_suggested(loaded: bool, package: Package) -> None:
    package(names=IMPORTED)
    if loaded:
        import_module("acme_named.names")
    assert check_import_string("acme_named.names:FastDecoder") == ""
    assert check_import_string("acme_named.names:fsat") == (
        "acme_named.names has no 'fsat'; nearest: fast, slow"
    )


def test_imported_modules_are_inspected(package: Package) -> None:
    package(names="globals()['made'] = 1\ngone = 1\ndel gone", other="")
    import_module("acme_named.names")
    assert check_import_string("acme_named.names:made") == ""
    assert check_import_string("acme_named.names:gone") == (
        "acme_named.names has no 'gone'; nearest: made"
    )
    assert check_import_string("acme_named:other") == ""
    assert check_import_string("acme_named:ohter") == "acme_named has no 'ohter'"
    assert check_import_string("math:exp") == ""
    assert check_import_string("math:exq").startswith("math has no 'exq'; nearest: exp, ")


def test_modules_that_compute_names_are_not_queried(package: Package) -> None:
    package(
        lazy="def __getattr__(name): raise SystemExit('asked')",
        shaped=(
            "import sys\nfrom types import ModuleType\n"
            "class Shaped(ModuleType):\n"
            "    def __getattribute__(self, name):\n"
            "        if name == 'x': raise SystemExit('asked')\n"
            "        return super().__getattribute__(name)\n"
            "sys.modules[__name__].__class__ = Shaped"
        ),
        replaced="import sys\nsys.modules[__name__] = 3",
    )
    for name in ("lazy", "replaced", "shaped"):
        import_module(f"acme_named.{name}")
        assert check_import_string(f"acme_named.{name}:x") == ""
        assert not is_loaded(f"acme_named.{name}:x")


def test_modules_are_judged_by_their_source_until_they_are_imported(package: Package) -> None:
    package(
        names=(
            "from interposer_sandbox import check_import_string\n"
            "def known(name): return check_import_string(f'{__name__}:{name}')\n"
            "early = [known('later'), known('never')]\n"
            "def later(): ...\n"
        )
    )
    early = import_module("acme_named.names").early
    assert early[0] == ""
    assert early[1].startswith("acme_named.names has no 'never'")


def test_modules_created_at_run_time_are_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("acme_made")
    vars(module).update(fast=len, slow=1)
    monkeypatch.setitem(sys.modules, "acme_made", module)
    assert check_import_string("acme_made:slow") == ""
    assert check_import_string("acme_made:fsat") == "acme_made has no 'fsat'; nearest: fast, slow"


def test_blocked_modules_count_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "acme_blocked", None)
    assert check_import_string("acme_blocked:x") == "there is no module 'acme_blocked'"


@pytest.mark.process
def test_a_script_is_inspected(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "from interposer_sandbox import check_import_string\n"
        "three = 3\n"
        "def fast(x): ...\n"
        "names = ('fast', 'fsat', 'three')\n"
        "print(json.dumps([check_import_string(f'__main__:{name}') for name in names]))\n"
    )
    completed = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
    )
    assert json.loads(completed.stdout) == [
        "",
        "__main__ has no 'fsat'; nearest: fast, names, three",
        "",
    ]
