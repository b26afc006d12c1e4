"""Known run times of candidates: this host's measurements, then shipped tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch

from interposer._config.config import Config
from interposer._config.storage import default_store
from interposer._contract.capability import Device
from interposer._contract.choice import Candidate, Measured
from interposer._contract.errors import RecordError, StorageError
from interposer._contract.records import TuningEntry, resource_path
from interposer._contract.request import Request
from interposer._plugins.registry import Registry
from interposer._selection.figures import (
    KIND,
    Entry,
    Key,
    Measurement,
    address,
    plain,
    read_entries,
    this_host,
)
from interposer_sandbox import cached

Accepted = Callable[[], Sequence[Candidate]]


def torch_version() -> str:
    """Return the version of torch, with the build's tag."""
    return str(torch.__version__)


class Measurements:
    """The measurements for one device under one policy, read on first use."""

    def __init__(self, registry: Registry, device: Device, config: Config) -> None:
        self.registry = registry
        self.device = device
        self.store = default_store(config)
        self._uses_tables = config.tables

    def lookup(self, request: Request, accepted: Accepted) -> Measured | str | None:
        """Return the run times of the candidates that accept ``request``.

        This host's own measurements precede the tables of plugins. Among tables, the one with the
        longest glob for the device is first.

        Args:
            accepted: returns every candidate that accepts, regardless of the policy; called only if
                there are measurements.
        Returns: None if nothing is known; a string if the known measurements cannot be used, with
            the reason.
        """
        if not self._uses_tables or request.kind not in ("kernel", "attention"):
            return None
        problems = []
        for result in (
            self._lookup_host(request, accepted),
            *self._lookup_tables(request, accepted),
        ):
            if isinstance(result, Measured):
                return result
            problems += [result] if result else []
        return problems[0] if problems else None

    def key(self, request: Request) -> Key:
        """Return the key under which measurements for ``request`` are stored on this host."""
        assert request.kind in ("kernel", "attention")
        return Key(
            host=this_host(),
            device=self.device.name,
            platform=request.platform,
            kind=request.kind,
            name=request.name,
            dtype=request.dtype,
            dims=dict(request.dims),
            detail=None if request.detail is None else request.detail.to_json(),
        )

    def driver(self) -> str:
        """Return the identification of the device's driver."""
        return self.registry.driver(self.device.platform)

    def _lookup_host(self, request: Request, accepted: Accepted) -> Measured | str | None:
        source = "the measurements of this host"
        key = plain(self.key(request))
        try:
            value = self.store.read(KIND, key)
        except StorageError as error:
            return f"{source} cannot be used: {error.path} {error.reason}"
        if value is None:
            return None
        entry = Entry.stored(key, value)
        if isinstance(entry, str):
            return f"{source} cannot be used: {entry}"
        # Another torch or driver may change run times.
        for name, measured_version, current_version in (
            ("torch", entry.value.torch, torch_version()),
            ("the driver", entry.value.driver, self.driver()),
        ):
            if measured_version != current_version:
                changes = (
                    f"{name} changed from {_shown(measured_version)} to {_shown(current_version)}"
                )
                return _stale(source, changes)
        return _check_current(entry.value, accepted(), source)

    def _lookup_tables(self, request: Request, accepted: Accepted) -> list[Measured | str | None]:
        matching = [
            (record, plugin.source.origin)
            for plugin, record in self.registry.records(TuningEntry)
            if fnmatchcase(self.device.name, record.device)
        ]
        # The longest glob is the most specific; origin and name make the order deterministic.
        matching.sort(key=lambda pair: (-len(pair[0].device), pair[1], pair[0].name))
        results: list[Measured | str | None] = []
        for record, origin in matching:
            source = f"the table {record.name!r} of {origin}"
            try:
                entries = _shipped_entries(record.resource, self.device.name)
            except (RecordError, StorageError) as error:
                results.append(f"{source} cannot be used: {error}")
                continue
            entry = entries.get(address(self.key(request)))
            if entry is not None:
                results.append(_check_current(entry.value, accepted(), source))
        return results


@cached
def _shipped_entries(resource: str, device: str) -> dict[str, Entry]:
    """Read the newest entry per address of a shipped table, as if measured on ``device``."""
    newest: dict[str, Entry] = {}
    for entry in read_entries(resource_path(resource)):
        key_address = address(entry.key.model_copy(update={"device": device}))
        if key_address not in newest or newest[key_address].value.measured < entry.value.measured:
            newest[key_address] = entry
    return newest


def _check_current(
    value: Measurement, accepted: Sequence[Candidate], source: str
) -> Measured | str:
    """Return the run times, or why the measurement does not fit the candidates that accept now."""
    measured_versions = {name: figures.version for name, figures in value.candidates.items()}
    # A candidate that could not be measured counts as known, and is never chosen by time.
    measured_versions |= {name: version for name, (version, _) in value.failed.items()}
    current_versions = {candidate.qualified_name: candidate.version for candidate in accepted}
    changes = [
        f"{name} was added" for name in sorted(current_versions.keys() - measured_versions.keys())
    ]
    changes += [
        f"{name} stopped accepting the request"
        for name in sorted(measured_versions.keys() - current_versions.keys())
    ]
    changes += [
        f"{name} changed from {measured_versions[name]} to {current_versions[name]}"
        for name in sorted(current_versions.keys() & measured_versions.keys())
        if current_versions[name] != measured_versions[name]
    ]
    if changes:
        return _stale(source, ", ".join(changes))
    seconds = {name: figures.seconds for name, figures in value.candidates.items()}
    upper = {name: figures.high for name, figures in value.candidates.items()}
    return Measured(seconds, source, upper)


def _stale(source: str, changes: str) -> str:
    return f"{source} cannot be used, because since then {changes}. Try: interposer tune"


def _shown(version: str) -> str:
    return version[:12] or "unknown"
