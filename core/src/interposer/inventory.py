"""What there is to choose from, before any model asks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from interposer.capability import Device
from interposer.choice import Candidate
from interposer.judges import judge_requirements
from interposer.records import AttentionEntry, Kernel, LayerEntry
from interposer.registry import Registry
from interposer.request import Kind, Request
from interposer.requires import Dim, Requires
from interposer.verdict import Verdict

__all__ = ["Option", "Subject", "inventory", "requirements"]

KINDS: tuple[Kind, ...] = ("kernel", "attention", "layer", "scheme")


@dataclass(frozen=True, slots=True)
class Option:
    """A candidate, and whether the device would do, whatever the dtype and the dimensions."""

    candidate: Candidate
    verdict: Verdict

    @property
    def platform(self) -> str:
        """The platform that it runs on, or an empty string for any."""
        return getattr(self.candidate.record, "platform", "")


@dataclass(frozen=True, slots=True)
class Subject:
    """What there is to choose from for an op, a layer id, a scheme, or attention."""

    kind: Kind
    name: str
    options: tuple[Option, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}" if self.name else self.kind


def inventory(registry: Registry, device: Device) -> tuple[Subject, ...]:
    """Return everything that a model can ask for, with its candidates, the highest score first."""
    found = []
    for kind in KINDS:
        for name in registry.subjects(kind):
            candidates = sorted(
                registry.candidates(kind, name), key=lambda c: (-c.score, c.provider, c.name)
            )
            options = (Option(c, _judge(c, kind, name, device)) for c in candidates)
            found.append(Subject(kind, name, tuple(options)))
    return tuple(found)


def requirements(candidate: Candidate) -> list[str]:
    """Return what a candidate declares to need, one sentence part each."""
    record = candidate.record
    if not isinstance(record, Kernel | LayerEntry | AttentionEntry):
        return []
    needs = [f"platform {record.platform}"] if record.platform else []
    requires = record.requires
    if requires.architectures:
        needs.append(f"architecture {' or '.join(sorted(requires.architectures))}")
    if requires.features:
        needs.append(f"features {', '.join(sorted(requires.features))}")
    if requires.dtypes:
        needs.append(f"dtype {' or '.join(requires.dtypes)}")
    needs += [f"{name} {_bounds(dim)}" for name, dim in requires.dims.items()]
    return [*needs, f"what {record.predicate} says"] if record.predicate else needs


def _judge(candidate: Candidate, kind: Kind, name: str, device: Device) -> Verdict:
    record = candidate.record
    if not isinstance(record, Kernel | LayerEntry | AttentionEntry):
        return Verdict.accept()
    requires = Requires(record.requires.features, record.requires.architectures)
    request = Request(kind, name, device.platform, device.capability)
    return judge_requirements(replace(record, requires=requires), request)


def _bounds(dim: Dim) -> str:
    bounds = [f"one of {list(dim.one_of)}"] if dim.one_of else []
    if dim.at_least is not None:
        bounds.append(f"at least {dim.at_least}")
    if dim.at_most is not None:
        bounds.append(f"at most {dim.at_most}")
    if dim.multiple_of is not None:
        bounds.append(f"a multiple of {dim.multiple_of}")
    return " and ".join(bounds) or "stated"
