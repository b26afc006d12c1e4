"""Choose the dtype of a model's KV cache: from the user's config, or from the checkpoint."""

from __future__ import annotations

import torch

from interposer import CausalModel, Config, Site
from interposer.errors import ConfigError
from interposer.tooling import UINT4

_OPTION = "Config(kv_cache='int4')"


def stored_as(site: Site) -> tuple[torch.dtype, bool]:
    """Return the dtype of an attention layer's cache, and whether heads have separate scales.

    Raises: ConfigError: 4 bits are requested, but the checkpoint has scales for another dtype.
    """
    scheme = site.resolver.scheme
    cache_format = scheme.cache_format(site.prefix) if scheme else None
    # The checkpoint's format if its scheme quantizes the cache, else the model's dtype.
    if site.resolver.config.kv_cache == "auto":
        return (
            (cache_format.dtype, cache_format.head_scales) if cache_format else (site.dtype, False)
        )
    if cache_format is not None:
        raise ConfigError(
            f"{_OPTION} was asked for, but the checkpoint stores the cache of {site.prefix!r} as "
            f"{cache_format.dtype}, with its own scales. Try: leave kv_cache out, or remove the "
            "scheme of the cache from quantization_config"
        )
    return UINT4, False


def cache_note(model: CausalModel, config: Config, page_size: int) -> str:
    """Return a note about the bytes of a token in a 4-bit cache; empty without such a cache.

    Raises: ConfigError: no layer can store 4 bits.
    """
    if config.kv_cache == "auto":
        return ""
    int4_layers = [a for a in model.attention_layers if a.backend.spec.cache_dtype == UINT4]
    if not int4_layers:
        raise ConfigError(
            f"{_OPTION} was asked for, but no layer of {type(model).__name__} can store keys and "
            "values in 4 bits. Try: leave kv_cache out"
        )
    token_bytes = sum(layer.backend.kv_layout().page_bytes() for layer in int4_layers) / page_size
    specs = [layer.backend.spec for layer in int4_layers]
    dtype = str(specs[0].dtype).removeprefix("torch.")
    plain_bytes = sum(2 * s.num_kv_heads * s.head_size * s.dtype.itemsize for s in specs)
    return (
        f"Keys and values are stored in 4 bits, as kv_cache says: a token takes "
        f"{token_bytes:.0f} bytes in {len(int4_layers)} layers, of {plain_bytes} in {dtype}"
    )
