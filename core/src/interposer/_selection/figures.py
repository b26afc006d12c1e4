"""Measured run times of candidates on a device, as data that can be shipped."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, JsonValue, ValidationError

from interposer._config.rules import Exact, first_fault
from interposer._config.storage import JSON, checksum
from interposer._contract.errors import StorageError

KIND = "measurements"
# Ratio of upper quartile to median. On a quiet machine the ratio is below 1.1; candidates of one
# request often differ by less than 1.5.
_SCATTERED = 1.5

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


def this_host() -> str:
    """Return the name under which this host's measurements are stored."""
    return platform.node() or "unknown"


class Key(Exact):
    """A request, and the device on which it was measured; equal keys share one measurement.

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


class Figures(Exact):
    """The measured run times of one candidate, in seconds per call.

    Attributes:
        version: of the distribution that provides the candidate.
        seconds: geometric mean of the medians at each number of tokens.
        low: geometric mean of the lower quartiles.
        high: geometric mean of the upper quartiles.
        per_tokens: the median by number of tokens, written as decimal text.
    """

    version: str
    seconds: Seconds
    low: Seconds
    high: Seconds
    # Keys are text, because JSON has no integer keys.
    per_tokens: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]*$")], Seconds]

    def __str__(self) -> str:
        seconds, low, high = map(duration, (self.seconds, self.low, self.high))
        return f"{seconds} ({low} to {high}){', scattered' if self.is_scattered else ''}"

    @property
    def is_scattered(self) -> bool:
        """Whether the run times differ so much that they hardly tell candidates apart."""
        return is_scattered(self.seconds, self.high)


class Measurement(Exact):
    """The run times of all candidates for one key, with the software versions.

    Attributes:
        driver: identifies the driver; empty if the platform names no driver files.
        failed: version and reason by candidate that could not be measured.
    """

    driver: str
    torch: str
    interposer: str
    measured: AwareDatetime
    candidates: dict[Name, Figures]
    failed: dict[Name, tuple[str, str]] = Field(default_factory=dict)


class Entry(Exact):
    """A measured request: the key and the run times of its candidates."""

    key: Key
    value: Measurement

    @property
    def fastest(self) -> str:
        """The qualified name of the fastest candidate; empty if all failed."""
        candidates = self.value.candidates
        return min(candidates, key=lambda name: (candidates[name].seconds, name), default="")

    @classmethod
    def stored(cls, key: Mapping[str, JSON], value: JSON) -> Entry | str:
        """Parse an entry of the store; return the reason as text if the value is invalid."""
        try:
            # A strict model accepts dates and tuples only from JSON text, so convert the value.
            return cls.model_validate_json(json.dumps({"key": dict(key), "value": value}))
        except ValidationError as error:
            return first_fault(error)


class _File(Exact):
    version: Literal[1]
    entries: list[Entry]
    checksum: str


def read_entries(path: str | Path) -> tuple[Entry, ...]:
    """Read the entries of a file that ``interposer tune --export`` wrote.

    Raises: StorageError: the file cannot be read, or is no intact table.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StorageError(path, f"cannot be read: {error}") from error
    remedy = "export it again: interposer tune MODEL_DIR --export FILE"
    try:
        file = _File.model_validate_json(text)
        intact = file.checksum == checksum(json.loads(text)["entries"])
    except ValidationError as error:
        raise StorageError(
            path, f"is not a table of measurements: {first_fault(error)}", remedy
        ) from error
    except ValueError as error:
        raise StorageError(path, f"is not a table of measurements: {error}", remedy) from error
    if not intact:
        raise StorageError(path, "is corrupt: content and checksum differ", remedy)
    return tuple(file.entries)


def plain(key: Key) -> dict[str, JSON]:
    """Convert ``key`` to plain JSON values, the form of keys in the store."""
    facts: dict[str, JSON] = key.model_dump(mode="json")
    return facts


def address(key: Key) -> str:
    """Return a checksum that is equal for keys that differ only in the host."""
    return checksum({**plain(key), "host": ""})


def is_scattered(seconds: float, high: float) -> bool:
    """Return whether the upper quartile of run times is far above their median."""
    return high > _SCATTERED * seconds


def duration(seconds: float, digits: int = 4) -> str:
    """Format a time with a unit, as ``"1.234 ms"``."""
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
    unit, size = next((pair for pair in units if seconds >= pair[1]), ("ns", 1e-9))
    return f"{seconds / size:.{digits}g} {unit}"
