"""The devices that Level Zero shows to this process, asked for in another one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interposer_xpu._hardware import level_zero_inquiry

LOADER = "libze_loader.so.1"
_LIMIT_SECONDS = 60.0
# What results mean to whoever reads a refusal.
_MEANINGS = {
    0x70000001: "the device was lost. Restart the machine, or look at: dmesg | grep -E 'xe|i915'",
    0x70010000: "this user may not use the device. Join the group of /dev/dri/renderD*, usually "
    "render",
    0x70020000: "a library or the kernel's driver that the driver needs is missing",
    0x78000001: "no driver of Level Zero found a device. Install Intel's: apt-get install "
    "libze-intel-gpu1, or intel-level-zero-gpu with older releases",
    0x78000002: "driver and loader are of versions that do not fit together",
}


class DriverError(Exception):
    """Level Zero gives no answer; ``code`` is its result, 0 where it was not even asked."""

    def __init__(self, call: str, code: int, text: str) -> None:
        self.call = call
        self.code = code
        said = f"{call}: {text}" if call else text
        meaning = _MEANINGS.get(code)
        super().__init__(f"{said}; {meaning}" if meaning else said)


class DriverLostError(DriverError):
    """The process that asks Level Zero crashed or hung in it."""

    def __init__(self, text: str) -> None:
        super().__init__("", 0, text)


@dataclass(frozen=True, slots=True)
class XPUDevice:
    """One device in the driver's order.

    Attributes:
        device_id: of the PCI bus.
        ip_version: of the graphics, from which the architecture follows; 0 where the driver does
            not say.
        integrated: it shares the processor's memory.
        xe_cores, vector_engines: units, of eight or sixteen vector engines each.
        bandwidth_bytes_per_s: of its memory; 0 where the driver does not say.
        shared_bytes: local memory that one work-group may have.
        cache_bytes: the last level.
        float64: it computes in double precision.
    """

    name: str
    uuid: str
    device_id: int
    ip_version: int
    integrated: bool
    xe_cores: int
    vector_engines: int
    memory_bytes: int
    bandwidth_bytes_per_s: int
    shared_bytes: int
    cache_bytes: int
    sub_group_sizes: tuple[int, ...]
    float64: bool

    @classmethod
    def of(cls, facts: dict[str, Any]) -> XPUDevice:
        """Return what the inquiry printed of one device."""
        return cls(**{**facts, "sub_group_sizes": tuple(facts["sub_group_sizes"])})


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of Level Zero: versions of its drivers, and its devices."""

    driver: str
    devices: tuple[XPUDevice, ...]


def ask(library: str = LOADER, limit_seconds: float = _LIMIT_SECONDS) -> Answer:
    """Return the devices that Level Zero shows to a process with this one's environment.

    Raises:
        DriverError: it cannot be loaded, or answers with an error.
        DriverLostError: it crashes, or does not answer in time.
    """
    program = str(Path(level_zero_inquiry.__file__))
    command = [sys.executable, "-I", "-S", program, library]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise DriverLostError(
            f"Level Zero gave no answer in {limit_seconds:g} s. Look at: dmesg | grep -E 'xe|i915'"
        ) from None
    try:
        facts = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise DriverLostError(
            f"the process that asks Level Zero ended with {done.returncode}: {said[0]}"
        ) from None
    if "devices" not in facts:
        raise DriverError(facts["call"], facts["code"], facts["text"])
    return Answer(facts["driver"], tuple(XPUDevice.of(device) for device in facts["devices"]))
