"""Optional packages: which versions are taken, and what their functions are given.

In a package's place stands a wheel that is made here and installed without an index. Its function
computes on the processor what the package's documentation says that it computes.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, M pages, P pages, S page size.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from platforms.cuda.tests.wheels import install

from interposer import AttentionSpec, Capability, Config, Resolver, Site, current_registry
from interposer.capability import Device
from interposer.testing import attention_specs, check_attention
from interposer_cuda.flash_attention_3 import FlashAttention3Backend

FLASH_3 = """
import torch


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):
    for numbers in (cache_seqlens, page_table, cu_seqlens_q):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous()
    assert q.dtype == k_cache.dtype == v_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1
    starts = cu_seqlens_q.tolist()
    assert max_seqlen_q >= max(b - a for a, b in zip(starts, starts[1:]))
    out = torch.empty_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        begin, end = starts[row], starts[row + 1]
        slots = page_table[row].long()
        keys, values = (c[slots].flatten(0, 1)[:length].float() for c in (k_cache, v_cache))
        heads = q.shape[1] // keys.shape[1]
        keys, values = (t.repeat_interleave(heads, 1) for t in (keys, values))
        scores = torch.einsum("tnd,lnd->ntl", q[begin:end].float(), keys) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        # Aligned to the bottom right corner.
        place = torch.arange(end - begin)[:, None] + length - (end - begin)
        distance = place - torch.arange(length)
        left, right = window_size
        right = 0 if causal else right
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance > left
        if right >= 0:
            hidden |= -distance > right
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("ntl,lnd->tnd", weights, values).to(q.dtype)
    return out
"""
HOPPER = Capability("sm_90")
DEVICE = Device("none", "cpu", "a device without kernels of its own", Capability("any"))


@pytest.fixture
def flash_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path, "flash-attn-3", "3.0.0b2", "flash_attn_interface", FLASH_3)
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    yield
    sys.modules.pop("flash_attn_interface", None)


def site(dtype: torch.dtype) -> Site:
    registry = current_registry(Config(plugins={"interposer-ops"}))
    return Site(Resolver(registry, DEVICE, Config()), "attention", dtype)


def test_flash_attention_3_is_given_what_it_documents(flash_3: None) -> None:
    checked = []
    for label, spec in attention_specs(quick=True):
        for dtype in (torch.bfloat16, torch.float16):
            own = replace(spec, dtype=dtype, cache_dtype=dtype)
            if spec.dtype == torch.bfloat16 and FlashAttention3Backend.accepts(own, HOPPER):
                assert check_attention(FlashAttention3Backend, own, site(dtype)) == [], label
                checked.append(own)
    assert len(checked) >= 10
    assert {bool(spec.window_tokens) for spec in checked} == {True, False}
    assert {bool(spec.softcap) for spec in checked} == {True, False}
    assert any(spec.num_heads > spec.num_kv_heads for spec in checked)


SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    page_size=16,
    scale=0.125,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"dtype": torch.float32, "cache_dtype": torch.float32}, "computes in 16 bit floats, got"),
        ({"head_size": 100}, "takes heads of multiples of 8 up to 256, got 100"),
        ({"head_size": 320}, "takes heads of multiples of 8 up to 256, got 320"),
        ({"num_heads": 3}, "needs heads in groups of one size, got 3 heads, 2 kv heads"),
        ({"cache_dtype": torch.float8_e4m3fn}, "wants queries in the cache's dtype, got torch."),
        ({"sinks": True}, "does not do sinks"),
        ({"type": "encoder"}, "serves decoder attention only, got encoder"),
    ],
)
def test_what_flash_attention_3_cannot_do_is_refused(
    flash_3: None, change: dict[str, object], expected: str
) -> None:
    assert FlashAttention3Backend.accepts(SPEC, HOPPER)
    spec = replace(SPEC, **change)  # type: ignore[arg-type]
    assert FlashAttention3Backend.accepts(spec, HOPPER).reason.startswith(expected)
    assert "flash_attn_interface" not in sys.modules


@pytest.mark.parametrize("version", ["2.8.3", "3.1.0", "4.0.0"])
def test_other_versions_are_refused_by_their_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(tmp_path, "flash-attn-3", version, "flash_attn_interface", "raise SystemExit(1)")
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    reason = FlashAttention3Backend.accepts(SPEC, HOPPER).reason
    assert reason.startswith(f"needs flash-attn-3 >=3.0.0b1,<3.1, found {version}: build it from")


def test_what_is_not_installed_is_refused() -> None:
    reason = FlashAttention3Backend.accepts(SPEC, HOPPER).reason
    assert reason.startswith("needs the package flash-attn-3, which is not installed: build it")
