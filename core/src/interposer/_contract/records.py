"""The declarative records that a plugin returns.

Everything heavy is named by an import string, ``"package.module:attribute"``, and loaded only
when it was chosen. This module imports neither torch nor any plugin.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from interposer._contract.errors import RecordError, nearest_first
from interposer._contract.requires import Requires

PROPERTIES = frozenset(
    {"batch_invariant", "deterministic", "graph_safe", "in_place", "opaque", "traceable"}
)
"""The promises that a kernel may make about itself."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
"""The collectives that a communicator may have, and the names of its methods."""

FUSED_COLLECTIVES = ("all_reduce_add_rms_norm",)
"""Methods that do a collective and the op behind it; where there is none, one follows the other."""

NAMES = ("name", "op", "layer_id", "method", "suffix")
"""The fields that hold names; none may be empty."""

TARGETS = ("target", "predicate", "prepare", "restore", "confirm", "cases", "examples")
"""The fields that hold import strings; all but the first may be empty."""


class _Checked:
    """A record that is refused where it is made, if it cannot mean anything."""

    __slots__ = ()

    def __post_init__(self) -> None:
        _check(self)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class OpEntry(_Checked):
    """Names a ``CustomOp``: ``target`` is the op object, defined beside its reference.

    Attributes:
        properties: what the reference promises, a subset of ``PROPERTIES``.
        emulation: how the reference does without the arithmetic that the op is meant for, such as
            ``"dequantizes, then multiplies floats"``. It is told where the reference is chosen,
            and a configuration can refuse it.
    """

    name: str
    target: str
    properties: frozenset[str] = frozenset()
    emulation: str = ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of a custom op.

    Attributes:
        op: name of the op that is implemented.
        name: ``<op>_<technique>``, unique among the kernels of one distribution; not
            ``reference``, which is the op's own definition.
        target: import string of a function with the op's signature.
        platform: name of the platform that it runs on; empty runs on any.
        requires: what can be judged without importing the kernel.
        predicate: import string of ``(Request) -> Verdict`` for what cannot be declared.
        prepare: import string of a function that takes the op's constant tensors by name and
            returns what the kernel wants instead, once, after the weights were loaded.
        restore: import string of the inverse of ``prepare``: it takes what that returned and, as
            ``into``, empty tensors by name, and fills those with the constants, bit for bit; the
            weight can always be asked for.
        score: the higher wins among accepted kernels; the reference has 0.
        properties: promises, a subset of ``PROPERTIES``.
        form: name of what ``prepare`` returns, where kernels of several ops of one distribution
            hold one copy of it for the same tensors; without it a kernel holds a copy of its own.
        confirm: import string of ``(Request) -> Verdict``, asked in this process where the kernel
            would be chosen, and not of a device that is only described: for what takes long to find
            out, such as whether a library that compiles itself can be imported.
        extra_roundings: to the dtype of results on the way, beyond those that the op's tolerance
            allows: of what the kernel stores in fewer bits than the op defines. Whoever compares it
            with the reference allows as many more.
        proven_on: architectures on which it was compared with the reference; empty is none, and
            None, which says nothing, counts as all. What is not proven goes behind what is.
        layout: version of what ``prepare`` returns, where that is tensors whose bytes mean the same
            in every process on devices of one capability: a file may hold them. 0 is any other.
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
            if (held := getattr(self, label)) and not self.prepare:
                raise RecordError(
                    f"{self.name!r} has the {label} {held!r}, but prepares nothing. "
                    f"Try: leave out the {label}"
                )
        if self.name == "reference":
            raise RecordError(f"a kernel for {self.op!r} is named 'reference', as the op itself is")


@dataclass(frozen=True, slots=True)
class LayerEntry(_Checked):
    """A class for a layer id: the standard one, or a replacement that subclasses it.

    ``cases`` of a standard layer is the import string of a ``LayerCaseGenerator``, on whose cases
    the conformance suite compares replacements with it. ``properties`` are promises of the layer's
    own code; what the kernels that it binds promise, they say themselves.
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
    """An ``AttentionBackend`` class; its ``accepts`` judges the specification.

    ``predicate`` is an import string of ``(AttentionSpec, Capability) -> Verdict`` that answers
    in place of ``accepts``, so that the backend's own module is not imported to judge it.

    ``page_sizes`` are numbers of tokens in a page that an engine may choose among, the preferred
    one first; empty leaves the number to the engine. ``proven_on`` is that of ``Kernel``.
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
    """A ``QuantizationScheme`` class for one ``quant_method`` of checkpoints.

    ``examples`` is the import string of a function without parameters that returns settings of
    checkpoints by label, on which the conformance suite tries the scheme. They must quantize
    ``model.layers.0.self_attn.q_proj``, a linear layer of 512 inputs, or else the experts
    ``model.layers.0.mlp.experts``, of 128 inputs and 64 inside.

    ``instead_of`` are methods that nobody reads, for which this one is recommended.
    """

    method: str
    name: str
    target: str
    score: float = 10.0
    examples: str = ""
    instead_of: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelEntry(_Checked):
    """A ``ModelFamily`` class for the ``architectures`` that config.json names.

    ``reads`` are the fields of config.json that it computes with, which explanations show.

    ``examples`` is the import string of a function without parameters that returns the content of
    config.json by label, of models with few weights. The conformance suite compares the family on
    them with the class of transformers that has the architecture's name.
    """

    architectures: tuple[str, ...]
    name: str
    target: str
    score: float = 10.0
    examples: str = ""
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A ``CheckpointFile`` class for the files whose names end in ``suffix``, such as ``.gguf``."""

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
    """A ``Platform`` class; its ``probe`` says whether this machine has such a device.

    ``driver_files`` are absolute paths whose content changes when the driver does: verdicts and
    measurements are kept per driver. An ``explicit`` platform is taken only where it is named, and
    not even probed before: nobody wants a simulator because nothing better accepts the machine.

    ``runs`` are names of other platforms whose kernels, layers and attention backends run here too.
    All else that these require is judged by this platform's own devices. It is not followed
    further, to what those platforms state in turn; they need not be installed.
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
        for other in self.runs:
            if not (isinstance(other, str) and other):
                raise RecordError(f"{runs} {other!r}, which is not the name of a platform")
            if other == self.name:
                mend = "leave it out; what names a platform runs there anyway"
                raise RecordError(f"{runs} {other!r}, which is itself. Try: {mend}")


@dataclass(frozen=True, slots=True)
class CommunicatorEntry(_Checked):
    """A ``Communicator`` class for the collectives that it names; all but fused ones by default.

    Its requests state ``ranks``, ``hosts`` and ``platforms`` as numbers of different ones, and
    ``bytes`` of one rank, so that ``requires`` can say for which sizes and topologies it is.
    ``predicate`` and ``confirm`` are those of ``Kernel``, and so is ``proven_on``.
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
    """A description of a device of ``platform``: a JSON file inside the plugin's package.

    ``resource`` is ``"package:path/inside.json"``, see
    ``interposer_testing.described.DeviceDescription``.
    """

    name: str
    platform: str
    resource: str


@dataclass(frozen=True, slots=True)
class TuningEntry(_Checked):
    """A table measured on the devices whose name matches the glob ``device``.

    ``resource`` is ``"package:path/inside.json"``, see ``Table``.
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
    """Return kind, subject and name, which no two records of one distribution share."""
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
    """Return what an import string names.

    Raises: RecordError: the module lacks the attribute. An ImportError of the module passes.
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
    """Return the file that ``"package:path/inside.json"`` names, without importing the package.

    Raises: RecordError: there is no such package or file.
    """
    package, _, inside = resource.partition(":")
    # The top level alone: find_spec would import the parents of a dotted name.
    top, *rest = package.split(".")
    spec = find_spec(top)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, *rest, inside)
        if path.is_file():
            return path
    raise RecordError(f"{resource!r} points nowhere: the package {package!r} has no such file")


def _check(record: Record) -> None:
    """Refuse what cannot mean anything; exact types are checked with the plugin."""
    for label in (*NAMES, "device"):
        value = getattr(record, label, "absent")
        if not (isinstance(value, str) and value):
            raise RecordError(f"{record!r} has the {label} {value!r}, which is not a name")
    score = getattr(record, "score", 0.0)
    if not isinstance(score, int | float) or math.isnan(score):
        raise RecordError(f"{record.name!r} has the score {score!r}, which is not a number")
    unknown = sorted(getattr(record, "properties", frozenset()) - PROPERTIES)
    if unknown:
        known = ", ".join(sorted(PROPERTIES))
        raise RecordError(f"{record.name!r} has unknown properties {unknown}; known: {known}")
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
