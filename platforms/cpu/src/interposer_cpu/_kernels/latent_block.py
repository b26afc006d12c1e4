"""Latent attention (MLA) in the fused call of a decoder block.

Dimensions: T tokens, N heads, D size of a query and key head without its rotary part, R rotary
size, C latent size, V size of a value head, B sequences, P pages, S page size.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any

import torch

from interposer import AttentionBatch
from interposer_cpu._kernels.block_sums import is_last_projection
from interposer_cpu._kernels.fusion import (
    UNQUANTIZED,
    InputQuantization,
    fused,
    input_quantization,
    is_declared,
    is_fused,
)
from interposer_cpu._kernels.head_linear import NativeHeadLinear, operand_inputs
from interposer_cpu._kernels.interface import TYPES
from interposer_ops.caches import write_latent_cache
from interposer_ops.layers.attention import Attention, LatentBackend
from interposer_ops.layers.head_linear import HeadLinear
from interposer_ops.layers.latent_attention import HasLatentParts, LatentParts
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.tensor_parallel.linear import ColumnParallelLinear

# Memory layout of interposer_latent in native/blocks/blocks.h.
_SIZES = struct.Struct("=6qd16q")
_INT64 = torch.int64
# More tokens are computed part by part: there the Python between two parts takes little time, the
# call would keep more memory, and ``ExpandedAttention`` may serve long prompts.
_MOST_TOKENS = 64
_ROTATIONS = ("rotary_embedding", "rotary_embedding_interleaved")

# The library writes the cache itself.
fused("write_latent_cache")(write_latent_cache.reference)


class LatentHalf:
    """Describe latent attention in a decoder block to the native library.

    Attributes:
        parts: the layer's parts.
        others: further projections besides those of queries and outputs.
    """

    def __init__(self, parts: LatentParts) -> None:
        self.parts = parts
        compression = parts.query_compression
        self.others: tuple[Linear, ...] = (parts.vector_projection,)
        if compression is not None:
            self.others += (compression,)
        self._bound: tuple[tuple[Any, ...], torch.Tensor | None, tuple[bool, ...]] = ((), None, ())

    @classmethod
    def of(cls, mixer: Any, dtype: torch.dtype) -> LatentHalf | None:
        """Return the arguments of a self-attention layer; None if the library lacks a part."""
        layer: HasLatentParts = mixer
        parts = layer.latent_parts() if hasattr(mixer, "latent_parts") else None
        if parts is None or dtype not in TYPES:
            return None
        norms = [norm for norm in (parts.query_norm, parts.vector_norm) if norm is not None]
        backend = parts.attn.backend
        is_supported = (
            type(parts.query_projection) in (Linear, ColumnParallelLinear)
            and type(parts.vector_projection) is Linear
            and type(parts.query_compression) in (Linear, type(None))
            and is_last_projection(parts.output)
            and all(is_fused(norm, RMSNorm, norm.norm, "rms_norm") for norm in norms)
            and len({norm.eps for norm in norms}) == 1
            and any(is_declared(parts.rotary.rotate, op) for op in _ROTATIONS)
            and all(map(_is_fused_head, parts.absorption.head_layers))
            and type(parts.attn) is Attention
            and type(backend) is LatentBackend
            and parts.attn.spec.cache_dtype is dtype
            and is_declared(backend.write_kernel, "write_latent_cache")
            and is_declared(backend.attend_kernel, "latent_attention_decode")
        )
        return cls(parts) if is_supported else None

    def __reduce__(self) -> tuple[type[LatentHalf], tuple[LatentParts]]:
        """Rebuild the object from the copied parts when a layer is copied."""
        return LatentHalf, (self.parts,)

    def arguments(
        self, cache: torch.Tensor, plan: object, num_tokens: int, low_rank: tuple[int, ...]
    ) -> array[int] | None:
        """Build the C struct ``interposer_latent_call``; None if a step needs the parts.

        Args:
            cache: ``[P, S, C + R]``.
            plan: the plan of ``LatentBackend``.
            low_rank: addresses of the LoRA of ``others``.
        """
        if (
            num_tokens > _MOST_TOKENS
            or type(plan) is not AttentionBatch
            or cache.stride(2) != 1
            or cache.dtype is not self.parts.attn.spec.cache_dtype
        ):
            return None
        starts, lengths, table, slots = sequences = (
            plan.query_starts,
            plan.seq_lens,
            plan.page_table,
            plan.slots,
        )
        if not all(t.dtype is _INT64 and t.is_contiguous() for t in sequences):
            return None
        heads = [_head_weight(operand) for operand in self.parts.absorption.head_operands]
        kernels = (
            *[projection.kernel for projection in self.others],
            *[inputs for _, inputs in heads],
        )
        if kernels != self._bound[0]:
            self._bound = self._bind(kernels)
        _, sizes, statics = self._bound
        if sizes is None:
            return None
        vector, *compression = self.others
        scales = [
            projection.operands[-1].data_ptr() if is_static else 0
            for projection, is_static in zip(self.others, statics, strict=True)
        ]
        if not compression:
            scales, low_rank = [*scales, 0], (*low_rank, 0)
        page_stride, token_stride, _ = cache.stride()
        return array(
            "q",
            (
                sizes.data_ptr(),
                compression[0].operands[0][0].data_ptr() if compression else 0,
                vector.operands[0][0].data_ptr(),
                *[packed.data_ptr() for packed, _ in heads],
                *reversed(scales),  # the struct begins with the compression
                *reversed(low_rank),
                lengths.shape[0],
                starts.data_ptr(),
                lengths.data_ptr(),
                table.data_ptr(),
                table.stride(0),
                slots.data_ptr(),
                cache.data_ptr(),
                page_stride,
                token_stride,
            ),
        )

    def _bind(
        self, kernels: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], torch.Tensor | None, tuple[bool, ...]]:
        """Fill the C struct ``interposer_latent``; without it if a kernel is not declared."""
        *projections, queries, values = kernels
        declared = [input_quantization(kernel) for kernel in projections]
        quantizations = [q for q in declared if q is not None]
        if len(quantizations) < len(declared):
            return kernels, None, ()
        statics = tuple(quantization.is_static for quantization in quantizations)
        vector, compression = (*quantizations, UNQUANTIZED)[:2]
        coded = (compression, vector, queries, values)
        parts = self.parts
        facts = _SIZES.pack(
            *parts.sizes,
            is_declared(parts.rotary.rotate, _ROTATIONS[1]),
            parts.attn.spec.page_size,
            parts.attn.spec.scale,
            *(field for quantization in coded for field in quantization.fields),
        )
        return kernels, torch.frombuffer(bytearray(facts), dtype=_INT64), statics


def _is_fused_head(layer: HeadLinear) -> bool:
    """Check whether the library can compute a layer of heads."""
    is_standard = type(layer) in (HeadLinear, NativeHeadLinear)
    return is_standard and is_declared(layer.multiply, "batched_linear")


def _head_weight(operand: Any) -> tuple[torch.Tensor, InputQuantization]:
    """Return the packed weight of an operand of heads, and the quantization of its inputs."""
    return operand[0], operand_inputs(operand)
