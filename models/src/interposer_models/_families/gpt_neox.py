"""GPT-NeoX: parallel attention and MLP with layer norms, and partial rotary embedding.

Source: arXiv:2204.06745; Pythia: arXiv:2304.01373.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, Field
from torch import Tensor, nn

from interposer import Site
from interposer_models._decoder.attention import FusedAttention, FusedForm
from interposer_models._decoder.decoder import NormedBlock
from interposer_models._decoder.family import MultiHeadFamily
from interposer_models._decoder.layers import LayerNorm, PlainMLP
from interposer_models._decoder.settings import Epsilon, FieldError, FrameNames, RopeBase

_NORMS = ("input_layernorm", "", "post_attention_layernorm", "")
# Causal masks, which older checkpoints contain although they follow from the context length.
_MASK = re.compile(r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias")

# Names that this architecture gives to fields of the rotary embedding, and their defaults.
_NEOX_NAMES = {
    "partial_rotary_factor": ("rotary_pct", 0.25),
    "rope_theta": ("rotary_emb_base", 10000.0),
}


class ParallelResidualBlock(nn.Module):
    """Decoder block with parallel attention and MLP on the same input, each with a norm."""

    def __init__(
        self, norms: tuple[LayerNorm, LayerNorm], attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn, self.mlp = attention, mlp

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
        dtype = x.dtype
        x, stream = self.input_layernorm.forward_add(x, residual)
        attended = self.self_attn(x, cos, sin, cache, plan, rows)
        if rows is not None:
            stream = stream[rows]
        return attended + self.mlp(self.post_attention_layernorm(stream.to(dtype))), stream


class GPTNeoX(MultiHeadFamily):
    """Settings of GPT-NeoX and Pythia, which also build the decoder."""

    reads_partial_rotary_factor: ClassVar[bool] = True
    frame = FrameNames("gpt_neox", "embed_in", "final_layer_norm", "embed_out")
    attention_name = "attention"

    hidden_act: str = "gelu"
    layer_norm_eps: Epsilon = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rope_theta: RopeBase = Field(
        default=10000.0, validation_alias=AliasChoices("rope_theta", "rotary_emb_base")
    )
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.25, validation_alias=AliasChoices("partial_rotary_factor", "rotary_pct")
    )

    @classmethod
    def merged_rotation(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Merge the rotary fields, and refuse those that transformers ignores for this model."""
        nested = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        for name, (neox_name, default) in _NEOX_NAMES.items():
            if name in fields and fields[name] != nested.get(name, fields.get(neox_name, default)):
                raise FieldError(
                    f"{name} is {fields[name]!r} outside of rope_parameters, where this "
                    "architecture does not read it",
                    f"state it as {neox_name}, or as {name} within rope_parameters",
                )
        return super().merged_rotation(fields)

    def renamed(self, name: str) -> str | None:
        """Return the tensor's name, with the usual name of the LM head; None for a mask."""
        if _MASK.fullmatch(name):
            return None
        return name.replace("lm_head.", "embed_out.") if name.startswith("lm_head.") else name

    def norm(self, site: Site) -> LayerNorm:
        """Build a LayerNorm for the module path ``site``."""
        return LayerNorm(site, self.hidden_size, self.layer_norm_eps)

    def block(self, site: Site, index: int, page_size: int) -> nn.Module:
        """Build a block in which attention and MLP run in parallel, or one after the other."""
        attention_site = site.at("attention")
        form = FusedForm(
            ("query_key_value", "dense"),
            self.attention_bias,
            rotary_size=self.rotary_size,
            by_head=True,
        )
        spec = self.attention_spec(attention_site, index, page_size)
        attention = FusedAttention(attention_site, spec, self.hidden_size, form)
        sizes, names = (
            (self.hidden_size, self.intermediate_size),
            ("dense_h_to_4h", "dense_4h_to_h"),
        )
        mlp = PlainMLP(site.at("mlp"), sizes, names, self.hidden_act, bias=True)
        if not self.use_parallel_residual:
            return NormedBlock(site, self.norm, _NORMS, attention, mlp)
        norms = self.norm(site.at(_NORMS[0])), self.norm(site.at(_NORMS[2]))
        return ParallelResidualBlock(norms, attention, mlp)
