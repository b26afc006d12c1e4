"""Families whose tiny configuration needs more than rules, each with the reason."""

from __future__ import annotations

from typing import Any

CHANGES: dict[str, dict[str, Any]] = {}
