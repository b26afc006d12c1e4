"""Codes of 1 to 8 bits that lie in words without gaps, as compressed-tensors packs them.

Dimensions: W words of a row, N codes of a row.

Source: the layout is that of ``pack_to_int32`` of compressed-tensors 0.20, which earlier releases
share for 1, 2, 4 and 8 bits; those left the rest of a word empty where another width did not fill
it, and stored more words.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from interposer_quantization._weights.int_packing import unpack_words

_WORD = 32
# Each is held in 64 bits for a moment.
_CODES_AT_ONCE = 1 << 22


def number_of_words(num_codes: int, bits: int) -> int:
    """Return how many words hold the codes of a row."""
    return -(-num_codes * bits // _WORD)


def unpack_bits(words: torch.Tensor, bits: int, num_codes: int) -> torch.Tensor:
    """Return the codes in the words of each row; code n starts at bit n * bits.

    Args:
        words: ``[..., W]`` int32; the first code lies in the lowest bits of the first word.
        bits: 1 to 8.
        num_codes: N.
    Returns: ``[..., N]`` uint8.
    """
    if bits in (4, 8):
        return unpack_words(words, bits)[..., :num_codes]
    starts = torch.arange(num_codes, device=words.device) * bits
    first, offset = starts // _WORD, starts % _WORD
    codes = torch.empty(*words.shape[:-1], num_codes, dtype=torch.uint8, device=words.device)
    rows = max(1, _CODES_AT_ONCE // num_codes)
    for part, result in zip(words.split(rows), codes.split(rows), strict=True):
        # A zero word more, for codes that end in the last one.
        unsigned = functional.pad(part, (0, 1)).long() & (1 << _WORD) - 1
        # What the upper word loses on its way up is beyond the eight bits that are looked at.
        pairs = unsigned[..., first] | unsigned[..., first + 1] << _WORD
        result.copy_(pairs >> offset & (1 << bits) - 1)
    return codes
