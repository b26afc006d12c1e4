"""Test cases of a decoder block.

Dimensions: T tokens, H hidden size, I intermediate size, N heads, K kv heads, D head size, R
rotated size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from interposer import AttentionSpec, Case, Site, Tolerance
from interposer_ops.attention._sequences_cases import Lengths
from interposer_ops.experts._error_propagation_cases import Errors
from interposer_ops.layers._attention_cases import Step, attended, plain_spec, spec_at
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.norms._norms_cases import norm_weight
from interposer_ops.rotary._rotary import rotated_halves
from interposer_testing.cases import LayerCase, OfLayer, normal

_EPS = 1e-6
_GELU = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}


def decoder_block_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of several sizes: prefill, decode, the first block and the last block."""
    generator = torch.Generator().manual_seed(seed)
    prompts, mixed = (
        Lengths(sequences, page_size=16) for sequences in (((5, 5), (2, 2)), ((19, 1), (6, 3)))
    )
    for block in (
        _Block("decode", Lengths(((7, 1),), page_size=16), (4, 2, 32), 32, dtype),
        _Block("prompts, first block", prompts, (4, 2, 16), 16, dtype, is_first=True),
        _Block("mixed, last block", mixed, (6, 2, 16), 8, dtype, rows=(0, 3)),
        _Block("mixed, biases", mixed, (3, 1, 16), 16, dtype, "gelu", biased=True, normed=False),
        _Block("prompts, window", prompts, (2, 2, 32), 32, dtype, "gelu_pytorch_tanh", window=3),
    ):
        yield block.case(generator)


@dataclass
class _Block:
    """The parameters of a block, and the sequences of its step.

    Attributes:
        heads: N, K and D.
        rows: tokens that are selected after attention; empty: all tokens.
    """

    label: str
    lengths: Lengths
    heads: tuple[int, int, int]
    rotary_size: int
    dtype: torch.dtype
    activation: str = "silu"
    normed: bool = True
    biased: bool = False
    is_first: bool = False
    window: int | None = None
    rows: tuple[int, ...] = ()
    hidden_size: int = 40
    inner: int = 48

    @cached_property
    def spec(self) -> AttentionSpec:
        return plain_spec(self.heads, self.dtype, self.lengths.page_size, self.window)

    def attention(self, site: Site) -> SelfAttention:
        eps = _EPS if self.normed else None
        args = self.hidden_size, self.rotary_size, eps, self.biased, self.biased
        return SelfAttention(site, spec_at(self.spec, site), *args)

    def mlp(self, site: Site) -> GatedMLP:
        return GatedMLP(site, self.hidden_size, self.inner, self.activation, self.biased)

    def case(self, generator: torch.Generator) -> LayerCase:
        heads, kv_heads, size = self.heads
        hidden_size, inner, count = self.hidden_size, self.inner, self.lengths.num_tokens
        shapes = {
            "self_attn.qkv_proj": ((heads + 2 * kv_heads) * size, hidden_size),
            "self_attn.o_proj": (hidden_size, heads * size),
            "mlp.gate_up_proj": (2 * inner, hidden_size),
            "mlp.down_proj": (hidden_size, inner),
        }
        parameters = {}
        for name, shape in shapes.items():
            parameters[f"{name}.weight"] = normal(shape, self.dtype, generator, shape[1] ** -0.5)
            if self.biased:
                parameters[f"{name}.bias"] = normal(shape[:1], self.dtype, generator, 0.2)
        norms = {"input_layernorm": hidden_size, "post_attention_layernorm": hidden_size}
        if self.normed:
            norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
        for name, width in norms.items():
            parameters[f"{name}.weight"] = norm_weight(width, self.dtype, generator)
        step = Step(self.lengths, self.spec, generator)
        x = normal((count, hidden_size), self.dtype, generator)
        residual = None if self.is_first else torch.randn(x.shape, generator=generator)
        angles = 7 * torch.rand((count, self.rotary_size // 2), generator=generator)
        inputs = _Inputs(x, residual, angles.cos(), angles.sin())
        errors = Errors()
        _compute(self, parameters, step, inputs, errors)
        return LayerCase(
            self.label,
            {
                "hidden_size": hidden_size,
                "norm_eps": _EPS,
                "attention": self.attention,
                "mlp": self.mlp,
            },
            (*inputs, OfLayer(partial(_cache, step)), OfLayer(partial(_plan, step)),
             torch.tensor(self.rows) if self.rows else None),
            parameters,
            facts=Case("", {}, magnitude=errors.bound(self.dtype)),
            tolerance=Tolerance(roundings=1),
        )  # fmt: skip


def _cache(step: Step, layer: DecoderBlock, device: str) -> Tensor:
    return step.cache(layer.self_attn.attn, device)


def _plan(step: Step, layer: DecoderBlock, device: str) -> object:
    return step.plan(layer.self_attn.attn, device)


class _Inputs(NamedTuple):
    x: Tensor
    residual: Tensor | None
    cos: Tensor
    sin: Tensor


def _compute(
    block: _Block, parameters: dict[str, Tensor], step: Step, inputs: _Inputs, errors: Errors
) -> None:
    """Compute a block in float64 from formulas, and record every intermediate result in ``errors``.

    Each step gets as many roundings as the tolerance of its op allows.
    """
    weights = {name: tensor.double() for name, tensor in parameters.items()}
    x, cos, sin = (tensor.double() for tensor in (inputs.x, inputs.cos, inputs.sin))
    heads, kv_heads, size = block.heads

    def norm(rows: Tensor, name: str) -> Tensor:
        scaled = rows * (rows.square().mean(-1, keepdim=True) + _EPS).rsqrt()
        return errors.note(scaled * weights[f"{name}.weight"], 3, rows.shape[-1] + 4)

    def linear(rows: Tensor, name: str) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        offset = None if bias is None else bias.abs()
        terms = functional.linear(rows.abs(), weight.abs(), offset)
        return errors.note(functional.linear(rows, weight, bias), 2, rows.shape[-1] + 1, terms)

    def turned(parts: Tensor) -> Tensor:
        return errors.note(rotated_halves(parts, cos, sin), 3, 2, parts.abs().amax(-1, keepdim=True)
                           .mul(2).expand(parts.shape))  # fmt: skip

    # The residual stream is float32: no rounding to the storage dtype.
    total = errors.note(x if inputs.residual is None else x + inputs.residual, 0)
    qkv = linear(norm(total, "input_layernorm"), "self_attn.qkv_proj")
    sizes = [count * size for count in (heads, kv_heads, kv_heads)]
    query, key, value = (part.unflatten(-1, (-1, size)) for part in qkv.split(sizes, -1))
    if block.normed:
        query, key = norm(query, "self_attn.q_norm"), norm(key, "self_attn.k_norm")
    query, key = turned(query), turned(key)
    attention = attended(step, query, key, value, errors)
    projected = linear(attention.flatten(1), "self_attn.o_proj")
    if block.rows:
        projected, total = projected[list(block.rows)], total[list(block.rows)]
    total = errors.note(total + projected, 0)
    both = linear(norm(total, "post_attention_layernorm"), "mlp.gate_up_proj")
    gate, up = both.chunk(2, -1)
    approximate = _GELU.get(block.activation)
    if approximate is None:
        activated = functional.silu(gate)
    else:
        activated = functional.gelu(gate, approximate=approximate)
    # Where the result of a gelu is close to zero, its error is relative to the gate instead.
    product = errors.note(activated * up, 3, 8, (gate * up).abs())
    errors.show(torch.stack((linear(product, "mlp.down_proj"), total)))
