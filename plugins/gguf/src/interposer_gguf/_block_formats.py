"""The blocks that quantized tensors of GGUF files consist of, and the numbers they stand for.

Dimensions: O rows, B blocks of a row, C bytes of a block, N numbers of a block, G groups of a
block that have a scale each, I = B * N numbers of a row.

Source: the block layouts of ggml (ggml-common.h) as gguf-py reads them (gguf/quants.py). Fields of
two bytes are little-endian, and are put together by arithmetic, so that the machine's order of
bytes does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from interposer.errors import UnknownNameError

Codes = Callable[[torch.Tensor], torch.Tensor]
Scales = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The layout of a block: each number is code * scale + offset, those of its group.

    Attributes:
        name: what ggml calls it, in lower case.
        number: of its type in GGUF files.
        size: N.
        num_bytes: C.
        halves: where in a block the float16 numbers begin, in bytes; all else is integers.
        group_size: numbers that share a scale.
        lowest: the lowest code.
        highest: the highest code.
        block_codes: from blocks ``[..., C]`` uint8 to codes ``[..., N]`` int8.
        block_scales: from blocks and a dtype to scales ``[..., G]`` and offsets, or None for 0.
    """

    name: str
    number: int
    size: int
    num_bytes: int
    halves: tuple[int, ...]
    group_size: int
    lowest: int
    highest: int
    block_codes: Codes
    block_scales: Scales

    def row_bytes(self, num_numbers: int) -> int:
        """Return the bytes of a row of so many numbers, a multiple of ``size``."""
        return num_numbers // self.size * self.num_bytes

    def row_numbers(self, num_bytes: int) -> int:
        """Return how many numbers stand in a row of so many bytes."""
        return num_bytes // self.num_bytes * self.size

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the codes ``[O, I]`` int8 of rows ``[O, B * C]`` uint8."""
        return self.block_codes(self._blocks(rows)).flatten(-2)

    def scales(
        self, rows: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scales ``[O, B * G]`` and offsets of that shape, or None where all are 0.

        Args:
            rows: ``[O, B * C]`` uint8.
            dtype: of the result, float32 or wider: in both, scales are exact.
        """
        scale, offset = self.block_scales(self._blocks(rows), dtype)
        return scale.flatten(-2), None if offset is None else offset.flatten(-2)

    def dequantized(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers ``[O, I]`` of rows ``[O, B * C]`` uint8.

        Args:
            dtype: of the result and of the arithmetic, float32 or wider.
        """
        blocks = self._blocks(rows)
        scale, offset = self.block_scales(blocks, dtype)
        num_groups = self.size // self.group_size
        codes = self.block_codes(blocks).unflatten(-1, (num_groups, self.group_size))
        numbers = codes.to(dtype).mul_(scale.unsqueeze(-1))
        if offset is not None:
            numbers.add_(offset.unsqueeze(-1))
        result: torch.Tensor = numbers.flatten(-3)
        return result

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        num_blocks = rows.shape[-1] // self.num_bytes
        blocks: torch.Tensor = rows.unflatten(-1, (num_blocks, self.num_bytes))
        return blocks


def format_named(name: str) -> BlockFormat:
    """Return the format of that name.

    Raises: UnknownNameError: there is none.
    """
    if name not in FORMATS:
        raise UnknownNameError("block format", name, FORMATS)
    return FORMATS[name]


def _half(blocks: torch.Tensor, start: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the float16 that begins at a byte of each block, ``[..., 1]``."""
    low, high = (blocks[..., start + place].to(torch.int16) for place in range(2))
    return (low | high << 8).view(torch.float16).to(dtype).unsqueeze(-1)


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Return codes ``[..., 2 * bytes]`` uint8: all low nibbles, then all high ones."""
    return torch.cat((octets & 15, octets >> 4), -1)


def _fifth_bits(octets: torch.Tensor) -> torch.Tensor:
    """Return the bits of four bytes, the lowest first, as ``[..., 32]`` uint8 of 0 or 16."""
    places = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return ((octets.unsqueeze(-1) >> places & 1) << 4).flatten(-2)


def _q4_0_codes(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[..., 2:]).to(torch.int8) - 8


def _q4_1_codes(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[..., 4:]).to(torch.int8)


def _q5_0_codes(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).to(torch.int8) - 16


def _q5_1_codes(blocks: torch.Tensor) -> torch.Tensor:
    return (_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])).to(torch.int8)


def _q8_0_codes(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., 2:].view(torch.int8)


def _q4_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return codes of which 32 stand in the low nibbles of 32 bytes, the next in the high ones."""
    return _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2).to(torch.int8)


def _q5_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return codes as those of q4_k; the fifth bit of number i of group g is bit g of byte i."""
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    fifths = (blocks[..., None, 16:48] >> places & 1) << 4
    fours = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    codes: torch.Tensor = (fours | fifths).flatten(-2).to(torch.int8)
    return codes


def _q6_k_codes(blocks: torch.Tensor) -> torch.Tensor:
    """Return codes of which each half of a block has 64 bytes of four bits and 32 of two."""
    fours = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    twos = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> places & 3) << 4
    codes: torch.Tensor = (fours | twos).flatten(-3).to(torch.int8) - 32
    return codes


def _one_scale(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
    return _half(blocks, 0, dtype), None


def _scale_and_offset(
    blocks: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return _half(blocks, 0, dtype), _half(blocks, 2, dtype)


def _k_scales(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of eight groups: 6-bit factors of a common scale, and of a common minimum.

    Four bytes hold the factors of the first four groups, four those of their minima, and four the
    low nibbles of both for the last four, whose upper bits are the spare ones of the first eight.
    """
    first, minima, last = (blocks[..., start : start + 4] for start in (4, 8, 12))
    factors = torch.cat((first & 63, last & 15 | first >> 6 << 4), -1)
    less = torch.cat((minima & 63, last >> 4 | minima >> 6 << 4), -1)
    scale = _half(blocks, 0, dtype) * factors.to(dtype)
    return scale, -(_half(blocks, 2, dtype) * less.to(dtype))


def _q6_k_scales(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
    return _half(blocks, 208, dtype) * blocks[..., 192:208].view(torch.int8).to(dtype), None


FORMATS: Mapping[str, BlockFormat] = {
    layout.name: layout
    for layout in (
        BlockFormat("q4_0", 2, 32, 18, (0,), 32, -8, 7, _q4_0_codes, _one_scale),
        BlockFormat("q4_1", 3, 32, 20, (0, 2), 32, 0, 15, _q4_1_codes, _scale_and_offset),
        BlockFormat("q5_0", 6, 32, 22, (0,), 32, -16, 15, _q5_0_codes, _one_scale),
        BlockFormat("q5_1", 7, 32, 24, (0, 2), 32, 0, 31, _q5_1_codes, _scale_and_offset),
        BlockFormat("q8_0", 8, 32, 34, (0,), 32, -128, 127, _q8_0_codes, _one_scale),
        BlockFormat("q4_k", 12, 256, 144, (0, 2), 32, 0, 15, _q4_k_codes, _k_scales),
        BlockFormat("q5_k", 13, 256, 176, (0, 2), 32, 0, 31, _q5_k_codes, _k_scales),
        BlockFormat("q6_k", 14, 256, 210, (208,), 16, -32, 31, _q6_k_codes, _q6_k_scales),
    )
}
"""Every format that is read, by name."""
