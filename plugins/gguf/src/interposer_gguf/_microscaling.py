"""MXFP4 in GGUF files: blocks of 32 four-bit floats with a power of two as scale.

Shapes: E experts, O rows, G blocks of a row, C bytes of a block.

Source: OCP Microscaling Formats 1.0 for values and scales; ggml (ggml-common.h) for the layout of a
block: the scale, then 16 bytes with the first 16 values in the low halves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from interposer_gguf._block_formats import FORMATS, BlockFormat

_SIZE, _NUM_BYTES = 32, 17
# The positive values of E2M1, doubled so that they are integers; scales are halved instead.
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
_BIAS = 127


def _unpack(blocks: torch.Tensor) -> torch.Tensor:
    values = torch.tensor([*_DOUBLED, *(-value for value in _DOUBLED)], dtype=torch.int8)
    return values.to(blocks.device)[_nibbles(blocks).long()]


def _scales(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
    exponents = blocks[..., :1].to(torch.int32) - _BIAS
    # ``unpack_block`` returns doubled values, so the scale is 2^exponent / 2.
    half = torch.full(exponents.shape, 0.5, dtype=dtype, device=blocks.device)
    return half.ldexp(exponents), None


def _nibbles(blocks: torch.Tensor) -> torch.Tensor:
    octets = blocks[..., 1:]
    return torch.cat((octets & 15, octets >> 4), -1)


MXFP4 = BlockFormat("mxfp4", 39, _SIZE, _NUM_BYTES, (), _SIZE, -12, 12, _unpack, _scales)
"""The format MXFP4. This plugin has no kernel for it: ``Mxfp4Experts`` computes such experts."""

LAYOUTS: Mapping[str, BlockFormat] = {**FORMATS, MXFP4.name: MXFP4}
"""Every block format that a tensor of a file may have, by name."""


def unpacked(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks ``[E, O, G, 16]`` and scales ``[E, O, G]``, uint8, in the layout of gpt-oss.

    In the layout of gpt-oss, a byte holds two adjacent values, the first in the low half.

    Args:
        rows: ``[E, O, G * C]`` uint8.
    """
    blocks = rows.unflatten(-1, (-1, _NUM_BYTES))
    first, second = _nibbles(blocks).unflatten(-1, (-1, 2)).unbind(-1)
    return first | second << 4, blocks[..., 0].contiguous()
