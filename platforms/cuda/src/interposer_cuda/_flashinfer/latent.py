"""The op of latent attention by FlashInfer, where it is installed.

An op has no plan, so that each call plans anew and waits for the device; the backend does not.
Arguments are tested on the processor against a class of the same meaning; on a GPU it was not run.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size.
Source: ``BatchMLAPagedAttentionWrapper`` in flashinfer/mla.py of flashinfer-python 0.6.0, and in
flashinfer/mla/_batch_mla of 0.7.2; the sizes are those of DeepSeek's models, for which its kernels
are tested. ``_validate_fa_causal_tile_bound`` of 0.7.2: of several queries, some may miss a key
that they see, unless heads are a divisor of the rows of a tile.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import torch

from interposer import Request, Verdict
from interposer_cuda._flashinfer.pages import FlashInferPages
from interposer_cuda._providers import FLASHINFER

_WORKSPACE_BYTES = 128 * 2**20


class _Wrappers(threading.local):
    """One wrapper for each device, which a thread has to itself."""

    def __init__(self) -> None:
        self.made: dict[torch.device, Any] = {}

    def on(self, device: torch.device) -> Any:
        if device not in self.made:
            workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            package = import_module("flashinfer")
            self.made[device] = package.BatchMLAPagedAttentionWrapper(workspace, backend="fa2")
        return self.made[device]


_wrappers = _Wrappers()


TILE_ROWS = 128
"""Rows of the largest tile: queries of one sequence, head by head. Others have half as many."""


def judge(request: Request) -> Verdict:
    """Accept a cache of the request's dtype, where the package is installed."""
    stored, num_heads = request.dims["cache_dtype"], request.dims["num_heads"]
    if stored != request.dtype:
        return Verdict.refuse(f"reads caches of {request.dtype}, as queries are, got {stored}")
    if TILE_ROWS % int(num_heads):
        return Verdict.refuse(f"takes heads that divide {TILE_ROWS}, got {num_heads}")
    return FLASHINFER.judge()


def latent_attention_decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_tokens: int,
    latent_size: int,
    scale: float,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``latent_attention_decode``."""
    num_tokens, num_heads, width = query.shape
    if not num_tokens:
        return query.new_empty((num_tokens, num_heads, latent_size))
    # What is stored acts as keys, whose factor is one of the scores, and as values.
    factor = 1.0 if cache_scale is None else cache_scale.item()
    pages = FlashInferPages.of(page_table, seq_lens, cache.shape[1])
    wrapper = _wrappers.on(query.device)
    plan_step(
        wrapper,
        query_starts,
        pages,
        seq_lens,
        num_heads=num_heads,
        head_dim_ckv=latent_size,
        head_dim_kpe=width - latent_size,
        page_size=cache.shape[1],
        sm_scale=scale * factor,
        q_data_type=query.dtype,
        kv_data_type=cache.dtype,
    )
    out = run_layer(wrapper, query, cache, latent_size)
    return out if cache_scale is None else out * factor


def plan_step(
    wrapper: Any,
    query_starts: torch.Tensor,
    pages: FlashInferPages,
    seq_lens: torch.Tensor,
    **facts: Any,
) -> None:
    """Let ``wrapper`` plan a step, for calls of ``run_layer``.

    Args:
        query_starts, seq_lens: ``[B + 1]`` and ``[B]``, which it wants on the host.
        facts: what is the same in every step.
    """
    # 0.7 takes these names still, though deprecated; those that it wants instead, 0.6 lacks.
    wrapper.plan(
        qo_indptr=query_starts.to(torch.int32),
        kv_indptr=pages.starts,
        kv_indices=pages.indices,
        kv_len_arr=seq_lens.to(torch.int32),
        causal=True,
        **facts,
    )


def run_layer(
    wrapper: Any, query: torch.Tensor, cache: torch.Tensor, latent_size: int
) -> torch.Tensor:
    """Return ``[T, N, C]`` of queries ``[T, N, C + R]`` and the cache ``[P, S, C + R]``."""
    out: torch.Tensor = wrapper.run(
        q_nope=query[..., :latent_size],
        q_pe=query[..., latent_size:],
        ckv_cache=cache[..., :latent_size],
        kpe_cache=cache[..., latent_size:],
    )
    return out
