"""The records of all usable plugins, as candidates for the selection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from interposer.choice import Candidate
from interposer.config import Config, effective_config
from interposer.errors import FOREIGN_ERRORS, PluginError, RecordError, UnknownNameError
from interposer.judges import Judge, accept, judge_attention, judge_declared, judge_platform
from interposer.memo import memoized
from interposer.plugins import Plugin, Plugins, discover
from interposer.records import (
    AttentionEntry,
    Kernel,
    LayerEntry,
    OpEntry,
    PlatformEntry,
    Record,
    SchemeEntry,
    load_target,
)
from interposer.request import AttentionType, Kind

__all__ = ["Registry", "current_registry"]

_SUBJECTS: dict[Kind, str] = {
    "kernel": "op",
    "layer": "layer id",
    "scheme": "quantization method",
}


class Registry:
    """Candidates by kind and subject; built once from the plugins of one discovery."""

    def __init__(self, plugins: Plugins) -> None:
        self.plugins = plugins
        self._candidates: dict[Kind, dict[str, list[Candidate]]] = {
            kind: {} for kind in ("platform", "kernel", "layer", "attention", "scheme")
        }
        owners: dict[str, Plugin] = {}
        for plugin in plugins.loaded:
            for record in plugin.records:
                if isinstance(record, OpEntry):
                    _claim(owners, record, plugin)
                kind, subject, name, score, judge = _filed(record)
                candidate = Candidate(
                    name, plugin.distribution, plugin.version, score, record, judge
                )
                self._candidates[kind].setdefault(subject, []).append(candidate)
        self.ops: dict[str, OpEntry] = {
            record.name: record
            for plugin in plugins.loaded
            for record in plugin.records
            if isinstance(record, OpEntry)
        }

    def candidates(self, kind: Kind, subject: str = "") -> list[Candidate]:
        """Return every candidate for an op, a layer id or a quantization method.

        Platforms and attention backends have no subject.

        Raises: UnknownNameError: no installed plugin knows the subject.
        """
        known = self.ops if kind == "kernel" else self._candidates[kind]
        if subject and subject not in known:
            hint = "Is the plugin for it installed? `interposer plugins` lists what is."
            raise UnknownNameError(_SUBJECTS[kind], subject, known, hint)
        return self._candidates[kind].get(subject, [])

    def load(self, candidate: Candidate, target: str) -> Any:
        """Return what ``target``, an import string of the candidate's record, names.

        Raises: PluginError: it cannot be imported.
        """
        try:
            return load_target(target)
        except FOREIGN_ERRORS as error:
            plugin = next(
                plugin.name
                for plugin in self.plugins.loaded
                if plugin.distribution == candidate.provider and candidate.record in plugin.records
            )
            raise PluginError(
                plugin,
                candidate.origin,
                f"{candidate.name!r} was chosen, but {target!r} cannot be loaded: {error!r}",
                f"mend or reinstall it, or disable it: INTERPOSER_DISABLE={plugin}",
            ) from error

    def check_pins(self, config: Config) -> None:
        """Raise UnknownNameError for a pin on an op, layer id or attention type nobody knows."""
        types = get_args(AttentionType)
        for key in config.kernels:
            _check_known("op", key, self.ops, "in Config.kernels")
        for key in config.layers:
            _check_known("layer id", key, self._candidates["layer"], "in Config.layers")
        for key in config.attention:
            _check_known("attention type", key, types, "in Config.attention")


def current_registry(config: Config | None = None) -> Registry:
    """Return the registry for the configuration in force, one per set of disabled names."""
    return _registry(effective_config(config).disable)


@memoized
def _registry(disabled: frozenset[str]) -> Registry:
    return Registry(discover(disabled))


def _filed(record: Record) -> tuple[Kind, str, str, float, Judge]:
    """Return kind, subject, candidate name, score and judge of a record."""
    match record:
        case OpEntry():
            return "kernel", record.name, "reference", 0.0, accept
        case Kernel():
            return "kernel", record.op, record.name, record.score, judge_declared(record)
        case LayerEntry():
            return "layer", record.layer_id, record.name, record.score, judge_declared(record)
        case AttentionEntry():
            return "attention", "", record.name, record.score, judge_attention(record)
        case SchemeEntry():
            return "scheme", record.method, record.name, record.score, accept
        case PlatformEntry():
            return "platform", "", record.name, record.score, judge_platform(record)


def _claim(owners: dict[str, Plugin], record: OpEntry, plugin: Plugin) -> None:
    if record.name in owners:
        both = sorted((owners[record.name].distribution, plugin.distribution))
        raise RecordError(
            f"op {record.name!r} is defined by {both[0]} and by {both[1]}. "
            f"Try: disable one of them, INTERPOSER_DISABLE={both[0]} or {both[1]}"
        )
    owners[record.name] = plugin


def _check_known(kind: str, key: str, known: Iterable[str], where: str) -> None:
    name = key.partition("@")[0]
    if name not in known:
        raise UnknownNameError(kind, name, known, where=where)
