"""Measured choice: kernels and attention backends are timed on this host, the fastest is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interposer.tuning.table import Table
    from interposer.tuning.tuner import tune

__all__ = ["Table", "tune"]


def __getattr__(name: str) -> object:
    # The selection reads measurements, and the tuner works through the selection.
    if name == "Table":
        from interposer.tuning.table import Table

        return Table
    if name == "tune":
        from interposer.tuning.tuner import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
