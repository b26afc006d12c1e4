"""Query of Level Zero for its devices, made in a child process."""

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
# Explanations of ze_result_t codes for the reader of a refusal.
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
    """Level Zero failed; ``code`` is its result, or 0 if Level Zero could not be called."""

    def __init__(self, call: str, code: int, text: str) -> None:
        self.call = call
        self.code = code
        message = f"{call}: {text}" if call else text
        meaning = _MEANINGS.get(code)
        super().__init__(f"{message}; {meaning}" if meaning else message)


class DriverLostError(DriverError):
    """The child process that queries Level Zero crashed or hung."""

    def __init__(self, text: str) -> None:
        super().__init__("", 0, text)


@dataclass(frozen=True, slots=True)
class XPUDevice:
    """Properties of one device, as the driver reports them.

    Attributes:
        device_id: PCI device id.
        ip_version: graphics IP version, which determines the architecture; 0 if not reported.
        integrated: the GPU shares the CPU's memory.
        xe_cores, vector_engines: total numbers; an Xe-core has 8 or 16 vector engines.
        bandwidth_bytes_per_s: memory bandwidth; 0 if not reported.
        shared_bytes: largest local memory of one work-group.
        cache_bytes: size of the last-level cache.
        float64: the GPU computes in double precision.
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
        """Create the device from the JSON object that the inquiry printed."""
        return cls(**{**facts, "sub_group_sizes": tuple(facts["sub_group_sizes"])})


@dataclass(frozen=True, slots=True)
class Answer:
    """Level Zero's answer: the driver versions, and the devices in the driver's order."""

    driver: str
    devices: tuple[XPUDevice, ...]


def ask(library: str = LOADER, limit_seconds: float = _LIMIT_SECONDS) -> Answer:
    """Query the devices that Level Zero shows to a child process with the same environment.

    Args:
        library: name or path of the Level Zero loader.
    Raises:
        DriverError: Level Zero cannot be loaded, or returns an error.
        DriverLostError: Level Zero crashes, or does not answer in time.
    """
    # -I and -S keep the user's environment and site-packages out, which start slowly and may fail.
    program = str(Path(level_zero_inquiry.__file__))
    command = [sys.executable, "-I", "-S", program, library]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise DriverLostError(
            f"Level Zero gave no answer in {limit_seconds:g} s. Look at: dmesg | grep -E 'xe|i915'"
        ) from None
    try:
        # Libraries may print as well; the answer is the last line.
        facts = json.loads(process.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        message = process.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise DriverLostError(
            f"the process that asks Level Zero ended with {process.returncode}: {message[0]}"
        ) from None
    if "devices" not in facts:
        raise DriverError(facts["call"], facts["code"], facts["text"])
    return Answer(facts["driver"], tuple(XPUDevice.of(device) for device in facts["devices"]))
