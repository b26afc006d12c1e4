"""Blocks of MXFP4 stand for the numbers that the library ``gguf`` finds in them."""

from __future__ import annotations

import gguf
import torch

from interposer_gguf._microscaling import MXFP4, unpacked
from interposer_ops.quantizers import decode_e2m1, decode_e8m0, unpack_nibbles

NUMBER = gguf.GGMLQuantizationType.MXFP4


def random_blocks(seed: int) -> torch.Tensor:
    """Return rows ``[2, 3, 4 * 17]`` with scales from the least to a large one."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (2, 3, 4, 17), dtype=torch.uint8, generator=generator)
    blocks[..., 0] = torch.tensor([0, 1, 127, 250], dtype=torch.uint8)
    return blocks.flatten(-2)


def test_the_layout_agrees_with_the_gguf_library() -> None:
    assert NUMBER.value == MXFP4.number
    assert gguf.GGML_QUANT_SIZES[NUMBER] == (MXFP4.size, MXFP4.num_bytes)


def test_values_agree_with_the_gguf_library() -> None:
    rows = random_blocks(0)
    expected = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), NUMBER))
    assert torch.equal(MXFP4.dequantized(rows, torch.float32), expected)


def test_unpacked_blocks_have_the_same_values() -> None:
    rows = random_blocks(1)
    blocks, scales = unpacked(rows)
    assert blocks.shape == (2, 3, 4, 16)
    assert scales.shape == (2, 3, 4)
    codes = decode_e2m1(unpack_nibbles(blocks.flatten(2)), torch.float64).unflatten(-1, (4, 32))
    numbers = (codes * decode_e8m0(scales, torch.float64)[..., None]).flatten(-2)
    assert torch.equal(numbers, MXFP4.dequantized(rows, torch.float64))
