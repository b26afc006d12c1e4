"""The test cases of an op as a space of axes, such as shape, options, memory layout and values.

An op's case generator is a ``CaseSpace``. Every point is one combination of labels, one per axis.
Points can be counted without building cases, and each case is built from a seed alone.
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
