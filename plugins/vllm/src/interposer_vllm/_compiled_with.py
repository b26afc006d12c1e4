"""The choices of this process that a compiled model depends on."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from interposer import explain
from interposer_vllm._session import opened_session
from interposer_vllm._taking import TAKEN

__all__ = ["compiled_with"]


def compiled_with() -> dict[str, Any]:
    """Return what is taken and by which kernels, the same in every process with equal choices.

    Policy that leads to the same choices is no part of it, nor is anything that differs from one
    start to the next. Nothing is chosen by asking.
    """
    found: dict[str, Any] = {
        "version": version("interposer-vllm"),
        "seams": sorted(name for name, verdict in TAKEN.items() if verdict),
    }
    session = opened_session()
    if session is not None:
        choices = explain(session).to_dict()["choices"]
        found["taken"] = sorted(set(session.taken))
        found["choices"] = sorted(map(_line, choices))
    return found


def _line(choice: dict[str, Any]) -> str:
    facts = " ".join(f"{name}={value}" for name, value in sorted(choice["dims"].items()))
    what = f"{choice['kind']} {choice['name']} {choice['dtype']} {facts}"
    chosen = f"{choice['chosen']} ({choice['provider']} {choice['version']})"
    return f"{what}: {chosen} at {', '.join(sorted(set(choice['places'])))}"
