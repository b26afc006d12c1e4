"""All patches, one module each with the name ``PATCH``; no import of vLLM at module level."""

from __future__ import annotations

from interposer_vllm._patch import Patch
from interposer_vllm._patches import compiled, gptq, kernels, loading

__all__ = ["EARLY_PATCHES", "PATCHES"]

EARLY_PATCHES: tuple[Patch, ...] = (compiled.PATCH, loading.PATCH, kernels.PATCH, gptq.PATCH)
"""Patches applied when vLLM registers plugins: vLLM uses these parts before it loads a model."""

PATCHES: tuple[Patch, ...] = (*EARLY_PATCHES, *loading.LAYER_PATCHES)
