"""Unsigned codes of 4 or 8 bits in words of 32, of checkpoints and of kernels.

Nothing here reads a word as bytes, so that the order of bytes of the machine does not matter.
Dimensions: W words of a row, N = W * 32 / bits codes of a row.

Source: the layouts are those that AutoGPTQ 0.7 and AutoAWQ 0.2 write.
"""

from __future__ import annotations

import torch

from interposer_ops.quantizers import pack_nibbles, unpack_nibbles

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The code that stands at each place of a word of AWQ, the lowest bits first."""

_WORD_BYTES = 4
_SIGN = 128


def unpack_words(words: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Return the codes in the words of each row.

    Args:
        words: ``[..., W]`` int32; the lowest bits hold the first code.
        bits: 4 or 8.
        order: which code of its word stands at each place; empty where they stand in order.
    Returns: ``[..., N]`` uint8.
    """
    octets = torch.empty(*words.shape, _WORD_BYTES, dtype=torch.uint8, device=words.device)
    # Byte by byte, so that what is held besides is no larger than the words.
    for place in range(_WORD_BYTES):
        octets[..., place] = words >> 8 * place & 255
    codes = unpack_nibbles(octets) if bits == 4 else octets
    if order:
        codes = codes[..., [order.index(code) for code in range(len(order))]]
    return codes.flatten(-2)


def pack_words(codes: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Return the words that hold the codes of each row; ``unpack_words`` undoes it.

    Args:
        codes: ``[..., N]`` uint8 below ``2 ** bits``; words are full.
        bits: 4 or 8.
        order: as in ``unpack_words``.
    Returns: ``[..., W]`` int32.
    """
    per_word = 32 // bits
    words = codes.unflatten(-1, (codes.shape[-1] // per_word, per_word)).to(torch.int32)
    if order:
        words = words[..., list(order)]
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    # No two codes share a bit, so the sum carries nothing; that of int32 is kept from widening.
    packed: torch.Tensor = (words << shifts).sum(-1, dtype=torch.int32)
    return packed


def kernel_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes as the weight-only ops take them.

    Args:
        codes: ``[O, I]`` uint8.
        bits: 4 or 8.
    Returns: for 4 bits ``[O, I / 2]`` uint8, two codes a byte; for 8 ``[O, I]`` int8, less 128.
    """
    return pack_nibbles(codes) if bits == 4 else (codes ^ _SIGN).view(torch.int8)
