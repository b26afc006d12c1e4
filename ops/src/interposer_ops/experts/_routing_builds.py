"""Builds of routing."""

from __future__ import annotations

import torch

from interposer_ops._triton.build import Build, meta

_BF16, _FP32 = torch.bfloat16, torch.float32

BUILDS = (
    Build("topk_softmax_triton", "2 of 8", lambda: (meta(_BF16, 64, 8), 2, True)),
    Build("topk_softmax_triton", "8 of 128", lambda: (meta(_BF16, 64, 128), 8, True)),
    Build(
        "topk_sigmoid_triton",
        "8 of 256 with a bias",
        lambda: (meta(_FP32, 64, 256), meta(_FP32, 256), 8, True, 2.5),
        "float32",
    ),
    Build(
        "grouped_topk_triton",
        "8 of 256 in 8 groups",
        lambda: (meta(_FP32, 64, 256), meta(_FP32, 256), 8, 4, 8, "sigmoid", True, 2.5),
        "float32",
    ),
    Build(
        "grouped_topk_triton",
        "6 of 160 in 8 groups",
        lambda: (meta(_BF16, 64, 160), None, 8, 3, 6, "softmax", False, 16.0),
    ),
)
