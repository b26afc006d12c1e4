"""Former module of the names that moved to :mod:`interposer_engine.roofline`."""

from __future__ import annotations

from interposer_models._moved import moved_module

__getattr__ = moved_module(__name__, "interposer_engine.roofline")
