"""The hook by which the core gets a plan of a model directory. It needs no torch to import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interposer.hookspecs import hookimpl

if TYPE_CHECKING:
    from interposer import Config, Placement
    from interposer_models._loader import Plan

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_plan(
    path: Path,
    config: Config,
    dtype: str,
    placement: Placement | None,
    quantization: str | Mapping[str, Any] | None,
) -> Plan:
    """Return the plan of a Hugging Face model directory."""
    from interposer_models._loader import plan

    return plan(path, dtype, config=config, quantization=quantization, placement=placement)
