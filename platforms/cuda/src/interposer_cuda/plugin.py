"""The records of the CUDA platform. Neither this module nor what it imports needs torch."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import DeviceEntry, PlatformEntry, Record

INTERPOSER_API = ">=1.0,<2"

# GPUs that are described for planning, each in its file of ``devices``.
_DESCRIBED = ("a100", "b200", "h100", "h200", "rtx4090", "rtx5090", "t4")

# What changes with the driver: verdicts and measurements are kept per driver.
_DRIVER_FILES = ("/proc/driver/nvidia/version",)


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform and the described GPUs."""
    return [
        PlatformEntry("cuda", "interposer_cuda.platform:CUDAPlatform", driver_files=_DRIVER_FILES),
        *(DeviceEntry(name, "cuda", f"interposer_cuda:devices/{name}.json") for name in _DESCRIBED),
    ]
