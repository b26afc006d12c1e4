"""Engines of vLLM in processes of their own, which ``make test-vllm`` has an environment for."""

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

Runs = list[dict[str, Any]]


@pytest.fixture(scope="session")
def run_in_vllm() -> Callable[..., Runs]:
    """Return a function of runs and variables that returns what vLLM made of each run."""

    def run(runs: Runs, **variables: str) -> Runs:
        if importlib.util.find_spec("vllm") is None:
            pytest.fail("vLLM is not installed here. Try: make test-vllm")
        environment = {**os.environ, **variables}
        environment.pop("OMP_NUM_THREADS", None)
        program = Path(__file__).with_name("engine_run.py")
        done = subprocess.run(
            [sys.executable, str(program), json.dumps(runs)],
            env=environment,
            capture_output=True,
            text=True,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        assert lines, done.stdout[-4000:] + done.stderr[-8000:]
        found: Runs = json.loads(lines[-1].removeprefix("RESULT"))
        return found

    return run
