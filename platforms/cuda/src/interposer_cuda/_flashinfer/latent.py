"""The op ``latent_attention_decode`` by FlashInfer, if the package is installed.

An op has no plan, so every call plans again and synchronizes; the attention backend avoids both.
Call arguments are tested on the CPU against a stand-in class.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size.
Source: ``BatchMLAPagedAttentionWrapper`` in flashinfer/mla.py of flashinfer-python 0.6.0, and in
flashinfer/mla/_batch_mla of 0.7.2, whose kernels are tested for DeepSeek's sizes.
``_validate_fa_causal_tile_bound`` of 0.7.2: with several queries per sequence, a query may skip a
visible key unless the number of heads divides the rows of a tile.
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
    """FlashInfer wrappers of the current thread by device; each wrapper holds one plan."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, Any] = {}

    def on(self, device: torch.device) -> Any:
        if device not in self.by_device:
            workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            package = import_module("flashinfer")
            self.by_device[device] = package.BatchMLAPagedAttentionWrapper(workspace, backend="fa2")
        return self.by_device[device]


_wrappers = _Wrappers()


TILE_ROWS = 128
"""Rows of the largest tile: queries of one sequence times heads. The smaller tile has half."""


def judge(request: Request) -> Verdict:
    """Accept a cache of the request's dtype if FlashInfer is installed."""
    cache_dtype, num_heads = request.dims["cache_dtype"], request.dims["num_heads"]
    if cache_dtype != request.dtype:
        return Verdict.refuse(f"reads caches of {request.dtype}, as queries are, got {cache_dtype}")
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
    """Compute the op ``latent_attention_decode`` with FlashInfer."""
    num_tokens, num_heads, width = query.shape
    if not num_tokens:
        return query.new_empty((num_tokens, num_heads, latent_size))
    # The latent vectors serve as keys and as values: the cache scale multiplies the scores (here
    # through sm_scale) and the output.
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
    **layer_arguments: Any,
) -> None:
    """Plan a step with ``wrapper``, for later calls of ``run_layer``.

    Args:
        query_starts, seq_lens: ``[B + 1]`` and ``[B]``; FlashInfer copies both to the host.
        layer_arguments: keyword arguments that are the same in every step.
    """
    # FlashInfer 0.7 deprecates these parameter names, but 0.6 lacks the new names.
    wrapper.plan(
        qo_indptr=query_starts.to(torch.int32),
        kv_indptr=pages.starts,
        kv_indices=pages.indices,
        kv_len_arr=seq_lens.to(torch.int32),
        causal=True,
        **layer_arguments,
    )


def run_layer(
    wrapper: Any, query: torch.Tensor, cache: torch.Tensor, latent_size: int
) -> torch.Tensor:
    """Attend to the cache with the wrapper's plan.

    Args:
        query: ``[T, N, C + R]``.
        cache: ``[P, S, C + R]``.
    Returns: ``[T, N, C]``.
    """
    out: torch.Tensor = wrapper.run(
        q_nope=query[..., :latent_size],
        q_pe=query[..., latent_size:],
        ckv_cache=cache[..., :latent_size],
        kpe_cache=cache[..., latent_size:],
    )
    return out
