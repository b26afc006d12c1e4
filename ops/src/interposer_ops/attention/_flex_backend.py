"""Decoder attention through torch's FlexAttention, for feature combinations without a fixed kernel.

Windows, softcap, sinks and 8-bit caches work in any combination. The cached tokens that a step
reads are copied first.

On an accelerator FlexAttention is compiled at the first call, which needs Triton, and again for
steps of one query or of few tokens and for each kind of layer. If these are more variants than
``torch._dynamo.config.recompile_limit``, torch runs the uncompiled form. The backend does not
declare itself safe for device graphs, so a step captured as a graph refuses it.

Results are tested on the CPU with torch's uncompiled form. On an H100 and an H200 the compiled form
was correct, except that capped scores raised; those were not run again.

Dimensions: T tokens, N heads, K kv heads, D head size, B sequences, M pages of the longest
sequence, L cached tokens that are read, P pages, S page size.
Source: arXiv:2412.05496; torch.nn.attention.flex_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from interposer import AttentionBatch, AttentionSpec, Capability, Site, Verdict
from interposer_ops.attention._decoder_backend import DecoderBackend
from interposer_ops.attention._gathered_backend import windowed
from interposer_ops.caches._cache_writer import cache_dims
from interposer_ops.caches._kv_cache import gather_cache, read_positions
from interposer_ops.caches._quantized_cache import gather_cache_fp8, gather_cache_int8

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_HEAD_SIZE = 16


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """Slots, lengths and block mask of one step, shared by all layers.

    Attributes:
        slots: ``[T]`` int64, the slots to write.
        page_table: ``[B, M]`` int64.
        lengths, firsts: ``[B]`` int64; number and first position of each sequence's tokens to read.
        num_keys: L.
        mask: block mask of T queries and L keys; None if there is no query.
    """

    slots: Tensor
    page_table: Tensor
    lengths: Tensor
    firsts: Tensor
    num_keys: int
    mask: BlockMask | None


class FlexBackend(DecoderBackend):
    """Attention backend that computes all sequences in one FlexAttention call with a block mask."""

    def __init__(self, spec: AttentionSpec, site: Site) -> None:
        super().__init__(spec, site)
        op: Any = gather_cache
        if spec.is_quantized:
            op = gather_cache_fp8 if spec.cache_dtype.is_floating_point else gather_cache_int8
        self._gather: Any = site.bind_kernel(op, **cache_dims(spec))
        self._cap = None if spec.softcap is None else _capped(spec.softcap)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept specs of ``DecoderBackend`` with dtypes and head sizes of FlexAttention."""
        if spec.dtype not in _DTYPES:
            return Verdict.refuse(f"computes in 32 or 16 bit floats, got {spec.dtype}")
        if spec.head_size < _MIN_HEAD_SIZE:
            return Verdict.refuse(f"takes heads of {_MIN_HEAD_SIZE} or more, got {spec.head_size}")
        return super().accepts(spec, capability)

    def plan(self, batch: AttentionBatch) -> FlexPlan:
        """Plan a step: the cache slots to read, and the block mask of queries and keys."""
        firsts, lengths = windowed(batch, self.spec.window_tokens)
        # The host copy gives the shape without waiting for the device.
        num_keys = int(windowed(batch.on_host(), self.spec.window_tokens)[1].sum())
        num_queries, mask = len(batch.slots), None
        if num_queries:
            counts = batch.query_starts.diff()
            queries = read_positions(batch.seq_lens - counts, counts, num_queries)
            keys = read_positions(firsts, lengths, num_keys)
            mask = _mask(*queries, *keys, self.spec.window_tokens)
        return FlexPlan(batch.slots, batch.page_table, lengths, firsts, num_keys, mask)

    def prepare_scales(self, key_scale: Tensor, value_scale: Tensor) -> Any:
        """Prepare the scales for the kernels that read and write the cache."""
        read_scales = [
            self._gather.prepared(scale=scale)["scale"] for scale in (key_scale, value_scale)
        ]
        return read_scales, self._writer.prepared(key_scale, value_scale)

    def attend_to(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: FlexPlan,
        sinks: Tensor | None,
        scales: Any,
    ) -> Tensor:
        """Attend to copies of the cached keys and values; see ``DecoderBackend.attend_to``."""
        if plan.mask is None:
            return torch.empty_like(query)
        key, value = (self._read(c, plan, s) for c, s in zip((keys, values), scales, strict=True))
        out, aux = _function(query.device.type)(
            query.transpose(0, 1)[None],
            key,
            value,
            score_mod=self._cap,
            block_mask=plan.mask,
            scale=self.spec.scale,
            enable_gqa=self.spec.num_heads != self.spec.num_kv_heads,
            return_aux=AuxRequest(lse=True),
        )
        if sinks is not None:
            # A sink adds e^s to the softmax's denominator, without a value: rescale the result by
            # e^lse / (e^lse + e^s).
            out = out * torch.sigmoid(aux.lse - sinks[:, None].to(aux.lse.dtype))[..., None]
        rows: Tensor = out[0].transpose(0, 1).to(query.dtype)
        return rows

    def _read(self, cache: Tensor, plan: FlexPlan, scale: Tensor | None) -> Tensor:
        """Gather ``[1, K, L, D]`` from a cache ``[P, S, K, D]``, in the spec's dtype."""
        arguments = (cache, plan.page_table, plan.lengths, plan.firsts)
        if scale is None:
            rows = self._gather.function(*arguments, plan.num_keys)
        else:
            rows = self._gather.function(*arguments, scale, plan.num_keys, self.spec.dtype)
        heads: Tensor = rows.transpose(0, 1)[None]
        return heads


def _mask(
    query_sequence: Tensor,
    query_position: Tensor,
    key_sequence: Tensor,
    key_position: Tensor,
    window_tokens: int | None,
) -> BlockMask:
    def is_visible(_sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query_position[query] - key_position[key]
        visible = (query_sequence[query] == key_sequence[key]) & (distance >= 0)
        return visible if window_tokens is None else visible & (distance < window_tokens)

    device = str(query_position.device)
    return create_block_mask(is_visible, None, None, len(query_position), len(key_position), device)


def _capped(softcap: float) -> Callable[..., Tensor]:
    def cap(score: Tensor, *_places: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _function(device_type: str) -> Any:
    """Return the FlexAttention function for a device; uncompiled on CPU, which serves tests."""
    if device_type == "cpu":
        return flex_attention
    # Disable CUDA graphs here whatever the process-wide setting: inside the engine's own graph, an
    # inner graph would write to memory that is not its own.
    compiled = torch.compile(flex_attention, dynamic=True, options={"triton.cudagraphs": False})
    # torch 2.11 to 2.13 cannot lower a symbolic float for the softcap, so floats are constants.
    return torch._dynamo.config.patch(specialize_float=True)(compiled)
