"""Latent attention through FlashInfer, planned once per step, where it is installed.

Prompts and decode steps are planned in the same way. Steps that its kernels have no room for go to
the standard op, and so do those in which some query would miss a key. Arguments are tested on the
processor against a class of the same meaning; on a GPU it was not run.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size.
Source: ``BatchMLAPagedAttentionWrapper`` in flashinfer/mla.py of flashinfer-python 0.6.0, and in
flashinfer/mla/_batch_mla of 0.7.2: starts, pages and lengths in int32, a causal mask that is
aligned to the last query and key, both parts of the cache as views of it; ``MLAPlan`` in
include/flashinfer/attention/scheduler.cuh and ``_fa_plan_work_count`` of 0.7.2: at most 16,384
items of work, which are tiles of 64 or 128 rows of queries, and what long sequences are split into.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from interposer import AttentionBatch, AttentionSpec, Capability, Site, Verdict
from interposer_cuda._flashinfer.latent import TILE_ROWS, plan_step, run_layer
from interposer_cuda._flashinfer.wrappers import (
    FlashInferPlan,
    FlashInferWrappers,
    buffers,
    pages_of,
)
from interposer_cuda._latent_sizes import judge_sizes
from interposer_cuda._providers import FLASHINFER
from interposer_ops.layers.attention import LatentBackend

_WRAPPER = "BatchMLAPagedAttentionWrapper"
# Splits are no more than there are multiprocessors, of which this leaves room for 1,024.
_MOST_TILES = 16384 - 1024


class FlashInferLatentBackend(LatentBackend):
    """Writes with the op's kernel, attends with the package's wrapper."""

    plans_on_host = True

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._wrappers = FlashInferWrappers(site)
        self._facts = {
            "num_heads": spec.num_heads,
            "head_dim_ckv": spec.latent_size,
            "head_dim_kpe": spec.head_size - spec.latent_size,
            "page_size": spec.page_size,
            "sm_scale": spec.scale,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.cache_dtype,
        }
        is_hopper = site.resolver.device.capability.architecture == "sm_90"
        self._kernels = "fa3" if is_hopper else "fa2"
        if not site.resolver.described:
            self._kind: Any = getattr(import_module("flashinfer"), _WRAPPER)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept the sizes of DeepSeek's models in 16 bits."""
        verdict = super().accepts(spec, capability) and judge_sizes(spec)
        if verdict and spec.num_heads > TILE_ROWS:
            return Verdict.refuse(f"takes up to {TILE_ROWS} heads, got {spec.num_heads}")
        # What cannot be had by installing it, is said first.
        return verdict and FLASHINFER.judge()

    def plan(self, batch: AttentionBatch) -> Any:
        """Let the package plan the step, or return it as it is, for the standard op."""
        if not self._takes(batch.on_host()):
            return super().plan(batch)
        wrapper = self._wrappers.kept(_WRAPPER, lambda: self._made(batch))
        self._plan_step(wrapper, batch)
        return self._wrappers.planned(batch.slots, wrapper)

    def plan_fixed(self, batch: AttentionBatch) -> FlashInferPlan:
        """Return a plan with a wrapper, and buffers that it reads, of its own."""
        size, most_pages = batch.page_table.shape
        held = buffers(
            batch,
            qo_indptr=size + 1,
            kv_indptr=size + 1,
            kv_indices=size * most_pages,
            kv_len_arr=size,
        )
        wrapper = self._made(batch, use_cuda_graph=True, **held)
        plan = FlashInferPlan(batch.slots, wrapper, None)
        self.update_plan(plan, batch)
        return plan

    def update_plan(self, plan: FlashInferPlan, batch: AttentionBatch) -> None:
        """Let the package plan into the buffers of the plan; nothing is waited for."""
        self._plan_step(plan.wrapper, batch)

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: Any) -> torch.Tensor:
        """Call the package, or the op; see ``LatentBackend.attend``.

        Raises: RequestError: the plan is not the last one.
        """
        if isinstance(plan, AttentionBatch):
            return super().attend(query, cache, plan)
        self._wrappers.check(plan)
        return run_layer(plan.wrapper, query, cache, self.spec.latent_size)

    def _takes(self, host: AttentionBatch) -> bool:
        """Say whether its kernels attend rightly, by what the host knows of the step."""
        num_heads, num_sequences = self.spec.num_heads, len(host.seq_lens)
        if not len(host.slots):
            return False
        if host.max_query_tokens > 1 and TILE_ROWS % num_heads:
            return False
        num_rows = host.query_starts.diff() * num_heads
        is_full = int(num_rows.sum()) // num_sequences > TILE_ROWS // 2
        tile_rows = TILE_ROWS if is_full else TILE_ROWS // 2
        num_tiles = int(((num_rows + tile_rows - 1) // tile_rows).sum())
        return num_tiles <= _MOST_TILES

    def _plan_step(self, wrapper: Any, batch: AttentionBatch) -> None:
        host = batch.on_host()
        pages = pages_of(batch, self.spec.page_size)
        plan_step(wrapper, host.query_starts, pages, host.seq_lens, **self._facts)

    def _made(self, batch: AttentionBatch, **facts: Any) -> Any:
        """Return a new wrapper."""
        workspace = self._wrappers.workspace(batch.slots.device)
        return self._kind(workspace, backend=self._kernels, **facts)
