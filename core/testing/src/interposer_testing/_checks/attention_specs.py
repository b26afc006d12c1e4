"""The attention specs on which backends are tested.

Dimensions: N heads, K kv heads, D head size, C latent size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from interposer import AttentionSpec
from interposer.tooling import UINT4

_HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (3, 1)}
_MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window_tokens": 6},
    "softcap": {"softcap": 2.0},
    "window+softcap": {"window_tokens": 3, "softcap": 2.0},
}
_EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "e4m3": {"cache_dtype": torch.float8_e4m3fn},
    "e4m3 per head": {"cache_dtype": torch.float8_e4m3fn, "head_scales": True},
    "e5m2": {"cache_dtype": torch.float8_e5m2},
    "int8": {"cache_dtype": torch.int8},
    "int8 per head": {"cache_dtype": torch.int8, "head_scales": True},
    "int4": {"cache_dtype": UINT4},
    "sinks": {"sinks": True},
    "ALiBi": {"alibi": True},
    "ALiBi of long contexts": {"alibi": True, "alibi_bias_max": 16.0},
    "prefix-LM": {"prefix_lm": True},
    "prefix-LM with ALiBi": {"prefix_lm": True, "alibi": True},
    "e4m3 with sinks": {"cache_dtype": torch.float8_e4m3fn, "sinks": True},
    "int4 with sinks": {"cache_dtype": UINT4, "sinks": True},
    "shared": {"shared": True},
    "int8 with sinks, shared": {"cache_dtype": torch.int8, "sinks": True, "shared": True},
    "source": {"type": "encoder_decoder"},
}
# Number of heads, latent size, rotary size. DeepSeek's models use 512 and 64.
_LATENT = {"latent 32+16": (4, 32, 16), "latent 512+64": (2, 512, 64), "latent 20+12": (3, 20, 12)}
_INDEXERS = {"indexer 4x32": (4, 32, 5), "indexer 3x20": (3, 20, 1), "indexer 8x64": (8, 64, 12)}
# The top k of sparse attention.
_SELECTED_TOKENS = 6
_PAGE_SIZES = (4, 16)
_DTYPES = (torch.float32, torch.bfloat16)


def attention_specs(
    *, quick: bool = False, page_sizes: Sequence[int] = ()
) -> Iterator[tuple[str, AttentionSpec]]:
    """Yield (label, spec) for all combinations of heads, masks, head sizes, page sizes and dtypes.

    Extras (quantized cache, sinks, ALiBi, prefix-LM, encoder inputs) are combined with heads and
    masks only. Latent attention, sparse latent attention and indexers are combined with all page
    sizes.

    Args:
        quick: yield only specs that differ from the first spec of their dtype in at most one axis.
        page_sizes: page sizes of the backend's record, which come before the usual ones.
    """
    pages = tuple(dict.fromkeys((*page_sizes, *_PAGE_SIZES)))
    axes = (tuple(_HEADS), tuple(_MASKS), (32, 64, 80, 128), pages, tuple(_EXTRAS))
    # Build the specs of usual attention first, then those of latent attention and indexers.
    for heads, mask, head_size, page_size, extra, dtype in product(*axes, _DTYPES):
        point = (heads, mask, head_size, page_size, extra)
        is_other = [value != axis[0] for value, axis in zip(point, axes, strict=True)]
        is_crossed = is_other[4] and (is_other[2] or is_other[3])
        if not is_crossed and not (quick and sum(is_other) > 1):
            yield _spec(heads, mask, head_size, page_size, extra, dtype)
    kinds = ((_latent, _LATENT), (_sparse, _LATENT), (_indexer, _INDEXERS))
    for fields_of, sizes_by_label in kinds:
        first_label = next(iter(sizes_by_label))
        for (label, sizes), page_size, dtype in product(sizes_by_label.items(), pages, _DTYPES):
            if not (quick and label != first_label and page_size != pages[0]):
                label, facts = fields_of(label, *sizes)
                facts |= {"dtype": dtype, "cache_dtype": dtype, "page_size": page_size}
                yield f"{label} page {page_size}", AttentionSpec(num_kv_heads=1, **facts)


def _latent(
    label: str, num_heads: int, latent_size: int, rotary_size: int
) -> tuple[str, dict[str, Any]]:
    head_size = latent_size + rotary_size
    facts = {"num_heads": num_heads, "head_size": head_size, "scale": 3 * head_size**-0.5}
    return label, {**facts, "latent": True, "latent_size": latent_size}


def _sparse(label: str, *sizes: int) -> tuple[str, dict[str, Any]]:
    label, facts = _latent(label, *sizes)
    return f"sparse {label}", {**facts, "sparse": True, "top_k": _SELECTED_TOKENS}


def _indexer(label: str, num_heads: int, head_size: int, top_k: int) -> tuple[str, dict[str, Any]]:
    facts = {"num_heads": num_heads, "head_size": head_size, "scale": head_size**-0.5}
    return label, {**facts, "type": "indexer", "top_k": top_k}


def _spec(
    heads: str, mask: str, head_size: int, page_size: int, extra: str, dtype: torch.dtype
) -> tuple[str, AttentionSpec]:
    num_heads, num_kv_heads = _HEADS[heads]
    facts = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "dtype": dtype,
        "cache_dtype": dtype,
        "page_size": page_size,
        # Three times the usual scale: with small scores, softmax would be nearly uniform.
        "scale": 3 * head_size**-0.5,
    }
    spec = AttentionSpec(**{**facts, **_MASKS[mask], **_EXTRAS[extra]})
    label = f"{heads} {mask} head {head_size} page {page_size}"
    return f"{label} {extra}" if _EXTRAS[extra] else label, spec
