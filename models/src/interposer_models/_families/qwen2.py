"""Qwen2: Llama with biases of queries, keys and values, and windows in the upper layers.

Source: arXiv:2407.10671.
"""

from __future__ import annotations

from typing import ClassVar

from interposer import AttentionSpec, Site
from interposer_models._decoder.family import DecoderFamily
from interposer_ops.layers.self_attention import SelfAttention


class Qwen2(DecoderFamily):
    """Qwen2 and Qwen2.5."""

    reads_layer_types: ClassVar[bool] = True
    switches_windows: ClassVar[bool] = True
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` is above the ``max_window_layers`` with full attention."""
        return self.use_sliding_window and index >= self.max_window_layers

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build attention with a QKV bias, independent of the config."""
        sizes = self.hidden_size, self.rotary_size
        # Configs do not state the bias; every checkpoint has one for Q, K and V.
        return SelfAttention(site, spec, *sizes, None, True, self.attention_bias)
