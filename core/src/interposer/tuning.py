"""Measured run times of candidates on a device, as data that can be shipped."""

from __future__ import annotations

from interposer._selection.figures import (
    KIND,
    Entry,
    Figures,
    Key,
    Measurement,
    address,
    read_entries,
    this_host,
)

# fmt: off
__all__ = [
    "KIND", "Entry", "Figures", "Key", "Measurement", "address", "read_entries", "this_host",
]
# fmt: on
