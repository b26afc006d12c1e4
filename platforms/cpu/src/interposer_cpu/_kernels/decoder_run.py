"""Decoder blocks that follow each other, by one call of the compiled library.

What a block looks up at every call, it looks up for all blocks at once here: the Python between two
calls takes as long as a twentieth to a tenth of a decode step, as weights drive its data out of the
caches.

Dimensions: L blocks, T tokens, R tokens that matter, H hidden size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from interposer_cpu._kernels.attention import Plan
from interposer_cpu._kernels.block_words import BoundBlock, attention_words
from interposer_cpu._kernels.fusion import ForwardHooks
from interposer_cpu._kernels.interface import FLOAT32
from interposer_cpu.native import library

_WORDS = 38  # of a block, in the order that decoder_block takes them
_PRODUCTS, _NORMS = 4, 4

# Kernels of projections, what their blocks hold for them, and the words that stay the same.
_Bound = tuple[list[Any], list[BoundBlock], "array[int]"]


class DecoderRun:
    """The blocks as one call, unless something has to happen between two of them.

    Weights are looked up at every call, as by the block.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.blocks = tuple(blocks)
        parts = [block.parts() for block in blocks]
        self.products = [part for own in parts for part in own[:_PRODUCTS]]
        self.norms = [own[_PRODUCTS : _PRODUCTS + _NORMS] for own in parts]
        self.attentions = [own[-1] for own in parts]
        hooks = [ForwardHooks(blocks).dicts, *(block.hooks() for block in blocks)]
        self.hooks = tuple({id(own): own for some in hooks for own in some}.values())
        # Whoever watches a layer sets its own forward.
        self.instances = [vars(block) for block in blocks]
        self.sums = [block.sums for block in blocks]
        self.ranks = max(self.sums, key=lambda sums: sums.words)
        self._bound: _Bound = ([], [], array("q"))

    def __reduce__(self) -> tuple[type[DecoderRun], tuple[tuple[Any, ...]]]:
        """Let a copy look at the copies of the blocks."""
        return DecoderRun, (self.blocks,)

    def __call__(
        self,
        x: torch.Tensor,
        angles: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
        caches: Sequence[torch.Tensor],
        plans: Sequence[object],
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what the last block does; None where blocks have to be called one by one.

        Args:
            x: ``[T, H]``, of the first block, which has no residual stream before it.
            angles, caches, plans: of each block.
            rows: of the last block.
        """
        if is_compiling() or any(self.hooks) or any("forward" in own for own in self.instances):
            return None
        kernels = [product.kernel for product in self.products]
        if kernels != self._bound[0]:
            self._bound = self._bind(kernels, angles)
        _, bounds, template = self._bound
        first, count = self.blocks[0], x.shape[0]
        if (
            not template
            or x.dtype is not first.dtype
            or not x.is_contiguous()
            or not (rows is None or (rows.is_contiguous() and rows.dtype is torch.int64))
            or not all(type(plan) is Plan for plan in plans)
            or not all(map(_are_plain, {id(pair): pair for pair in angles}.values()))
        ):
            return None
        length = len(self.blocks)
        chosen = count if rows is None else rows.shape[0]
        residual = x.to(FLOAT32)
        # In turn: what a block reads lies in one of both, what it writes in the other.
        hidden = torch.empty(2, count, first.hidden_size, dtype=x.dtype)
        stream = torch.empty(2, count, first.hidden_size, dtype=FLOAT32)
        out = torch.empty(chosen, first.hidden_size, dtype=x.dtype)
        total = torch.empty(chosen, first.hidden_size, dtype=FLOAT32)
        outs = [half.data_ptr() for half in hidden] * length
        totals = [half.data_ptr() for half in stream] * length
        table = template[:]
        self._write_weights(table, bounds)
        tables = [(cos.data_ptr(), sin.data_ptr()) for cos, sin in angles]  # type: ignore[union-attr]
        strides = [cache.stride() for cache in caches]
        sizes = [cache.itemsize for cache in caches]
        for place, words in (
            (13, [cos for cos, _ in tables]),
            (14, [sin for _, sin in tables]),
            (15, [plan.address for plan in plans]),  # type: ignore[attr-defined]
            (16, [cache.data_ptr() for cache in caches]),
            (17, [own[0] * size for own, size in zip(strides, sizes, strict=True)]),
            (18, [own[1] * size for own, size in zip(strides, sizes, strict=True)]),
            (23, [x.data_ptr(), *outs[: length - 1]]),
            (24, [residual.data_ptr(), *totals[: length - 1]]),
            (26, [count] * length),
            (29, [*outs[: length - 1], out.data_ptr()]),
            (30, [*totals[: length - 1], total.data_ptr()]),
        ):
            table[place::_WORDS] = array("q", words)
        if rows is not None:
            table[27 - _WORDS], table[28 - _WORDS] = rows.data_ptr(), chosen
        table[37::_WORDS] = array("q", [sums.address for sums in self.sums])
        self.ranks.check(library().decoder_blocks(table.buffer_info()[0], length))
        return out, total

    def _write_weights(self, table: array[int], bounds: list[BoundBlock]) -> None:
        """Write addresses of weights and of their scales."""
        packed = [product.operands[0][0].data_ptr() for product in self.products]
        for place in range(_PRODUCTS):
            table[1 + place :: _WORDS] = array("q", packed[place::_PRODUCTS])
        added = 0  # by the first norm, which does not add
        before, behind, queries, keys = [], [], [], []
        for norm, query, key, post in self.norms:
            before.append(norm.constants[added].data_ptr())
            queries.append(0 if query is None else query.constants[0].data_ptr())
            keys.append(0 if key is None else key.constants[0].data_ptr())
            behind.append(post.constants[1].data_ptr())
            added = 1
        for place, words in ((9, before), (10, queries), (11, keys), (12, behind)):
            table[place::_WORDS] = array("q", words)
        for index, attn in enumerate(self.attentions):
            if attn.scales is not None or attn.spec.sinks:
                start = index * _WORDS + 19
                table[start : start + 4] = array("q", attention_words(attn))
        for index, bound in enumerate(bounds):
            if bound.statics:
                own, start = self.products[index * _PRODUCTS :][:_PRODUCTS], index * _WORDS + 5
                table[start : start + 4] = array("q", bound.input_scales(own))

    def _bind(self, kernels: list[Any], angles: Sequence[Any]) -> _Bound:
        """Return the words of all blocks that stay the same; none where a block is not whole."""
        bounds, table = [], array("q", bytes(8 * _WORDS * len(self.blocks)))
        for index, block in enumerate(self.blocks):
            own = tuple(kernels[index * _PRODUCTS :][:_PRODUCTS])
            bound = block.bound(own, angles[index][0])
            if bound.address is None or not bound.is_whole:
                return kernels, [], array("q")
            bounds.append(bound)
            table[index * _WORDS] = bound.address
            table[index * _WORDS + 25] = 1 if index else 0  # whether x is added to the stream
            table[index * _WORDS + 28] = -1  # all rows
        return kernels, bounds, table


def _are_plain(tables: tuple[Any, Any]) -> bool:
    cos, sin = tables
    return cos is not None and cos.dtype is FLOAT32 and cos.is_contiguous() and sin.is_contiguous()
