"""Builds of attention over a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP16, _FP32, _INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int64
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_NO_E4M3 = frozenset({"sm_75", "sm_80"})
_NAME = "paged_attention_triton"


def _call(
    heads: tuple[int, int, int],
    *,
    dtype: torch.dtype = _BF16,
    cache_dtype: torch.dtype | None = None,
    longest: int = 1024,
    window_tokens: int | None = None,
    softcap: float | None = None,
    features: tuple[str, ...] = (),
) -> Callable[[], tuple[Any, ...]]:
    """Return the arguments of 4 sequences in pages of 16; the longest query decides the launches.

    Args:
        heads: heads, kv heads, head size.
        features: names of optional arguments that are given.
    """

    def arguments() -> tuple[Any, ...]:
        num_heads, kv_heads, head_size = heads
        cache = meta(cache_dtype or dtype, 4096, 16, kv_heads, head_size)
        options = {
            "sinks": meta(dtype, num_heads),
            "alibi_slopes": meta(_FP32, num_heads),
            "prefix_lens": meta(_INT64, 4),
            "key_scale": meta(_FP32, 1),
            "value_scale": meta(_FP32, 1),
        }
        return (
            meta(dtype, 4 * longest, num_heads, head_size),
            cache,
            cache,
            meta(_INT64, 4, 1024),
            meta(_INT64, 5),
            meta(_INT64, 4),
            longest,
            head_size**-0.5,
            True,
            window_tokens,
            softcap,
            *(tensor if name in features else None for name, tensor in options.items()),
        )

    return arguments


_LLAMA = (32, 8, 128)
_SCALES = ("key_scale", "value_scale")

BUILDS = (
    Build(_NAME, "32 and 8 heads of 128", _call(_LLAMA), matrix=True),
    Build(_NAME, "32 and 8 heads of 128, decode", _call(_LLAMA, longest=1), matrix=True),
    Build(
        _NAME,
        "8 and 4 heads of 256, window, softcap",
        _call((8, 4, 256), window_tokens=4096, softcap=50.0),
        matrix=True,
    ),
    Build(
        _NAME,
        "64 and 8 heads of 64, window, softcap, sinks",
        _call((64, 8, 64), window_tokens=128, softcap=30.0, features=("sinks",)),
        matrix=True,
    ),
    Build(
        _NAME,
        "float16, 32 and 8 heads of 80, alibi, prefix",
        _call((32, 8, 80), dtype=_FP16, features=("alibi_slopes", "prefix_lens")),
        "float16",
        matrix=True,
    ),
    Build(_NAME, "float32, 16 and 16 heads of 64", _call((16, 16, 64), dtype=_FP32), "float32"),
    Build(
        _NAME,
        "float8_e4m3fn, 32 and 8 heads of 128",
        _call(_LLAMA, cache_dtype=_E4M3, features=_SCALES),
        dims={"cache_dtype": "float8_e4m3fn"},
        matrix=True,
        without=_NO_E4M3,
    ),
    Build(
        _NAME,
        "float8_e5m2, 32 and 8 heads of 128",
        _call(_LLAMA, cache_dtype=_E5M2, features=_SCALES),
        dims={"cache_dtype": "float8_e5m2"},
        matrix=True,
    ),
)
