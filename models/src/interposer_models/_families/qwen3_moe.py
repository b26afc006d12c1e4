"""Qwen3-MoE: Qwen3 with many small experts, in all layers or some.

Source: arXiv:2505.09388.
"""

from __future__ import annotations

from typing import ClassVar

from interposer_models._decoder.mixture import SparseFamily, count_of_experts
from interposer_models._decoder.settings import Positive
from interposer_models._families.qwen3 import Qwen3


class Qwen3Moe(SparseFamily, Qwen3):
    """Qwen3 with experts."""

    # Unlike Qwen3, transformers ignores layer_types for this architecture.
    reads_layer_types: ClassVar[bool] = False
    head_dim: Positive | None = None
    num_local_experts: Positive | None = count_of_experts(128)
    num_experts_per_tok: Positive | None = 8

    def slides(self, index: int) -> bool:
        """Say whether windows are used; unlike in Qwen3, the first layers have windows too."""
        return self.use_sliding_window
