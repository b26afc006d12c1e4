"""Builds of attention without a cache, and of joining what parts of the keys gave."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from interposer import Dims
from interposer_ops._triton.build import Build, meta

_TOKENS = 4096


class _Model(NamedTuple):
    """What a layer fixes."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window_tokens: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Return a call of four sequences."""
        starts = meta(torch.int64, 5)
        return (
            meta(self.dtype, _TOKENS, self.heads, self.head_size),
            meta(self.dtype, _TOKENS, self.kv_heads, self.head_size),
            meta(self.dtype, _TOKENS, self.kv_heads, self.value_size),
            starts,
            starts,
            _TOKENS,
            _TOKENS,
            self.head_size**-0.5,
            self.causal,
            self.window_tokens,
            self.softcap,
            meta(self.dtype, self.heads) if self.sinks else None,
            meta(torch.float32, self.heads) if self.alibi else None,
        )

    def dims(self) -> Dims:
        """Return what a request states."""
        return {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_size": self.head_size,
            "value_size": self.value_size,
            "causal": self.causal,
            "windowed": self.window_tokens is not None,
            "softcapped": self.softcap is not None,
            "sinks": self.sinks,
            "alibi": self.alibi,
        }


def _build(label: str, model: _Model, kernel: str = "ragged_attention_triton") -> Build:
    dtype = str(model.dtype).removeprefix("torch.")
    matrix = model.dtype is not torch.float32
    return Build(kernel, label, model.arguments, dtype, model.dims(), matrix)


def _states() -> tuple[Any, ...]:
    out, lse = meta(torch.bfloat16, 64, 128, 128), meta(torch.float32, 64, 128)
    return out, lse, out, lse


BUILDS = (
    _build("causal, 32 and 8 heads of 128", _Model(32, 8, 128, 128)),
    _build("causal, 32 and 8 heads of 64", _Model(32, 8, 64, 64)),
    _build("causal, 16 and 8 heads of 256", _Model(16, 8, 256, 256)),
    _build("encoder, 16 heads of 80, float16", _Model(16, 16, 80, 80, torch.float16, False)),
    _build(
        "window and softcap, 16 and 8 heads of 256",
        _Model(16, 8, 256, 256, window_tokens=4096, softcap=50.0),
    ),
    _build(
        "window and sinks, 64 and 8 heads of 64",
        _Model(64, 8, 64, 64, window_tokens=128, sinks=True),
    ),
    _build("ALiBi, 32 heads of 128", _Model(32, 32, 128, 128, alibi=True)),
    _build("causal, 8 heads of 64, float32", _Model(8, 8, 64, 64, torch.float32)),
    _build(
        "latent, 128 heads of 192 and 128",
        _Model(128, 128, 192, 128),
        "ragged_attention_with_lse_triton",
    ),
    Build(
        "merge_attention_states_triton",
        "128 heads of 128",
        _states,
        dims={"num_heads": 128, "value_size": 128},
    ),
)
