"""The selection request for an attention layer of vLLM, or the reason for refusing the layer."""

from __future__ import annotations

from typing import Any

import torch

from interposer import AttentionSpec
from interposer.errors import ConfigError
from interposer_ops.attention import alibi_slopes

__all__ = ["spec_of"]

_CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def spec_of(name: str, layer: Any, page_size: int, config: Any) -> AttentionSpec:
    """Describe an attention layer of vLLM as a request for an attention backend.

    The chosen backend may store keys and values in a layout of its own. So a layer is refused if
    another layer or engine reads the layer's cache, or if some steps attend to later tokens.

    Args:
        name: name of the layer in ``config``.
        layer: vLLM's ``Attention``.
        page_size: tokens in one block of the cache.
        config: the ``VllmConfig`` of the engine.
    Raises: ConfigError: no request can describe the layer.
    """
    impl = layer.impl
    if impl.attn_type != "decoder":
        raise ConfigError(f"attends as {impl.attn_type}, not as a decoder")
    if layer.head_size_v != layer.head_size:
        raise ConfigError(f"has values of {layer.head_size_v} and keys of {layer.head_size}")
    _check_readers(name, config)
    if layer.use_mm_prefix or getattr(layer, "is_draft_layer", False):
        raise ConfigError("has steps without a causal mask")
    dtype = layer.dtype
    cache_dtype = _CACHE_DTYPES.get(layer.kv_cache_dtype, layer.kv_cache_torch_dtype)
    if cache_dtype != dtype and getattr(layer, "calculate_kv_scales", False):
        raise ConfigError("computes the scales of its cache while it runs")
    return AttentionSpec(
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        page_size=page_size,
        scale=impl.scale,
        # vLLM states -1 for no window, and 0 for no softcap.
        window_tokens=None if impl.sliding_window == -1 else impl.sliding_window,
        softcap=impl.logits_soft_cap or None,
        sinks=impl.sinks is not None,
        alibi=_is_alibi(impl),
    )


def _check_readers(name: str, config: Any) -> None:
    """Raise ConfigError if another layer, worker or engine reads or writes the layer's cache."""
    if config.kv_transfer_config is not None:
        raise ConfigError("hands its cache to another engine, in vLLM's form")
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("has its context on several workers")
    layers = config.compilation_config.static_forward_context
    for layer_name, layer in layers.items():
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        if target is not None and name in (layer_name, target):
            raise ConfigError(f"shares a cache: {layer_name!r} reads that of {target!r}")


def _is_alibi(impl: Any) -> bool:
    if impl.alibi_slopes is None:
        return False
    if not torch.allclose(alibi_slopes(impl.num_heads, "cpu"), impl.alibi_slopes.cpu()):
        raise ConfigError("has ALiBi slopes that do not follow from its number of heads")
    return True
