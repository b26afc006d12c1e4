"""Records of the platform; importing this module does not import torch."""

from __future__ import annotations

from interposer.hookspecs import hookimpl
from interposer.records import PlatformEntry, Record

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> list[Record]:
    """Return the platform."""
    return [PlatformEntry("example", "interposer_example_device.platform:ExamplePlatform")]
