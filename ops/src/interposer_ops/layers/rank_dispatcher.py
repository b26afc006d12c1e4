"""Deprecated: names moved to :mod:`interposer_ops.layers.moe.dispatcher`."""

from __future__ import annotations

from interposer_ops.layers._moved import moved_names

__getattr__ = moved_names(__name__)
