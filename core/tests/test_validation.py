"""What is wrong with records is found without importing what they name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interposer import (
    AttentionEntry,
    Dim,
    Kernel,
    LayerEntry,
    OpEntry,
    Platform,
    PlatformEntry,
    PluggableLayer,
    Requires,
    Site,
)
from interposer.records import DeviceEntry, Record, TuningEntry
from interposer.validation import MOST_RECORDS, check_classes, check_records

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
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a maker of modules in the package ``acme_static``; a name may hold slashes."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(**sources: str) -> None:
        for name, source in {"__init__": "", **sources}.items():
            file = tmp_path / "acme_static" / f"{name.replace('__in__', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)

    return make


def kernel(target: str, **fields: Any) -> Kernel:
    return Kernel("rms_norm", "rms_norm_acme", target, **fields)


def check(record: object) -> str:
    faults = check_records([record])
    assert len(faults) < 2
    return faults[0] if faults else ""


@pytest.mark.parametrize("name", _DEFINED)
def test_names_that_a_module_defines_are_found(name: str, package: Callable[..., None]) -> None:
    package(names=_SOURCE)
    assert check(kernel(f"acme_static.names:{name}")) == ""
    assert "acme_static" not in sys.modules


@pytest.mark.parametrize("name", _UNDEFINED)
def test_names_that_it_does_not_define_are_refused(name: str, package: Callable[..., None]) -> None:
    package(names=_SOURCE)
    assert f"acme_static.names has no {name!r}; nearest: " in check(
        kernel(f"acme_static.names:{name}")
    )


@pytest.mark.parametrize("field", ["predicate", "prepare"])
def test_predicates_and_preparations_are_looked_up_as_well(
    field: str, package: Callable[..., None]
) -> None:
    package(names="fast = 1")
    record = kernel("acme_static.names:fast", **{field: "acme_static.names:fsat"})
    assert "has no 'fsat'; nearest: fast" in check(record)


def test_modules_that_are_not_there_are_refused(package: Callable[..., None]) -> None:
    package(names="", sub__in____init__="", sub__in__deep="x = 1")
    assert "there is no module 'acme_nowhere'" in check(kernel("acme_nowhere.kernels:x"))
    assert "no module 'acme_static.nmaes'; nearest: names" in check(kernel("acme_static.nmaes:x"))
    assert "no module 'acme_static.names.sub'" in check(kernel("acme_static.names.sub:x"))
    assert "no module 'acme_static.sub.dep'" in check(kernel("acme_static.sub.dep:x"))
    assert check(kernel("acme_static.sub.deep:x")) == ""
    assert check(kernel("acme_static.sub:deep")) == ""


@pytest.mark.parametrize(
    "source",
    [
        "from os.path import *",
        "def __getattr__(name): return 1",
        "globals()['x'] = 1",
        "exec('x = 1')",
        "import sys\nsetattr(sys.modules[__name__], 'x', 1)",
        "def",
    ],
)
def test_what_the_source_cannot_tell_passes(source: str, package: Callable[..., None]) -> None:
    package(names=source)
    assert check(kernel("acme_static.names:x")) == ""


def test_native_and_packages_with_a_path_of_their_own_pass(package: Callable[..., None]) -> None:
    package(__init__="__path__.append('/elsewhere')")
    assert check(kernel("acme_static.elsewhere:x")) == ""
    assert check(kernel("math:x")) == ""


def test_resources_have_to_exist(package: Callable[..., None], tmp_path: Path) -> None:
    package()
    entries = [
        DeviceEntry("acme", "acme", "acme_static:device.json"),
        TuningEntry("acme", "Acme *", "acme_static:device.json"),
    ]
    assert all("has no such file" in check(entry) for entry in entries)
    (tmp_path / "acme_static" / "device.json").write_text("{}")
    assert check_records(entries) == []


class Sly(str):
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class SlyKernel(Kernel):
    """Not what it seems."""


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("x", "declares a 'str', which is not a record"),
        (Kernel, "declares a 'type', which is not a record"),
        (SlyKernel("a", "b", "math:x"), "declares a 'SlyKernel', which is not a record"),
        (kernel("math:x", platform=Sly("cpu")), "a platform that is a Sly, not a text"),
        (kernel("math:x", platform=3), "a platform that is a int, not a text"),
        (kernel("math:x", score=float("inf")), "a score that is not a finite number"),
        (kernel("math:x", score=True), "a score that is not a finite number"),
        (kernel("math:x", properties={"deterministic"}), "no frozenset of texts"),
        (kernel("math:x", requires=None), "requires that is a NoneType, not a Requires"),
        (kernel("math:x", requires=Requires(features={1})), "no frozenset of texts"),  # type: ignore[arg-type]
        (kernel("math:x", requires=Requires(dtypes=["float32"])), "no tuple of texts"),  # type: ignore[arg-type]
        (kernel("math:x", requires=Requires(dims={"a": 1})), "Dim"),  # type: ignore[dict-item]
        (kernel("math:x", requires=Requires(dims={"a": Dim(at_least="1")})), "no int"),  # type: ignore[arg-type]
        (kernel("math:x", requires=Requires(dims={"a": Dim(one_of=[1])})), "tuple"),  # type: ignore[arg-type]
        (OpEntry("é", "math:x"), r"the name '\xe9', which is not printable ASCII"),
        (OpEntry("a\x1b[31m", "math:x"), r"the name 'a\x1b[31m', which is not printable"),
        (OpEntry("a" * 101, "math:x"), "a name of 101 characters; 100 are allowed"),
        (OpEntry("a", f"math.{'b' * 500}:x"), "a target of 507 characters; 300 are allowed"),
        (PlatformEntry("a", "math:x", driver_files=["/a"]), "no tuple of texts"),  # type: ignore[arg-type]
    ],
)
def test_fields_are_what_they_seem(record: object, reason: str) -> None:
    (fault,) = check_records([record])
    assert reason in fault
    assert fault.isascii()


def test_sound_fields_pass() -> None:
    dims = MappingProxyType({"size": Dim(at_least=1, one_of=(1, "2"))})
    requires = Requires(frozenset({"avx"}), frozenset(), ("float32",), dims)
    assert (
        check_records([kernel("math:x", requires=requires, score=3), OpEntry("a", "math:y")]) == []
    )


def test_no_two_records_are_the_same() -> None:
    faults = check_records([OpEntry("a", "math:x"), OpEntry("a", "math:y"), OpEntry("b", "math:x")])
    assert faults == ["declares OpEntry a twice"]


def test_there_may_not_be_too_many() -> None:
    records = [OpEntry(f"op_{number}", "math:x") for number in range(MOST_RECORDS)]
    assert check_records(records) == []
    assert check_records([*records, OpEntry("more", "math:x")]) == [
        "declares more than 1,000 records"
    ]


@given(st.text(min_size=1))
def test_any_name_can_be_shown(name: str) -> None:
    faults = check_records([OpEntry(name, "math:x")])
    assert bool(faults) is not (len(name) <= 100 and name.isascii() and name.isprintable())
    assert all(fault.isascii() and fault.isprintable() for fault in faults)


class Standard(PluggableLayer):
    """A standard layer."""

    layer_id = "acme"

    def __init__(self, site: Site, size: int) -> None:
        super().__init__(site)


class Good(Standard):
    """A replacement."""


class Other(Standard):
    """A replacement with another signature."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, 1)


class Abstract(Platform):
    """A platform without members."""

    name = "acme"
    device_type = "cpu"


class Misnamed(Platform):
    """A platform of another name."""

    name = "other"
    device_type = "cpu"
    probe = devices = capability = dtypes = None  # type: ignore[assignment]


class Nameless(Platform):
    """A platform without a name."""

    device_type = "cpu"
    probe = devices = capability = dtypes = None  # type: ignore[assignment]


def raising(_target: str) -> Any:
    raise OSError("on purpose")


def missing(_target: str) -> Any:
    raise ImportError("not on this machine")


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda _: Standard, ""),
        (lambda _: Good, ""),
        (missing, ""),
        (raising, "loading layer 'mine' raised OSError('on purpose')"),
        (lambda _: Other, "takes (self, site: 'Site') -> 'None', but Standard takes"),
        (lambda _: PluggableLayer, "subclasses no layer whose layer_id is 'acme'"),
        (lambda _: Abstract, "which does not subclass PluggableLayer"),
        (lambda _: 3, "is 3, which does not subclass PluggableLayer"),
    ],
)
def test_layers_are_checked(load: Callable[[str], Any], reason: str) -> None:
    faults = check_classes([LayerEntry("acme", "mine", "a.b:c")], load)
    assert len(faults) == bool(reason)
    assert all(reason in fault for fault in faults)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (missing, ""),
        (raising, "loading platform 'acme' raised OSError"),
        (lambda _: Abstract, "lacks the required members capability, devices, dtypes, probe"),
        (lambda _: Misnamed, "is Misnamed, whose name is 'other'"),
        (lambda _: Nameless, "has no name, which must be a text"),
        (lambda _: Standard, "which does not subclass Platform"),
    ],
)
def test_platforms_are_checked(load: Callable[[str], Any], reason: str) -> None:
    faults = check_classes([PlatformEntry("acme", "a.b:c")], load)
    assert len(faults) == bool(reason)
    assert all(reason in fault for fault in faults)


def test_what_is_loaded_is_told_first() -> None:
    stages: list[str] = []
    records: list[Record] = [LayerEntry("acme", "mine", "a.b:c"), AttentionEntry("other", "a.b:c")]
    assert check_classes(records, lambda _: Good, stages.append) == []
    assert stages == ["loading layer 'mine'"]
