"""Packing of unsigned 4-bit and 8-bit values into int32, for checkpoints and for kernels.

Only shifts and masks are used, so the result does not depend on the machine's byte order.
Dimensions: W int32 values of a row, N = W * 32 / bits quantized values of a row.

Source: the layouts are those that AutoGPTQ 0.7 and AutoAWQ 0.2 write.
"""

from __future__ import annotations

import torch

from interposer_ops.quantizers import pack_nibbles, unpack_nibbles

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the value in each nibble of a packed AWQ int32, from the lowest bits up."""

_WORD_BYTES = 4
_SIGN = 128


def unpack_int32(packed: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Unpack the quantized values of each row from int32.

    Args:
        packed: ``[..., W]`` int32; the lowest bits hold the first value.
        bits: 4 or 8.
        order: index of the value at each position of an int32; empty if in ascending order.
    Returns: ``[..., N]`` uint8.
    """
    octets = torch.empty(*packed.shape, _WORD_BYTES, dtype=torch.uint8, device=packed.device)
    # One byte position at a time: temporaries then stay no larger than the packed weights.
    for byte in range(_WORD_BYTES):
        octets[..., byte] = packed >> 8 * byte & 255
    values = unpack_nibbles(octets) if bits == 4 else octets
    if order:
        values = values[..., [order.index(value) for value in range(len(order))]]
    return values.flatten(-2)


def pack_int32(unpacked: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack the quantized values of each row into int32; the inverse of ``unpack_int32``.

    Args:
        unpacked: ``[..., N]`` uint8 below ``2 ** bits``; N must be a multiple of 32 / bits.
        bits: 4 or 8.
        order: as in ``unpack_int32``.
    Returns: ``[..., W]`` int32.
    """
    # One int32 holds 8 or 4 values.
    per_word = 32 // bits
    values = unpacked.unflatten(-1, (unpacked.shape[-1] // per_word, per_word)).to(torch.int32)
    if order:
        values = values[..., list(order)]
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=unpacked.device)
    # The shifted values share no bits, so the sum never carries. dtype stops int64 promotion.
    packed: torch.Tensor = (values << shifts).sum(-1, dtype=torch.int32)
    return packed


def to_kernel_layout(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Convert quantized values to the weight layout of the weight-only ops.

    Args:
        values: ``[O, I]`` uint8.
        bits: 4 or 8.
    Returns: for 4 bits ``[O, I / 2]`` uint8, two values per byte; for 8 ``[O, I]`` int8, minus 128.
    """
    # Flipping the sign bit of a uint8 subtracts 128 in two's complement.
    return pack_nibbles(values) if bits == 4 else (values ^ _SIGN).view(torch.int8)
