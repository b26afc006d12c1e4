"""Loaders: functions that import the winner's object and, if necessary, construct it.

``select_and_load`` calls a loader for the winner. A loader that raises refuses its candidate, and
the next best one is loaded instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interposer._contract.attention import AttentionBackend, AttentionSpec
from interposer._contract.choice import Candidate
from interposer._contract.communicator import Communicator, Ranks
from interposer._contract.errors import InterposerError
from interposer._contract.layer import PluggableLayer, Site, check_replacement
from interposer._contract.model import ModelFamily
from interposer._contract.op import CustomOp
from interposer._contract.records import (
    AttentionEntry,
    CommunicatorEntry,
    Kernel,
    LayerEntry,
    ModelEntry,
    SchemeEntry,
)
from interposer._contract.verdict import Verdict
from interposer._examination.task import Task
from interposer._plugins.registry import Registry
from interposer._selection.select import CandidateRefusedError, Loader


def kernel_loader(registry: Registry, op: CustomOp[..., Any], described: bool) -> Loader:
    """Return a loader of a kernel's function, ``prepare`` and ``restore``; None for missing ones.

    Args:
        described: the device is only described, so the reference is loaded for every kernel.
    """

    def load(candidate: Candidate) -> tuple[Any, Any, Any]:
        record = candidate.record
        if described or not isinstance(record, Kernel):
            return op.reference, None, None
        prepare, restore = (
            registry.load(candidate, target) if target else None
            for target in (record.prepare, record.restore)
        )
        return registry.load(candidate, record.target), prepare, restore

    return load


def layer_loader(registry: Registry, standard: type[PluggableLayer], has_ranks: bool) -> Loader:
    """Return a loader that imports a replacement of a standard layer and checks its class."""

    def load(candidate: Candidate) -> type[PluggableLayer]:
        assert isinstance(candidate.record, LayerEntry)
        replacement: type[PluggableLayer] = registry.load(candidate, candidate.record.target)
        check_replacement(standard, replacement, candidate.qualified_name)
        # A class that inherits ``reduces`` may override the method that adds results up.
        if has_ranks and standard.reduces and not vars(replacement).get("reduces"):
            raise _refused("its class does not set `reduces`, so it may not sum over the ranks")
        return replacement

    return load


def backend_loader(
    registry: Registry,
    spec: AttentionSpec,
    site: Site,
    built: dict[tuple[str, AttentionSpec], AttentionBackend],
) -> Loader:
    """Return a loader that builds an attention backend, once for all layers of an equal spec.

    Args:
        built: the backends by qualified name and spec, to which new ones are added.
    """

    def load(candidate: Candidate) -> AttentionBackend:
        assert isinstance(candidate.record, AttentionEntry)
        key = (candidate.qualified_name, spec)
        if key not in built:
            backend = registry.load(candidate, candidate.record.target)
            # A backend whose ``accepts`` checks features one by one may predate this feature.
            backend.check_keywords(spec)
            built[key] = backend(spec, site)
        return built[key]

    return load


def communicator_loader(
    registry: Registry, ranks: Ranks, device: str, built: dict[str, Communicator]
) -> Loader:
    """Return a loader that builds a communicator, once for all collectives; None without a group.

    Args:
        built: the communicators by qualified name, to which new ones are added.
    """

    def load(candidate: Candidate) -> Communicator | None:
        assert isinstance(candidate.record, CommunicatorEntry)
        if ranks.group is None:
            return None
        name = candidate.qualified_name
        if name not in built:
            build = registry.load(candidate, candidate.record.target)
            built[name] = build(ranks, device)
        return built[name]

    return load


def scheme_loader(registry: Registry) -> Loader:
    """Return a loader of the class of a quantization scheme."""

    def load(candidate: Candidate) -> Any:
        assert isinstance(candidate.record, SchemeEntry)
        return registry.load(candidate, candidate.record.target)

    return load


class ModelLoader:
    """Loader that imports a model family and parses config.json with it.

    Attributes:
        first_error: the refusal of the first family that refused the content of config.json.
    """

    def __init__(self, registry: Registry, config: Mapping[str, Any], source: object) -> None:
        self.first_error: InterposerError | None = None
        self._registry = registry
        self._config = config
        self._source = source

    def __call__(self, candidate: Candidate) -> ModelFamily:
        """Parse the settings, after a trial in another process that detects a hanging parser."""
        assert isinstance(candidate.record, ModelEntry)
        target = candidate.record.target
        task = Task("model", {"target": target, "config": dict(self._config)})
        verdict = self._registry.trial(candidate, task)
        if not verdict:
            raise CandidateRefusedError(verdict)
        family = self._registry.load(candidate, target)
        try:
            settings = family.parse(self._config, self._source)
        except InterposerError as error:
            self.first_error = self.first_error or error
            raise
        if not isinstance(settings, ModelFamily):
            raise _refused(f"its parse returned {settings!r:.100}, not a ModelFamily")
        return settings


def _refused(reason: str) -> CandidateRefusedError:
    return CandidateRefusedError(Verdict.refuse(reason))
