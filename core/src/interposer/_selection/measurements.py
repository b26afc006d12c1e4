"""Known times of candidates: this host's measurements, then shipped tables."""

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
    """The figures for one device under one policy; nothing is read before it is asked for."""

    def __init__(self, registry: Registry, device: Device, config: Config) -> None:
        self.registry = registry
        self.device = device
        self.store = default_store(config)
        self._wanted = config.tables

    def lookup(self, request: Request, accepted: Accepted) -> Measured | str | None:
        """Return what those that accept ``request`` took for it.

        This host's own measurements go before the tables of plugins, of which the one with the
        longest glob for the device goes first.

        Args:
            accepted: returns every candidate that accepts, whatever the policy says of it; asked
                only if there are figures.
        Returns: None if nothing is known; a text if something is, but cannot be used, and why.
        """
        if not self._wanted or request.kind not in ("kernel", "attention"):
            return None
        problems = []
        for found in (self._own(request, accepted), *self._shipped(request, accepted)):
            if isinstance(found, Measured):
                return found
            problems += [found] if found else []
        return problems[0] if problems else None

    def key(self, request: Request) -> Key:
        """Return the key under which measurements for ``request`` are kept on this host."""
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
        """Return what tells the driver of the device apart."""
        return self.registry.driver(self.device.platform)

    def _own(self, request: Request, accepted: Accepted) -> Measured | str | None:
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
        for name, then, now in (
            ("torch", entry.value.torch, torch_version()),
            ("the driver", entry.value.driver, self.driver()),
        ):
            if then != now:
                changes = f"{name} was {_shown(then)}, is {_shown(now)}"
                return _stale(source, changes)
        return _fitting(entry.value, accepted(), source)

    def _shipped(self, request: Request, accepted: Accepted) -> list[Measured | str | None]:
        matching = [
            (record, plugin.source.origin)
            for plugin, record in self.registry.records(TuningEntry)
            if fnmatchcase(self.device.name, record.device)
        ]
        matching.sort(key=lambda pair: (-len(pair[0].device), pair[1], pair[0].name))
        found: list[Measured | str | None] = []
        for record, origin in matching:
            source = f"the table {record.name!r} of {origin}"
            try:
                entries = _shipped_entries(record.resource, self.device.name)
            except (RecordError, StorageError) as error:
                found.append(f"{source} cannot be used: {error}")
                continue
            entry = entries.get(address(self.key(request)))
            if entry is not None:
                found.append(_fitting(entry.value, accepted(), source))
        return found


@cached
def _shipped_entries(resource: str, device: str) -> dict[str, Entry]:
    """Return the newest entry by address; the table counts for every device that it is for."""
    found: dict[str, Entry] = {}
    for entry in read_entries(resource_path(resource)):
        at = address(entry.key.model_copy(update={"device": device}))
        if at not in found or found[at].value.measured < entry.value.measured:
            found[at] = entry
    return found


def _fitting(value: Measurement, accepted: Sequence[Candidate], source: str) -> Measured | str:
    """Return the figures, or why they are not those of the candidates that accept."""
    known = {name: figures.version for name, figures in value.candidates.items()}
    known |= {name: version for name, (version, _) in value.failed.items()}
    now = {candidate.qualified_name: candidate.version for candidate in accepted}
    changes = [f"{name} was not measured" for name in sorted(now.keys() - known.keys())]
    changes += [f"{name} does not accept any more" for name in sorted(known.keys() - now.keys())]
    changes += [
        f"{name} was {known[name]}, is {now[name]}"
        for name in sorted(now.keys() & known.keys())
        if now[name] != known[name]
    ]
    if changes:
        return _stale(source, ", ".join(changes))
    seconds = {name: figures.seconds for name, figures in value.candidates.items()}
    upper = {name: figures.high for name, figures in value.candidates.items()}
    return Measured(seconds, source, upper)


def _stale(source: str, changes: str) -> str:
    return f"{source} cannot be used: stale, as {changes}"


def _shown(version: str) -> str:
    return version[:12] or "unknown"
