"""The plugin hook that plans model directories for ``interposer explain`` and ``tune``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interposer.hookspecs import hookimpl

if TYPE_CHECKING:
    from interposer import Config, Placement
    from interposer_engine import ExpertParallel, Plan

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_plan(
    path: Path,
    config: Config,
    dtype: str,
    placement: Placement | None,
    quantization: str | Mapping[str, Any] | None,
    tensor_parallel: int | None,
    expert_parallel: bool | ExpertParallel | None,
) -> Plan:
    """Plan a Hugging Face model directory without loading its weights."""
    from interposer_engine import plan

    return plan(
        path,
        dtype,
        config=config,
        quantization=quantization,
        placement=placement,
        tensor_parallel=tensor_parallel,
        expert_parallel=expert_parallel or False,
    )
