"""Decoder attention by AITER's flash attention for sequences of any length.

Its own way to read pages ends the process on some GPUs (ROCm/aiter, issues 4455 and 4456), so
that what is read is copied out of the cache first. Argument mapping is tested with functions that
compute on the processor; on a GPU it was not run.

Dimensions: T tokens, N heads, K kv heads, D head size, L cached tokens that are read.
"""

from __future__ import annotations

import torch

from interposer import AttentionSpec, Capability, Site, Verdict
from interposer_ops.attention import GatheredBackend, GatheredStep, window_ends
from interposer_rocm._aiter.library import FLASH, function, require
from interposer_rocm._aiter.package import judge_flash


class AiterFlashBackend(GatheredBackend):
    """Whole prompts attend to the step's own keys, everything else to copies from the cache."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        """Examine AITER, unless the device is only described.

        Raises: AiterError, PluginError: it cannot be used.
        """
        super().__init__(spec, site)
        if not site.resolver.described:
            require(FLASH)
            self._attend = function(FLASH)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept what ``judge_flash`` accepts."""
        return judge_flash(spec, capability)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: GatheredStep
    ) -> torch.Tensor:
        """Call AITER; see ``GatheredBackend.attend``."""
        out: torch.Tensor = self._attend(
            query,
            key,
            value,
            cu_seqlens_q=step.query_starts,
            cu_seqlens_k=step.key_starts,
            max_seqlen_q=step.max_query_tokens,
            max_seqlen_k=step.max_key_tokens,
            softmax_scale=self.spec.scale,
            logits_soft_cap=self.spec.softcap or 0.0,
            causal=True,
            window_size=window_ends(self.spec),
        )
        return out
