"""Decoder attention by flash-attn, if a build for AMD GPUs is installed.

flash-attn reads only pages of 128 tokens or more, so its variable-length function is called on
gathered copies of the cache. On AMD GPUs, flash-attn runs kernels of Composable Kernel (CK), or
Triton kernels if ``FLASH_ATTENTION_TRITON_AMD_ENABLE`` is set. Argument mapping is tested with a
function that computes on the CPU; no GPU has run this module.

Source: ``flash_attn_varlen_func`` in flash_attn/flash_attn_interface.py of
Dao-AILab/flash-attention 2.
"""

from __future__ import annotations

import torch

from interposer import AttentionSpec, Capability, Site, Verdict
from interposer.errors import InterposerError
from interposer_ops.attention import GatheredBackend, GatheredStep, window_ends
from interposer_rocm._examined_package import ExaminedPackage
from interposer_rocm._flash_attention_judge import flash_attention_version, judge

_FUNCTION = "flash_attn:flash_attn_varlen_func"
_KEYWORDS = {
    _FUNCTION: {
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("softmax_scale", "causal", "window_size"),
    }
}


class FlashAttentionError(InterposerError):
    """flash-attn cannot be used; the message gives the reason and a remedy."""


_PACKAGE = ExaminedPackage(
    "flash-attn", flash_attention_version, _KEYWORDS, FlashAttentionError, "FLASH_ATTENTION_"
)
inquire = _PACKAGE.inquire
refresh = _PACKAGE.refresh


class FlashAttentionBackend(GatheredBackend):
    """Attends with flash-attn to gathered copies of the cache; windows are supported."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        """Check that flash-attn works, unless the device is only described.

        Raises: FlashAttentionError, PluginError: flash-attn cannot be used.
        """
        super().__init__(spec, site)
        if not site.resolver.described:
            _PACKAGE.require(_FUNCTION)
            self._attend = _PACKAGE.function(_FUNCTION)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept plain decoders in 16 bits on GPUs with matrix units; see ``judge``."""
        return judge(spec, capability)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: GatheredStep
    ) -> torch.Tensor:
        """Attend with flash-attn; see ``GatheredBackend.attend``."""
        # Without a softcap: CK kernels ignore the argument, so ``judge`` refuses layers with a
        # softcap.
        out: torch.Tensor = self._attend(
            query,
            key,
            value,
            cu_seqlens_q=step.query_starts,
            cu_seqlens_k=step.key_starts,
            max_seqlen_q=step.max_query_tokens,
            max_seqlen_k=step.max_key_tokens,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=window_ends(self.spec),
        )
        return out
