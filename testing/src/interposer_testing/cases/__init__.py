"""Cases of an op as a space: axes, the points between them, and what may be strange about memory.

An op's case generator is a ``CaseSpace``: every point is one combination of shape class, option,
layout and special value, is built by itself from a seed, and can be counted without being built.
"""

from __future__ import annotations

from interposer_testing.cases._axis import ORDINARY, Axis, Point
from interposer_testing.cases._layer import LayerCase, OfLayer, Placed
from interposer_testing.cases._layout import Strides
from interposer_testing.cases._numbers import longest_row, normal, peak, uniform
from interposer_testing.cases._space import CaseSpace, PlannedCase, planned_cases
from interposer_testing.cases._special import Special

__all__ = [
    "ORDINARY",
    "Axis",
    "CaseSpace",
    "LayerCase",
    "OfLayer",
    "Placed",
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
