"""What is wrong with declared records, found without running what they name, and with classes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from interposer._contract.errors import FOREIGN_ERRORS, RecordError, described
from interposer._contract.records import (
    AttentionEntry,
    CheckpointEntry,
    DeviceEntry,
    Kernel,
    LayerEntry,
    OpEntry,
    PlatformEntry,
    Record,
    SchemeEntry,
    TuningEntry,
    identity,
    load_target,
    resource_path,
)
from interposer._contract.requires import Dim, Requires
from interposer._validation.import_string import check_import_string, is_loaded

if TYPE_CHECKING:
    from interposer._contract.layer import PluggableLayer

MOST_RECORDS = 1_000
"""How many records one plugin may declare."""

NAME_LIMIT = 100
"""How many characters a name may have."""

_KINDS = get_args(Record)
_TARGETS = ("target", "predicate", "prepare", "confirm", "cases", "examples")
_TARGET_LIMIT = 300
# What rules and pins are written with has another meaning in them: / * @ , = and spaces.
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_NAMES = ("name", "op", "layer_id", "method", "suffix", "platform")


def check_records(records: Iterable[object]) -> list[str]:
    """Return everything that is wrong with the records of one plugin.

    Nothing that they name is imported; where that is so already, it is looked at. What can only be
    known by importing it passes.
    """
    records = list(records)
    return check_facts(records) or [*_check_places(records)]  # type: ignore[arg-type]


def check_facts(records: Iterable[object]) -> list[str]:
    """Return what is wrong with records in themselves, without a look at what they name."""
    records = list(records)
    if len(records) > MOST_RECORDS:
        return [f"declares more than {MOST_RECORDS:,} records"]
    # By exact class: what a subclass does when it is compared or shown is anybody's guess.
    strangers = [type(record).__name__ for record in records if type(record) not in _KINDS]
    if strangers:
        return [f"declares a {plain_name(strangers[0])}, which is not a record"]
    faults = [fault for record in records for fault in _check_fields(record)]
    return faults or [*_check_identities(records)]  # type: ignore[arg-type]


def check_classes(
    records: Iterable[Record],
    load: Callable[[str], Any] = load_target,
    begin: Callable[[str], None] = lambda stage: None,
) -> list[str]:
    """Return what is wrong with the classes of layers and platforms, which are loaded.

    Ops, attention backends, schemes and formats of files are checked where their modules are
    imported already. What cannot be imported here is left for later: what it needs may be on other
    machines.

    Args:
        load: returns what an import string names.
        begin: told what is done next, as in "loading platform 'acme'".
    """
    faults: list[str] = []
    for record in records:
        if isinstance(record, Kernel | DeviceEntry | TuningEntry):
            continue
        if not isinstance(record, LayerEntry | PlatformEntry) and not is_loaded(record.target):
            continue
        what, check = _CHECKS[type(record)]
        begin(f"loading {what} {record.name!r}")
        try:
            faults += check(record, load(record.target))
        except ImportError:
            continue
        except RecordError as error:
            faults.append(str(error))
        except FOREIGN_ERRORS as error:
            faults.append(f"loading {what} {record.name!r} raised {described(error)}")
    return faults


def plain_name(name: str) -> str:
    """Return at most a hundred characters of ``name`` in quotes, what is not ASCII escaped."""
    return ascii(name if len(name) <= NAME_LIMIT else f"{name[:NAME_LIMIT]}...")


def _check_identities(records: list[Record]) -> Iterator[str]:
    counts = Counter(identity(record) for record in records)
    for found, count in counts.items():
        if count > 1:
            yield f"declares {' '.join(filter(None, found))} twice"


def _check_places(records: list[Record]) -> Iterator[str]:
    targets: dict[tuple[str, bool], str] = {}
    for record in records:
        if isinstance(record, DeviceEntry | TuningEntry):
            try:
                resource_path(record.resource)
            except (RecordError, ValueError) as error:
                yield f"{record.name!r}: {error}"
            continue
        for label in _TARGETS:
            if target := getattr(record, label, ""):
                called = label != "target" or isinstance(record, Kernel)
                targets.setdefault((target, called), f"{record.name!r}")
    for (target, called), name in targets.items():
        if fault := check_import_string(target):
            yield f"{name} names {target!r}: {fault}"
        elif called and is_loaded(target) and not callable(found := load_target(target)):
            yield f"{name} names {target!r}, which is {_kind(found)}, not a function"


def _check_fields(record: object) -> Iterator[str]:
    kind = type(record).__name__
    for field in fields(record):  # type: ignore[arg-type]
        fault = _check_field(field.name, getattr(record, field.name, None))
        if fault:
            yield f"{kind} {_shown(record)} has {fault}"


def _check_field(label: str, value: object) -> str:
    """Return what is wrong with a field as the end of a sentence, or an empty string."""
    match label:
        case "requires":
            return _check_requires(value)
        case "score":
            # A subclass of float may compare as it likes.
            sound = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
            return "" if sound else "a score that is not a finite number"
        case "properties" | "instead_of":
            sound = type(value) is frozenset and all(type(item) is str for item in value)
            return "" if sound else f"{label} that are no frozenset of texts"
        case "driver_files":
            sound = type(value) is tuple and all(type(item) is str for item in value)
            return "" if sound else "driver_files that are no tuple of texts"
        case "extra_roundings":
            sound = type(value) is int and value >= 0
            return "" if sound else "extra_roundings that are no int of at least 0"
        case "explicit":
            return "" if type(value) is bool else "an explicit that is neither True nor False"
    if type(value) is not str:
        return f"a {label} that is {_kind(value)}, not a text"
    limit = _TARGET_LIMIT if label in (*_TARGETS, "resource") else NAME_LIMIT
    if len(value) > limit:
        return f"a {label} of {len(value):,} characters; {limit} are allowed"
    if not (value.isascii() and value.isprintable()):
        return f"the {label} {plain_name(value)}, which is not printable ASCII"
    if label in _NAMES and not _NAME.fullmatch(value):
        return f"the {label} {plain_name(value)}; names consist of A-Z, a-z, 0-9, '_', '.' and '-'"
    return ""


def _check_requires(value: object) -> str:
    if type(value) is not Requires:
        return f"requires that is {_kind(value)}, not a Requires"
    sets = (value.features, value.architectures)
    if not all(type(s) is frozenset and all(type(i) is str for i in s) for s in sets):
        return "requires whose features or architectures are no frozenset of texts"
    dtypes = value.dtypes
    if type(dtypes) is not tuple or not all(type(dtype) is str for dtype in dtypes):
        return "requires whose dtypes are no tuple of texts"
    dims: Mapping[str, Dim] = value.dims
    if type(dims) not in (dict, MappingProxyType):
        return "requires whose dims are no dict"
    for name, dim in dims.items():
        if type(name) is not str or type(dim) is not Dim:
            return "requires whose dims are not of the form {'name': Dim(...)}"
        bounds = (dim.at_least, dim.at_most, dim.multiple_of)
        if not all(bound is None or type(bound) is int for bound in bounds):
            return f"requires whose dim {plain_name(name)} has a bound that is no int"
        if type(dim.one_of) is not tuple:
            return f"requires whose dim {plain_name(name)} has a one_of that is no tuple"
    return ""


def _shown(record: object) -> str:
    name = getattr(record, "name", None)
    return plain_name(name) if type(name) is str else "without a name"


def _kind(value: object) -> str:
    name = plain_name(type(value).__name__)[1:-1]
    return f"{'an' if name[:1].lower() in set('aeiou') else 'a'} {name}"


def _check_layer(record: LayerEntry, found: object) -> list[str]:
    from interposer._contract.layer import PluggableLayer, check_replacement

    if not (isinstance(found, type) and issubclass(found, PluggableLayer)):
        return [f"layer {record.name!r} is {found!r:.100}, which does not subclass PluggableLayer"]
    standard = _standard(found, record.layer_id)
    if standard is None:
        return [
            f"layer {record.name!r} is {found.__qualname__}, which subclasses no layer "
            f"whose layer_id is {record.layer_id!r}"
        ]
    check_replacement(standard, found, record.name)
    return []


def _standard(found: type[PluggableLayer], layer_id: str) -> type[PluggableLayer] | None:
    return next((base for base in found.__mro__ if vars(base).get("layer_id") == layer_id), None)


def _check_platform(record: PlatformEntry, found: Any) -> list[str]:
    from interposer._contract.platform import Platform

    what = f"platform {record.name!r}"
    faults = _check_subclass(what, found, Platform) or [
        f"{what} has no {label}, which must be a text"
        for label in ("name", "device_type")
        if type(getattr(found, label, None)) is not str
    ]
    if not faults and found.name != record.name:
        faults = [f"{what} is {found.__qualname__}, whose name is {found.name!r}"]
    return faults


def _check_op(record: OpEntry, found: object) -> list[str]:
    from interposer._contract.op import CustomOp

    if not isinstance(found, CustomOp):
        return [f"op {record.name!r} is {_kind(found)}, not a CustomOp, which @custom_op makes"]
    if found.name != record.name:
        return [f"op {record.name!r} is a CustomOp whose name is {found.name!r:.100}"]
    return []


def _check_attention(record: AttentionEntry, found: Any) -> list[str]:
    from interposer._contract.attention import AttentionBackend

    return _check_subclass(f"attention backend {record.name!r}", found, AttentionBackend)


def _check_scheme(record: SchemeEntry, found: Any) -> list[str]:
    from interposer._contract.quantization import QuantizationScheme

    what = f"scheme {record.name!r}"
    faults = _check_subclass(what, found, QuantizationScheme)
    method = getattr(found, "method", None)
    if not faults and method != record.method:
        qualname = found.__qualname__
        faults = [f"{what} is {qualname}, whose method is {method!r:.100}, not {record.method!r}"]
    return faults


def _check_checkpoint(record: CheckpointEntry, found: Any) -> list[str]:
    from interposer._contract.checkpoint import CheckpointFile

    return _check_subclass(f"format of files {record.name!r}", found, CheckpointFile)


def _check_subclass(what: str, found: Any, parent: type) -> list[str]:
    if not (isinstance(found, type) and issubclass(found, parent)):
        return [f"{what} is {found!r:.100}, which does not subclass {parent.__name__}"]
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    return [f"{what} lacks the required members {', '.join(missing)}"] if missing else []


_CHECKS: dict[type[Record], tuple[str, Callable[[Any, Any], list[str]]]] = {
    LayerEntry: ("layer", _check_layer),
    PlatformEntry: ("platform", _check_platform),
    OpEntry: ("op", _check_op),
    AttentionEntry: ("attention backend", _check_attention),
    SchemeEntry: ("scheme", _check_scheme),
    CheckpointEntry: ("format of files", _check_checkpoint),
}
