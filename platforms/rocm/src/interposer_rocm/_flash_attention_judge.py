"""Verdicts on flash-attn for an attention layer, without importing flash-attn or torch.

Source: the README of Dao-AILab/flash-attention, "AMD ROCm Support": MI200 to MI355 with CK kernels,
MI200 to MI355 and RDNA with Triton kernels, 16-bit floats, head sizes up to 256; the code in
``csrc/flash_attn_ck`` ignores a softcap.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from interposer import Verdict

if TYPE_CHECKING:
    from interposer import AttentionSpec, Capability

_DISTRIBUTION = "flash-attn"
_SUPPORTED = "2."
_LARGEST_HEAD = 256
_WITH_MATRIX_UNITS = frozenset({"mfma", "wmma"})


def flash_attention_version() -> str:
    """Return the version of flash-attn; "" if flash-attn is not installed."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def judge(spec: AttentionSpec, capability: Capability) -> Verdict:
    """Accept plain decoders over a 16-bit cache, without softcap, on GPUs with matrix units."""
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16"):
        return Verdict.refuse(f"computes in floats of 16 bits, got {spec.dtype}")
    if spec.head_size % 8 or spec.head_size > _LARGEST_HEAD:
        return Verdict.refuse(
            f"head_size is {spec.head_size}, must be a multiple of 8 up to {_LARGEST_HEAD}"
        )
    if spec.num_heads % spec.num_kv_heads:
        heads = f"{spec.num_heads} heads, {spec.num_kv_heads} kv heads"
        return Verdict.refuse(f"needs heads in groups of one size, got {heads}")
    if spec.softcap:
        return Verdict.refuse("ignores a softcap on these GPUs")
    verdict = spec.judge_plain_decoder()
    if not verdict:
        return verdict
    if not capability.features & _WITH_MATRIX_UNITS:
        return Verdict.refuse(f"has no kernels for {capability.architecture}")
    installed_version = flash_attention_version()
    if installed_version.startswith(_SUPPORTED):
        return Verdict.accept()
    problem = (
        f"needs a flash-attn {_SUPPORTED}x, found {installed_version}"
        if installed_version
        else "needs the package flash-attn, which is not installed"
    )
    return Verdict.refuse(
        f"{problem}. It is not needed: the backend 'paged' serves with Triton kernels, and "
        "'aiter_flash' where AITER is installed"
    )
