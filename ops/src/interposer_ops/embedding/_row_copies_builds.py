"""Builds of copies of rows, and of capped logits."""

from __future__ import annotations

from typing import Any

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP32, _INT64 = torch.bfloat16, torch.float32, torch.int64


def _lookup(*options: object) -> tuple[Any, ...]:
    return meta(_INT64, 64), meta(_BF16, 128256, 4096), *options


BUILDS = (
    Build("embedding_triton", "128256 rows, 4096 wide", _lookup),
    Build("vocab_parallel_embedding_triton", "4096 wide", lambda: _lookup(128256)),
    Build(
        "select_rows_triton",
        "4096 wide",
        lambda: (meta(_BF16, 4096, 4096), meta(_INT64, 64)),
    ),
    Build(
        "select_rows_triton",
        "float32, 3 apart of 20",
        lambda: (meta(_FP32, 4096, 3, 33)[..., :20], meta(_INT64, 64)),
        "float32",
    ),
    Build(
        "pad_rows_triton",
        "1280 wide",
        lambda: (meta(_BF16, 4096, 1280), meta(_INT64, 17), 512),
    ),
    Build(
        "unpad_rows_triton",
        "1280 wide",
        lambda: (meta(_BF16, 16, 512, 1280), meta(_INT64, 17), 4096),
    ),
    Build("logits_softcap_triton", "256000 wide", lambda: (meta(_BF16, 64, 256000), 30.0)),
    Build(
        "logits_softcap_triton",
        "float32, 256000 wide",
        lambda: (meta(_FP32, 64, 256000), 30.0),
        "float32",
    ),
)
