"""Cases of an op as a space: axes, the points between them, and what may be strange about memory.

An op's case generator is a ``CaseSpace``: every point is one combination of shape class, option,
layout and special value, is built by itself from a seed, and can be counted without being built.
"""

from __future__ import annotations

from interposer.cases.axis import Axis, Point
from interposer.cases.layout import LAYOUTS, Strides
from interposer.cases.numbers import longest_row, normal, peak, uniform
from interposer.cases.space import CaseSpace, PlannedCase, planned_cases
from interposer.cases.special import Special

__all__ = [
    "LAYOUTS",
    "Axis",
    "CaseSpace",
    "PlannedCase",
    "Point",
    "Special",
    "Strides",
    "longest_row",
    "normal",
    "peak",
    "planned_cases",
    "uniform",
]
