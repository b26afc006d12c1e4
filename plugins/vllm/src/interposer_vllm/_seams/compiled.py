"""The key of compiled models on disk, to which the choices of this process are added.

vLLM names what it compiled by its settings and by what is registered as its environment variables.
That layers were replaced, and by which kernels, is neither.
"""

from __future__ import annotations

from typing import Any

from interposer import Verdict
from interposer_vllm._compiled_with import compiled_with
from interposer_vllm._seam import Member, Seam

__all__ = ["SEAM"]

FACTOR = "interposer"
"""The name among the factors, which no variable of vLLM has."""


def _take() -> Verdict:
    from vllm import envs

    factors: dict[str, Any] = envs.environment_variables
    if FACTOR in factors:
        return Verdict.refuse(f"another plugin has registered the factor {FACTOR!r}")
    factors[FACTOR] = compiled_with
    if FACTOR not in envs.compile_factors():
        del factors[FACTOR]
        return Verdict.refuse("compile_factors() leaves out what is registered")
    return Verdict.accept()


SEAM = Seam(
    name="compiled",
    members=(Member("vllm.envs:compile_factors", "()"),),
    take=_take,
    stays="Names of compiled models",
)
