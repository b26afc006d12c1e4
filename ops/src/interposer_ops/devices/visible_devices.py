"""Devices that a runtime shows to a process: reading of device lists, and the probe's verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from interposer import Verdict

__all__ = ["VisibleDevices", "judge_gpus", "read_device_list", "refuse_hidden", "require_index"]

_Device = TypeVar("_Device")


@dataclass(frozen=True, slots=True)
class VisibleDevices(Generic[_Device]):
    """The GPUs that a process sees.

    Attributes:
        devices: visible devices in the order of the runtime.
        note: reason for the selection; empty if the runtime's default applies.
    """

    devices: tuple[_Device, ...]
    note: str = ""


def read_device_list(
    variable: str, text: str, find: Callable[[str], _Device]
) -> VisibleDevices[_Device]:
    """Parse a device list of an environment variable, up to the first invalid entry.

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
            note = f"{variable}={text}: {fault}, and entries from there on are ignored"
            return VisibleDevices(tuple(devices), note)
    return VisibleDevices(tuple(devices), f"{variable}={text}")


def require_index(index: int, count: int) -> None:
    """Check that the machine has a GPU with this index.

    Raises: ValueError: there is no such GPU.
    """
    if not 0 <= index < count:
        range_text = f"the last is {count - 1}" if count else "there are none"
        raise ValueError(f"there is no GPU {index}, {range_text}")


def refuse_hidden(total: int, note: str, runtime: str = "") -> Verdict:
    """Refuse a machine whose GPUs are all hidden from this process.

    Args:
        total: number of GPUs of the machine.
        note: how they are hidden.
        runtime: software that hides them, if the driver shows them.
    """
    gpus_text = f"{total} GPUs" if total > 1 else "1 GPU"
    return Verdict.refuse(
        f"none of {gpus_text} is visible{f' to {runtime}' if runtime else ''}: {note}"
    )


def judge_gpus(counts: str, gpus: Sequence[tuple[str, Verdict]], *notes: str) -> Verdict:
    """Accept the machine if torch has kernels for a visible GPU, and describe the GPUs.

    Args:
        counts: how many GPUs are visible.
        gpus: name of each visible GPU, and whether torch has kernels for the GPU.
        notes: further parts of the description; empty ones are left out.
    """
    if not any(verdict for _, verdict in gpus):
        return gpus[0][1]
    names = ", ".join(sorted({name for name, _ in gpus}))
    return Verdict.accept("; ".join(filter(None, [f"{counts}: {names}", *notes])))
