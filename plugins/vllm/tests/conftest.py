"""Engines of vLLM in processes of their own, for whichever module asks.

One process runs engine after engine, but for those with guesses by n-grams: these load numba, and
no engine of vLLM 0.32 starts afterwards, as it asks every object of every module for a kernel.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Engines = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def run_engines() -> Engines:
    """Return the function that returns what vLLM made of each run, see ``engine_run.py``."""
    return _run


def _run(runs: list[dict[str, Any]], **variables: str) -> list[dict[str, Any]]:
    if importlib.util.find_spec("vllm") is None:
        pytest.fail("vLLM is not installed here. Try: make test-vllm")
    together = [asked for asked in runs if "speculative_config" not in asked["options"]]
    rest = iter(_process(together, variables))
    return [next(rest) if asked in together else _process([asked], variables)[0] for asked in runs]


def _process(runs: list[dict[str, Any]], variables: dict[str, str]) -> list[dict[str, Any]]:
    environment = {**os.environ, **variables}
    environment.pop("OMP_NUM_THREADS", None)
    program = Path(__file__).with_name("engine_run.py")
    done = subprocess.run(
        [sys.executable, str(program), json.dumps(runs)],
        env=environment,
        capture_output=True,
        text=True,
    )
    marked = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found = [json.loads(line.removeprefix("RESULT")) for line in marked]
    assert len(found) == len(runs), done.stdout[-4000:] + done.stderr[-8000:]
    return found
