"""SmolLM3: Llama without rotary embedding in every fourth layer.

Source: arXiv:2501.18795 for such layers; huggingface.co/blog/smollm3.
"""

from __future__ import annotations

from typing import ClassVar

from interposer import AttentionSpec, Site
from interposer_models._decoder.attention import UnrotatedAttention
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Positive, RopeBase
from interposer_ops.layers.self_attention import SelfAttention


class SmolLM3(DecoderFamily):
    """SmolLM3; layers without rotation may have a window."""

    reads_layer_types: ClassVar[bool] = True
    num_key_value_heads: Positive | None = 4
    rope_theta: RopeBase = 2000000.0
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: Positive = 4
    use_sliding_window: bool = False

    def rotates(self, index: int) -> bool:
        """Say whether layer ``index`` rotates queries and keys."""
        flags = self.no_rope_layers  # 1 means that the layer does rotate, despite the field's name
        if flags is not None and index < len(flags):
            return bool(flags[index])
        return (index + 1) % self.no_rope_layer_interval != 0

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` has the window."""
        # Windows are only in layers without rotation.
        return self.use_sliding_window and not self.rotates(index)

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build attention with or without rotation."""
        if self.rotates(index):
            return super().self_attention(site, index, spec)
        bias = self.attention_bias
        return UnrotatedAttention(site, spec, self.hidden_size, self.rotary_size, None, bias, bias)
