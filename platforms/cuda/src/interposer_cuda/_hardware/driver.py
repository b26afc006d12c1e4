"""The devices that CUDA shows to this process, asked for in another one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interposer_cuda._hardware import driver_inquiry

_NAME = "libcuda.so.1"
_LIMIT_SECONDS = 60.0
# What the driver's codes mean to whoever reads a refusal, where its own text does not say it.
_MEANINGS = {
    34: "only the stub of the driver's library is found, which is there to link with. Take the "
    "folder of stubs out of LD_LIBRARY_PATH",
    46: "the device is in use by a process that has it for itself",
    100: "no device is visible",
    802: "the fabric of the GPUs is not ready. Start nvidia-fabricmanager",
    803: "the driver's library and the kernel's module are of different versions. Restart, or "
    "make the container's driver that of the host",
    804: "the installed compatibility package of CUDA does not serve this device. Remove "
    "cuda-compat",
    999: "in a container, /dev/nvidia-uvm may be missing; elsewhere, try nvidia-modprobe -u",
}


class DriverError(Exception):
    """The driver gives no answer; ``code`` is its ``CUresult``, 0 where it was not even asked."""

    def __init__(self, call: str, code: int, text: str) -> None:
        self.call = call
        self.code = code
        said = f"{call}: {text} (code {code})" if code else f"{call}: {text}" if call else text
        meaning = _MEANINGS.get(code)
        super().__init__(f"{said}; {meaning}" if meaning else said)


class DriverLostError(DriverError):
    """The process that asks the driver crashed or hung in it."""

    def __init__(self, text: str) -> None:
        super().__init__("", 0, text)


@dataclass(frozen=True, slots=True)
class CUDADevice:
    """One device in CUDA's order: ``cuda:0`` is the first.

    Attributes:
        shared_bytes, shared_optin_bytes: shared memory of one block, without and with opting in.
        memory_khz, bus_bits: of its memory, from which the bandwidth follows.
        compute_mode: 0 shared, 2 prohibited, 3 for one process.
        peers: ordinals of the devices whose memory it reaches.
    """

    name: str
    uuid: str
    memory_bytes: int
    peers: tuple[int, ...]
    shared_bytes: int
    integrated: bool
    multiprocessors: int
    can_map_host_memory: bool
    compute_mode: int
    memory_khz: int
    bus_bits: int
    l2_bytes: int
    unified_addressing: bool
    major: int
    minor: int
    shared_optin_bytes: int
    cluster_launch: bool
    tensor_map_access: bool

    @classmethod
    def of(cls, facts: dict[str, Any]) -> CUDADevice:
        """Return what the inquiry printed of one device."""
        flags = (
            *("integrated", "can_map_host_memory", "unified_addressing"),
            *("cluster_launch", "tensor_map_access"),
        )
        return cls(
            **{
                **facts,
                "peers": tuple(facts["peers"]),
                **{flag: bool(facts[flag]) for flag in flags},
            }
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the driver: the newest CUDA that it serves, and the visible devices."""

    cuda: tuple[int, int]
    devices: tuple[CUDADevice, ...]


def ask(libraries: Iterable[str] = (_NAME,), limit_seconds: float = _LIMIT_SECONDS) -> Answer:
    """Return the devices that CUDA shows to a process with this one's environment.

    Args:
        libraries: what to load the driver by; the first that loads is asked.
    Raises:
        DriverError: it cannot be loaded, or answers with an error.
        DriverLostError: it crashes, or does not answer in time.
    """
    program = str(Path(driver_inquiry.__file__))
    command = [sys.executable, "-I", "-S", program, *libraries]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise DriverLostError(
            f"CUDA's driver gave no answer in {limit_seconds:g} s. If it takes long to wake, "
            "nvidia-persistenced keeps it awake"
        ) from None
    try:
        facts = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise DriverLostError(
            f"the process that asks CUDA's driver ended with {done.returncode}: {said[0]}"
        ) from None
    if "devices" not in facts:
        raise DriverError(facts["call"], facts["code"], facts["text"])
    major, minor = facts["cuda"]
    return Answer((major, minor), tuple(CUDADevice.of(device) for device in facts["devices"]))
