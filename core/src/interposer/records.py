"""The declarative records that a plugin returns.

Everything heavy is named by an import string, ``"package.module:attribute"``, and loaded only
when it was chosen. This module imports neither torch nor any plugin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from interposer.errors import RecordError
from interposer.requires import Requires

__all__ = [
    "PROPERTIES",
    "AttentionEntry",
    "Kernel",
    "LayerEntry",
    "OpEntry",
    "PlatformEntry",
    "Record",
    "SchemeEntry",
    "load_target",
]

PROPERTIES = frozenset(
    {"batch_invariant", "deterministic", "graph_safe", "in_place", "opaque", "traceable"}
)
"""What a kernel may promise about itself."""


@dataclass(frozen=True, slots=True)
class OpEntry:
    """Names a ``CustomOp``: ``target`` is the op object, defined beside its reference."""

    name: str
    target: str

    def __post_init__(self) -> None:
        _check(self.name, self.target)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of a custom op.

    Attributes:
        op: name of the op that is implemented.
        name: ``<op>_<technique>``, unique among the kernels of one distribution.
        target: import string of a function with the op's signature.
        platform: name of the platform that it runs on; empty runs on any.
        requires: what can be judged without importing the kernel.
        predicate: import string of ``(Request) -> Verdict`` for what cannot be declared.
        prepare: import string of a function that takes the op's constant tensors by name and
            returns what the kernel wants instead, once, after the weights were loaded.
        score: the higher wins among accepted kernels; the reference has 0.
        properties: promises, a subset of ``PROPERTIES``.
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

    def __post_init__(self) -> None:
        _check(self.name, self.target, self.predicate, self.prepare)
        unknown = sorted(self.properties - PROPERTIES)
        if unknown:
            known = ", ".join(sorted(PROPERTIES))
            raise RecordError(f"kernel {self.name!r} has unknown properties {unknown}; known: {known}")


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """A class for a layer id: the standard one, or a replacement that subclasses it."""

    layer_id: str
    name: str
    target: str
    platform: str = ""
    requires: Requires = field(default_factory=Requires)
    predicate: str = ""
    score: float = 10.0

    def __post_init__(self) -> None:
        _check(self.name, self.target, self.predicate)


@dataclass(frozen=True, slots=True)
class AttentionEntry:
    """An ``AttentionBackend`` class; its ``accepts`` judges the specification."""

    name: str
    target: str
    platform: str = ""
    requires: Requires = field(default_factory=Requires)
    score: float = 10.0

    def __post_init__(self) -> None:
        _check(self.name, self.target)


@dataclass(frozen=True, slots=True)
class SchemeEntry:
    """A ``QuantizationScheme`` class for one ``quant_method`` of checkpoints."""

    method: str
    name: str
    target: str
    score: float = 10.0

    def __post_init__(self) -> None:
        _check(self.name, self.target)


@dataclass(frozen=True, slots=True)
class PlatformEntry:
    """A ``Platform`` class; its ``probe`` says whether this machine has such a device."""

    name: str
    target: str
    score: float = 10.0

    def __post_init__(self) -> None:
        _check(self.name, self.target)


Record = OpEntry | Kernel | LayerEntry | AttentionEntry | SchemeEntry | PlatformEntry


def load_target(target: str) -> Any:
    """Return what an import string names.

    Raises: RecordError: the module lacks the attribute. An ImportError of the module passes.
    """
    module_name, _, attribute = target.partition(":")
    module = import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise RecordError(f"{target!r} points nowhere: {module_name} has no {attribute!r}") from None


def _check(name: str, target: str, *optional_targets: str) -> None:
    if not name:
        raise RecordError(f"a record for {target!r} has no name")
    for import_string in (target, *(t for t in optional_targets if t)):
        module, _, attribute = import_string.partition(":")
        parts = [*module.split("."), attribute]
        if not all(part.isidentifier() for part in parts):
            raise RecordError(
                f"{name!r} names {import_string!r}, which is not of the form 'package.module:name'"
            )
