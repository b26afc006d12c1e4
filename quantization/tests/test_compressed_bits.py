"""Codes in words are those of the compressed-tensors library, whatever their width."""

from __future__ import annotations

import torch
from compressed_tensors.compressors.pack_quantized.helpers import (  # type: ignore[import-untyped]
    pack_to_int32,
    unpack_from_int32,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples

from interposer_quantization._compressed_tensors.bits import count_words, unpack_bits


def test_long_rows_are_unpacked_in_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (3, (1 << 21) + 32)
    codes = torch.randint(0, 8, shape, generator=generator, dtype=torch.uint8)
    words = pack_to_int32((codes.short() - 4).to(torch.int8), 3)
    assert torch.equal(unpack_bits(words, 3, shape[1]), codes)


@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 4),
    num_codes=st.integers(1, 140),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=num_examples(300))
def test_packing_matches_compressed_tensors(
    bits: int, rows: int, num_codes: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, num_codes), generator=generator, dtype=torch.uint8)
    signed = (codes.short() - 2 ** (bits - 1)).to(torch.int8)
    words = pack_to_int32(signed, bits)
    assert words.shape == (rows, count_words(num_codes, bits))
    assert torch.equal(unpack_bits(words, bits, num_codes), codes)
    assert torch.equal(unpack_from_int32(words, bits, codes.shape), signed)
