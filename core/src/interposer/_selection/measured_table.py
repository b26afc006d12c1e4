"""Measured tables: what candidates took for requests on a device, as data that can be shipped."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from interposer._config.storage import JSON, Store, checksum, write_text
from interposer._contract.errors import StorageError

KIND = "measurements"

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


def this_host() -> str:
    """Return the name under which this host's measurements are kept."""
    return platform.node() or "unknown"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Key(_Model):
    """What was measured where; two requests with equal keys get one figure.

    Attributes:
        device: the device's name, such as the model of a processor.
        detail: the typed request, such as an ``AttentionSpec``, as plain data.
    """

    host: Name
    device: str
    platform: Name
    kind: Literal["kernel", "attention"]
    name: Name
    dtype: str
    dims: dict[str, int | float | str | bool]
    detail: dict[str, JsonValue] | None = None

    def __str__(self) -> str:
        dims = " ".join(f"{name}={value}" for name, value in sorted(self.dims.items()))
        return f"{self.kind} {self.name!r} [{self.dtype} {dims}]".replace(" ]", "]")


class Figures(_Model):
    """What one candidate took.

    Attributes:
        version: of the distribution that provides it.
        seconds: geometric mean of the medians at each number of tokens.
        low: the same of the lower quartiles.
        high: the same of the upper quartiles.
        per_tokens: the median by number of tokens, written as decimal text.
    """

    version: str
    seconds: Seconds
    low: Seconds
    high: Seconds
    per_tokens: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]*$")], Seconds]

    def __str__(self) -> str:
        seconds, low, high = map(_duration, (self.seconds, self.low, self.high))
        return f"{seconds} ({low} to {high})"


class Measurement(_Model):
    """The value that is kept for a key.

    Attributes:
        driver: what tells the driver apart, empty where the platform names no files of one.
        failed: version and reason by candidate that could not be measured.
    """

    driver: str
    torch: str
    interposer: str
    measured: AwareDatetime
    candidates: dict[Name, Figures]
    failed: dict[Name, tuple[str, str]] = Field(default_factory=dict)


class Entry(_Model):
    """One key with what was measured for it."""

    key: Key
    value: Measurement

    @property
    def fastest(self) -> str:
        """The qualified name of the fastest candidate; empty if all failed."""
        found = self.value.candidates
        return min(found, key=lambda name: (found[name].seconds, name), default="")


class NotMeasured(_Model):
    """A choice of the model that no measurement can decide, and why."""

    request: str
    reason: str


class _File(_Model):
    version: Literal[1]
    entries: list[Entry]
    checksum: str


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
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise StorageError(path, f"cannot be read: {error}") from error
        mend = "export it again: interposer tune MODEL_DIR --export FILE"
        try:
            file = _File.model_validate_json(text)
            intact = file.checksum == checksum(json.loads(text)["entries"])
        except ValidationError as error:
            raise StorageError(path, f"is no table: {_first(error)}", mend) from error
        except ValueError as error:
            raise StorageError(path, f"is no table: {error}", mend) from error
        if not intact:
            raise StorageError(path, "is corrupt: content and checksum differ", mend)
        return cls(entries=tuple(file.entries))

    @classmethod
    def stored(cls, store: Store) -> Table:
        """Return the measurements in ``store``; what is corrupt there is left out."""
        found = (
            parsed(entry.key, entry.value) for entry in store.entries(KIND) if not entry.problem
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
    store.write(KIND, plain(entry.key), entry.value.model_dump(mode="json"))


def plain(key: Key) -> dict[str, JSON]:
    """Return ``key`` as it stands in the store."""
    facts: dict[str, JSON] = key.model_dump(mode="json")
    return facts


def parsed(key: Mapping[str, JSON], value: JSON) -> Entry | str:
    """Return what the store holds as an entry, or why it is none."""
    try:
        return Entry.model_validate_json(json.dumps({"key": dict(key), "value": value}))
    except ValidationError as error:
        return _first(error)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the mean that weighs a factor the same wherever it stands."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def address(key: Key) -> str:
    """Return a text that is equal for keys that differ in the host at most."""
    return checksum({**plain(key), "host": ""})


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def _order(entry: Entry) -> str:
    key = entry.key
    return "\0".join((key.kind, key.name, key.device, key.host, checksum(plain(key))))


def _on_host(entry: Entry, host: str) -> Entry:
    return Entry(key=entry.key.model_copy(update={"host": host}), value=entry.value)


def _first(error: ValidationError) -> str:
    problem: Any = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"]) or "the file"
    return f"{place}: {problem['msg']}"
