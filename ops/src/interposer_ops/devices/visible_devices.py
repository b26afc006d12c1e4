"""Devices that a runtime shows to a process, from environment variables that list devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["VisibleDevices", "read_device_list", "require_index"]

_Device = TypeVar("_Device")


@dataclass(frozen=True, slots=True)
class VisibleDevices(Generic[_Device]):
    """The devices that a process sees.

    Attributes:
        devices: visible devices in the order of the runtime.
        note: reason for the selection; empty if the runtime's default applies.
    """

    devices: tuple[_Device, ...]
    note: str = ""


def read_device_list(
    variable: str, text: str, find: Callable[[str], _Device]
) -> VisibleDevices[_Device]:
    """Read a list of devices, which ends at the first invalid entry.

    Args:
        variable: name of the environment variable, whose value is ``text``.
        find: returns the device of an entry; raises ValueError with the entry's fault.
    """
    if not text.strip():
        return VisibleDevices((), f"{variable} is empty, which hides every GPU")
    devices: list[_Device] = []
    for entry in text.split(","):
        try:
            devices.append(find(entry))
        except ValueError as fault:
            note = f"{variable}={text}: {fault}, and the list ends there"
            return VisibleDevices(tuple(devices), note)
    return VisibleDevices(tuple(devices), f"{variable}={text}")


def require_index(index: int, count: int) -> None:
    """Check that the machine has a GPU with this index.

    Raises: ValueError: there is no such GPU.
    """
    if not 0 <= index < count:
        range_text = f"the last is {count - 1}" if count else "there are none"
        raise ValueError(f"there is no GPU {index}, {range_text}")
