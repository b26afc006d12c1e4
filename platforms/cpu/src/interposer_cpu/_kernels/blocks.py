"""Layers that compute several of their parts by one call of the compiled library.

Where a part is of another class than the standard one, or holds a kernel that is not declared in
``fusion``, or has hooks that ``additions`` does not know, they do what the standard layers do. So
they do under torch's compiler, which then sees the parts.

Dimensions: T tokens, H hidden size, N heads, K kv heads, D head size, R rotated size.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch.compiler import is_compiling

from interposer import AttentionSpec, Site
from interposer_cpu._kernels.additions import ProductHooks
from interposer_cpu._kernels.block_sums import is_first, is_last, product_of
from interposer_cpu._kernels.fusion import (
    InputCodings,
    activation_number,
    is_fused,
    weight_words,
)
from interposer_cpu._kernels.interface import FLOAT32, TYPES
from interposer_cpu.native import library
from interposer_ops.layers.activation import GatedActivation
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention


@final
class NativeGatedMLP(GatedMLP):
    """Both products and the activation in one call, and float32 between them."""

    reduces = True
    ends_in_projection = True

    def __init__(
        self,
        site: Site,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        bias: bool = False,
    ) -> None:
        super().__init__(site, hidden_size, intermediate_size, activation, bias)
        number = activation_number(self.activation.activate, self.activation.options)
        self.activation_number = number or 0
        self.is_fusable = (
            number is not None
            and type(self.activation) is GatedActivation
            and is_first(self.gate_up_proj)
            and is_last(self.down_proj)
        )
        # Found faster than submodules are, and with what they hold after weights were exchanged.
        self._parts: Any = (self.gate_up_proj, self.down_proj)
        self._codings = InputCodings()
        # Whatever watches a sum over ranks is called, as this layer takes it by the projection.
        product = product_of(self.down_proj)
        self._is_summed = product is not self.down_proj
        watched = (self.activation, self.down_proj) if self._is_summed else (self.activation,)
        self._hooks = ProductHooks((self.gate_up_proj, product), watched)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[T, H]`` of ``x`` ``[T, H]``."""
        gate_up, down = self._parts
        if (
            not self.is_fusable
            or is_compiling()
            or (added := self._hooks.added()) is None
            or None in (codings := self._codings.of(gate_up.kernel, down.kernel))
            or x.ndim != 2
            or not x.is_contiguous()
        ):
            return super().forward(x)
        dtype = x.dtype
        count, length = x.shape
        out = torch.empty(count, down.operands[0][1], dtype=dtype)
        library().mlp(
            *weight_words(codings[0], gate_up.operands),
            *weight_words(codings[1], down.operands),
            x.data_ptr(),
            out.data_ptr(),
            TYPES[dtype],
            self.activation_number,
            count,
            length,
            *added.addresses,
            added.ids(count),
        )
        return down.reduce(out) if self._is_summed else out


@final
class NativeSelfAttention(SelfAttention):
    """Projection, norms of heads and rotation in one call."""

    reduces = True
    ends_in_projection = True

    def __init__(
        self,
        site: Site,
        spec: AttentionSpec,
        hidden_size: int,
        rotary_size: int,
        norm_eps: float | None = None,
        qkv_bias: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(site, spec, hidden_size, rotary_size, norm_eps, qkv_bias, bias)
        heads, kv_heads, _ = self.sizes  # of this rank
        self.counts = tuple(size // self.head_size for size in (heads, kv_heads, kv_heads))
        rotary, norms = self.rotary, (self.q_norm, self.k_norm)
        self.eps = 0.0 if norm_eps is None else norm_eps
        self.is_fusable = (
            is_first(self.qkv_proj)
            and is_fused(rotary, RotaryEmbedding, rotary.rotate, "rotary_embedding")
            and all(is_fused(n, RMSNorm, n.norm, "rms_norm") for n in norms if n is not None)
        )
        self._parts: Any = (self.qkv_proj, *norms)
        self._codings = InputCodings()
        self._hooks = ProductHooks((self.qkv_proj,), (rotary, *filter(None, norms)))

    def heads(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query ``[T, N, D]``, key and value ``[T, K, D]``, ready for the attention."""
        projection, query_norm, key_norm = self._parts
        if (
            not self.is_fusable
            or is_compiling()
            or (added := self._hooks.added()) is None
            or None in (codings := self._codings.of(projection.kernel))
            or cos.dtype is not FLOAT32
            or not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous())
        ):
            return super().heads(x, cos, sin)
        dtype = x.dtype
        count, length = x.shape
        heads, kv_heads, _ = self.counts
        size = self.head_size
        out = torch.empty(count, heads + 2 * kv_heads, size, dtype=dtype)
        library().project_heads(
            *weight_words(codings[0], projection.operands),
            x.data_ptr(),
            out.data_ptr(),
            0 if query_norm is None else query_norm.constants[0].data_ptr(),
            0 if key_norm is None else key_norm.constants[0].data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            TYPES[dtype],
            heads,
            kv_heads,
            size,
            cos.shape[1],
            count,
            length,
            *added.addresses,
            added.ids(count),
            self.eps,
        )
        query, key, value = out.split(self.counts, 1)
        return query, key, value
