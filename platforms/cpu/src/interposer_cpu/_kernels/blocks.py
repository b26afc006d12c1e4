"""MLP and self-attention layers that compute several parts by one fused native call.

A layer calls its parts one by one, as the standard layer does, in these cases: a part has a
non-standard class, a kernel without a declaration in ``fusion``, or a hook other than LoRA (see
``additions``); or torch.compile compiles the layer, and optimizes across the parts.

Dimensions: T tokens, H hidden size, N heads, K kv heads, D head size, R rotated size.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch.compiler import is_compiling

from interposer import AttentionSpec, Site
from interposer_cpu._kernels.additions import ProjectionHooks
from interposer_cpu._kernels.block_sums import (
    hooked_module,
    is_first_projection,
    is_last_projection,
)
from interposer_cpu._kernels.fusion import (
    InputQuantizations,
    activation_number,
    is_fused,
    weight_arguments,
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
    """Gated MLP: both matmuls and the activation in one call, with float32 between them."""

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
            and is_first_projection(self.gate_up_proj)
            and is_last_projection(self.down_proj)
        )
        # A tuple attribute is read faster than submodules of nn.Module, and is not registered as
        # submodules a second time. Kernels and operands are
        # read from the modules at every call, so that exchanged weights are used.
        self._parts: Any = (self.gate_up_proj, self.down_proj)
        self._quantizations = InputQuantizations()
        # LoRA is added before the all-reduce, if there is one; hooks on down_proj itself run after
        # the all-reduce.
        down_matmul = hooked_module(self.down_proj)
        self._is_summed = down_matmul is not self.down_proj
        watched = (self.activation, self.down_proj) if self._is_summed else (self.activation,)
        self._hooks = ProjectionHooks((self.gate_up_proj, down_matmul), watched)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the gated MLP of ``x`` ``[T, H]``, ``[T, H]``."""
        gate_up, down = self._parts
        if (
            not self.is_fusable
            or is_compiling()
            or (lora := self._hooks.lora()) is None
            or None in (quantizations := self._quantizations.of(gate_up.kernel, down.kernel))
            or x.ndim != 2
            or not x.is_contiguous()
        ):
            return super().forward(x)
        dtype = x.dtype
        count, length = x.shape
        out = torch.empty(count, down.operands[0][1], dtype=dtype)
        library().mlp(
            *weight_arguments(quantizations[0], gate_up.operands),
            *weight_arguments(quantizations[1], down.operands),
            x.data_ptr(),
            out.data_ptr(),
            TYPES[dtype],
            self.activation_number,
            count,
            length,
            *lora.addresses,
            lora.ids(count),
        )
        return down.reduce(out) if self._is_summed else out


@final
class NativeSelfAttention(SelfAttention):
    """Self-attention: QKV projection, norms of heads and rotary embedding in one call."""

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
            is_first_projection(self.qkv_proj)
            and is_fused(rotary, RotaryEmbedding, rotary.rotate, "rotary_embedding")
            and all(is_fused(n, RMSNorm, n.norm, "rms_norm") for n in norms if n is not None)
        )
        self._parts: Any = (self.qkv_proj, *norms)
        self._quantizations = InputQuantizations()
        self._hooks = ProjectionHooks((self.qkv_proj,), (rotary, *filter(None, norms)))

    def heads(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute query ``[T, N, D]``, key and value ``[T, K, D]``, normalized and rotated."""
        projection, query_norm, key_norm = self._parts
        if (
            not self.is_fusable
            or is_compiling()
            or (lora := self._hooks.lora()) is None
            or None in (quantizations := self._quantizations.of(projection.kernel))
            or cos.dtype is not FLOAT32
            or not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous())
        ):
            return super().heads(x, cos, sin)
        dtype = x.dtype
        count, length = x.shape
        heads, kv_heads, _ = self.counts
        size = self.head_size
        # The call writes query, key and value into one tensor; the results are views of it.
        out = torch.empty(count, heads + 2 * kv_heads, size, dtype=dtype)
        library().project_heads(
            *weight_arguments(quantizations[0], projection.operands),
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
            *lora.addresses,
            lora.ids(count),
            self.eps,
        )
        query, key, value = out.split(self.counts, 1)
        return query, key, value
