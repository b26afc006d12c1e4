"""All seams, each in a module of its own with the name ``SEAM``. None imports vLLM by itself."""

from __future__ import annotations

from interposer_vllm._seam import Seam
from interposer_vllm._seams import compiled, gptq, kernels, loading

__all__ = ["FIRST", "SEAMS"]

FIRST: tuple[Seam, ...] = (compiled.SEAM, loading.SEAM, kernels.SEAM, gptq.SEAM)
"""Those that are taken when vLLM registers its plugins, for it asks them before it loads."""

SEAMS: tuple[Seam, ...] = (*FIRST, *loading.LAYERS)
