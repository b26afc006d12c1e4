"""Candidates for everything that a model can request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from interposer._contract.capability import Device
from interposer._contract.choice import Candidate, Choice
from interposer._contract.errors import nearest_first
from interposer._contract.records import AttentionEntry, CommunicatorEntry, Kernel, LayerEntry
from interposer._contract.request import Kind, Request
from interposer._contract.requires import Dim, Requires
from interposer._contract.verdict import Verdict
from interposer._plugins.acceptance import judge_requirements
from interposer._plugins.plugins import Plugin
from interposer._plugins.registry import Registry

KINDS: tuple[Kind, ...] = ("kernel", "attention", "layer", "scheme", "model", "communicator")
_RECORDS_WITH_REQUIREMENTS = (Kernel, LayerEntry, AttentionEntry, CommunicatorEntry)


@dataclass(frozen=True, slots=True)
class Option:
    """A candidate, and whether it can run on the device for at least some dtype and dims."""

    candidate: Candidate
    verdict: Verdict

    @property
    def platform(self) -> str:
        """The platform that the candidate runs on, or an empty string for any."""
        return getattr(self.candidate.record, "platform", "")


@dataclass(frozen=True, slots=True)
class Subject:
    """An op, layer id, scheme, architecture, collective or attention, with all candidates."""

    kind: Kind
    name: str
    options: tuple[Option, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}" if self.name else f"{self.kind} backends"


@dataclass(frozen=True, slots=True)
class Stray:
    """A kernel that is never chosen, because no plugin defines the op."""

    plugin: Plugin
    kernel: Kernel
    reason: str

    @property
    def said(self) -> str:
        """A sentence with the reason why the kernel is never chosen, and the next action."""
        return (
            f"Kernel {self.kernel.name!r} of {self.plugin.distribution} {self.plugin.version} "
            f"is for {self.reason}. Try: correct the name, or install the plugin that defines the "
            "op"
        )


def inventory(registry: Registry, device: Device) -> tuple[Subject, ...]:
    """Return everything that a model can request, with candidates by descending score."""
    all_subjects = []
    for kind in KINDS:
        for name in registry.subjects(kind):
            candidates = sorted(
                registry.candidates(kind, name), key=lambda c: (-c.score, c.provider, c.name)
            )
            options = (Option(c, _judge(registry, c, kind, name, device)) for c in candidates)
            all_subjects.append(Subject(kind, name, tuple(options)))
        if kind == "kernel":
            all_subjects += _stray_subjects(registry)
    return tuple(all_subjects)


def strays(registry: Registry) -> list[Stray]:
    """Return the kernels for ops that no plugin defines."""
    result = []
    for plugin, kernel in registry.records(Kernel):
        if kernel.op not in registry.ops:
            nearest = nearest_first(kernel.op, registry.ops)[:1]
            hint = f"; nearest: {nearest[0]!r}" if nearest else ""
            reason = f"the op {kernel.op!r}, which no installed plugin defines{hint}"
            result.append(Stray(plugin, kernel, reason))
    return result


def requirements(candidate: Candidate) -> list[str]:
    """Return the declared requirements of a candidate, one sentence part each."""
    record = candidate.record
    if not isinstance(record, _RECORDS_WITH_REQUIREMENTS):
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
    return [*needs, f"acceptance by {record.predicate}"] if record.predicate else needs


def reads(candidate: Candidate) -> list[str]:
    """Return a line with the fields of config.json that a model family uses."""
    field_names = getattr(candidate.record, "reads", ())
    return [f"reads {', '.join(field_names)}"] if field_names else []


def _stray_subjects(registry: Registry) -> Iterator[Subject]:
    by_op: dict[str, list[Option]] = {}
    for stray in strays(registry):
        plugin, kernel = stray.plugin, stray.kernel
        verdict = Verdict.refuse(f"it is for {stray.reason}")
        option = Option(
            Candidate(
                kernel.name,
                plugin.distribution,
                plugin.version,
                kernel.score,
                kernel,
                partial(_always, verdict),
            ),
            verdict,
        )
        by_op.setdefault(kernel.op, []).append(option)
    for op, options in sorted(by_op.items()):
        yield Subject("kernel", op, tuple(options))


def _judge(
    registry: Registry, candidate: Candidate, kind: Kind, name: str, device: Device
) -> Verdict:
    record = candidate.record
    if not isinstance(record, _RECORDS_WITH_REQUIREMENTS):
        return Verdict.accept()
    # Without dtypes and dims, which no request has fixed yet.
    requires = Requires(record.requires.features, record.requires.architectures)
    request = Request(kind, name, device.platform, device.capability)
    verdict = judge_requirements(replace(record, requires=requires), request, registry.runs)
    if verdict and not candidate.is_proven_on(device.capability.architecture):
        return Verdict.accept("its author never ran it there")
    return verdict


def _always(verdict: Verdict, _request: Request) -> Verdict:
    return verdict


def _bounds(dim: Dim) -> str:
    bounds = [f"one of {list(dim.one_of)}"] if dim.one_of else []
    if dim.at_least is not None:
        bounds.append(f"at least {dim.at_least}")
    if dim.at_most is not None:
        bounds.append(f"at most {dim.at_most}")
    if dim.multiple_of is not None:
        bounds.append(f"a multiple of {dim.multiple_of}")
    return " and ".join(bounds) or "stated"


@dataclass(frozen=True, slots=True)
class Row:
    """One distinct choice with the places in the model that share it."""

    choice: Choice
    prefixes: tuple[str, ...]
