"""Builds of what draws, verifies and judges tokens."""

from __future__ import annotations

from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP32, _INT64 = torch.bfloat16, torch.float32, torch.int64
_ROWS, _VOCAB_SIZE = 64, 128256
_LABEL = "64 rows of 128256"


def _logits(dtype: torch.dtype = _FP32) -> torch.Tensor:
    return meta(dtype, _ROWS, _VOCAB_SIZE)


def _floats() -> torch.Tensor:
    return meta(_FP32, _ROWS)


def _whole() -> torch.Tensor:
    return meta(_INT64, _ROWS)


def _sampled() -> tuple[Any, ...]:
    return _logits(), _floats(), _whole(), _floats(), _floats(), _whole(), _whole()


def _verified() -> tuple[Any, ...]:
    return meta(_INT64, _ROWS, 4), meta(_BF16, _ROWS, 5, _VOCAB_SIZE), _whole()


def _rejected(certain: bool) -> tuple[Any, ...]:
    draft = None if certain else meta(_FP32, _ROWS, 4, _VOCAB_SIZE)
    target = meta(_FP32, _ROWS, 5, _VOCAB_SIZE)
    return meta(_INT64, _ROWS, 4), draft, target, _whole(), _whole(), _whole()


BUILDS = (
    Build(
        "gumbel_argmax_triton",
        _LABEL,
        lambda: (_logits(), _floats(), _whole(), _whole()),
        "float32",
    ),
    Build("sample_tokens_triton", "all truncations", _sampled, "float32"),
    Build(
        "sample_tokens_triton",
        "greedy, bfloat16",
        lambda: (_logits(_BF16), None, None, None, None, _whole(), _whole()),
    ),
    Build(
        "mask_top_k_top_p_triton",
        _LABEL,
        lambda: (_logits(), _whole(), _floats()),
        "float32",
    ),
    Build("mask_min_p_triton", _LABEL, lambda: (_logits(), _floats()), "float32"),
    Build(
        "token_logprobs_triton",
        "20 likeliest of 128256",
        lambda: (_logits(), _whole(), 20),
        "float32",
        dims={"num_top": 20},
    ),
    Build(
        "token_logprobs_triton",
        "none of the likeliest",
        lambda: (_logits(_BF16), _whole(), 0),
        dims={"num_top": 0},
    ),
    Build("greedy_verify_triton", "4 drafts, bfloat16", _verified),
    Build("rejection_sample_triton", "4 drafts", lambda: _rejected(False), "float32"),
    Build("rejection_sample_triton", "4 certain drafts", lambda: _rejected(True), "float32"),
)
