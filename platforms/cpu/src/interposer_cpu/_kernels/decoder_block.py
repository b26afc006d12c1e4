"""A whole decoder block in one call of the compiled library.

Dimensions: T tokens, R tokens with an output, H hidden size, N heads, K kv heads, D head size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.compiler import is_compiling

from interposer import Site
from interposer_cpu._kernels.additions import LoraArguments, ProjectionHooks
from interposer_cpu._kernels.attention import NativeBackend, Plan
from interposer_cpu._kernels.block_sums import (
    BlockAllReduce,
    hooked_module,
    is_last_projection,
    reduce_in_shared_memory,
)
from interposer_cpu._kernels.blocks import NativeGatedMLP, NativeSelfAttention
from interposer_cpu._kernels.bound_block import BoundBlock, attention_arguments
from interposer_cpu._kernels.decoder_run import DecoderRun
from interposer_cpu._kernels.fusion import UNQUANTIZED, input_quantization, is_fused
from interposer_cpu._kernels.interface import FLOAT32, TYPES
from interposer_cpu._kernels.latent_block import LatentHalf
from interposer_cpu._kernels.moe_half import MoEHalf
from interposer_cpu.native import library
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention

_INT64 = torch.int64
# Memory layout of interposer_block in native/blocks/blocks.h.
_BLOCK_STRUCT = struct.Struct("=23q3dq")
_NO_LORA = LoraArguments((0, 0), None)


class _NoProjection:
    """Stands for the projections of an MLP in a block without a fused MLP; its address is 0."""

    kernel = None
    operands = ((torch.empty(0),),)


@final
class NativeDecoderBlock(DecoderBlock):
    """Decoder block in one fused call; the MLP is called separately if it cannot be fused.

    The attention is a ``NativeSelfAttention``, or latent attention (MLA). In place of the MLP, the
    block can have an MoE layer, see ``MoEHalf``. Weights are looked up at every
    call, so that exchanged weights are used and old ones are freed. With tensor parallelism, the
    call includes the all-reduces through shared memory.
    """

    reduces = True

    def __init__(
        self,
        site: Site,
        hidden_size: int,
        norm_eps: float,
        attention: Callable[[Site], SelfAttention],
        mlp: Callable[[Site], nn.Module],
    ) -> None:
        super().__init__(site, hidden_size, norm_eps, attention, mlp)
        mixer: Any = self.self_attn
        mlp_layer: Any = self.mlp
        self.hidden_size = hidden_size
        self.dtype = site.dtype
        self.latent = LatentHalf.of(mixer, site.dtype)
        self.is_fusable = (
            site.dtype in TYPES
            and _is_fused_norm(self.input_layernorm)
            and _is_fused_norm(self.post_attention_layernorm)
            and (self.latent is not None or _is_fused_attention(mixer))
            and reduce_in_shared_memory(mixer.o_proj)
        )
        self.takes_mlp = (
            self.is_fusable
            and isinstance(mlp_layer, NativeGatedMLP)
            and mlp_layer.is_fusable
            and reduce_in_shared_memory(mixer.o_proj, mlp_layer.down_proj)
        )
        self.moe = MoEHalf.of(mlp_layer, site.dtype) if self.is_fusable else None
        # A tuple attribute is read faster than submodules of nn.Module.
        self._parts: Any = ()
        mixers: tuple[Any, ...] = ()
        further_projections: tuple[Any, ...] = ()
        if self.is_fusable:  # another attention class can have other parts
            if self.latent is None:
                projection, head_norms = mixer.qkv_proj, (mixer.q_norm, mixer.k_norm)
            else:
                latent = self.latent.parts
                projection = latent.query_projection
                head_norms = (latent.query_norm, latent.vector_norm)
                further_projections = self.latent.others
                mixers = (latent.absorption,)
            norms = (self.input_layernorm, *head_norms, self.post_attention_layernorm)
            self._parts = (projection, mixer.o_proj, *norms, mixer.attn)
            mixers += (*norms, mixer.attn, mixer, mixer.rotary)
        projections = (mlp_layer.gate_up_proj, mlp_layer.down_proj) if self.takes_mlp else ()
        self._mlp_parts: Any = projections or (_NoProjection, _NoProjection)
        mlp_others = (mlp_layer, mlp_layer.activation) if self.takes_mlp else ()
        self._hooks = _hooks((*self._parts[:2], *further_projections), mixers)
        self._mlp_hooks = _hooks(projections, mlp_others)
        output = mixer.o_proj if self.is_fusable else None
        down_proj = mlp_layer.down_proj if self.takes_mlp else None
        self.all_reduce = BlockAllReduce(output, down_proj)
        self._bound = BoundBlock((), False, None)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        plan: object,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the block; same arguments and results as ``DecoderBlock.forward``."""
        if not self.is_fusable or is_compiling() or (lora := self._hooks.lora()) is None:
            return super().forward(x, residual, cos, sin, cache, plan, rows)
        projection, output, norm, query_norm, key_norm, post_norm, attn = self._parts
        up, down = self._mlp_parts
        kernels = (projection.kernel, output.kernel, up.kernel, down.kernel)
        fused_call = self.bound(kernels, cos)
        if (
            fused_call.address is None
            or x.dtype is not self.dtype
            or cos.dtype is not FLOAT32
            or not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous())
            or not (rows is None or (rows.is_contiguous() and rows.dtype is _INT64))
        ):
            return super().forward(x, residual, cos, sin, cache, plan, rows)
        # The library keeps the residual in float32; the first block of a model gets none.
        if residual is None:
            is_added, residual = 0, x.to(FLOAT32)
        elif residual.dtype is FLOAT32 and residual.is_contiguous():
            is_added = 1
        else:
            return super().forward(x, residual, cos, sin, cache, plan, rows)
        count = x.shape[0]
        num_outputs = count if rows is None else rows.shape[0]
        hidden_size = self.hidden_size
        latent_call = None
        cache_arguments: Sequence[int] = (0, 0, 0, 0)
        if self.latent is not None:
            latent_call = self.latent.arguments(cache, plan, count, lora.addresses[2:])
            if latent_call is None:
                return super().forward(x, residual, cos, sin, cache, plan, rows)
        elif type(plan) is Plan:
            head_stride, page_stride, *_ = cache.stride()
            size = cache.itemsize  # the library takes the strides of the cache in bytes
            cache_arguments = (
                plan.address,
                cache.data_ptr(),
                head_stride * size,
                page_stride * size,
            )
        else:
            return super().forward(x, residual, cos, sin, cache, plan, rows)
        out = torch.empty(num_outputs, hidden_size, dtype=x.dtype)
        total = torch.empty(num_outputs, hidden_size, dtype=FLOAT32)
        mlp_lora = self._mlp_hooks.lora() if fused_call.is_whole else None
        has_mlp = mlp_lora is not None
        moe = None if self.moe is None else self.moe.address()
        if mlp_lora is None:
            mlp_lora = _NO_LORA  # self.mlp is called below and runs its own hooks
        adapter_source = lora if lora.hook is not None else mlp_lora
        lost = library().decoder_block(
            fused_call.address,
            projection.operands[0][0].data_ptr(),
            output.operands[0][0].data_ptr(),
            up.operands[0][0].data_ptr() if has_mlp else 0,
            down.operands[0][0].data_ptr() if has_mlp else 0,
            *fused_call.input_scales((projection, output, up, down)),
            # constants[0] belongs to rms_norm, constants[1] to fused_add_rms_norm
            norm.constants[1 if is_added else 0].data_ptr(),
            0 if query_norm is None else query_norm.constants[0].data_ptr(),
            0 if key_norm is None else key_norm.constants[0].data_ptr(),
            post_norm.constants[1].data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            *cache_arguments,
            *attention_arguments(attn),
            x.data_ptr(),
            residual.data_ptr(),
            is_added,
            count,
            0 if rows is None else rows.data_ptr(),
            -1 if rows is None else num_outputs,
            out.data_ptr(),
            total.data_ptr(),
            *lora.addresses[:2],
            *mlp_lora.addresses,
            adapter_source.ids(count),
            adapter_source.ids(num_outputs),
            self.all_reduce.address,
            0 if latent_call is None else latent_call.buffer_info()[0],
            moe or 0,
        )
        self.all_reduce.check(lost)
        return (out if has_mlp or moe else self.mlp(out)), total

    @classmethod
    def joined(cls, blocks: Sequence[nn.Module]) -> DecoderRun | None:
        """Join consecutive blocks into one call; None if a block cannot be fused completely."""
        fusable = [
            block
            for block in blocks
            if isinstance(block, cls) and (block.takes_mlp or block.moe is not None)
        ]
        return DecoderRun(fusable) if len(fusable) == len(blocks) else None

    def parts(self) -> tuple[Any, ...]:
        """List the parts: four projections, four norms (a norm can be None), the attention.

        A block with an MoE layer has no third and fourth projection: their addresses are 0.
        """
        projection, output, *norms, attn = self._parts
        return projection, output, *self._mlp_parts, *norms, attn

    def hooks(self) -> tuple[Any, ...]:
        """List the forward-hook dictionaries of all modules; every one is empty without hooks."""
        return *self._hooks.dicts, *self._mlp_hooks.dicts

    def bound(self, kernels: tuple[Any, ...], cos: torch.Tensor) -> BoundBlock:
        """Return the native arguments of the block for the projections' current kernels."""
        # Exchanging weights can exchange kernels too, without any notice to this layer.
        if kernels != self._bound.kernels:
            self._bound = self._bind(kernels, cos)
        return self._bound

    def _bind(self, kernels: tuple[Any, ...], cos: torch.Tensor) -> BoundBlock:
        """Build the native arguments of the block from the declarations of its kernels."""
        declared = [input_quantization(kernel) for kernel in kernels]
        if None in declared[:2]:
            return BoundBlock(kernels, False, None)
        is_whole = self.takes_mlp and None not in declared
        # Without a fused MLP, the last two quantizations are not used.
        quantizations = [q or UNQUANTIZED for q in declared]
        fields = [field for quantization in quantizations for field in quantization.fields]
        statics = tuple(quantization.is_static for quantization in quantizations)
        mlp: Any = self.mlp
        heads, kv_heads, head_size, head_eps = self._head_facts()
        facts = _BLOCK_STRUCT.pack(
            TYPES[self.dtype],
            mlp.activation_number if is_whole else 0,
            self.hidden_size,
            heads,
            kv_heads,
            head_size,
            cos.shape[1],
            *fields,
            self.input_layernorm.eps,
            head_eps,
            self.post_attention_layernorm.eps,
            self.all_reduce.summand_bits,
        )
        return BoundBlock(kernels, is_whole, facts, statics if any(statics) else ())

    def _head_facts(self) -> tuple[int, int, int, float]:
        """Return the numbers of heads and kv heads, the head size and epsilon of the norms."""
        mixer: Any = self.self_attn
        if self.latent is None:
            heads, kv_heads, _ = mixer.counts
            return heads, kv_heads, mixer.head_size, mixer.eps
        parts = self.latent.parts
        # The size of a value head: values are the inputs of the output projection.
        return parts.attn.spec.num_heads, 1, parts.sizes[3], parts.vector_norm.eps


def _hooks(
    projections: Sequence[nn.Module], other_modules: Sequence[nn.Module | None]
) -> ProjectionHooks:
    """Watch the matmul hooks of the projections, and the hooks of all other modules."""
    matmuls = [hooked_module(projection) for projection in projections]
    reduced = [p for p, matmul in zip(projections, matmuls, strict=True) if p is not matmul]
    return ProjectionHooks(matmuls, [m for m in (*other_modules, *reduced) if m is not None])


def _is_fused_attention(mixer: Any) -> bool:
    """Check whether fused calls can compute a self-attention layer other than latent attention."""
    return (
        isinstance(mixer, NativeSelfAttention)
        and mixer.is_fusable
        and is_last_projection(mixer.o_proj)
        and type(mixer.attn) is Attention
        and isinstance(mixer.attn.backend, NativeBackend)
    )


def _is_fused_norm(norm: RMSNorm) -> bool:
    """Check whether fused calls can compute a norm, both with and without residual addition."""
    kernels = {"rms_norm": norm.norm, "fused_add_rms_norm": norm.add_norm}
    return all(is_fused(norm, RMSNorm, kernel, op) for op, kernel in kernels.items())
