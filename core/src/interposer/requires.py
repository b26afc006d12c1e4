"""Declarative requirements of candidates; this module imports no torch."""

from __future__ import annotations

from interposer._contract.requires import DTYPES, Dim, Requires

__all__ = ["DTYPES", "Dim", "Requires"]
