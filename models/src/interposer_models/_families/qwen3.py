"""Qwen3: Llama with per-head norms of queries and keys before the rotation.

Source: arXiv:2505.09388.
"""

from __future__ import annotations

from typing import ClassVar

from interposer import AttentionSpec, Site
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Positive
from interposer_ops.layers.self_attention import SelfAttention


class Qwen3(DecoderFamily):
    """Qwen3, the dense models."""

    reads_layer_types: ClassVar[bool] = True
    switches_windows: ClassVar[bool] = True
    head_dim: Positive | None = 128
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` is above the ``max_window_layers`` with full attention."""
        return self.use_sliding_window and index >= self.max_window_layers

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build attention with norms of query and key heads."""
        sizes, bias = (self.hidden_size, self.rotary_size), self.attention_bias
        return SelfAttention(site, spec, *sizes, self.rms_norm_eps, bias, bias)
