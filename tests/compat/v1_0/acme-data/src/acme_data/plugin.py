"""Data only: a device of acme-platform that is described, and a table for its board."""

from __future__ import annotations

from interposer import DeviceEntry, TuningEntry, hookimpl

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records() -> list[DeviceEntry | TuningEntry]:
    """Return the device and the table."""
    return [
        DeviceEntry("acme-mini", platform="acme", resource="acme_data:devices/mini.json"),
        TuningEntry("board", device="Acme b*", resource="acme_data:tables/board.json"),
    ]
