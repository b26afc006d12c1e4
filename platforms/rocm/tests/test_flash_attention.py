"""flash-attn is checked by its metadata, examined in a child process, and called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from platforms.rocm.tests.fake_aiter import install

from interposer import Capability, Config, Device, Resolver, Site, current_registry
from interposer.errors import NoCandidateError
from interposer_rocm import _flash_attention as flash_attention
from interposer_rocm._flash_attention import FlashAttentionBackend
from interposer_rocm._flash_attention_judge import flash_attention_version, judge
from interposer_testing import attention_specs, check_attention

PARTS = {"interposer-ops", "interposer-rocm"}
CAPABILITY = Capability("gfx90a", frozenset({"mfma"}))
MI250X = Device("rocm", "cpu", "the CPU as a stand-in", CAPABILITY)
# The function as flash-attn documents it, on the CPU.
TEXT = """
import torch

def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):
    assert q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert block_table is None
    group = q.shape[1] // k.shape[1]
    parts = []
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert starts_q[-1] == len(q) and starts_k[-1] == len(k)
    for b in range(len(starts_q) - 1):
        queries = q[starts_q[b]:starts_q[b + 1]].float().transpose(0, 1)
        span = slice(starts_k[b], starts_k[b + 1])
        keys, values = (t[span].float().repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        n, m = queries.shape[1], keys.shape[1]
        assert n <= max_seqlen_q and m <= max_seqlen_k
        scores = queries @ keys.transpose(1, 2) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
        seen = j <= i if causal else torch.ones(n, m, dtype=torch.bool)
        if window_size[0] >= 0:
            seen = seen & (j >= i - window_size[0])
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        parts.append((weights @ values).transpose(0, 1))
    return torch.cat(parts).to(q.dtype)
"""
NOT_THERE = (
    "needs the package flash-attn, which is not installed. It is not needed: the backend 'paged' "
    "serves with Triton kernels, and 'aiter_flash' where AITER is installed"
)
SPECS = [
    spec for _, spec in attention_specs(quick=True) if judge(spec, CAPABILITY).reason == NOT_THERE
]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a function that installs a package of that name for this test."""

    def put(text: str = TEXT, version: str = "2.8.3") -> None:
        folder = install(tmp_path, {"flash_attn/__init__.py": text}, "flash-attn", version)
        monkeypatch.syspath_prepend(str(folder))
        flash_attention.refresh()

    yield put
    flash_attention.refresh()
    sys.modules.pop("flash_attn", None)


def pinned() -> Resolver:
    config = Config(plugins=PARTS, isolation="off", attention={"decoder": "flash_attention"})
    return Resolver(current_registry(config), MI250X, config, trusted=frozenset(PARTS))


@pytest.mark.process
def test_flash_attention_matches_the_ops(use: Any) -> None:
    use()
    assert len(SPECS) >= 4
    assert any(spec.window_tokens for spec in SPECS)
    for spec in SPECS:
        assert judge(spec, CAPABILITY)
        site = Site(pinned(), "attention", spec.dtype)
        assert check_attention(FlashAttentionBackend, spec, site) == [], spec


def test_without_flash_attn_the_alternatives_are_named() -> None:
    assert flash_attention_version() == ""
    resolver, spec = pinned(), SPECS[0]
    with pytest.raises(NoCandidateError, match="It is not needed: the backend 'paged' serves"):
        resolver.attention(spec, Site(resolver, "attention", spec.dtype))


@pytest.mark.process
def test_a_failed_import_is_reported(use: Any) -> None:
    use("raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')")
    resolver, spec = pinned(), SPECS[0]
    with pytest.raises(NoCandidateError) as caught:
        resolver.attention(spec, Site(resolver, "attention", spec.dtype))
    (refusal,) = [r for r in caught.value.refusals if r.candidate == "flash_attention"]
    assert refusal.reason == (
        "flash-attn 2.8.3 cannot be imported: ImportError: flash_attn_2_cuda.so: undefined symbol: "
        "_ZN3c10"
    )


@pytest.mark.parametrize(
    ("change", "capability", "expected"),
    [
        ({"softcap": 30.0}, CAPABILITY, "ignores a softcap on these GPUs"),
        ({"head_size": 264}, CAPABILITY, "head_size is 264, must be a multiple of 8 up to 256"),
        ({"num_heads": 3, "num_kv_heads": 2}, CAPABILITY, "needs heads in groups of one size"),
        ({"dtype": torch.float32}, CAPABILITY, "computes in floats of 16 bits, got torch.float32"),
        ({"sinks": True}, CAPABILITY, "does not do sinks"),
        ({}, Capability("gfx1030"), "has no kernels for gfx1030"),
    ],
)
def test_unsupported_requests_are_refused(
    change: dict[str, Any], capability: Capability, expected: str
) -> None:
    assert judge(replace(SPECS[0], **change), capability).reason.startswith(expected)


@pytest.mark.process
def test_other_versions_are_refused(use: Any) -> None:
    use(version="4.0.0")
    assert judge(SPECS[0], CAPABILITY).reason.startswith("needs a flash-attn 2.x, found 4.0.0. It")
