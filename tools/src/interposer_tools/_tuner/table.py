"""Tables of measurements: written to files, merged, and kept as those of this host."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from interposer.tooling import Store, checksum, write_text
from interposer.tuning import KIND, Entry, address, read_entries, this_host


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NotMeasured(_Model):
    """A choice of the model that no measurement can decide, and why."""

    request: str
    reason: str


class Table(_Model):
    """Measurements, one entry per key.

    Attributes:
        not_measured: what a run left out; it is not written to files.
    """

    entries: tuple[Entry, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> Table:
        """Return the table in a file that ``write`` made.

        Raises: StorageError: it cannot be read, or is no intact table.
        """
        return cls(entries=read_entries(path))

    @classmethod
    def stored(cls, store: Store) -> Table:
        """Return the measurements in ``store``; what is corrupt there is left out."""
        found = (
            Entry.stored(entry.key, entry.value)
            for entry in store.entries(KIND)
            if not entry.problem
        )
        return cls(entries=tuple(entry for entry in found if isinstance(entry, Entry)))

    def write(self, path: str | Path) -> None:
        """Write the entries to a file, sorted, in place of what was there.

        Raises: StorageError: the file cannot be written.
        """
        entries = [entry.model_dump(mode="json") for entry in sorted(self.entries, key=_order)]
        facts = {"version": 1, "entries": entries, "checksum": checksum(entries)}
        write_text(Path(path), json.dumps(facts, indent=1) + "\n")

    def merge(self, other: Table) -> tuple[Table, tuple[Entry, ...]]:
        """Return the entries of both, and the older ones of them that newer ones replaced.

        Of two that were measured at the same time the other table's stays.
        """
        kept: dict[str, Entry] = {}
        replaced = []
        for entry in (*self.entries, *other.entries):
            place = _order(entry)
            older, newer = kept.get(place, entry), entry
            if older.value.measured > newer.value.measured:
                older, newer = newer, older
            kept[place] = newer
            if older != newer:
                replaced.append(older)
        missing = (*self.not_measured, *other.not_measured)
        return Table(entries=tuple(kept.values()), not_measured=missing), tuple(replaced)

    def install(self, store: Store) -> tuple[Entry, ...]:
        """Keep every entry as a measurement of this host unless a newer one is kept already.

        Returns: the entries that were replaced in ``store``.
        Raises: StorageError: an entry cannot be written.
        """
        host = this_host()
        own = Table(entries=tuple(_on_host(entry, host) for entry in self.entries))
        # Of several hosts' entries for one key the newest counts.
        newest, _ = Table().merge(own)
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
    """Keep ``entry`` in ``store``.

    Raises: StorageError: it cannot be written.
    """
    facts = entry.model_dump(mode="json")
    store.write(KIND, facts["key"], facts["value"])


def _order(entry: Entry) -> str:
    key = entry.key
    return "\0".join((key.kind, key.name, key.device, key.host, address(key)))


def _on_host(entry: Entry, host: str) -> Entry:
    return Entry(key=entry.key.model_copy(update={"host": host}), value=entry.value)
