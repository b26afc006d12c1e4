"""Decoder attention by AITER's batched prefill, which reads the cache as it lies.

Every cached token is a page to it, and a step names those of each sequence: keys and values are not
moved. What follows from lengths and pages is computed on the device, in as much memory as the
longest sequence of the step needs, so that a captured step reads other lengths when it is replayed.
The other function that takes pages, flash attention for sequences of any length, ends the process
on some GPUs (ROCm/aiter, issues 4455 and 4456).

Argument mapping is tested with a function that computes on the processor; on a GPU it was not run.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, M pages of the longest
sequence, P pages, S page size, L cached tokens that can be read.
Source: ``mha_batch_prefill_func`` in aiter/ops/mha.py and its checks in
csrc/py_itfs_ck/mha_batch_prefill_kernels.cu of amd-aiter 0.1.7: keys and values ``[P S, K, D]``,
starts and indices in int32, a causal mask that is aligned to the last query and key, a window of
``(left, right)`` tokens besides the query's own. Its test, op_tests/test_batch_prefill.py, puts 128
indices behind the last, which kernels fetch ahead, and leaves out causal masks without a softcap
for gfx950 with ROCm 7.2, whose compiler it blames.
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

_FETCHED_AHEAD = 128
_MISCOMPILED = ("gfx950", "7.2.")


class AiterStep(NamedTuple):
    """Arguments that all layers of a step share.

    Attributes:
        slots: ``[T]`` int64, that are written.
        read: ``[L]`` int32, slots of all sequences, one after the other, and more behind them.
        query_starts, key_starts: ``[B + 1]`` int32.
    """

    slots: torch.Tensor
    read: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    max_query_tokens: int
    max_seq_tokens: int


class AiterFlashBackend(AttentionBackend):
    """Writes with the op's kernel, attends with the package's function."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        """Examine AITER, unless the device is only described.

        Raises: AiterError, PluginError: it cannot be used.
        """
        super().__init__(spec, site)
        self._write = CacheWriter(spec, site).store
        self._facts = {
            "softmax_scale": spec.scale,
            "logits_soft_cap": spec.softcap or 0.0,
            "causal": True,
            "window_size": window_ends(spec),
        }
        if not site.resolver.described:
            _check_compiler(spec, site.resolver.device.capability.architecture)
            require(FLASH)
            self._attend: Any = function(FLASH)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept what ``judge_flash`` accepts."""
        return judge_flash(spec, capability)

    def kv_layout(self) -> KVCacheLayout:
        """Return ``[2, P, S, K, D]``, keys first: either is ``[P S, K, D]`` without a copy."""
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: AttentionBatch) -> AiterStep:
        """Return where each sequence's tokens lie; the host waits for nothing."""
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
        """Write, then attend; see ``AttentionBackend.forward``."""
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
            kv_page_indices=plan.read,
            max_seqlen_q=plan.max_query_tokens,
            max_seqlen_k=plan.max_seq_tokens,
            **self._facts,
        )
        return out


def _slots(batch: AttentionBatch, starts: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return ``[L]`` int32 slots, where L depends on shapes alone.

    What lies behind the last token of all is some slot of the last sequence.
    """
    count, most_pages = batch.page_table.shape
    size = count * batch.max_seq_tokens + _FETCHED_AHEAD
    place = torch.arange(size, dtype=torch.int32, device=starts.device)
    row = torch.searchsorted(starts[1:], place, right=True).clamp(max=count - 1)
    position = place - starts[row]
    page = (position // page_size).clamp(max=most_pages - 1)
    slots = batch.page_table[row, page.long()] * page_size + position % page_size
    return slots.to(torch.int32)


def _check_compiler(spec: AttentionSpec, architecture: str) -> None:
    affected, hip = _MISCOMPILED
    if architecture == affected and spec.softcap is None:
        found = TorchBuild.installed().hip
        if found.startswith(hip):
            raise AiterError(
                f"ROCm {found} compiles AITER's causal attention without a softcap wrongly for "
                f"{affected}, as its own tests say. Try: another ROCm"
            )
