"""Latent attention through FlashInfer, planned once per step, if the package is installed.

Prompts and decode steps are planned alike. The standard op serves steps too large for FlashInfer's
work queue, and steps in which FlashInfer's causal tiles would skip a key. Call arguments are tested
on the CPU against a stand-in class.

Dimensions: T tokens, N heads, C latent size, R rotary size, B sequences, M pages of the longest
sequence, P pages, S page size.
Source: ``BatchMLAPagedAttentionWrapper`` in flashinfer/mla.py of flashinfer-python 0.6.0, and in
flashinfer/mla/_batch_mla of 0.7.2: starts, pages and lengths in int32, a causal mask that is
aligned to the last query and key, both parts of the cache as views of it; ``MLAPlan`` in
include/flashinfer/attention/scheduler.cuh and ``_fa_plan_work_count`` of 0.7.2: at most 16,384
work items, each a tile of 64 or 128 query rows or one split of a long sequence.
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
    graph_buffers,
    pages_of,
)
from interposer_cuda._latent_sizes import judge_sizes
from interposer_cuda._providers import FLASHINFER
from interposer_ops.layers.attention import LatentBackend

_WRAPPER = "BatchMLAPagedAttentionWrapper"
# Splits also take work items. A GPU adds at most one split per multiprocessor: 1,024 are reserved.
_MAX_TILES = 16384 - 1024


class FlashInferLatentBackend(LatentBackend):
    """Writes the cache with interposer's kernel, then attends with FlashInfer's MLA wrapper."""

    plans_on_host = True

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        self._wrappers = FlashInferWrappers(site)
        self._plan_arguments = {
            "num_heads": spec.num_heads,
            "head_dim_ckv": spec.latent_size,
            "head_dim_kpe": spec.head_size - spec.latent_size,
            "page_size": spec.page_size,
            "sm_scale": spec.scale,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.cache_dtype,
        }
        # FlashInfer has fa3 kernels for sm_90 only.
        is_hopper = site.resolver.device.capability.architecture == "sm_90"
        self._kernel_family = "fa3" if is_hopper else "fa2"
        if not site.resolver.described:
            self._wrapper_class: Any = getattr(import_module("flashinfer"), _WRAPPER)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept DeepSeek's latent sizes in 16 bits."""
        verdict = super().accepts(spec, capability) and judge_sizes(spec)
        if verdict and spec.num_heads > TILE_ROWS:
            return Verdict.refuse(f"takes up to {TILE_ROWS} heads, got {spec.num_heads}")
        # Limits of the package come first: installing the package would not lift the limits.
        return verdict and FLASHINFER.judge()

    def plan(self, batch: AttentionBatch) -> Any:
        """Plan the step with FlashInfer, or return a plan for the standard op."""
        if not self._is_supported(batch.on_host()):
            return super().plan(batch)
        wrapper = self._wrappers.cached(_WRAPPER, lambda: self._new_wrapper(batch))
        self._plan_step(wrapper, batch)
        return self._wrappers.new_plan(batch.slots, wrapper)

    def plan_fixed(self, batch: AttentionBatch) -> FlashInferPlan:
        """Plan a step with a new wrapper and buffers at fixed addresses, for a captured graph."""
        size, max_pages = batch.page_table.shape
        index_buffers = graph_buffers(
            batch,
            qo_indptr=size + 1,
            kv_indptr=size + 1,
            kv_indices=size * max_pages,
            kv_len_arr=size,
        )
        wrapper = self._new_wrapper(batch, use_cuda_graph=True, **index_buffers)
        plan = FlashInferPlan(batch.slots, wrapper, None)
        self.update_plan(plan, batch)
        return plan

    def update_plan(self, plan: FlashInferPlan, batch: AttentionBatch) -> None:
        """Plan the next replay into the plan's own buffers, without synchronizing."""
        self._plan_step(plan.wrapper, batch)

    def attend(self, query: torch.Tensor, cache: torch.Tensor, plan: Any) -> torch.Tensor:
        """Attend with FlashInfer or the standard op; see ``LatentBackend.attend``.

        Raises: RequestError: a newer plan has replaced ``plan``.
        """
        if isinstance(plan, AttentionBatch):
            return super().attend(query, cache, plan)
        self._wrappers.check(plan)
        return run_layer(plan.wrapper, query, cache, self.spec.latent_size)

    def _is_supported(self, host: AttentionBatch) -> bool:
        """Say whether FlashInfer attends to this step correctly, from the host's lengths."""
        num_heads, num_sequences = self.spec.num_heads, len(host.seq_lens)
        if not len(host.slots):
            return False
        if host.max_query_tokens > 1 and TILE_ROWS % num_heads:
            return False
        # The scheduler picks the large tile by the mean number of query rows per sequence.
        num_rows = host.query_starts.diff() * num_heads
        is_full = int(num_rows.sum()) // num_sequences > TILE_ROWS // 2
        tile_rows = TILE_ROWS if is_full else TILE_ROWS // 2
        num_tiles = int(((num_rows + tile_rows - 1) // tile_rows).sum())
        return num_tiles <= _MAX_TILES

    def _plan_step(self, wrapper: Any, batch: AttentionBatch) -> None:
        host = batch.on_host()
        pages = pages_of(batch, self.spec.page_size)
        plan_step(wrapper, host.query_starts, pages, host.seq_lens, **self._plan_arguments)

    def _new_wrapper(self, batch: AttentionBatch, **options: Any) -> Any:
        workspace = self._wrappers.workspace(batch.slots.device)
        return self._wrapper_class(workspace, backend=self._kernel_family, **options)
