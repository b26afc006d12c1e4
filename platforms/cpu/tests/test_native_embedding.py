"""Lookup in packed tables, and the one packed copy of a table that a head multiplies by."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from interposer import Config, Resolver, Site, current_registry, place
from interposer_cpu import native
from interposer_cpu._kernels import embedding as native_embedding
from interposer_cpu._kernels import linear
from interposer_cpu._kernels.embedding import (
    pack_embedding,
    pack_w4a16_embedding,
    pack_w8a16_embedding,
)
from interposer_ops.embedding import w4a16_embedding, w8a16_embedding
from interposer_ops.layers.embedding import Embedding, LMHead

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

V, H = 150, 64


def codes(bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a quantized embedding, its scales and zero points."""
    generator = torch.Generator().manual_seed(bits)
    scale = torch.rand(V, 2, generator=generator) + 0.5
    if bits == 4:
        weight = torch.randint(0, 256, (V, H // 2), dtype=torch.uint8, generator=generator)
        return weight, scale, torch.randint(0, 16, (V, 2), dtype=torch.uint8, generator=generator)
    weight = torch.randint(-128, 128, (V, H), dtype=torch.int8, generator=generator)
    return weight, scale, torch.randint(-9, 9, (V, 2), dtype=torch.int8, generator=generator)


PACKERS: dict[int, tuple[Callable[..., Any], Callable[..., Any]]] = {
    4: (pack_w4a16_embedding, linear.pack_w4a16),
    8: (pack_w8a16_embedding, linear.pack_w8a16),
}


def test_an_embedding_and_its_tied_head_share_one_packed_copy() -> None:
    weight = torch.randn(V, H)
    looked_up = pack_embedding(weight)["weight"][0][0]
    assert linear.pack(weight, None)["weight"][0] is looked_up
    # A matmul with a bias, or with an equal weight at another address, needs another copy.
    assert linear.pack(weight, torch.zeros(V))["weight"][0] is not looked_up
    assert linear.pack(weight.clone(), None)["weight"][0] is not looked_up


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_quantized_embedding_and_its_tied_head_share_one_copy(
    bits: int, asymmetric: bool
) -> None:
    weight, scale, zeros = codes(bits)
    offsets = zeros if asymmetric else None
    pack_rows, pack_product = PACKERS[bits]
    looked_up = pack_rows(weight, scale, offsets)["weight"][0][0]
    assert pack_product(weight, scale, None, offsets)["weight"][0] is looked_up
    # Other scales, or additional zero points, need another copy of the same values.
    assert pack_product(weight, scale.clone(), None, offsets)["weight"][0] is not looked_up
    other = None if asymmetric else zeros
    assert pack_product(weight, scale, None, other)["weight"][0] is not looked_up


def test_a_head_with_quantized_inputs_shares_the_same_copy() -> None:
    weight, scale, zeros = codes(4)
    looked_up = pack_w4a16_embedding(weight, scale, zeros)["weight"][0][0]
    assert linear.pack_w4a8(weight, scale, zeros, None)["weight"][0] is looked_up
    weight, scale, _ = codes(8)
    of_rows = scale[:, 0].contiguous()
    looked_up = pack_w8a16_embedding(weight, of_rows, None)["weight"][0][0]
    assert linear.pack_int8(weight, of_rows, None)["weight"][0] is looked_up
    assert linear.pack_int8(weight, of_rows.clone(), None)["weight"][0] is not looked_up


def test_a_weight_written_after_packing_is_packed_again() -> None:
    weight = torch.randn(V, H)
    table = pack_embedding(weight)["weight"]
    weight[3] += 1
    product = linear.pack(weight, None)["weight"]
    assert product[0] is not table[0][0]
    x = torch.randn(2, H)
    torch.testing.assert_close(linear.linear(x, product, None), x @ weight.T)
    # Inference tensors have no version counter.
    with torch.inference_mode():
        unversioned = torch.randn(V, H)
        first = pack_embedding(unversioned)["weight"]
        unversioned[3] += 1
        rows = native_embedding.embedding(torch.tensor([3]), pack_embedding(unversioned)["weight"])
        assert torch.equal(rows, unversioned[3:4])
        assert not torch.equal(native_embedding.embedding(torch.tensor([3]), first), rows)


def test_a_packed_copy_is_freed_with_its_last_user() -> None:
    weight = torch.randn(V, H)
    table = pack_embedding(weight)["weight"]
    gone, source = weakref.ref(table[0][0]), weakref.ref(weight)
    product = linear.pack(weight, None)["weight"]
    del weight
    gc.collect()
    assert source() is None
    del table
    gc.collect()
    assert gone() is product[0]
    del product
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_uses_the_memory_of_its_embedding(dtype: torch.dtype) -> None:
    config = Config(canary="off", tables=False)
    site = Site(Resolver(current_registry(), place().device, config), "", dtype)
    at = site.at("lm_head")
    embedding = Embedding(site.at("embed_tokens"), V, H, at)
    head = LMHead(at, V, H, tied=embedding)
    weight = torch.randn(V, H).to(dtype)
    embedding.get_parameter("weight").data.copy_(weight)
    for layer in (embedding, head):
        layer.finalize()
    assert embedding.lookup is native_embedding.embedding
    assert embedding.constants[0][0][0] is head.operands[0][0]
    assert [*embedding.parameters(), *head.parameters()] == []
    ids = torch.tensor([0, V - 1, 63, 64])
    assert torch.equal(embedding(ids), weight[ids])
    alone = Embedding(site.at("alone"), V, H)
    assert alone.lookup is None
    alone.finalize()
    assert alone.lookup is not native_embedding.embedding


def tables() -> dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
    """Return functions that compute the actual and the expected result."""
    plain = torch.randn(V, H)
    packed = pack_embedding(plain)["weight"]
    (w4, s4, z4), (w8, s8, z8) = codes(4), codes(8)
    four, eight = (
        pack_w4a16_embedding(w4, s4, z4)["weight"],
        pack_w8a16_embedding(w8, s8, z8)["weight"],
    )
    half = torch.bfloat16
    return {
        "plain": lambda ids: (native_embedding.embedding(ids, packed), plain[ids]),
        "int4": lambda ids: (
            native_embedding.w4a16_embedding(ids, four, None, None, half),
            w4a16_embedding(ids, w4, s4, z4, half),
        ),
        "int8": lambda ids: (
            native_embedding.w8a16_embedding(ids, eight, None, None, half),
            w8a16_embedding(ids, w8, s8, z8, half),
        ),
    }


@pytest.mark.parametrize("kind", ["plain", "int4", "int8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_looked_up_rows_equal_the_reference(kind: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    # Enough of them for several threads, in memory with gaps.
    ids = torch.randint(V, (2 * 1111,), generator=torch.Generator().manual_seed(1))[::2]
    actual, expected = tables()[kind](ids)
    torch.set_num_threads(before)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["plain", "int4", "int8"])
@pytest.mark.parametrize("wrong", [V, -1, 1 << 40])
def test_token_ids_out_of_range_are_refused(kind: str, wrong: int) -> None:
    with pytest.raises(IndexError):
        tables()[kind](torch.tensor([0, wrong]))


def test_compiled_code_calls_the_registered_op() -> None:
    weight, scale, zeros = codes(4)
    table = pack_w4a16_embedding(weight, scale, zeros)["weight"]

    def rows(ids: torch.Tensor) -> torch.Tensor:
        return native_embedding.w4a16_embedding(ids, table, None, None, torch.float32)

    ids = torch.tensor([5, 0, 149])
    compiled = torch.compile(rows, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(ids), rows(ids))
