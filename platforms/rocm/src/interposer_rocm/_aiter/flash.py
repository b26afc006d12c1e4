"""Decoder attention by AITER's batched prefill, which reads the KV cache in place.

To AITER every cached token is a page of size 1, and a step lists the tokens of each sequence. The
list is computed on the device with a size that depends on shapes alone (sequences times the longest
length), so a captured graph can be replayed with other lengths. AITER's variable-length flash
attention also takes pages, but crashes the process on some GPUs (ROCm/aiter, issues 4455 and 4456).

Argument mapping is tested with a function that computes on the CPU; no GPU has run this module.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, M pages of the longest
sequence, P pages, S page size, L listed tokens.
Source: ``mha_batch_prefill_func`` in aiter/ops/mha.py and its checks in
csrc/py_itfs_ck/mha_batch_prefill_kernels.cu of amd-aiter 0.1.7: keys and values ``[P S, K, D]``,
starts and indices in int32, a causal mask that is aligned to the last query and key, a window of
``(left, right)`` tokens in addition to the query's own. AITER's op_tests/test_batch_prefill.py
appends 128 indices, which kernels prefetch, and skips causal masks without a softcap on gfx950 with
ROCm 7.2 because of a compiler fault.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from interposer import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capability,
    KVCacheLayout,
    Site,
    Verdict,
)
from interposer_ops.attention import window_ends
from interposer_ops.caches import CacheWriter, cumulated
from interposer_rocm._aiter.library import FLASH, AiterError, function, require
from interposer_rocm._aiter.package import judge_flash
from interposer_rocm._hardware.torch_build import TorchBuild

# Kernels prefetch this number of indices beyond the last one.
_FETCHED_AHEAD = 128
# Architecture, and beginning of the ROCm versions whose compiler is faulty.
_MISCOMPILED = ("gfx950", "7.2.")


class AiterStep(NamedTuple):
    """Arguments of AITER's batched prefill that all layers of a step share.

    Attributes:
        slots: ``[T]`` int64, cache slots to write.
        read_slots: ``[L]`` int32, cache slots to read, sequence by sequence, then padding.
        query_starts, key_starts: ``[B + 1]`` int32.
    """

    slots: torch.Tensor
    read_slots: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    max_query_tokens: int
    max_seq_tokens: int


class AiterFlashBackend(AttentionBackend):
    """Writes the cache with interposer's kernel, then attends in place with AITER."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        """Check that AITER works, unless the device is only described.

        Raises: AiterError, PluginError: AITER cannot be used.
        """
        super().__init__(spec, site)
        self._write = CacheWriter(spec, site).store
        self._layer_arguments = {
            "softmax_scale": spec.scale,
            "logits_soft_cap": spec.softcap or 0.0,
            "causal": True,
            "window_size": window_ends(spec),
        }
        if not site.resolver.described:
            _require_good_compiler(spec, site.resolver.device.capability.architecture)
            require(FLASH)
            self._attend: Any = function(FLASH)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept plain decoders in 16 bits; see ``judge_flash``."""
        return judge_flash(spec, capability)

    def kv_layout(self) -> KVCacheLayout:
        """Return the cache layout ``[2, P, S, K, D]``; each half is viewable as ``[P S, K, D]``."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> AiterStep:
        """List the cache slots of each sequence, without synchronizing."""
        starts = cumulated(batch.seq_lens)
        return AiterStep(
            batch.slots,
            _slots(batch, starts, self.spec.page_size),
            batch.query_starts.to(torch.int32),
            starts,
            batch.max_query_tokens,
            batch.max_seq_tokens,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        plan: AiterStep,
    ) -> torch.Tensor:
        """Write keys and values, then compute the attention; see ``AttentionBackend.forward``."""
        keys, values = cache.unbind(0)
        self._write(key, value, keys, values, plan.slots)
        if not len(query):
            return torch.empty_like(query)
        out: torch.Tensor = self._attend(
            query,
            keys.flatten(0, 1),
            values.flatten(0, 1),
            cu_seqlens_q=plan.query_starts,
            kv_indptr=plan.key_starts,
            kv_page_indices=plan.read_slots,
            max_seqlen_q=plan.max_query_tokens,
            max_seqlen_k=plan.max_seq_tokens,
            **self._layer_arguments,
        )
        return out


def _slots(batch: AttentionBatch, starts: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the cache slots to read, ``[L]`` int32, where L depends on shapes alone.

    Entries after the last token are padding: valid slots of the last sequence.
    """
    num_sequences, max_pages = batch.page_table.shape
    size = num_sequences * batch.max_seq_tokens + _FETCHED_AHEAD
    indices = torch.arange(size, dtype=torch.int32, device=starts.device)
    # The sequence of each listed token; padding belongs to the last sequence.
    row = torch.searchsorted(starts[1:], indices, right=True).clamp(max=num_sequences - 1)
    position = indices - starts[row]
    page = (position // page_size).clamp(max=max_pages - 1)
    slots = batch.page_table[row, page.long()] * page_size + position % page_size
    return slots.to(torch.int32)


def _require_good_compiler(spec: AttentionSpec, architecture: str) -> None:
    affected, hip_prefix = _MISCOMPILED
    if architecture == affected and spec.softcap is None:
        hip = TorchBuild.installed().hip
        if hip.startswith(hip_prefix):
            raise AiterError(
                f"ROCm {hip} compiles AITER's causal attention without a softcap wrongly for "
                f"{affected}, as its own tests say. Try: another ROCm"
            )
