"""Deliberately wrong kernels, each with the one thing that is wrong about it."""

from __future__ import annotations

from tests.wrong_kernels import arithmetic, attention, memory, promises, quantizing
from tests.wrong_kernels.wrong import WRONG, Wrong

__all__ = ["ALL", "Wrong", "arithmetic", "attention", "memory", "promises", "quantizing"]

ALL: tuple[Wrong, ...] = tuple(WRONG)
