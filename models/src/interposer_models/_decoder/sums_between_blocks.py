"""Sums over ranks at the end of decoder blocks, which the norm behind each block takes."""

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


def leave_sums(blocks: Sequence[nn.Module], last: nn.Module, site: Site) -> list[LeftSum]:
    """Leave the sum of each block to the norm of the next one, or to the last norm.

    Args:
        blocks: that follow each other.
        last: behind the last block.
        site: of the decoder.
    Returns: the sums that were left.
    """
    if alone(site):
        return []
    found = []
    readers: list[list[nn.Module]] = [*([block] for block in blocks[1:]), []]
    for block, behind in zip(blocks, readers, strict=True):
        norm = _first_norm(behind[0]) if behind else last
        if type(block) is not DecoderBlock or not isinstance(norm, RMSNorm):
            continue
        mlp: Any = block.mlp
        if not ends_in_projection(mlp, GatedMLP):
            continue
        if leave_sum(replace(site, prefix=norm.prefix), mlp.down_proj, norm, (mlp, block), behind):
            found.append(norm.left[0])
    return found


def _first_norm(block: nn.Module) -> nn.Module | None:
    return block.input_layernorm if type(block) is DecoderBlock else None
