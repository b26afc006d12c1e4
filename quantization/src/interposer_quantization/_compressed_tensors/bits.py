"""Unpacking of 1-bit to 8-bit values that compressed-tensors packs into int32 without gaps.

Dimensions: W int32 values of a row, N quantized values of a row.

Source: the layout is that of ``pack_to_int32`` of compressed-tensors 0.20. Earlier releases use the
same layout for 1, 2, 4 and 8 bits. For other widths, earlier releases pad each int32 and store more
int32 values.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer_quantization._weights.int_packing import unpack_int32

_WORD = 32
# Bounds the temporary memory: each value takes 64 bits while it is unpacked.
_CODES_AT_ONCE = 1 << 22


def count_words(num_codes: int, bits: int) -> int:
    """Return the number of int32 words that ``num_codes`` values of a row take."""
    return -(-num_codes * bits // _WORD)


def unpack_bits(words: torch.Tensor, bits: int, num_codes: int) -> torch.Tensor:
    """Unpack the quantized values of each row; value n starts at bit n * bits.

    Args:
        words: ``[..., W]`` int32; the first value is in the lowest bits of the first int32.
        bits: 1 to 8.
        num_codes: N.
    Returns: ``[..., N]`` uint8.
    """
    if bits in (4, 8):
        return unpack_int32(words, bits)[..., :num_codes]
    starts = torch.arange(num_codes, device=words.device) * bits
    # Each value lies in the 64 bits of one int32 and the next.
    first, offset = starts // _WORD, starts % _WORD
    unpacked = torch.empty(*words.shape[:-1], num_codes, dtype=torch.uint8, device=words.device)
    num_rows = max(1, _CODES_AT_ONCE // num_codes)
    for rows_packed, rows_unpacked in zip(
        words.split(num_rows), unpacked.split(num_rows), strict=True
    ):
        # Pad with a zero word, because the lookup of the last values reads one word too far.
        unsigned = functional.pad(rows_packed, (0, 1)).long() & (1 << _WORD) - 1
        # The shift drops high bits of the upper word; the mask below never reads those bits.
        pairs = unsigned[..., first] | unsigned[..., first + 1] << _WORD
        rows_unpacked.copy_(pairs >> offset & (1 << bits) - 1)
    return unpacked
