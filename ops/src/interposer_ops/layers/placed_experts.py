"""Deprecated: names moved to :mod:`interposer_ops.layers.moe.sharded_experts`."""

from __future__ import annotations

from interposer_ops.layers._moved import moved_names

__getattr__ = moved_names(__name__)
