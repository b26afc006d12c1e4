"""Explanations of choices: the policy, the reason, and the refusal of every other candidate."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, cast, get_args

from interposer._config.config import Config, config_sources, effective_config
from interposer._config.rules import Rule
from interposer._contract.capability import Device
from interposer._contract.errors import ConfigError, UnknownNameError, install_command
from interposer._contract.layer import ResolverProtocol
from interposer._contract.platform import Placement
from interposer._contract.records import load_target
from interposer._contract.request import AttentionType, Request
from interposer._contract.verdict import Refusal, Verdict
from interposer._explanation.inventory import Option, Row, Subject, inventory, requirements
from interposer._explanation.text import (
    refused_lines,
    row_lines,
    row_summary,
    subject_lines,
    subject_summary,
)
from interposer._plugins.registry import Registry, current_registry
from interposer._selection.placement import Planned, place, planned

VERSION = 1
"""The version of the format of ``Explanation.to_dict``."""

# The conformance kit depends on the core, so the core names it and imports it only on use.
_DESCRIBED = "interposer_testing.described:described_placement"


class Explainable(Protocol):
    """A model or a part of a model, with the resolver that made its choices."""

    @property
    def resolver(self) -> ResolverProtocol:
        """The resolver that made the choices."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of the policy: a field, the key in a mapping, and the source of the value."""

    field: str
    key: str
    value: str
    source: str

    def __str__(self) -> str:
        return f"{self.field}.{self.key}" if self.key else self.field


@dataclass(frozen=True, slots=True)
class Explanation:
    """All choices made for one model; prints as text, converts to JSON.

    The text has one line for each choice. ``all`` and ``why`` return explanations whose text has
    the refused candidates too.

    Attributes:
        policy: every setting that is not left to the selection.
        subjects: everything that can be chosen, if no model is explained.
        failures: kernels that failed at run time and were replaced.
        notes: further facts.
        unasked: everything that can be chosen, if a model is explained.
        all_candidates: the text includes the refused candidates.
        full: the text includes every place, requirement and traceback.
    """

    device: Device
    rows: tuple[Row, ...] = ()
    subjects: tuple[Subject, ...] = ()
    policy: tuple[Setting, ...] = ()
    failures: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    unasked: tuple[Subject, ...] = ()
    all_candidates: bool = False
    full: bool = False

    def all(self) -> Explanation:
        """Return this explanation with all candidates, including refused ones and the reasons.

        The candidates of other platforms are only counted.
        """
        return replace(self, all_candidates=True)

    def why(self, name: str) -> Explanation:
        """Return the explanation of one op, layer, attention type, scheme or architecture.

        The name of a collective works too. ``"platform"`` selects the platform, and ``"attention"``
        all attention types.

        Raises: ConfigError: the name is unknown, or is the name of a candidate.
        """
        rows = tuple(row for row in self.rows if name in _names(row.choice.request))
        known_subjects = (*self.subjects, *self.unasked)
        subjects = () if rows else tuple(s for s in known_subjects if name in _names(s))
        if not (rows or subjects):
            names = {n for row in self.rows for n in _names(row.choice.request)}
            names.update(n for subject in known_subjects for n in _names(subject))
            raise self._unknown(name, names)
        candidates = {r.candidate for row in rows for r in row.choice.refusals}
        candidates.update(row.choice.chosen.name for row in rows)
        is_unrequested = subjects and not self.subjects
        return replace(
            self,
            rows=rows,
            subjects=subjects,
            # Settings without a key, and for all names, affect this subject too.
            policy=tuple(s for s in self.policy if s.key.partition("@")[0] in (name, "*", "")),
            failures=tuple(f for f in self.failures if f.candidate in candidates),
            notes=(*self.notes, f"the model does not request {name!r}")
            if is_unrequested
            else self.notes,
            all_candidates=True,
            full=True,
        )

    def _unknown(self, name: str, names: Iterable[str]) -> ConfigError:
        """Build the error for a name that ``why`` does not accept."""
        # The name may be that of a candidate; then name the subjects that it serves.
        serves = {
            _names(subject)[0]
            for subject in (*self.subjects, *self.unasked)
            if any(name in (o.candidate.name, o.candidate.qualified_name) for o in subject.options)
        } | {
            row.choice.request.kind
            for row in self.rows
            if row.choice.request.kind == "platform"
            and name in (row.choice.chosen.name, *(r.candidate for r in row.choice.refusals))
        }
        if serves:
            first, *other_subjects = sorted(serves)
            more = f" and {len(other_subjects)} more" if other_subjects else ""
            return ConfigError(f"{name!r} is a candidate for {first!r}{more}. Try: --why {first}")
        kind = "op, layer id, attention type, scheme or architecture"
        return UnknownNameError(kind, name, names, "`interposer explain` lists all.")

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation's content as plain lists and dictionaries."""
        return {
            "version": VERSION,
            "device": {
                name: getattr(self.device, name) for name in ("platform", "torch_device", "name")
            },
            "policy": [
                {"setting": str(s), "value": s.value, "source": s.source} for s in self.policy
            ],
            "choices": [_choice_dict(row) for row in self.rows],
            "candidates": [
                {
                    "kind": subject.kind,
                    "name": subject.name,
                    "options": [_option_dict(option) for option in subject.options],
                }
                for subject in self.subjects
            ],
            "failures": [asdict(refusal) for refusal in self.failures],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return the explanation as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    def head(self) -> str:
        """The line about the device, and one line per note."""
        notes = (f"note: {note}" for note in self.notes)
        return "\n".join((f"device: {self.device.torch_device} ({self.device.name})", *notes))

    @property
    def hint(self) -> str:
        """The sentence that says how to show the omitted candidates; empty if there are none."""
        num_refused = sum(len(row.choice.refusals) for row in self.rows)
        num_omitted = num_refused + sum(len(subject.options) - 1 for subject in self.subjects)
        if self.all_candidates or not num_omitted:
            return ""
        return (
            f"{num_omitted} other candidates are not shown. Show them with --all, or those of one "
            "part with --why NAME. In Python: explanation.all(), explanation.why(NAME)"
        )

    def __str__(self) -> str:
        blocks = [[self.head]]
        if self.policy:
            lines = (f"  {setting} = {setting.value} ({setting.source})" for setting in self.policy)
            blocks.append(["policy:", *lines])
        if self.all_candidates:
            blocks += [row_lines(row, self.full) for row in self.rows]
            blocks += [subject_lines(subject, self.full) for subject in self.subjects]
        else:
            blocks.append([line for row in self.rows for line in row_summary(row)])
            blocks.append([subject_summary(subject) for subject in self.subjects])
        if self.failures:
            blocks.append(["failed while running:", *refused_lines(self.failures, self.full, "  ")])
        blocks.append([self.hint] if self.hint else [])
        return "\n\n".join("\n".join(block) for block in blocks if block)


def explain(
    model: Explainable | str | os.PathLike[str] | None = None,
    device: str | os.PathLike[str] | None = None,
    config: Config | None = None,
    dtype: str = "auto",
    quantization: str | Mapping[str, Any] | None = None,
    tensor_parallel: int | None = None,
    expert_parallel: Any = None,
) -> Explanation:
    """Explain every distinct choice for a model, or list everything that can be chosen.

    Args:
        model: an object that was built through a resolver; or a model directory, for which every
            choice is made but no weight is read; or None.
        device: a described device to choose for, by name or as a file, instead of this machine's; a
            built model is planned anew.
        config: policy that precedes all other sources; a built model has its own.
        dtype: to compute in, for a directory; ``"auto"`` takes the checkpoint's.
        quantization: the method for quantizing a directory's unquantized weights at load time, or
            the settings of a method; a built model has its own.
        tensor_parallel: the number of processes that compute a directory's model together, without
            starting any.
        expert_parallel: the expert parallelism, in the form that the planner takes.
    Raises:
        ConfigError: arguments other than ``model`` and ``device`` are given for a built model, one
            of the last three is given without a model, no plugin can plan ``model``, or, without a
            model, a rule names an unknown thing.
        NoCandidateError: every candidate for a part of the model was refused, or no platform can be
            used.
        UnknownNameError: ``device`` is neither a known name nor a file.
        StorageError: the file describes no device.
    """
    if not isinstance(device, str | os.PathLike | None):
        raise ConfigError(
            f"device is of the type {type(device).__name__}, must be the name or the file of a "
            "described device. Try: explain(model, device='graviton4')"
        )
    is_built = model is not None and not isinstance(model, str | os.PathLike)
    if is_built and not hasattr(model, "resolver"):
        raise ConfigError(
            f"model is of the type {type(model).__name__}, must be a model directory or a "
            "loaded model. Try: explain(path)"
        )
    if is_built and device is None:
        if config is not None:
            raise ConfigError(
                "explain() takes no config for a loaded model, which has one already. "
                "Try: explain(path, config=...)"
            )
        if quantization is not None:
            raise ConfigError(
                "explain() takes no quantization for a loaded model: its weights are "
                "stored as they are. Try: explain(path, quantization=...)"
            )
        for name, value in (("tensor", tensor_parallel), ("expert", expert_parallel)):
            if value is not None:
                raise ConfigError(
                    f"explain() takes no {name}_parallel for a loaded model. "
                    f"Try: explain(path, {name}_parallel=...)"
                )
        return _explain_built(cast(Explainable, model))
    parallel = {"tensor_parallel": tensor_parallel, "expert_parallel": expert_parallel}
    for name, value in {"quantization": quantization, **parallel}.items() if model is None else ():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} is about a model, and none is given. "
                f"Try: explain(path, {name}=...)"
            )
    registry = current_registry(config)
    placement = None if device is None else _described(registry, device)
    if model is not None:
        subject = cast("str | Planned", model)
        return _explain_built(planned(subject, config, dtype, placement, quantization, **parallel))
    # A model checks rules while it is planned; without one, nothing else would.
    registry.check_rules(effective_config(config))
    target = placement or place(config)
    return Explanation(
        target.device,
        (Row(target.choice, ("",)),),
        inventory(registry, target.device),
        settings(effective_config(config), target),
        notes=_notes(target),
    )


def _described(registry: Registry, device: str | os.PathLike[str]) -> Placement:
    try:
        placement = load_target(_DESCRIBED)(registry, device)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"device={device!r} is described, and {error.name} is not installed to read "
            f"descriptions. Try: {install_command('interposer-testing')}"
        ) from None
    return cast(Placement, placement)


def _explain_built(model: Explainable) -> Explanation:
    resolver = model.resolver
    placement: Placement | None = getattr(model, "placement", None)
    rows = (Row(choice, tuple(prefixes)) for choice, prefixes in resolver.choices.values())
    return Explanation(
        resolver.device,
        tuple(rows),
        policy=settings(resolver.config, placement),
        failures=tuple(resolver.failures),
        notes=(
            *_notes(placement),
            *resolver.notes,
            *getattr(model, "current_notes", ()),
            *_step_notes(model, "graphs", "decode steps run {} graphs", ("as", "without")),
            *_step_notes(model, "compiled", "steps are {}compiled", ("", "not ")),
        ),
        unasked=inventory(resolver.registry, resolver.device),
    )


def _notes(placement: Placement | None) -> tuple[str, ...]:
    """Return a note for a described device, because the choice of platform may not be shown."""
    return (placement.choice.why,) if placement is not None and placement.described else ()


def _step_notes(
    model: Explainable, name: str, text: str, words: tuple[str, str]
) -> tuple[str, ...]:
    """Return a note that says whether steps are captured or compiled, if the model can tell."""
    verdict: Verdict | None = getattr(model, name, None)
    if verdict is None:
        return ()
    statement = text.format(words[not verdict])
    return (f"{statement}: {verdict.reason}" if verdict.reason else statement,)


def _names(subject: Subject | Request) -> tuple[str, ...]:
    """Return the names by which ``Explanation.why`` selects a subject; for attention, all types."""
    if subject.kind == "attention" and isinstance(subject, Subject):
        return "attention", *get_args(AttentionType)
    if subject.kind == "attention":
        return subject.kind, subject.name
    return (subject.name or subject.kind,)  # platforms have no name


def _choice_dict(row: Row) -> dict[str, Any]:
    choice, request = row.choice, row.choice.request
    return {
        "kind": request.kind,
        "name": request.name,
        "dtype": request.dtype,
        "dims": dict(request.dims),
        "chosen": choice.chosen.name,
        "provider": choice.chosen.provider,
        "version": choice.chosen.version,
        "why": choice.why,
        "places": list(row.prefixes),
        "seconds": dict(choice.seconds),
        "notes": list(choice.notes),
        "refused": [asdict(refusal) for refusal in choice.refusals],
    }


def _option_dict(option: Option) -> dict[str, Any]:
    candidate = option.candidate
    return {
        "candidate": candidate.name,
        "provider": candidate.provider,
        "version": candidate.version,
        "score": candidate.score,
        "platform": option.platform,
        "requires": requirements(candidate),
        "properties": sorted(candidate.properties),
        "accepted": option.verdict.accepted,
        "reason": option.verdict.reason,
    }


def settings(config: Config, placement: Placement | None = None) -> tuple[Setting, ...]:
    """Return each setting of ``config`` with its source, in the order of the fields.

    A setting that none of the current sources has was an argument, or is a platform default.
    """
    sources = config_sources()
    result = []
    for name in Config.model_fields:
        if name in config.model_fields_set:
            value = getattr(config, name)
            entries = value if isinstance(value, Mapping) else {"": value}
            for key, entry in entries.items():
                # Sources are listed from the strongest, so the first match is the origin.
                origins = (s.name for s in sources if _set_by(s.config, name, key) == entry)
                result.append(Setting(name, key, _text(entry), next(origins, "argument")))
        if name == "kernels" and placement is not None:
            source = f"platform {placement.platform.name}"
            for op, kernel in placement.default_kernels.items():
                rule = config.kernels.get(op)
                if rule is None or not (rule.pin or rule.prefer):
                    result.append(Setting(name, op, _text(Rule(prefer=(kernel,))), source))
    return tuple(result)


def _set_by(config: Config, name: str, key: str) -> Any:
    """Return the value that ``config`` itself sets, or a marker that equals no value."""
    # None may be a value, so the function itself marks an unset field.
    if name not in config.model_fields_set:
        return _set_by
    value = getattr(config, name)
    return value.get(key, _set_by) if isinstance(value, Mapping) else value


def _text(value: Any) -> str:
    match value:
        case None:
            return "all"
        case bool():
            return "yes" if value else "no"
        case Set():
            return ", ".join(sorted(value)) or "none"
        case _:
            return str(value)
