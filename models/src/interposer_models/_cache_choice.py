"""The choice of how a model's keys and values are stored: the user's, or the checkpoint's."""

from __future__ import annotations

import torch

from interposer import CausalModel, Config, Site
from interposer.errors import ConfigError
from interposer.tooling import UINT4

_SAID = "Config(kv_cache='int4')"


def stored_as(site: Site) -> tuple[torch.dtype, bool]:
    """Return the dtype of the cache of attention at a site, and whether heads have own scales.

    Raises: ConfigError: 4 bits are asked for, and the checkpoint has scales for other ones.
    """
    scheme = site.resolver.scheme
    stored = scheme.cache_format(site.prefix) if scheme else None
    if site.resolver.config.kv_cache == "auto":
        return (stored.dtype, stored.head_scales) if stored else (site.dtype, False)
    if stored is not None:
        raise ConfigError(
            f"{_SAID} was asked for, but the checkpoint stores the cache of {site.prefix!r} as "
            f"{stored.dtype}, by scales of its own. Try: leave kv_cache out, or remove the scheme "
            "of the cache from its quantization_config"
        )
    return UINT4, False


def cache_note(model: CausalModel, config: Config, page_size: int) -> str:
    """Return what a token takes in a cache of 4 bits; empty where none was asked for.

    Raises: ConfigError: no layer stores 4 bits.
    """
    if config.kv_cache == "auto":
        return ""
    rounded = [a for a in model.attention_layers if a.backend.spec.cache_dtype == UINT4]
    if not rounded:
        raise ConfigError(
            f"{_SAID} was asked for, but no layer of {type(model).__name__} stores keys and values "
            "so. Try: leave kv_cache out"
        )
    taken = sum(layer.backend.kv_layout().page_bytes() for layer in rounded) / page_size
    specs = [layer.backend.spec for layer in rounded]
    plain = sum(2 * s.num_kv_heads * s.head_size * s.dtype.itemsize for s in specs)
    return (
        f"Keys and values are stored in 4 bits, as kv_cache says: a token takes {taken:.0f} bytes "
        f"in {len(rounded)} layers, of {plain} in {str(specs[0].dtype).removeprefix('torch.')}"
    )
