"""Tiny random models that are adapted, and what their results are compared by."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

__all__ = ["CACHE", "NARROW", "WIDE", "built", "close", "llama"]

# The cache's name in the arguments of the installed transformers.
CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)
# Weights are large enough for attention to tell tokens apart.
NARROW: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WIDE: dict[str, Any] = {
    **{name: value for name, value in NARROW.items() if name != "pad_token_id"},
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "initializer_range": 0.2,
}


def built(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a decoder with random weights, the same ones every time."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a narrow decoder of the Llama family."""
    return built(LlamaConfig(**{**NARROW, **changes}), dtype)


def close(found: Tensor, expected: Tensor) -> bool:
    """Say whether float32 results of some twenty operations in a row agree."""
    return bool((found - expected).abs().max() <= 2e-5 * expected.abs().max())
