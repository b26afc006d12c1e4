"""The declarative records that a plugin returns.

Every heavy object is named by an import string, ``"package.module:attribute"``, and loaded only
after the record was chosen. This module imports neither torch nor any plugin.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from interposer._contract.errors import RecordError, near_names, nearest_first
from interposer._contract.requires import Requires

PROPERTIES = frozenset(
    {
        *("batch_invariant", "deterministic", "differentiable", "graph_safe", "in_place"),
        *("opaque", "traceable"),
    }
)
"""The promises that a kernel may make about itself."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""The collectives that a communicator may have, and the names of its methods."""

FUSED_COLLECTIVES = ("all_reduce_add_rms_norm",)
"""Methods that fuse a collective and the op that follows it; optional in every communicator."""

NAMES = ("name", "op", "layer_id", "method", "suffix")
"""The fields that hold names, which must not be empty."""

TARGETS = ("target", "predicate", "prepare", "restore", "confirm", "cases", "examples")
"""The fields that hold import strings; only the first must not be empty."""


class _Checked:
    """Base of records that are checked at construction."""

    # Without it, the slots of subclasses would not save any memory.
    __slots__ = ()

    def __post_init__(self) -> None:
        _check(self)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class OpEntry(_Checked):
    """Declares an op: ``target`` names the ``CustomOp``, which is defined next to the reference.

    Attributes:
        properties: promises of the reference, a subset of ``PROPERTIES``.
        emulation: the reference's substitute for the arithmetic that the op is meant for, such as
            ``"dequantizes, then multiplies floats"``. Reports show the text if the reference is
            chosen, and a configuration can refuse emulation.
    """

    name: str
    target: str
    properties: frozenset[str] = frozenset()
    emulation: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Declares one kernel: an implementation of an op, with requirements and properties.

    Attributes:
        op: name of the op that is implemented.
        name: ``<op>_<technique>``, unique among the kernels of one distribution; not ``reference``,
            which is the op's own definition.
        target: import string of a function with the op's signature.
        platform: name of the platform that the kernel runs on; empty means any platform.
        requires: the requirements that can be judged without importing the kernel.
        predicate: import string of ``(Request) -> Verdict`` for requirements that ``requires``
            cannot declare.
        prepare: import string of a function that takes the op's constant tensors by name and
            returns the prepared constants by name; called once, after the weights were loaded.
        restore: import string of the inverse of ``prepare``: takes the prepared constants and, as
            ``into``, empty tensors by name, to be filled with the original constants, bit for bit.
        score: among the accepted kernels the highest score wins; the reference has 0.
        properties: promises, a subset of ``PROPERTIES``.
        form: name of the prepared form, if kernels of several ops of one distribution share one
            prepared copy of the same tensors; without ``form`` every kernel holds a separate copy.
        confirm: import string of ``(Request) -> Verdict``, called in this process when the kernel
            would be chosen, and never for a device that is only described. Meant for slow checks,
            such as the import of a library that compiles code.
        extra_roundings: roundings of intermediate results to the dtype, beyond the op's tolerance,
            for a kernel that stores fewer bits than the op defines. Comparisons with the reference
            allow as many more.
        proven_on: architectures on which the kernel was compared with the reference. Empty means
            none; None, which states nothing, counts as all. Unproven kernels rank after proven
            kernels.
        layout: version of the prepared form, if a file can store the prepared tensors because the
            bytes mean the same in every process on devices of one capability; otherwise 0.
    """

    op: str
    name: str
    target: str
    platform: str = ""
    requires: Requires = field(default_factory=Requires)
    predicate: str = ""
    prepare: str = ""
    score: float = 10.0
    properties: frozenset[str] = frozenset()
    form: str = ""
    confirm: str = ""
    extra_roundings: int = 0
    proven_on: frozenset[str] | None = None
    restore: str = ""
    layout: int = 0

    def __post_init__(self) -> None:
        _check(self)
        for label in ("form", "restore", "layout"):
            # All three describe the result of ``prepare``.
            if (value := getattr(self, label)) and not self.prepare:
                raise RecordError(
                    f"{self.name!r} has the {label} {value!r}, but prepares nothing. "
                    f"Try: leave out the {label}"
                )
        if "differentiable" in self.properties and self.prepare:
            raise RecordError(
                f"{self.name!r} promises to be differentiable, but prepares constants, which then "
                "get no gradient. Try: leave out the property, or prepare nothing"
            )
        if self.name == "reference":
            raise RecordError(f"a kernel for {self.op!r} is named 'reference', as the op itself is")


@dataclass(frozen=True, slots=True)
class LayerEntry(_Checked):
    """Declares a class for a layer id: the standard layer, or a subclass as replacement.

    ``cases`` of a standard layer is the import string of a ``LayerCaseGenerator``; the conformance
    suite compares replacements with the standard layer on these cases. ``properties`` are promises
    of the layer's own code; bound kernels have separate promises.
    """

    layer_id: str
    name: str
    target: str
    platform: str = ""
    requires: Requires = field(default_factory=Requires)
    predicate: str = ""
    score: float = 10.0
    cases: str = ""
    properties: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AttentionEntry(_Checked):
    """Declares an ``AttentionBackend`` class, whose ``accepts`` judges attention specs.

    ``predicate`` is an import string of ``(AttentionSpec, Capability) -> Verdict`` that replaces
    ``accepts``, so that the backend's module is not imported to judge a specification.

    ``page_sizes`` are page sizes in tokens from which an engine can choose, the preferred one
    first; empty leaves the size to the engine. ``proven_on`` is explained in ``Kernel``.
    """

    name: str
    target: str
    platform: str = ""
    requires: Requires = field(default_factory=Requires)
    predicate: str = ""
    score: float = 10.0
    properties: frozenset[str] = frozenset()
    page_sizes: tuple[int, ...] = ()
    proven_on: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class SchemeEntry(_Checked):
    """Declares a ``QuantizationScheme`` class for one ``quant_method`` of checkpoints.

    ``examples`` is the import string of a function without parameters that returns checkpoint
    settings by label, on which the conformance suite tests the scheme. The settings must quantize
    ``model.layers.0.self_attn.q_proj``, a linear layer with 512 inputs, or the experts
    ``model.layers.0.mlp.experts``, with hidden size 128 and intermediate size 64.

    ``instead_of`` are methods without any scheme, for which error texts recommend this one.
    """

    method: str
    name: str
    target: str
    score: float = 10.0
    examples: str = ""
    instead_of: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelEntry(_Checked):
    """Declares a ``ModelFamily`` class for the ``architectures`` that config.json names.

    ``reads`` are the fields of config.json that the family uses, for explanations.

    ``examples`` is the import string of a function without parameters that returns contents of
    config.json by label, each of a model with few weights. The conformance suite compares the
    family on these models with the transformers class that has the architecture's name.
    """

    architectures: tuple[str, ...]
    name: str
    target: str
    score: float = 10.0
    examples: str = ""
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """Declares a ``CheckpointFile`` class for files with a suffix such as ``.gguf``."""

    suffix: str
    name: str
    target: str
    score: float = 10.0

    def __post_init__(self) -> None:
        _check(self)
        if self.suffix != self.suffix.lower() or not re.fullmatch(r"\.[^./\\]+", self.suffix):
            raise RecordError(
                f"{self.name!r} has the suffix {self.suffix!r}, must be like '.acme', in lower case"
            )


@dataclass(frozen=True, slots=True)
class PlatformEntry:
    """Declares a ``Platform`` class, whose ``probe`` tells whether this machine has a device.

    ``driver_files`` are absolute paths of files that change with the driver: verdicts and
    measurements are stored per driver. An ``explicit`` platform is used, and probed, only if named
    by the user; a simulator is the typical case.

    ``runs`` are names of other platforms whose kernels, layers and attention backends run on this
    platform too. Further requirements are judged by this platform's devices. The relation is not
    transitive, and the other platforms need not be installed.
    """

    name: str
    target: str
    score: float = 10.0
    driver_files: tuple[str, ...] = ()
    explicit: bool = False
    runs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)
        runs = f"{self.name!r} runs"
        if not isinstance(self.runs, tuple):
            raise RecordError(f"{runs} {self.runs!r}, which is no tuple. Try: runs=('cpu',)")
        for platform in self.runs:
            if not (isinstance(platform, str) and platform):
                raise RecordError(f"{runs} {platform!r}, which is not the name of a platform")
            if platform == self.name:
                remedy = "leave it out; kernels of a platform always run on that platform"
                raise RecordError(f"{runs} {platform!r}, which is itself. Try: {remedy}")


@dataclass(frozen=True, slots=True)
class CommunicatorEntry(_Checked):
    """Declares a ``Communicator`` class for collectives; by default for all but fused ones.

    Requests for a collective state ``ranks`` (number of ranks), ``hosts`` and ``platforms``
    (numbers of distinct ones) and ``bytes`` (of one rank), so that ``requires`` can limit sizes and
    topologies. ``predicate``, ``confirm`` and ``proven_on`` are explained in ``Kernel``.
    """

    name: str
    target: str
    collectives: tuple[str, ...] = COLLECTIVES
    platform: str = ""
    requires: Requires = field(default_factory=Requires)
    predicate: str = ""
    confirm: str = ""
    score: float = 10.0
    properties: frozenset[str] = frozenset()
    proven_on: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class DeviceEntry(_Checked):
    """Declares the description of a device of ``platform``: a JSON file in the plugin's package.

    ``resource`` is ``"package:path/inside.json"``;
    ``interposer_testing.described.DeviceDescription`` documents the format.
    """

    name: str
    platform: str
    resource: str


@dataclass(frozen=True, slots=True)
class TuningEntry(_Checked):
    """Declares a table measured on the devices whose name matches the glob ``device``.

    ``resource`` is ``"package:path/inside.json"``; ``Table`` documents the format.
    """

    name: str
    device: str
    resource: str


Record = (
    OpEntry
    | Kernel
    | LayerEntry
    | AttentionEntry
    | SchemeEntry
    | ModelEntry
    | CheckpointEntry
    | PlatformEntry
    | CommunicatorEntry
    | DeviceEntry
    | TuningEntry
)


def identity(record: Record) -> tuple[str, str, str]:
    """Return kind, subject and name, which are unique among the records of one distribution."""
    subject = ""
    match record:
        case Kernel():
            subject = record.op
        case LayerEntry():
            subject = record.layer_id
        case SchemeEntry():
            subject = record.method
        case CheckpointEntry():
            subject = record.suffix
    return type(record).__name__, subject, record.name


def load_target(target: str) -> Any:
    """Import the object that an import string names.

    Raises: RecordError: the module lacks the attribute. An ImportError of the module is passed on.
    """
    module_name, _, attribute = target.partition(":")
    module = import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        nearest = ", ".join(nearest_first(attribute, vars(module))[:3])
        raise RecordError(
            f"{target!r} points nowhere: {module_name} has no {attribute!r}; nearest: {nearest}"
        ) from None


def resource_path(resource: str) -> Path:
    """Find the file of ``"package:path/inside.json"`` without importing the package.

    Raises: RecordError: the package or the file does not exist.
    """
    package, _, inside = resource.partition(":")
    # The top level alone: find_spec would import the parents of a dotted name.
    top, *subfolders = package.split(".")
    spec = find_spec(top)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, *subfolders, inside)
        if path.is_file():
            return path
    raise RecordError(f"{resource!r} points nowhere: the package {package!r} has no such file")


def _check(record: Record) -> None:
    """Raise RecordError for a meaningless field; exact types are checked with the plugin."""
    for label in (*NAMES, "device"):
        # A record without this field passes, because the default is a valid name.
        value = getattr(record, label, "absent")
        if not (isinstance(value, str) and value):
            raise RecordError(f"{record!r} has the {label} {value!r}, which is not a name")
    score = getattr(record, "score", 0.0)
    if not isinstance(score, int | float) or math.isnan(score):
        raise RecordError(f"{record.name!r} has the score {score!r}, which is not a number")
    unknown = sorted(getattr(record, "properties", frozenset()) - PROPERTIES)
    if unknown:
        raise RecordError(
            f"{record.name!r} has unknown properties {unknown}; known, nearest first: "
            f"{near_names(unknown[0], PROPERTIES)}"
        )
    if isinstance(record, DeviceEntry | TuningEntry):
        package, _, inside = record.resource.partition(":")
        if not all(part.isidentifier() for part in package.split(".")) or not inside:
            raise RecordError(
                f"{record.name!r} names {record.resource!r}, which is not of the form "
                "'package:path/inside.json'"
            )
        return
    optional = (getattr(record, label, "") for label in TARGETS[1:])
    for target in (record.target, *filter(None, optional)):
        module, _, attribute = target.partition(":")
        parts = [*module.split("."), attribute]
        if not all(part.isidentifier() for part in parts):
            raise RecordError(
                f"{record.name!r} names {target!r}, which is not of the form 'package.module:name'"
            )
