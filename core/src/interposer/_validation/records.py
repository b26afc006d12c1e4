"""Checks of declared records, without running targets, and of the records' classes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from interposer._contract.errors import RecordError, described, foreign_errors
from interposer._contract.records import (
    COLLECTIVES,
    FUSED_COLLECTIVES,
    NAMES,
    TARGETS,
    AttentionEntry,
    CheckpointEntry,
    CommunicatorEntry,
    DeviceEntry,
    Kernel,
    LayerEntry,
    ModelEntry,
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
from interposer_sandbox import check_import_string, is_loaded

if TYPE_CHECKING:
    from interposer._contract.layer import PluggableLayer

MOST_RECORDS = 1_000
"""The most records that one plugin may declare."""

NAME_LIMIT = 100
"""The most characters that a name may have."""

NAME_LETTERS = "A-Z, a-z, 0-9, '_', '.' and '-'"
"""The characters of names, for display."""

_COLLECTIVES = (*COLLECTIVES, *FUSED_COLLECTIVES)
_NAMES = f"names, of at most {NAME_LIMIT} of {NAME_LETTERS}"
_KINDS = get_args(Record)
_TARGET_LIMIT = 300
# Planning tries every page size with every layer, so the number of sizes is limited.
_MOST_SIZES = 64
_LARGEST_PAGE = 65_536
# Excluded characters have a meaning in rules and pins: / * @ , = and spaces.
_NAME = re.compile(r"[A-Za-z0-9_.-]*")


def check_records(records: Iterable[object]) -> list[str]:
    """Return all faults in the records of one plugin.

    Targets are not imported; targets that are already imported are checked. Faults that only an
    import could reveal are not found.
    """
    records = list(records)
    return check_facts(records) or [*_check_targets(records)]  # type: ignore[arg-type]


def check_facts(records: Iterable[object]) -> list[str]:
    """Return the faults in records, without looking up targets."""
    records = list(records)
    if len(records) > MOST_RECORDS:
        return [f"declares more than {MOST_RECORDS:,} records"]
    # By exact class: a subclass could override comparison and display.
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
    """Load the classes of layers and platforms, and return the faults found.

    Other classes are checked if already imported. A class with a failing import is skipped, because
    requirements may be missing on this machine only.

    Args:
        load: returns the object of an import string.
        begin: receives a description of each stage, as in "loading platform 'acme'".
    """
    faults: list[str] = []
    for record in records:
        if isinstance(record, Kernel | DeviceEntry | TuningEntry):
            continue
        # Layers and platforms are loaded in any case; other modules may be costly to import.
        if not isinstance(record, LayerEntry | PlatformEntry) and not is_loaded(record.target):
            continue
        label = f"{_PARENTS[type(record)][0]} {record.name!r}"
        begin(f"loading {label}")
        try:
            faults += _check_class(label, record, load(record.target))
        except ImportError:
            continue
        except RecordError as error:
            faults.append(str(error))
        except foreign_errors() as error:
            faults.append(f"loading {label} raised {described(error)}")
    return faults


def is_name(text: str) -> bool:
    """Tell whether a text is a valid name, which needs no quoting in rules and shells."""
    return 0 < len(text) <= NAME_LIMIT and bool(_NAME.fullmatch(text))


def plain_name(name: str) -> str:
    """Return at most a hundred characters of ``name`` as a quoted ASCII literal."""
    return ascii(name if len(name) <= NAME_LIMIT else f"{name[:NAME_LIMIT]}...")


def _check_identities(records: list[Record]) -> Iterator[str]:
    for record_identity, count in Counter(map(identity, records)).items():
        if count > 1:
            yield f"declares {' '.join(filter(None, record_identity))} twice"


def _check_targets(records: list[Record]) -> Iterator[str]:
    targets: dict[tuple[str, bool], str] = {}
    for record in records:
        if isinstance(record, DeviceEntry | TuningEntry):
            try:
                resource_path(record.resource)
            except (RecordError, ValueError) as error:
                yield f"{record.name!r}: {error}"
            continue
        for label in TARGETS:
            if target := getattr(record, label, ""):
                is_called = label != "target" or isinstance(record, Kernel)
                # Many records share a target, which is checked once.
                targets.setdefault((target, is_called), f"{record.name!r}")
    for (target, is_called), name in targets.items():
        if fault := check_import_string(target):
            yield f"{name} names {target!r}: {fault}"
        elif is_called and is_loaded(target) and not callable(target_object := load_target(target)):
            yield f"{name} names {target!r}, which is {_kind(target_object)}, not a function"


def _check_fields(record: object) -> Iterator[str]:
    name = getattr(record, "name", None)
    label = plain_name(name) if type(name) is str else "without a name"
    for field in fields(record):  # type: ignore[arg-type]
        fault = _check_field(field.name, getattr(record, field.name, None))
        if fault:
            yield f"{type(record).__name__} {label} has {fault}"


def _check_field(label: str, value: object) -> str:
    """Describe the fault in a field as the end of a sentence, or return ""."""
    if label == "requires":
        return _check_requires(value)
    if label in _SOUND:
        is_sound, fault = _SOUND[label]
        return "" if is_sound(value) else fault
    if type(value) is not str:
        return f"a {label} that is {_kind(value)}, not a text"
    limit = _TARGET_LIMIT if label in (*TARGETS, "resource") else NAME_LIMIT
    if len(value) > limit:
        return f"a {label} of {len(value):,} characters; {limit} are allowed"
    if not (value.isascii() and value.isprintable()):
        return f"the {label} {plain_name(value)}, which is not printable ASCII"
    if label in (*NAMES, "platform") and not _NAME.fullmatch(value):
        return f"the {label} {plain_name(value)}; names consist of {NAME_LETTERS}"
    return ""


def _texts(kind: type[frozenset[str] | tuple[str, ...]]) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind and all(type(item) is str for item in value)


def _are_names(value: Any) -> bool:
    return _texts(tuple)(value) and all(map(is_name, value))


# By exact types: a subclass could override comparison and printing.
_SOUND: dict[str, tuple[Callable[[Any], bool], str]] = {
    "score": (
        lambda value: type(value) in (int, float) and math.isfinite(value),
        "a score that is not a finite number",
    ),
    "properties": (_texts(frozenset), "properties that are no frozenset of texts"),
    "proven_on": (
        lambda value: value is None or _texts(frozenset)(value),
        "proven_on that is neither None nor a frozenset of texts",
    ),
    "instead_of": (_texts(frozenset), "instead_of that are no frozenset of texts"),
    "driver_files": (_texts(tuple), "driver_files that are no tuple of texts"),
    "extra_roundings": (
        lambda value: type(value) is int and value >= 0,
        "extra_roundings that are no int of at least 0",
    ),
    "layout": (
        lambda value: type(value) is int and value >= 0,
        "a layout that is no int of at least 0",
    ),
    "page_sizes": (
        lambda value: (
            type(value) is tuple
            and len(value) <= _MOST_SIZES
            and all(type(i) is int and 0 < i <= _LARGEST_PAGE for i in value)
        ),
        f"page_sizes that are no tuple of at most {_MOST_SIZES} ints from 1 to {_LARGEST_PAGE:,}",
    ),
    "architectures": (
        lambda value: bool(value) and _are_names(value),
        f"architectures that are no tuple of {_NAMES}",
    ),
    "collectives": (
        lambda value: bool(value) and _are_names(value) and set(value) <= {*_COLLECTIVES},
        f"collectives that are no tuple of some of {', '.join(_COLLECTIVES)}",
    ),
    "reads": (_are_names, f"reads that are no tuple of {_NAMES}"),
    "runs": (_are_names, f"runs that are no tuple of {_NAMES}"),
    "explicit": (lambda value: type(value) is bool, "an explicit that is neither True nor False"),
}


def _check_requires(value: object) -> str:
    if type(value) is not Requires:
        return f"requires that is {_kind(value)}, not a Requires"
    if not (_texts(frozenset)(value.features) and _texts(frozenset)(value.architectures)):
        return "requires whose features or architectures are no frozenset of texts"
    if not _texts(tuple)(value.dtypes):
        return "requires whose dtypes are no tuple of texts"
    dims: Mapping[str, Dim] = value.dims
    if type(dims) not in (dict, MappingProxyType):
        return "requires whose dims are no dict"
    for name, dim in dims.items():
        if type(name) is not str or type(dim) is not Dim:
            return "requires whose dims are not of the form {'name': Dim(...)}"
        bounds = {type(limit) for limit in (dim.at_least, dim.at_most, dim.multiple_of)}
        if not bounds <= {int, type(None)}:
            return f"requires whose dim {plain_name(name)} has a bound that is no int"
        if type(dim.one_of) is not tuple:
            return f"requires whose dim {plain_name(name)} has a one_of that is no tuple"
    return ""


def _kind(value: object) -> str:
    name = plain_name(type(value).__name__)[1:-1]
    return f"{'an' if name[:1].lower() in set('aeiou') else 'a'} {name}"


def _check_class(label: str, record: Record, target_class: Any) -> Iterator[str]:
    parent = load_target(_PARENTS[type(record)][1])
    if isinstance(record, OpEntry):
        if not isinstance(target_class, parent):
            yield f"{label} is {_kind(target_class)}, not a CustomOp, which @custom_op makes"
        elif target_class.name != record.name:
            yield f"{label} is a CustomOp whose name is {target_class.name!r:.100}"
    elif not (isinstance(target_class, type) and issubclass(target_class, parent)):
        yield f"{label} is {target_class!r:.100}, which does not subclass {parent.__name__}"
    elif isinstance(record, LayerEntry):
        yield from _check_layer(label, record, target_class)
    elif missing := sorted(getattr(target_class, "__abstractmethods__", ())):
        yield f"{label} lacks the required members {', '.join(missing)}"
    elif isinstance(record, PlatformEntry):
        members = ("name", "device_type")
        unnamed = [
            member for member in members if type(getattr(target_class, member, None)) is not str
        ]
        yield from (f"{label} has no {member}, which must be a text" for member in unnamed)
        if not unnamed and target_class.name != record.name:  # type: ignore[attr-defined]
            yield f"{label} is {target_class.__qualname__}, whose name is {target_class.name!r}"  # type: ignore[attr-defined]
    elif isinstance(record, SchemeEntry):
        method = getattr(target_class, "method", None)
        if method != record.method:
            mismatch = f"whose method is {method!r:.100}, not {record.method!r}"
            yield f"{label} is {target_class.__qualname__}, {mismatch}"


def _check_layer(
    label: str, record: LayerEntry, layer_class: type[PluggableLayer]
) -> Iterator[str]:
    from interposer._contract.layer import check_replacement

    # The first class of the hierarchy with this layer id is the standard layer.
    for base in layer_class.__mro__:
        if vars(base).get("layer_id") == record.layer_id:
            check_replacement(base, layer_class, record.name)
            return
    yield (
        f"{label} is {layer_class.__qualname__}, which subclasses no layer "
        f"whose layer_id is {record.layer_id!r}"
    )


# Import strings, because most of these modules import torch.
_PARENTS: dict[type[Record], tuple[str, str]] = {
    LayerEntry: ("layer", "interposer._contract.layer:PluggableLayer"),
    PlatformEntry: ("platform", "interposer._contract.platform:Platform"),
    OpEntry: ("op", "interposer._contract.op:CustomOp"),
    AttentionEntry: ("attention backend", "interposer._contract.attention:AttentionBackend"),
    SchemeEntry: ("scheme", "interposer._contract.quantization:QuantizationScheme"),
    ModelEntry: ("model family", "interposer._contract.model:ModelFamily"),
    CheckpointEntry: ("format of files", "interposer._contract.checkpoint:CheckpointFile"),
    CommunicatorEntry: ("communicator", "interposer._contract.communicator:Communicator"),
}
