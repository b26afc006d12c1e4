"""Adapter of vLLM's CPU build with the plugin that brings interposer's kernels."""

from __future__ import annotations

import os
from pathlib import Path

from cpu_engines.contract import BatchEngine, Settings
from cpu_engines.vllm_engine import Engine

__all__ = ["PLUGINS", "open_engine"]

PLUGINS = {"plain": "", "bridge": "interposer"}
"""The names in ``VLLM_PLUGINS`` by option."""


def open_engine(
    path: Path, option: str, threads: int, settings: Settings | None = None
) -> BatchEngine:
    """Load the model in bfloat16, or in its checkpoint's quantization."""
    os.environ["VLLM_PLUGINS"] = PLUGINS[option]
    engine = Engine(path, threads, settings or Settings())
    if option == "bridge":
        _check()
    return engine


def _check() -> None:
    """Raise RuntimeError if no kernel was replaced: the result would measure plain vLLM."""
    from interposer_vllm._session import session

    if not session().taken:
        raise RuntimeError(f"nothing was taken over: {session().kept}")
