"""Tables of measurements: read, merged, written to files, and stored for this host."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from interposer.tooling import Store, checksum, write_text
from interposer.tuning import KIND, Entry, address, read_entries, this_host


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NotMeasured(_Model):
    """A request that the tuner did not measure, with the reason."""

    request: str
    reason: str


class InProcess(_Model):
    """A candidate that the tuner timed in its own process, with the reason.

    The clock and the comparison of such a measurement can be changed by the candidate.
    """

    request: str
    candidate: str
    reason: str


class Table(_Model):
    """A table of measured run times, with one entry per measured request.

    Attributes:
        in_process: candidates that a run timed in the tuner's own process, which ``write`` omits.
        not_measured: requests that a run skipped, which ``write`` omits.
    """

    entries: tuple[Entry, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()
    in_process: tuple[InProcess, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> Table:
        """Read a table from a file that ``write`` wrote.

        Raises: StorageError: the file cannot be read, or is no intact table.
        """
        return cls(entries=read_entries(path))

    @classmethod
    def stored(cls, store: Store) -> Table:
        """Read the valid measurements in ``store``; skip corrupt ones."""
        entries = (
            Entry.stored(entry.key, entry.value)
            for entry in store.entries(KIND)
            if not entry.problem
        )
        return cls(entries=tuple(entry for entry in entries if isinstance(entry, Entry)))

    def write(self, path: str | Path) -> None:
        """Write the sorted entries to a file, and replace an existing file.

        Raises: StorageError: the file cannot be written.
        """
        entries = [entry.model_dump(mode="json") for entry in sorted(self.entries, key=_order)]
        facts = {"version": 1, "entries": entries, "checksum": checksum(entries)}
        write_text(Path(path), json.dumps(facts, indent=1) + "\n")

    def merge(self, other: Table) -> tuple[Table, tuple[Entry, ...]]:
        """Merge two tables; the newer measurement of a key wins, in a tie that of ``other``.

        Returns: the merged table, and the older measurements that were replaced.
        """
        newest: dict[str, Entry] = {}
        replaced = []
        for entry in (*self.entries, *other.entries):
            key = _order(entry)
            # The first entry of a key is compared with itself, which replaces nothing.
            older, newer = newest.get(key, entry), entry
            if older.value.measured > newer.value.measured:
                older, newer = newer, older
            newest[key] = newer
            if older != newer:
                replaced.append(older)
        skipped = (*self.not_measured, *other.not_measured)
        table = Table(
            entries=tuple(newest.values()),
            not_measured=skipped,
            in_process=(*self.in_process, *other.in_process),
        )
        return table, tuple(replaced)

    def install(self, store: Store) -> tuple[Entry, ...]:
        """Store every entry as a measurement of this host, unless a newer one is stored already.

        Returns: the entries that were replaced in ``store``.
        Raises: StorageError: an entry cannot be written.
        """
        host = this_host()
        local = Table(entries=tuple(_on_host(entry, host) for entry in self.entries))
        # A file can have entries of several hosts, which now have the same key: use the newest.
        newest, _ = Table().merge(local)
        before = {_order(entry): entry for entry in Table.stored(store).entries}
        replaced = []
        for entry in newest.entries:
            older = before.get(_order(entry))
            if older is not None and older.value.measured > entry.value.measured:
                continue
            write_entry(store, entry)
            if older is not None and older != entry:
                replaced.append(older)
        return tuple(replaced)


def write_entry(store: Store, entry: Entry) -> None:
    """Write one measured request to ``store``.

    Raises: StorageError: the entry cannot be written.
    """
    facts = entry.model_dump(mode="json")
    store.write(KIND, facts["key"], facts["value"])


def _order(entry: Entry) -> str:
    key = entry.key
    # NUL, because names may contain any printable separator.
    return "\0".join((key.kind, key.name, key.device, key.host, address(key)))


def _on_host(entry: Entry, host: str) -> Entry:
    return Entry(key=entry.key.model_copy(update={"host": host}), value=entry.value)
