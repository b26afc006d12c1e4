"""Devices described in files, for planning where the hardware isn't."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
)

from interposer import (
    Capability,
    Choice,
    Device,
    DeviceEntry,
    Memory,
    Placement,
    Platform,
    Refusal,
    Registry,
    Request,
    Verdict,
)
from interposer.errors import (
    ConfigError,
    MissingMemberError,
    RecordError,
    StorageError,
    UnknownNameError,
    nearest_first,
)
from interposer.records import resource_path

__all__ = ["DeviceDescription", "described_placement", "find_description"]

_MOST_NAMED = 3


def _printable(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("must be printable, without space around it")
    return text


Word = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
Bytes = Annotated[int, Field(ge=0)]
Rate = Literal[
    "memory_bytes_per_s",
    "flops_per_s",
    "link_bytes_per_s",
    "link_seconds",
    "network_bytes_per_s",
    "network_seconds",
]


class DeviceDescription(BaseModel):
    """A device as its platform describes it, in data that a JSON file can hold.

    Attributes:
        version: of this format.
        name: what the platform calls the device; tables of measurements are found by it.
        platform: name of the platform, which a plugin has to provide.
        torch_device: what tensors would be placed on.
        architecture, features, formats, units, memory_bytes, caches_bytes, rates: see
            ``Capability``.
        dtypes: torch names, without ``torch.``, of what models may be run in, preferred first.
        default_kernels: the platform's kernel pins that hold unless the user decides otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1]
    name: Word
    platform: Word
    torch_device: Word
    architecture: Word
    features: frozenset[Word]
    formats: frozenset[Word]
    units: Annotated[int, Field(ge=1)]
    memory_bytes: Bytes
    caches_bytes: Mapping[Word, Bytes]
    rates: Mapping[Rate, Annotated[float, Field(gt=0, strict=False)]] = Field(default_factory=dict)
    dtypes: Annotated[tuple[str, ...], Field(min_length=1)]
    default_kernels: Mapping[Word, Word] = Field(default_factory=dict)

    @field_validator("dtypes")
    @classmethod
    def _check_dtypes(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise ValueError(f"{name!r} is no dtype of torch")
        return names

    @field_serializer("features", "formats")
    def _sort(self, names: frozenset[str]) -> list[str]:
        return sorted(names)

    @classmethod
    def of(cls, placement: Placement) -> DeviceDescription:
        """Return the description of the device that a placement found."""
        platform, device = placement.platform, placement.device
        can = device.capability
        return cls(
            version=1,
            name=device.name,
            platform=device.platform,
            torch_device=device.torch_device,
            architecture=can.architecture,
            features=can.features,
            formats=can.formats,
            units=can.units,
            memory_bytes=can.memory_bytes,
            caches_bytes=can.caches_bytes,
            rates=can.rates,  # type: ignore[arg-type]
            dtypes=tuple(
                str(dtype).removeprefix("torch.") for dtype in platform.dtypes(device.torch_device)
            ),
            default_kernels=placement.default_kernels,
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> DeviceDescription:
        """Return what a JSON file holds.

        Raises: StorageError: it cannot be read, or holds something else; the text says what.
        """
        mend = "interposer doctor --describe FILE writes one to start from"
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise StorageError(path, f"cannot be read: {error.strerror}", mend) from error
        except ValidationError as error:
            raise StorageError(path, f"describes no device: {_faults(error)}", mend) from error

    def to_json(self) -> str:
        """Return the text of a file that ``read`` takes; equal descriptions give equal texts."""
        return self.model_dump_json(indent=2) + "\n"

    def device(self) -> Device:
        """Return the device as its platform would."""
        capability = Capability(
            self.architecture,
            self.features,
            self.formats,
            self.units,
            self.memory_bytes,
            dict(self.caches_bytes),
            {str(name): rate for name, rate in self.rates.items()},
        )
        return Device(self.platform, self.torch_device, self.name, capability)


class DescribedPlatform(Platform):
    """A platform that answers from a description, so nothing can run on it."""

    def __init__(self, description: DeviceDescription) -> None:
        self.description = description
        device_type = description.torch_device.partition(":")[0]
        # Its class serves every description, so its name is that of the instance.
        self.name = description.platform  # type: ignore[misc]
        self.device_type = device_type  # type: ignore[misc]

    @classmethod
    def probe(cls) -> Verdict:
        """Refuse: a description is no hardware."""
        return Verdict.refuse("the device is described, not there")

    def devices(self) -> Sequence[Device]:
        """Return the described device."""
        return [self.description.device()]

    def capability(self, device: str) -> Capability:
        """Return what the described device can do."""
        return self.description.device().capability

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the described dtypes."""
        return [getattr(torch, name) for name in self.description.dtypes]

    def memory(self, device: str) -> Memory:
        """Return the described memory, all of it free."""
        total = self.description.memory_bytes
        return Memory(total_bytes=total, free_bytes=total)

    def synchronize(self, device: str) -> None:
        """Raise MissingMemberError."""
        raise self._absent()

    def seed(self, seed: int) -> None:
        """Raise MissingMemberError."""
        raise self._absent()

    def default_kernels(self) -> Mapping[str, str]:
        """Return the described pins."""
        return self.description.default_kernels

    def _absent(self) -> MissingMemberError:
        return MissingMemberError(
            f"{self.description.name!r} is described, not there: nothing can run on it. "
            "Try: place() for the devices of this machine"
        )


def find_description(registry: Registry, wanted: str | os.PathLike[str]) -> DeviceDescription:
    """Return the description of that name, which a plugin ships, or that a file holds.

    Args:
        wanted: a name, ``provider/name`` where two plugins ship one name, or a file.
    Raises:
        UnknownNameError: it is neither.
        ConfigError: two plugins ship that name.
        StorageError: the file holds no description.
    """
    return _found(registry, wanted)[0]


def described_placement(registry: Registry, wanted: str | os.PathLike[str]) -> Placement:
    """Return the placement on a described device, see ``find_description``; nothing is probed.

    Raises: UnknownNameError: no plugin that is in use provides its platform.
    """
    description, source = _found(registry, wanted)
    candidates = sorted(
        registry.candidates("platform"), key=lambda c: (-c.score, c.provider, c.name)
    )
    own = [candidate for candidate in candidates if candidate.name == description.platform]
    if not own:
        raise UnknownNameError(
            "platform",
            description.platform,
            [candidate.name for candidate in candidates],
            "Choices need the plugin that has its kernels. Is it installed, and not disabled?",
            f"of the device {description.name!r}",
        )
    chosen, *others = own
    others += [candidate for candidate in candidates if candidate not in own]
    reason = f"the device is described as one of {chosen.origin}"
    choice = Choice(
        Request("platform", ""),
        chosen,
        f"{description.name!r} is described {source}",
        tuple(Refusal(other.name, other.origin, reason) for other in others),
    )
    return Placement(DescribedPlatform(description), description.device(), choice, described=True)


def _found(registry: Registry, wanted: str | os.PathLike[str]) -> tuple[DeviceDescription, str]:
    """Return a description, and where it is from."""
    shipped = registry.records(DeviceEntry)
    if isinstance(wanted, str):
        found = [
            (plugin, entry)
            for plugin, entry in shipped
            if wanted in (entry.name, f"{plugin.distribution}/{entry.name}")
        ]
        if len(found) > 1:
            qualified = " or ".join(repr(f"{p.distribution}/{e.name}") for p, e in found)
            raise ConfigError(f"{wanted!r} is ambiguous as a described device. Try: {qualified}")
        if found:
            plugin, entry = found[0]
            description = DeviceDescription.read(resource_path(entry.resource))
            if description.platform != entry.platform:
                raise RecordError(
                    f"the record {entry.name!r} of {plugin.distribution} is of platform "
                    f"{entry.platform!r}, its file {entry.resource!r} of {description.platform!r}"
                )
            return description, f"by {entry.name} of {plugin.distribution} {plugin.version}"
        if not Path(wanted).is_file() and not _is_path(wanted):
            names = [entry.name for _, entry in shipped]
            hint = "A description can also be a file: its name ends in .json."
            raise UnknownNameError("device", wanted, names, hint)
    return DeviceDescription.read(wanted), f"in {Path(wanted)}"


def _is_path(text: str) -> bool:
    return text.endswith(".json") or Path(text).name != text


def _faults(error: ValidationError) -> str:
    """Return what is wrong, each with its place."""
    faults = []
    for fault in error.errors():
        place = ".".join(map(str, fault["loc"]))
        if fault["type"] == "extra_forbidden":
            nearest = nearest_first(place, DeviceDescription.model_fields)[0]
            faults.append(f"unknown key {place!r}, the nearest known is {nearest!r}")
        elif fault["type"] == "missing":
            faults.append(f"{place} is missing")
        else:
            given = f" is {fault['input']!r}" if place else ""
            faults.append(f"{place}{given}: {fault['msg']}".removeprefix(": "))
    more = len(faults) - _MOST_NAMED
    return "; ".join(faults[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
