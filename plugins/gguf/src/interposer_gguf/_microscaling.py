"""MXFP4 in GGUF files: 32 numbers of four bits with a power of two as their scale.

Dimensions: E experts, O rows, G blocks of a row, C bytes of a block.

Source: OCP Microscaling Formats 1.0 for numbers and scales; the layout of a block is that of ggml
(ggml-common.h): the scale, then 16 bytes, whose low halves are the first 16 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from interposer_gguf._block_formats import FORMATS, BlockFormat

_SIZE, _NUM_BYTES = 32, 17
# Twice the numbers that four bits stand for, so that they are integers.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_BIAS = 127


def _codes(blocks: torch.Tensor) -> torch.Tensor:
    values = torch.tensor([*_DOUBLED, *(-value for value in _DOUBLED)], dtype=torch.int8)
    return values.to(blocks.device)[_nibbles(blocks).long()]


def _scales(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
    exponents = blocks[..., :1].to(torch.int32) - _BIAS
    half = torch.full(exponents.shape, 0.5, dtype=dtype, device=blocks.device)
    return half.ldexp(exponents), None


def _nibbles(blocks: torch.Tensor) -> torch.Tensor:
    octets = blocks[..., 1:]
    return torch.cat((octets & 15, octets >> 4), -1)


MXFP4 = BlockFormat("mxfp4", 39, _SIZE, _NUM_BYTES, (), _SIZE, -12, 12, _codes, _scales)
"""The format, of which no kernel of this plugin computes."""

LAYOUTS: Mapping[str, BlockFormat] = {**FORMATS, MXFP4.name: MXFP4}
"""Every format that a tensor of a file may have, by name."""


def unpacked(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks ``[E, O, G, 16]`` and scales ``[E, O, G]`` as gpt-oss has them, uint8.

    There, a byte holds two numbers that follow each other, the first one in its low half.

    Args:
        rows: ``[E, O, G * C]`` uint8.
    """
    blocks = rows.unflatten(-1, (-1, _NUM_BYTES))
    first, second = _nibbles(blocks).unflatten(-1, (-1, 2)).unbind(-1)
    return first | second << 4, blocks[..., 0].contiguous()
