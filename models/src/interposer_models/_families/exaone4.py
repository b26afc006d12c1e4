"""EXAONE 4: norms after attention and MLP, per-head norms, rotation only in window layers.

Source: arXiv:2507.11407.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.attention import UnrotatedAttention
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.settings import Epsilon, WindowTokens
from interposer_models._families.olmo import NORMS
from interposer_ops.layers.self_attention import SelfAttention


class Exaone4(DecoderFamily):
    """Settings of EXAONE 4; without a window, all layers have full attention with rotation."""

    reads_layer_types: ClassVar[bool] = True
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: WindowTokens | None = 4096
    sliding_window_pattern: Annotated[int, Field(ge=0)] | str | None = 4

    def slides(self, index: int) -> bool:
        """Say whether layer ``index`` has a sliding window; in a pattern of letters, by L."""
        pattern = self.sliding_window_pattern
        if isinstance(pattern, str):
            return pattern[index % len(pattern)] == "L"
        # A pattern of 4: three windowed layers, then a full one.
        return bool(pattern) and (index + 1) % (pattern or 1) != 0

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention with per-head norms, without rotation in full-attention layers."""
        is_rotated = self.sliding_window is None or self.windows[index] is not None
        attention_class = SelfAttention if is_rotated else UnrotatedAttention
        return attention_class(site, spec, self.hidden_size, self.rotary_size, self.rms_norm_eps)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with norms on the outputs of attention and MLP."""
        return self.normed_block(site, index, page_size, NORMS)
