"""Measured tables: what candidates took for requests on a device, as data that can be shipped."""

from __future__ import annotations

from interposer._selection.measured_table import (
    KIND,
    Entry,
    Figures,
    Key,
    Measurement,
    NotMeasured,
    Table,
    address,
    geometric_mean,
    parsed,
    plain,
    this_host,
    write_entry,
)

__all__ = [
    "KIND",
    "Entry",
    "Figures",
    "Key",
    "Measurement",
    "NotMeasured",
    "Table",
    "address",
    "geometric_mean",
    "parsed",
    "plain",
    "this_host",
    "write_entry",
]
