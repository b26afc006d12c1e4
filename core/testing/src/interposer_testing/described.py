"""Devices that are described in files, to plan a model without the hardware."""

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
from interposer.tooling import platform_hint

__all__ = ["DeviceDescription", "described_placement", "find_description"]

_MAX_FAULTS = 3
# Descriptions of the SDK's platforms, whose packages are not always installed, by platform.
_DESCRIPTIONS: Mapping[str, tuple[str, ...]] = {
    "cpu": (
        *("ampere-altra", "apple-m4", "graviton4", "icelake-server", "sapphire-rapids"),
        *("z14", "z16", "zen2", "zen5"),
    ),
    "cuda": ("a100", "b200", "h100", "h200", "rtx4090", "rtx5090", "t4"),
    "rocm": ("mi250x", "mi300x", "mi355x", "rx7900xtx", "rx9070xt"),
    "xpu": ("arc140v", "b580", "max1550"),
}


def _printable(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ValueError("must be printable text without leading or trailing spaces")
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
    """The description of a device by its platform, which a JSON file can store.

    Attributes:
        version: version of the file format.
        name: name of the device; tables of measurements use the same name.
        platform: name of the platform, which an installed plugin must provide.
        torch_device: torch device for tensors.
        architecture, features, formats, units, memory_bytes, caches_bytes, rates: see
            ``Capability``.
        dtypes: dtypes for models as torch names without ``torch.``, the preferred one first.
        default_kernels: kernels that the platform pins unless the user configures others.
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
        """Describe the device of a placement."""
        platform, device = placement.platform, placement.device
        capability = device.capability
        return cls(
            version=1,
            name=device.name,
            platform=device.platform,
            torch_device=device.torch_device,
            architecture=capability.architecture,
            features=capability.features,
            formats=capability.formats,
            units=capability.units,
            memory_bytes=capability.memory_bytes,
            caches_bytes=capability.caches_bytes,
            rates=capability.rates,  # type: ignore[arg-type]
            dtypes=tuple(
                str(dtype).removeprefix("torch.") for dtype in platform.dtypes(device.torch_device)
            ),
            default_kernels=placement.default_kernels,
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> DeviceDescription:
        """Read a description from a JSON file.

        Raises: StorageError: the file cannot be read, or is no valid description.
        """
        remedy = "interposer doctor --describe FILE writes one to start from"
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise StorageError(path, f"cannot be read: {error.strerror}", remedy) from error
        except ValidationError as error:
            raise StorageError(path, f"describes no device: {_faults(error)}", remedy) from error

    def to_json(self) -> str:
        """Return the text of a JSON file for ``read``; equal descriptions give equal texts."""
        return self.model_dump_json(indent=2) + "\n"

    def device(self) -> Device:
        """Create the described device, equal to a device that the platform detects."""
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
    """A platform that reads all answers from a device description and can run no code."""

    def __init__(self, description: DeviceDescription) -> None:
        self.description = description
        device_type = description.torch_device.partition(":")[0]
        # One class serves all descriptions, so the name is an attribute of the instance.
        self.name = description.platform  # type: ignore[misc]
        self.device_type = device_type  # type: ignore[misc]

    @classmethod
    def probe(cls) -> Verdict:
        """Refuse, because a described device is no hardware."""
        return Verdict.refuse("the device is described, not there")

    def devices(self) -> Sequence[Device]:
        """List the described device."""
        return [self.description.device()]

    def capability(self, device: str) -> Capability:
        """Return the capability in the description."""
        return self.description.device().capability

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        """Return the dtypes in the description."""
        return [getattr(torch, name) for name in self.description.dtypes]

    def memory(self, device: str) -> Memory:
        """Return the memory size in the description, with all memory free."""
        total = self.description.memory_bytes
        return Memory(total_bytes=total, free_bytes=total)

    def synchronize(self, device: str) -> None:
        """Raise MissingMemberError, because the device is only described."""
        raise self._error()

    def seed(self, seed: int) -> None:
        """Raise MissingMemberError, because the device is only described."""
        raise self._error()

    def default_kernels(self) -> Mapping[str, str]:
        """Return the kernel pins in the description."""
        return self.description.default_kernels

    def _error(self) -> MissingMemberError:
        return MissingMemberError(
            f"{self.description.name!r} is described, not there: nothing can run on it. "
            "Try: place() for the devices of this machine"
        )


def find_description(registry: Registry, wanted: str | os.PathLike[str]) -> DeviceDescription:
    """Find a device description by name or read it from a file.

    Args:
        wanted: the name of a description that a plugin ships, ``provider/name`` if two plugins ship
            the same name, or the path of a JSON file.
    Raises:
        UnknownNameError: there is no such description and no such file.
        ConfigError: two plugins ship this name.
        StorageError: the file is no valid description.
    """
    return _find(registry, wanted)[0]


def described_placement(registry: Registry, wanted: str | os.PathLike[str]) -> Placement:
    """Create a placement on a described device without probing this machine.

    Args:
        wanted: see ``find_description``.
    Raises: UnknownNameError: no loaded plugin provides the platform of the device; or see
        ``find_description``.
    """
    description, source = _find(registry, wanted)
    # The best plugin for the platform comes first; names break ties.
    candidates = sorted(
        registry.candidates("platform"), key=lambda c: (-c.score, c.provider, c.name)
    )
    matching = [candidate for candidate in candidates if candidate.name == description.platform]
    if not matching:
        raise UnknownNameError(
            "platform",
            description.platform,
            [candidate.name for candidate in candidates],
            _platform_hint(registry, description.platform),
            f"of the device {description.name!r}",
        )
    chosen, *refused = matching
    refused += [candidate for candidate in candidates if candidate not in matching]
    reason = f"the device is described as one of {chosen.origin}"
    choice = Choice(
        Request("platform", ""),
        chosen,
        f"{description.name!r} is described {source}",
        tuple(Refusal(candidate.name, candidate.origin, reason) for candidate in refused),
    )
    return Placement(DescribedPlatform(description), description.device(), choice, described=True)


def _find(registry: Registry, device: str | os.PathLike[str]) -> tuple[DeviceDescription, str]:
    """Find a description by name or file; return it with the origin, such as "in gpu.json"."""
    shipped = registry.records(DeviceEntry)
    # A ``Path`` is always a file, a text can be both: names of descriptions come first.
    if isinstance(device, str):
        matching = [
            (plugin, entry)
            for plugin, entry in shipped
            if device in (entry.name, f"{plugin.distribution}/{entry.name}")
        ]
        if len(matching) > 1:
            qualified = " or ".join(repr(f"{p.distribution}/{e.name}") for p, e in matching)
            raise ConfigError(f"{device!r} is ambiguous as a described device. Try: {qualified}")
        if matching:
            plugin, entry = matching[0]
            description = DeviceDescription.read(resource_path(entry.resource))
            if description.platform != entry.platform:
                raise RecordError(
                    f"the record {entry.name!r} of {plugin.distribution} is of platform "
                    f"{entry.platform!r}, its file {entry.resource!r} of {description.platform!r}"
                )
            return description, f"by {entry.name} of {plugin.distribution} {plugin.version}"
        # A text that looks like a path goes to ``read``, whose error names the path.
        if not Path(device).is_file() and not _is_path(device):
            names = [entry.name for _, entry in shipped]
            raise UnknownNameError("device", device, names, _device_hint(registry, device))
    return DeviceDescription.read(device), f"in {Path(device)}"


def _device_hint(registry: Registry, name: str) -> str:
    """Return the next action for the name of a device that no plugin in use describes."""
    for platform, names in _DESCRIPTIONS.items():
        if name in names:
            package = f"interposer-{platform}"
            return f"{package} describes {name!r}, and {registry.plugins.remedy(package)}"
    return "A description can also be a file whose name ends in .json."


def _platform_hint(registry: Registry, platform: str) -> str:
    """Return the next action for a platform that no plugin in use provides."""
    general_hint = (
        "The plugin with the kernels of this platform is needed. Is it installed and enabled?"
    )
    return platform_hint(registry, platform) or general_hint


def _is_path(text: str) -> bool:
    return text.endswith(".json") or Path(text).name != text


def _faults(error: ValidationError) -> str:
    """Format validation errors as text, each with the path of the field."""
    faults = []
    for fault in error.errors():
        path = ".".join(map(str, fault["loc"]))
        # pydantic's own texts for these two do not help to find a misspelt key.
        if fault["type"] == "extra_forbidden":
            nearest = nearest_first(path, DeviceDescription.model_fields)[0]
            faults.append(f"unknown key {path!r}, the nearest known is {nearest!r}")
        elif fault["type"] == "missing":
            faults.append(f"{path} is missing")
        else:
            value = f" is {fault['input']!r}" if path else ""
            faults.append(f"{path}{value}: {fault['msg']}".removeprefix(": "))
    num_omitted = len(faults) - _MAX_FAULTS
    return "; ".join(faults[:_MAX_FAULTS]) + (
        f"; and {num_omitted} more" if num_omitted > 0 else ""
    )
