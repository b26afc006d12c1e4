"""A cache has the declared shape, lies in memory as declared, and has the declared size."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer import KVCacheLayout
from interposer.errors import RecordError


@st.composite
def layouts(draw: st.DrawFn) -> KVCacheLayout:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axis = draw(st.integers(0, len(shape)))
    order = tuple(draw(st.permutations(range(len(shape) + 1))))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
    layers_axis = draw(st.none() | st.integers(0, len(shape) + 1))
    return KVCacheLayout(shape, axis, order, dtype, layers_axis)


@given(layouts(), st.integers(1, 3), st.integers(1, 5))
def test_allocated_caches_have_the_declared_layout(
    layout: KVCacheLayout, num_layers: int, num_pages: int
) -> None:
    caches = layout.allocate(num_layers, num_pages, "cpu")
    assert len(caches) == num_layers
    for index, cache in enumerate(caches):
        assert cache.shape == layout.shape(num_pages)
        assert cache.dtype == layout.dtype
        assert cache.numel() * cache.element_size() == num_pages * layout.page_bytes()
        # From the slowest to the fastest axis, each stride is the size of everything inside it.
        in_memory = [cache.shape[axis] for axis in layout.stride_order]
        strides = [cache.stride(axis) for axis in layout.stride_order]
        if layout.layers_axis is not None:
            in_memory.insert(layout.layers_axis, num_layers)
            inside = prod(in_memory[layout.layers_axis + 1 :])
            assert cache.storage_offset() == index * inside
            strides.insert(layout.layers_axis, inside)
        assert strides == [prod(in_memory[i + 1 :]) for i in range(len(in_memory))]
        cache.fill_(index)
    # No cache lies in the memory of another.
    assert all(bool((cache == index).all()) for index, cache in enumerate(caches))


def test_pages_are_inserted_at_their_axis() -> None:
    layout = KVCacheLayout((2, 16, 4, 64), 1, (1, 0, 3, 2, 4), torch.bfloat16)
    assert layout.shape(10) == (2, 10, 16, 4, 64)
    assert layout.page_bytes() == 2 * 16 * 4 * 64 * 2
    # Pages are the slowest: one page of all of it is contiguous.
    (cache,) = layout.allocate(1, 10, "cpu")
    assert cache.stride(1) == 2 * 16 * 4 * 64
    assert cache[:, 3].permute(0, 2, 1, 3).is_contiguous()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"page_axis": 3}, "page_axis 3 is not an axis of 3 dimensions"),
    ({"page_axis": -1}, "page_axis -1 is not an axis of 3 dimensions"),
    ({"stride_order": (0, 1)}, r"stride_order \(0, 1\) does not order 3 axes"),
    ({"stride_order": (0, 1, 1)}, r"stride_order \(0, 1, 1\) does not order 3 axes"),
    ({"layers_axis": 4}, "layers_axis 4 is not among 4 dimensions"),
    ({"layers_axis": -1}, "layers_axis -1 is not among 4 dimensions"),
    ({"stride_order": (0, 1, 2, 3)}, r"stride_order \(0, 1, 2, 3\) does not order 3 axes"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_layout_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"page_axis": 0, "stride_order": (0, 1, 2)}
    with pytest.raises(RecordError, match=message):
        KVCacheLayout((2, 16), **{**right, **fields}, dtype=torch.float32)
