"""What is wrong with records is found without importing what they name."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import WAIT_SECONDS

from interposer import (
    AttentionEntry,
    Dim,
    Kernel,
    LayerEntry,
    ModelEntry,
    OpEntry,
    Platform,
    PlatformEntry,
    PluggableLayer,
    Requires,
    SchemeEntry,
    Site,
    custom_op,
)
from interposer._contract.attention import AttentionBackend
from interposer._contract.checkpoint import CheckpointFile
from interposer._contract.model import ModelFamily
from interposer._contract.op import Case
from interposer._contract.quantization import QuantizationScheme
from interposer._validation.records import MOST_RECORDS, check_classes, check_records
from interposer.records import CheckpointEntry, DeviceEntry, Record, TuningEntry


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a maker of modules in the package ``acme_static``."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(**sources: str) -> None:
        for name, source in {"__init__": "", **sources}.items():
            file = tmp_path / "acme_static" / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)

    return make


_LETTERS = f"{string.ascii_letters}{string.digits}_.-"


def kernel(target: str, **fields: Any) -> Kernel:
    return Kernel("rms_norm", "rms_norm_acme", target, **fields)


def check(record: object) -> str:
    faults = check_records([record])
    assert len(faults) < 2
    return faults[0] if faults else ""


@pytest.mark.parametrize("field", ["predicate", "prepare"])
def test_predicates_and_preparations_are_looked_up_as_well(
    field: str, package: Callable[..., None]
) -> None:
    package(names="fast = 1")
    record = kernel("acme_static.names:fast", **{field: "acme_static.names:fsat"})
    assert "has no 'fsat'; nearest: fast" in check(record)


def three() -> int:
    return 3


number = 3


@pytest.mark.parametrize("field", ["target", "predicate", "prepare"])
def test_an_imported_target_that_is_no_function_is_refused(field: str) -> None:
    fields = {"target": f"{__name__}:three", field: f"{__name__}:number"}
    assert check(kernel(**fields)).endswith(":number', which is an int, not a function")


def test_an_imported_predicate_that_is_no_function_is_refused() -> None:
    record = AttentionEntry("paged", f"{__name__}:number", predicate=f"{__name__}:number")
    assert "not a function" in check(record)
    assert check(AttentionEntry("paged", f"{__name__}:number")) == ""


def test_resources_must_exist(package: Callable[..., None], tmp_path: Path) -> None:
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


@pytest.mark.landing(22)
@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("x", "declares a 'str', which is not a record"),
        (Kernel, "declares a 'type', which is not a record"),
        (SlyKernel("a", "b", "math:x"), "declares a 'SlyKernel', which is not a record"),
        (kernel("math:x", platform=Sly("cpu")), "a platform that is a Sly, not a text"),
        (kernel("math:x", platform=3), "a platform that is an int, not a text"),
        (kernel("math:x", score=float("inf")), "a score that is not a finite number"),
        (kernel("math:x", score=True), "a score that is not a finite number"),
        (kernel("math:x", extra_roundings=-1), "extra_roundings that are no int of at least 0"),
        (kernel("math:x", extra_roundings=True), "extra_roundings that are no int of at least 0"),
        (kernel("math:x", properties={"deterministic"}), "no frozenset of texts"),
        (kernel("math:x", requires=None), "requires that is a NoneType, not a Requires"),
        (kernel("math:x", requires=Requires(features={1})), "no frozenset of texts"),  # type: ignore[arg-type]
        (kernel("math:x", requires=Requires(dtypes=["float32"])), "no tuple of texts"),  # type: ignore[arg-type]
        (kernel("math:x", requires=Requires(dims={"a": 1})), "Dim"),  # type: ignore[dict-item]
        (kernel("math:x", requires=Requires(dims={"a": Dim(at_least="1")})), "no int"),  # type: ignore[arg-type]
        (kernel("math:x", requires=Requires(dims={"a": Dim(one_of=[1])})), "tuple"),  # type: ignore[arg-type]
        (OpEntry("é", "math:x"), r"the name '\xe9', which is not printable ASCII"),
        (OpEntry("a\x1b[31m", "math:x"), r"the name 'a\x1b[31m', which is not printable"),
        (OpEntry("a b", "math:x"), "'a b'; names consist of A-Z, a-z, 0-9, '_', '.' and '-'"),
        (PlatformEntry("a/b", "math:x"), "the name 'a/b'; names"),
        (AttentionEntry("a*", "math:x"), "the name 'a*'; names"),
        (DeviceEntry("a,b", "acme", "acme:b.json"), "the name 'a,b'; names"),
        (DeviceEntry("a", "ac me", "acme:b.json"), "the platform 'ac me'; names"),
        (LayerEntry("a@b", "c", "math:x"), "the layer_id 'a@b'; names"),
        (SchemeEntry("a=b", "c", "math:x"), "the method 'a=b'; names"),
        (ModelEntry("Llama", "c", "math:x"), "architectures that are no tuple of names"),  # type: ignore[arg-type]
        (ModelEntry((), "c", "math:x"), "architectures that are no tuple of names"),
        (ModelEntry(("a b",), "c", "math:x"), "architectures that are no tuple of names"),
        (ModelEntry(("a",), "c", "math:x", reads=("", "b")), "reads that are no tuple of names"),
        (Kernel("rms norm", "c", "math:x"), "the op 'rms norm'; names"),
        (OpEntry("a" * 101, "math:x"), "a name of 101 characters; 100 are allowed"),
        (OpEntry("a", f"math.{'b' * 500}:x"), "a target of 507 characters; 300 are allowed"),
        (PlatformEntry("a", "math:x", driver_files=["/a"]), "no tuple of texts"),  # type: ignore[arg-type]
        (PlatformEntry("a", "math:x", runs=("b c",)), "runs that are no tuple of names"),
        (PlatformEntry("a", "math:x", explicit=1), "neither True nor False"),  # type: ignore[arg-type]
    ],
)
def test_fields_must_have_exact_types(record: object, reason: str) -> None:
    (fault,) = check_records([record])
    assert reason in fault
    assert fault.isascii()


def test_sound_fields_pass() -> None:
    dims = MappingProxyType({"size": Dim(at_least=1, one_of=(1, "2"))})
    requires = Requires(frozenset({"avx"}), frozenset(), ("float32",), dims)
    records = [kernel("math:exp", requires=requires, score=3), OpEntry("a", "math:e")]
    assert check_records(records) == []


def test_records_must_be_unique() -> None:
    faults = check_records([OpEntry("a", "math:x"), OpEntry("a", "math:y"), OpEntry("b", "math:x")])
    assert faults == ["declares OpEntry a twice"]


def test_the_number_of_records_is_limited() -> None:
    records = [OpEntry(f"op_{count}", "math:exp") for count in range(MOST_RECORDS)]
    assert check_records(records) == []
    assert check_records([*records, OpEntry("more", "math:x")]) == [
        "declares more than 1,000 records"
    ]


@given(st.text(min_size=1) | st.text(string.printable, min_size=1) | st.text(_LETTERS, min_size=1))
def test_any_name_can_be_shown_and_the_plain_ones_pass(name: str) -> None:
    faults = check_records([OpEntry(name, "math:exp")])
    assert bool(faults) is not (len(name) <= 100 and set(name) <= set(_LETTERS))
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


def test_each_load_is_announced_first() -> None:
    stages: list[str] = []
    records: list[Record] = [
        LayerEntry("acme", "mine", "a.b:c"),
        AttentionEntry("other", "a.b:c"),
        OpEntry("other", "a.b:c"),
        SchemeEntry("other", "other", "a.b:c"),
    ]
    assert check_classes(records, lambda _: Good, stages.append) == []
    assert stages == ["loading layer 'mine'"]


def no_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    yield from ()


@custom_op("twice", cases=no_cases)
def twice(x: torch.Tensor) -> torch.Tensor:
    """Return ``2 x``."""
    return x + x


class Backend(AttentionBackend):
    """A backend that is all there."""

    accepts = kv_layout = plan = forward = None  # type: ignore[assignment]


class Planless(AttentionBackend):
    """A backend that lacks a member."""

    accepts = kv_layout = forward = None  # type: ignore[assignment]


class Scheme(QuantizationScheme):
    """A scheme of a method."""

    method = "beads"
    parse = linear_method = None  # type: ignore[assignment]


class Methodless(QuantizationScheme):
    """A scheme of none."""

    parse = linear_method = None  # type: ignore[assignment]


class Gem(ModelFamily):
    """A family that is all there."""

    parse = attention = build = None  # type: ignore[assignment]


class Unbuilt(ModelFamily):
    """A family that builds nothing."""

    parse = attention = None  # type: ignore[assignment]


class Archive(CheckpointFile):
    """A file that is all there."""

    open = stream = tokenizer = None  # type: ignore[assignment]


class Wordless(CheckpointFile):
    """A file without a tokenizer."""

    open = stream = None  # type: ignore[assignment]


HERE = __name__


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (OpEntry("twice", f"{HERE}:twice"), ""),
        (OpEntry("thrice", f"{HERE}:twice"), "op 'thrice' is a CustomOp whose name is 'twice'"),
        (OpEntry("three", f"{HERE}:three"), "op 'three' is a function, not a CustomOp"),
        (AttentionEntry("a", f"{HERE}:Backend"), ""),
        (AttentionEntry("a", f"{HERE}:Planless"), "lacks the required members plan"),
        (AttentionEntry("a", f"{HERE}:Scheme"), "which does not subclass AttentionBackend"),
        (SchemeEntry("beads", "b", f"{HERE}:Scheme"), ""),
        (SchemeEntry("marbles", "b", f"{HERE}:Scheme"), "whose method is 'beads', not 'marbles'"),
        (SchemeEntry("beads", "b", f"{HERE}:Methodless"), "whose method is None, not 'beads'"),
        (SchemeEntry("beads", "b", f"{HERE}:number"), "is 3, which does not subclass"),
        (ModelEntry(("Gem",), "g", f"{HERE}:Gem"), ""),
        (ModelEntry(("Gem",), "g", f"{HERE}:Unbuilt"), "lacks the required members build"),
        (ModelEntry(("Gem",), "g", f"{HERE}:Scheme"), "does not subclass ModelFamily"),
        (CheckpointEntry(".zip", "z", f"{HERE}:Archive"), ""),
        (CheckpointEntry(".zip", "z", f"{HERE}:Wordless"), "lacks the required members tokenizer"),
        (CheckpointEntry(".zip", "z", f"{HERE}:Scheme"), "does not subclass CheckpointFile"),
    ],
)
def test_imported_classes_are_checked(record: Record, reason: str) -> None:
    faults = check_classes([record])
    assert len(faults) == bool(reason)
    assert all(reason in fault for fault in faults)


@pytest.mark.parametrize("kind", [OpEntry, AttentionEntry])
def test_other_modules_are_not_imported_for_the_check(
    kind: type[OpEntry | AttentionEntry], package: Callable[..., None]
) -> None:
    package(never="raise SystemExit('this must never run')")
    assert check_classes([kind("a", "acme_static.never:x")]) == []


@pytest.mark.process
def test_the_names_of_a_script_are_checked(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "from interposer import Kernel, hookimpl\n"
        "from interposer._validation.records import check_records\n"
        "three = 3\n"
        "def fast(x): ...\n"
        "kernels = [Kernel('a', name, f'__main__:{name}') for name in ('fast', 'fsat', 'three')]\n"
        "print(json.dumps([check_records(kernels), 'torch' in sys.modules]))\n"
    )
    completed = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, timeout=WAIT_SECONDS
    )
    faults, torch = json.loads(completed.stdout)
    assert faults == [
        "'fsat' names '__main__:fsat': __main__ has no 'fsat'; nearest: fast, three, kernels",
        "'three' names '__main__:three', which is an int, not a function",
    ]
    assert not torch
