"""The records of the ROCm platform. Neither this module nor what it imports needs torch."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import DeviceEntry, PlatformEntry, Record

INTERPOSER_API = ">=1.0,<2"

# GPUs that are described for planning, each in its file of ``devices``.
_DESCRIBED = ("mi250x", "mi300x", "mi355x", "rx7900xtx", "rx9070xt")

# What changes with the driver: verdicts and measurements are kept per driver.
_DRIVER_FILES = ("/sys/module/amdgpu/version", "/sys/module/amdgpu/srcversion", "/proc/version")


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform, what it brings besides portable kernels, and the described GPUs."""
    return [
        PlatformEntry("rocm", "interposer_rocm.platform:ROCmPlatform", driver_files=_DRIVER_FILES),
        *(DeviceEntry(name, "rocm", f"interposer_rocm:devices/{name}.json") for name in _DESCRIBED),
    ]
