"""Consecutive decoder blocks in one call of the compiled library.

With one call per block, the Python between two calls takes 5 to 10 % of a decode step, because
the weights evict Python's data from the CPU caches. Here the arguments of all blocks are gathered
at once.

Dimensions: L blocks, T tokens, R tokens with an output, H hidden size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from interposer_cpu._kernels.attention import Plan
from interposer_cpu._kernels.bound_block import BoundBlock, attention_arguments
from interposer_cpu._kernels.fusion import ForwardHooks
from interposer_cpu._kernels.interface import FLOAT32
from interposer_cpu.native import library

# Number of arguments of the library's decoder_block. The table has one row of arguments per block,
# and the indices below follow the order of arguments in NativeDecoderBlock.forward.
_NUM_ARGUMENTS = 40
_NUM_PROJECTIONS, _NUM_NORMS = 4, 4

# Kernels of all projections, fused calls of the blocks, and a table of the constant arguments.
_Bound = tuple[list[Any], list[BoundBlock], "array[int]"]


class DecoderRun:
    """Call of several decoder blocks at once, if no Python code must run between blocks.

    Weights are looked up at every call, as in ``NativeDecoderBlock``.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.blocks = tuple(blocks)
        parts = [block.parts() for block in blocks]
        self.projections = [
            part for block_parts in parts for part in block_parts[:_NUM_PROJECTIONS]
        ]
        self.norms = [
            block_parts[_NUM_PROJECTIONS : _NUM_PROJECTIONS + _NUM_NORMS] for block_parts in parts
        ]
        self.attentions = [block_parts[-1] for block_parts in parts]
        self.latents = [(i, block.latent) for i, block in enumerate(blocks) if block.latent]
        self.moes = [(i, block.moe) for i, block in enumerate(blocks) if block.moe is not None]
        hooks = [ForwardHooks(blocks).dicts, *(block.hooks() for block in blocks)]
        # Deduplicated: the global hooks of torch are in every list.
        self.hooks = tuple({id(d): d for dicts in hooks for d in dicts}.values())
        # Tools that watch a layer set ``forward`` on the instance.
        self.instances = [vars(block) for block in blocks]
        self.all_reduces = [block.all_reduce for block in blocks]
        # One communicator serves all blocks: take a block that has one, if any.
        self.all_reduce = max(self.all_reduces, key=lambda reduce: reduce.summand_bits)
        self._bound: _Bound = ([], [], array("q"))

    def __reduce__(self) -> tuple[type[DecoderRun], tuple[tuple[Any, ...]]]:
        """Rebuild the object from the copied blocks when a model is copied."""
        return DecoderRun, (self.blocks,)

    def __call__(
        self,
        x: torch.Tensor,
        angles: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
        caches: Sequence[torch.Tensor],
        plans: Sequence[object],
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compute all decoder blocks; None if the blocks must be called one by one.

        Args:
            x: ``[T, H]``, input of the first block, which gets no residual.
            angles, caches, plans: one per block.
            rows: rows of the last block with an output; None for all.
        Returns: output and residual of the last block, ``[R, H]`` each.
        """
        if is_compiling() or any(self.hooks) or any("forward" in d for d in self.instances):
            return None
        kernels = [projection.kernel for projection in self.projections]
        if kernels != self._bound[0]:
            self._bound = self._bind(kernels, angles)
        _, bounds, template = self._bound
        first, count = self.blocks[0], x.shape[0]
        if (
            not template
            or x.dtype is not first.dtype
            or not x.is_contiguous()
            or not (rows is None or (rows.is_contiguous() and rows.dtype is torch.int64))
            or sum(type(plan) is Plan for plan in plans) + len(self.latents) < len(plans)
            or not all(map(_are_plain, {id(pair): pair for pair in angles}.values()))
        ):
            return None
        latents = []
        for index, latent in self.latents:
            no_lora = (0,) * len(latent.others)
            latents.append(latent.arguments(caches[index], plans[index], count, no_lora))
        moes = [moe.address() for _, moe in self.moes]
        if None in latents or None in moes:
            return None
        length = len(self.blocks)
        num_outputs = count if rows is None else rows.shape[0]
        residual = x.to(FLOAT32)
        # Double buffers: a block reads from one half and writes to the other.
        hidden = torch.empty(2, count, first.hidden_size, dtype=x.dtype)
        stream = torch.empty(2, count, first.hidden_size, dtype=FLOAT32)
        out = torch.empty(num_outputs, first.hidden_size, dtype=x.dtype)
        total = torch.empty(num_outputs, first.hidden_size, dtype=FLOAT32)
        outs = [half.data_ptr() for half in hidden] * length
        totals = [half.data_ptr() for half in stream] * length
        # A copy: entries that a call does not set keep the values of the template.
        table = template[:]
        self._write_weights(table, bounds)
        for (index, _), latent_call in zip(self.latents, latents, strict=True):
            table[index * _NUM_ARGUMENTS + 38] = latent_call.buffer_info()[0]
        for (index, _), address in zip(self.moes, moes, strict=True):
            table[index * _NUM_ARGUMENTS + 39] = address
        tables = [(cos.data_ptr(), sin.data_ptr()) for cos, sin in angles]  # type: ignore[union-attr]
        strides = [cache.stride() for cache in caches]
        sizes = [cache.itemsize for cache in caches]
        for index, column in (
            (13, [cos for cos, _ in tables]),
            (14, [sin for _, sin in tables]),
            (15, [plan.address if type(plan) is Plan else 0 for plan in plans]),
            (16, [cache.data_ptr() for cache in caches]),
            (17, [stride[0] * size for stride, size in zip(strides, sizes, strict=True)]),
            (18, [stride[1] * size for stride, size in zip(strides, sizes, strict=True)]),
            (23, [x.data_ptr(), *outs[: length - 1]]),
            (24, [residual.data_ptr(), *totals[: length - 1]]),
            (26, [count] * length),
            (29, [*outs[: length - 1], out.data_ptr()]),
            (30, [*totals[: length - 1], total.data_ptr()]),
        ):
            table[index::_NUM_ARGUMENTS] = array("q", column)
        if rows is not None:  # the last block
            table[27 - _NUM_ARGUMENTS], table[28 - _NUM_ARGUMENTS] = rows.data_ptr(), num_outputs
        table[37::_NUM_ARGUMENTS] = array("q", [reduce.address for reduce in self.all_reduces])
        self.all_reduce.check(library().decoder_blocks(table.buffer_info()[0], length))
        return out, total

    def _write_weights(self, table: array[int], bounds: list[BoundBlock]) -> None:
        """Write the addresses of weights, norms and scales to the argument table."""
        packed = [projection.operands[0][0].data_ptr() for projection in self.projections]
        for index in range(_NUM_PROJECTIONS):
            table[1 + index :: _NUM_ARGUMENTS] = array("q", packed[index::_NUM_PROJECTIONS])
        # A norm has two constants: for rms_norm and for fused_add_rms_norm. Only the first norm of
        # the first block has no residual to add.
        constant = 0
        input_norms, post_norms, query_norms, key_norms = [], [], [], []
        for norm, query, key, post in self.norms:
            input_norms.append(norm.constants[constant].data_ptr())
            query_norms.append(0 if query is None else query.constants[0].data_ptr())
            key_norms.append(0 if key is None else key.constants[0].data_ptr())
            post_norms.append(post.constants[1].data_ptr())
            constant = 1
        columns = ((9, input_norms), (10, query_norms), (11, key_norms), (12, post_norms))
        for index, column in columns:
            table[index::_NUM_ARGUMENTS] = array("q", column)
        for index, attn in enumerate(self.attentions):
            if attn.scales is not None or attn.spec.sinks:
                start = index * _NUM_ARGUMENTS + 19
                table[start : start + 4] = array("q", attention_arguments(attn))
        for index, fused_call in enumerate(bounds):
            if fused_call.statics:
                projections = self.projections[index * _NUM_PROJECTIONS :][:_NUM_PROJECTIONS]
                start = index * _NUM_ARGUMENTS + 5
                table[start : start + 4] = array("q", fused_call.input_scales(projections))

    def _bind(self, kernels: list[Any], angles: Sequence[Any]) -> _Bound:
        """Fill a table with the blocks' constant arguments; empty if a block cannot be fused."""
        bounds, table = [], array("q", bytes(8 * _NUM_ARGUMENTS * len(self.blocks)))
        for index, block in enumerate(self.blocks):
            block_kernels = tuple(kernels[index * _NUM_PROJECTIONS :][:_NUM_PROJECTIONS])
            fused_call = block.bound(block_kernels, angles[index][0])
            is_whole = fused_call.is_whole or block.moe is not None
            if fused_call.address is None or not is_whole:
                return kernels, [], array("q")
            bounds.append(fused_call)
            table[index * _NUM_ARGUMENTS] = fused_call.address
            table[index * _NUM_ARGUMENTS + 25] = (
                1 if index else 0
            )  # whether x is added to the residual
            table[index * _NUM_ARGUMENTS + 28] = -1  # all rows
        return kernels, bounds, table


def _are_plain(tables: tuple[Any, Any]) -> bool:
    cos, sin = tables
    return cos is not None and cos.dtype is FLOAT32 and cos.is_contiguous() and sin.is_contiguous()
