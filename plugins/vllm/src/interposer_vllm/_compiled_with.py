"""Cache key that ties a model compiled by vLLM to the kernels that interposer chose."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from interposer import explain
from interposer_vllm._patching import VERDICTS
from interposer_vllm._session import opened_session

__all__ = ["compiled_with"]


def compiled_with() -> dict[str, Any]:
    """Return the patches and chosen kernels, as a cache key that is stable across restarts.

    The result is part of a cache key, which must be stable across restarts. So the result leaves
    out the policy that led to the choices, and everything that differs between processes. Calling
    this function selects no kernel.
    """
    key: dict[str, Any] = {
        "version": version("interposer-vllm"),
        "seams": sorted(name for name, verdict in VERDICTS.items() if verdict),
    }
    # The report's field names: "seams" are the applied patches, "taken" the layers taken over.
    session = opened_session()
    if session is not None:
        choices = explain(session).to_dict()["choices"]
        key["taken"] = sorted(set(session.taken))
        key["choices"] = sorted(map(_describe_choice, choices))
    return key


def _describe_choice(choice: dict[str, Any]) -> str:
    dims = " ".join(f"{name}={value}" for name, value in sorted(choice["dims"].items()))
    request = f"{choice['kind']} {choice['name']} {choice['dtype']} {dims}"
    chosen = f"{choice['chosen']} ({choice['provider']} {choice['version']})"
    return f"{request}: {chosen} at {', '.join(sorted(set(choice['places'])))}"
