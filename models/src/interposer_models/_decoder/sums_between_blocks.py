"""Fuse the all-reduce at the end of each decoder block with the RMSNorm that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from interposer import Site
from interposer_ops.layers.cuts import alone
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.fused_sums import LeftSum, ends_in_projection, leave_sum
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm


def fuse_sums_into_norms(blocks: Sequence[nn.Module], last: nn.Module, site: Site) -> list[LeftSum]:
    """Move the all-reduce after each block into the next block's first norm, or the last norm.

    Args:
        blocks: in order.
        last: the norm after the last block.
        site: of the decoder.
    Returns: the fused sums.
    """
    if alone(site):
        return []
    fused_sums = []
    # A list with the following block, empty for the last one.
    next_blocks: list[list[nn.Module]] = [*([block] for block in blocks[1:]), []]
    for block, next_block in zip(blocks, next_blocks, strict=True):
        norm = _first_norm(next_block[0]) if next_block else last
        # A subclass may use the MLP's output in another way than adding it to the stream.
        if type(block) is not DecoderBlock or not isinstance(norm, RMSNorm):
            continue
        mlp: Any = block.mlp
        if not ends_in_projection(mlp, GatedMLP):
            continue
        if leave_sum(
            replace(site, prefix=norm.prefix), mlp.down_proj, norm, (mlp, block), next_block
        ):
            fused_sums.append(norm.left[0])
    return fused_sums


def _first_norm(block: nn.Module) -> nn.Module | None:
    return block.input_layernorm if type(block) is DecoderBlock else None
