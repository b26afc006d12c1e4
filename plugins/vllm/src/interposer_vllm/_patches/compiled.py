"""Patch that adds the choices of this process to the cache key of compiled models.

vLLM derives the key from its settings and from the functions that are registered as environment
variables. Neither contains the replaced layers or the chosen kernels.
"""

from __future__ import annotations

from typing import Any

from interposer import Verdict
from interposer.tooling import HostMember
from interposer_vllm._compiled_with import compiled_with
from interposer_vllm._patch import Patch

__all__ = ["PATCH"]

FACTOR = "interposer"
"""The name of the added factor, chosen so that no variable of vLLM has the same name."""


def _apply() -> Verdict:
    from vllm import envs

    factors: dict[str, Any] = envs.environment_variables
    if FACTOR in factors:
        return Verdict.refuse(f"another plugin has registered the factor {FACTOR!r}")
    # vLLM calls the functions in this mapping when it computes the key, after layers are chosen.
    factors[FACTOR] = compiled_with
    if FACTOR not in envs.compile_factors():
        del factors[FACTOR]
        return Verdict.refuse("compile_factors() ignores registered factors")
    return Verdict.accept()


PATCH = Patch(
    name="compiled",
    members=(HostMember("vllm.envs:compile_factors", "()"),),
    apply=_apply,
    scope="Names of compiled models",
)
