"""AITER's functions, and checks that the installed version can be called."""

from __future__ import annotations

from interposer import Request, Verdict
from interposer.errors import InterposerError
from interposer_rocm._aiter.package import aiter_version, is_quantized
from interposer_rocm._examined_package import ExaminedPackage

FLASH = "aiter:mha_batch_prefill_func"
MLA_DECODE = "aiter.mla:mla_decode_fwd"
FUSED_MOE = "aiter.fused_moe:fused_moe"
SHUFFLE_WEIGHT = "aiter.ops.shuffle:shuffle_weight"

# Keyword arguments that this plugin passes, checked against the installed functions.
_KEYWORDS = {
    FLASH: {
        *("q", "k", "v", "cu_seqlens_q", "kv_indptr", "kv_page_indices"),
        *("max_seqlen_q", "max_seqlen_k", "softmax_scale", "logits_soft_cap"),
        *("causal", "window_size"),
    },
    MLA_DECODE: {
        *("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens"),
        *("max_seqlen_q", "sm_scale"),
    },
    FUSED_MOE: {
        *("hidden_states", "w1", "w2", "topk_weight", "topk_ids"),
        *("activation", "quant_type"),
    },
    SHUFFLE_WEIGHT: {"x", "layout"},
}
_SCALE_KEYWORDS = {"w1_scale", "w2_scale"}


class AiterError(InterposerError):
    """AITER cannot be used; the message gives the reason and a remedy."""


_AITER = ExaminedPackage("AITER", aiter_version, _KEYWORDS, AiterError, "AITER_")
inquire = _AITER.inquire
refresh = _AITER.refresh
require = _AITER.require
function = _AITER.function


def confirm_experts(_request: Request) -> Verdict:
    """Check that AITER's fused MoE and its weight shuffle can be called."""
    return inquire().judge(FUSED_MOE, SHUFFLE_WEIGHT)


def confirm_scaled_experts(request: Request) -> Verdict:
    """Check that AITER's fused MoE can be called with weight scales."""
    verdict = confirm_experts(request)
    missing = sorted(_SCALE_KEYWORDS - {*inquire().parameters.get(FUSED_MOE, ())})
    if verdict and missing:
        return Verdict.refuse(
            f"aiter.fused_moe.fused_moe of AITER {aiter_version()} takes no {', '.join(missing)}. "
            "Try a newer one"
        )
    return verdict


def confirm_latent(request: Request) -> Verdict:
    """Check that AITER's MLA decode can be called with the request's cache dtype."""
    inquiry = inquire()
    verdict = inquiry.judge(MLA_DECODE)
    is_cache_quantized = is_quantized(request.dims, request.dtype)
    if verdict and is_cache_quantized and "kv_scale" not in inquiry.parameters[MLA_DECODE]:
        return Verdict.refuse(
            f"aiter.mla.mla_decode_fwd of AITER {aiter_version()} takes no kv_scale, which a "
            f"cache of {request.dims['cache_dtype']} needs. Try a newer one"
        )
    return verdict
