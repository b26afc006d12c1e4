"""Cohere 2: attention and MLP in parallel after one norm; no rotation in full attention.

Source: arXiv:2504.00698.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from interposer import AttentionSpec, Site
from interposer_models._decoder.attention import InterleavedAttention, UnrotatedAttention
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.layers import LayerNorm
from interposer_models._decoder.settings import Epsilon, Positive, WindowTokens
from interposer_ops.layers.self_attention import SelfAttention


class ParallelBlock(nn.Module):
    """Decoder block whose attention and MLP both read one normalised input."""

    def __init__(self, norm: nn.Module, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn, self.mlp = norm, attention, mlp

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: Tensor,
        plan: object,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output, not yet added, and the residual stream."""
        x, stream = self.input_layernorm.forward_add(x, residual)  # type: ignore[operator]
        attended = self.self_attn(x, cos, sin, cache, plan, rows)
        if rows is not None:
            x, stream = x[rows], stream[rows]
        return attended + self.mlp(x), stream


class Cohere2LM(CausalLM):
    """A decoder with an LM head whose logits are scaled."""

    def __init__(self, site: Site, config: Cohere2, page_size: int) -> None:
        super().__init__(site, config, lambda at, i: config.block(at, i, page_size), config.norm)
        self.factor = config.logit_scale

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the logits; see ``CausalModel``."""
        return super().forward(*args, **kwargs) * self.factor


class Cohere2(DecoderFamily):
    """Settings of Cohere 2 (Command R7B, Command A), which also build the decoder."""

    reads_layer_types: ClassVar[bool] = True
    layer_norm_eps: Epsilon = 1e-5
    logit_scale: Annotated[float, Field(gt=0)] = 0.0625
    tie_word_embeddings: bool = True
    sliding_window: WindowTokens | None = 4096
    sliding_window_pattern: Positive = 4

    def slides(self, index: int) -> bool:
        """Return True if layer ``index`` has a sliding window: all layers but every fourth."""
        return (index + 1) % self.sliding_window_pattern != 0

    def norm(self, site: Site) -> LayerNorm:
        """Build a LayerNorm without bias for the module path ``site``."""
        return LayerNorm(site, self.hidden_size, self.layer_norm_eps, bias=False)

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build self-attention, with interleaved rotary embedding if the layer has a window."""
        attention_class = UnrotatedAttention if spec.window_tokens is None else InterleavedAttention
        bias = self.attention_bias
        return attention_class(site, spec, self.hidden_size, self.rotary_size, None, bias, bias)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block with parallel attention and MLP after one norm."""
        at, norm = site.at("self_attn"), self.norm(site.at("input_layernorm"))
        attention = self.self_attention(at, index, self.attention_spec(at, index, page_size))
        return ParallelBlock(norm, attention, self.mlp(site, index))

    def build(self, site: Site, page_size: int) -> CausalLM:
        """Build the decoder with an LM head that scales the logits."""
        return Cohere2LM(site, self, page_size)
