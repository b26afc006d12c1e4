"""Bytes of packed weights, compared with the layout that ``linear/packed.h`` describes.

Packed files on disk hold these bytes, so that they must not change without a new ``layout``.
"""

from __future__ import annotations

import struct

import pytest
import torch

from interposer_cpu import native
from interposer_cpu._kernels.packing import PackedFormat, describe_weight
from interposer_ops.devices import host_memory

pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

_BLOCK = 64  # outputs
_PADDED_INPUTS = 8
_WORDS_AT = 40  # offset of the header's field
# Positions of eight inputs in the nibbles of a word, from the lowest.
_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)

# Whole lines, blocks and words, and each of them with a rest.
SIZES = [(1, 1), (3, 9), (16, 32), (17, 40), (60, 128), (64, 136), (67, 33), (130, 264), (192, 128)]


def packed_words(form: PackedFormat, weight: torch.Tensor) -> torch.Tensor:
    """Pack ``weight``, and return the words, ``[blocks, steps, 64]``."""
    description, kept = describe_weight(form, weight)
    library = native.library()
    num_bytes = library.packed_bytes(*description)
    # All bits are set before, so that a word that is left out shows.
    packed = host_memory.empty([num_bytes], torch.uint8).fill_(0xFF)
    library.pack(*description, packed.data_ptr())
    assert kept
    (start,) = struct.unpack_from("=q", bytes(packed[:64].tolist()), _WORDS_AT)
    return packed[start:].view(torch.int32).view(-(-len(weight) // _BLOCK), -1, _BLOCK)


def inputs_of(form: PackedFormat, words: torch.Tensor) -> torch.Tensor:
    """Return the bits of each input as integers, ``[outputs, inputs]`` with padding."""
    width = {PackedFormat.FLOAT32: 32, PackedFormat.BFLOAT16: 16}.get(form, 8)
    width = width // form.codes_per_element
    order = _NIBBLES if width == 4 else tuple(range(32 // width))
    wide = words.long()
    parts = [wide >> width * order.index(i) & (1 << width) - 1 for i in range(len(order))]
    blocks, steps, _ = words.shape
    return torch.stack(parts, 2).movedim(3, 1).reshape(blocks * _BLOCK, steps * len(order))


@pytest.mark.parametrize("form", sorted(set(PackedFormat) - {PackedFormat.COMPACT}))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_words_hold_the_inputs_of_sixteen_outputs_side_by_side(
    form: PackedFormat, size: tuple[int, int]
) -> None:
    outputs, inputs = size
    columns = -(-inputs // form.codes_per_element)
    inputs = columns * form.codes_per_element
    generator = torch.Generator().manual_seed(outputs * inputs)
    if form in (PackedFormat.FLOAT32, PackedFormat.BFLOAT16):
        dtype = torch.float32 if form is PackedFormat.FLOAT32 else torch.bfloat16
        weight = torch.randn(outputs, columns, generator=generator).to(dtype)
        bits = weight.view(torch.int32 if dtype == torch.float32 else torch.int16).long()
        expected = bits & (1 << 8 * weight.itemsize) - 1
    else:
        weight = torch.randint(0, 256, (outputs, columns), generator=generator, dtype=torch.uint8)
        if form is PackedFormat.E4M3:
            weight = weight.view(torch.float8_e4m3fn)
        expected = weight.view(torch.uint8).long()
        if form.codes_per_element == 2:
            expected = torch.stack([expected & 15, expected >> 4], 2).flatten(1)
        if form is PackedFormat.INT8:
            expected = expected ^ 0x80
    words = packed_words(form, weight)
    found = inputs_of(form, words)
    assert found.shape[1] == -(-inputs // _PADDED_INPUTS) * _PADDED_INPUTS
    assert torch.equal(found[:outputs, :inputs], expected)
    assert not found[outputs:].any()
    assert not found[:, inputs:].any()


def test_packed_bytes_do_not_depend_on_the_number_of_threads() -> None:
    weight = torch.randn(300, 96).bfloat16()
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(packed_words(PackedFormat.BFLOAT16, weight))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
