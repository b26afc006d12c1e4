"""Decoder attention by flash-attn, where a build of it for these GPUs is installed.

It reads pages of 128 tokens or more alone, so that the one for sequences of any length is
given copies. Its own kernels for these GPUs are CK's, or Triton's where
``FLASH_ATTENTION_TRITON_AMD_ENABLE`` is set, which it reads itself.

Source: ``flash_attn_varlen_func`` in flash_attn/flash_attn_interface.py of
Dao-AILab/flash-attention 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interposer import AttentionSpec, Capability, Verdict
from interposer.errors import InterposerError
from interposer_rocm.copied_keys import CopiedKeysBackend
from interposer_rocm.examined_package import ExaminedPackage
from interposer_rocm.flash_attention_judge import flash_attention_version, judge

__all__ = ["FlashAttentionBackend", "FlashAttentionError", "inquire", "refresh"]

_FUNCTION = "flash_attn:flash_attn_varlen_func"
_WANTED = {
    _FUNCTION: {
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("softmax_scale", "causal", "window_size"),
    }
}


class FlashAttentionError(InterposerError):
    """flash-attn cannot be used; the text says why and what to try."""


_PACKAGE = ExaminedPackage(
    "flash-attn", flash_attention_version, _WANTED, FlashAttentionError, "FLASH_ATTENTION_"
)
inquire = _PACKAGE.inquire
refresh = _PACKAGE.refresh


class FlashAttentionBackend(CopiedKeysBackend):
    """Windows are the function's own; softcapped logits it may leave as they are."""

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept what ``judge`` accepts."""
        return judge(spec, capability)

    def _found(self) -> Callable[..., Any]:
        _PACKAGE.require(_FUNCTION)
        return _PACKAGE.function(_FUNCTION)
