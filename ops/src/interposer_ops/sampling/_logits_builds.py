"""Builds of what changes logits before sampling."""

from __future__ import annotations

from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_FP32, _INT32, _INT64 = torch.float32, torch.int32, torch.int64
_ROWS, _VOCAB_SIZE = 64, 128256
_LABEL = "64 rows of 128256"


def _logits() -> torch.Tensor:
    return meta(_FP32, _ROWS, _VOCAB_SIZE)


def _penalties() -> tuple[Any, ...]:
    penalty = meta(_FP32, _ROWS)
    mask, counts = (meta(dtype, _ROWS, _VOCAB_SIZE) for dtype in (torch.bool, _INT32))
    return _logits(), mask, counts, penalty, penalty, penalty


def _bias() -> tuple[Any, ...]:
    return _logits(), meta(_INT64, _ROWS, 8), meta(_FP32, _ROWS, 8)


def _suppressed() -> tuple[Any, ...]:
    return _logits(), meta(_INT64, _ROWS), meta(_INT64, _ROWS), meta(_INT64, _ROWS, 4)


BUILDS = (
    Build("apply_penalties_triton", _LABEL, _penalties, "float32"),
    Build("apply_temperature_triton", _LABEL, lambda: (_logits(), meta(_FP32, _ROWS)), "float32"),
    Build(
        "apply_token_bitmask_triton",
        _LABEL,
        lambda: (_logits(), meta(_INT32, _ROWS, _VOCAB_SIZE // 32)),
        "float32",
    ),
    Build("apply_logit_bias_triton", _LABEL, _bias, "float32"),
    Build("suppress_tokens_until_triton", _LABEL, _suppressed, "float32"),
)
