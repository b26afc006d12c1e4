"""Block formats of quantized GGUF tensors, and dequantization.

Shapes: O rows, B blocks of a row, C bytes of a block, N values of a block, G groups of a block
(each with a scale), I = B * N values of a row.

Source: the block layouts of ggml (ggml-common.h) as gguf-py reads them (gguf/quants.py). Two-byte
fields are little-endian and are assembled by arithmetic, which works in any byte order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from interposer.errors import UnknownNameError

Unpack = Callable[[torch.Tensor], torch.Tensor]
Scales = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The layout of a block: value = quantized value * scale + offset of the group.

    Attributes:
        name: ggml's name in lower case.
        number: number of the type in GGUF files.
        size: N.
        num_bytes: C.
        halves: offsets of the float16 fields in a block, in bytes; all other fields are integers.
        group_size: values that share a scale.
        lowest: the lowest quantized value.
        highest: the highest quantized value.
        unpack_block: returns quantized values ``[..., N]`` int8 of blocks ``[..., C]`` uint8.
        block_scales: returns scales ``[..., G]`` and offsets, or None if all are 0, of blocks and a
            dtype.
    """

    name: str
    number: int
    size: int
    num_bytes: int
    halves: tuple[int, ...]
    group_size: int
    lowest: int
    highest: int
    unpack_block: Unpack
    block_scales: Scales

    def row_bytes(self, num_numbers: int) -> int:
        """Return the bytes of a row of ``num_numbers`` values, a multiple of ``size``."""
        return num_numbers // self.size * self.num_bytes

    def row_numbers(self, num_bytes: int) -> int:
        """Return the number of values in a row of ``num_bytes`` bytes."""
        return num_bytes // self.num_bytes * self.size

    def quantized(self, rows: torch.Tensor) -> torch.Tensor:
        """Unpack rows ``[O, B * C]`` uint8 to quantized values ``[O, I]`` int8."""
        return self.unpack_block(self._blocks(rows)).flatten(-2)

    def scales(
        self, rows: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scales ``[O, B * G]``, and offsets of the same shape, or None if all are 0.

        Args:
            rows: ``[O, B * C]`` uint8.
            dtype: dtype of the result, float32 or wider; scales are exact in each.
        """
        scale, offset = self.block_scales(self._blocks(rows), dtype)
        return scale.flatten(-2), None if offset is None else offset.flatten(-2)

    def dequantized(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize rows ``[O, B * C]`` uint8 to values ``[O, I]``.

        Args:
            dtype: dtype of the result and of the arithmetic, float32 or wider.
        """
        blocks = self._blocks(rows)
        scale, offset = self.block_scales(blocks, dtype)
        num_groups = self.size // self.group_size
        quantized = self.unpack_block(blocks).unflatten(-1, (num_groups, self.group_size))
        # In place, because a whole matrix may be large.
        values = quantized.to(dtype).mul_(scale.unsqueeze(-1))
        if offset is not None:
            values.add_(offset.unsqueeze(-1))
        result: torch.Tensor = values.flatten(-3)
        return result

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        num_blocks = rows.shape[-1] // self.num_bytes
        blocks: torch.Tensor = rows.unflatten(-1, (num_blocks, self.num_bytes))
        return blocks


def format_named(name: str) -> BlockFormat:
    """Return the block format with the given name.

    Raises: UnknownNameError: there is no such format.
    """
    if name not in FORMATS:
        raise UnknownNameError("block format", name, FORMATS)
    return FORMATS[name]


def _half(blocks: torch.Tensor, start: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the float16 field at byte ``start`` of each block, ``[..., 1]``."""
    low, high = (blocks[..., start + byte].to(torch.int16) for byte in range(2))
    return (low | high << 8).view(torch.float16).to(dtype).unsqueeze(-1)


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Unpack nibbles to ``[..., 2 * bytes]`` uint8: all low nibbles, then all high ones."""
    return torch.cat((octets & 15, octets >> 4), -1)


def _fifth_bits(octets: torch.Tensor) -> torch.Tensor:
    """Return the bits of four bytes, lowest first, as ``[..., 32]`` uint8 with values 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return ((octets.unsqueeze(-1) >> shifts & 1) << 4).flatten(-2)


def _unpack_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    # Byte i has value i in the low nibble and value i + 16 in the high nibble.
    return _nibbles(blocks[..., 2:]).to(torch.int8) - 8


# In these formats of 32 values, a block begins with the float16 scale and, in *_1, the float16
# offset.
def _unpack_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[..., 4:]).to(torch.int8)


def _unpack_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).to(torch.int8) - 16


def _unpack_q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).to(torch.int8)


def _unpack_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., 2:].view(torch.int8)


def _unpack_q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Unpack q4_k: 32 values are the low nibbles of 32 bytes, the next 32 the high nibbles."""
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2).to(torch.int8)


def _unpack_q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """Unpack q5_k: nibbles as in q4_k; the fifth bit of value i in group g is bit g of byte i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    # Bytes 16 to 47 hold the fifth bits, the bytes after these the nibbles.
    fifth_bits = (blocks[..., None, 16:48] >> shifts & 1) << 4
    low_bits = (
        _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    )
    quantized: torch.Tensor = (low_bits | fifth_bits).flatten(-2).to(torch.int8)
    return quantized


def _unpack_q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Unpack q6_k: each half of a block has 64 bytes of four low bits and 32 of two high bits."""
    low_bits = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    high_bits = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3) << 4
    quantized: torch.Tensor = (low_bits | high_bits).flatten(-3).to(torch.int8) - 32
    return quantized


def _scale_only(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
    return _half(blocks, 0, dtype), None


def _scale_and_offset(
    blocks: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return _half(blocks, 0, dtype), _half(blocks, 2, dtype)


def _k_scales(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and offsets of eight groups, from 6-bit factors of two float16 fields.

    Four bytes hold the scale factors of groups 0 to 3, four the offset factors of groups 0 to 3.
    Four more hold the low nibbles of both for groups 4 to 7, whose high bits are the top two bits
    of the first eight bytes.
    """
    scale_bytes, offset_bytes, shared_bytes = (
        blocks[..., start : start + 4] for start in (4, 8, 12)
    )
    scale_factors = torch.cat((scale_bytes & 63, shared_bytes & 15 | scale_bytes >> 6 << 4), -1)
    offset_factors = torch.cat((offset_bytes & 63, shared_bytes >> 4 | offset_bytes >> 6 << 4), -1)
    scale = _half(blocks, 0, dtype) * scale_factors.to(dtype)
    # The format subtracts its offsets, so the sign is reversed.
    return scale, -(_half(blocks, 2, dtype) * offset_factors.to(dtype))


def _q6_k_scales(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
    return _half(blocks, 208, dtype) * blocks[..., 192:208].view(torch.int8).to(dtype), None


# Fields as in ``BlockFormat``: name, number, size, num_bytes, halves, group_size, lowest, highest.
FORMATS: Mapping[str, BlockFormat] = {
    layout.name: layout
    for layout in (
        BlockFormat("q4_0", 2, 32, 18, (0,), 32, -8, 7, _unpack_q4_0, _scale_only),
        BlockFormat("q4_1", 3, 32, 20, (0, 2), 32, 0, 15, _unpack_q4_1, _scale_and_offset),
        BlockFormat("q5_0", 6, 32, 22, (0,), 32, -16, 15, _unpack_q5_0, _scale_only),
        BlockFormat("q5_1", 7, 32, 24, (0, 2), 32, 0, 31, _unpack_q5_1, _scale_and_offset),
        BlockFormat("q8_0", 8, 32, 34, (0,), 32, -128, 127, _unpack_q8_0, _scale_only),
        BlockFormat("q4_k", 12, 256, 144, (0, 2), 32, 0, 15, _unpack_q4_k, _k_scales),
        BlockFormat("q5_k", 13, 256, 176, (0, 2), 32, 0, 31, _unpack_q5_k, _k_scales),
        BlockFormat("q6_k", 14, 256, 210, (208,), 16, -32, 31, _unpack_q6_k, _q6_k_scales),
    )
}
"""The supported block formats, by name."""
