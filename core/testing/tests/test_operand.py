"""Arguments are copied into memory that is watched, or that nobody may touch beside them."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer_testing._checks.operand import Fence, Operand

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
FENCES: list[Fence] = ["", "before", "after"]


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from(FENCES),
    st.integers(0, 3),
    st.booleans(),
)
def test_an_operand_copies_values_and_strides(
    shape: list[int], dtype: torch.dtype, fence: Fence, offset: int, spread: bool
) -> None:
    storage = torch.arange(10, offset + 2 * torch.Size(shape).numel() + 11).to(dtype)
    tensor = storage[offset:][: 2 * torch.Size(shape).numel()].view(*shape, 2)[..., 0]
    if not spread:
        tensor = storage[offset:][: torch.Size(shape).numel()].view(shape)
    operand = Operand(tensor, "cpu", fence)
    assert torch.equal(operand.tensor, tensor)
    assert operand.tensor.stride() == tensor.stride()
    assert (operand.is_changed(), operand.strays()) == (False, 0)
    if tensor.numel():
        off = (operand.tensor.data_ptr() - offset * tensor.element_size()) % 64
        assert off == storage.data_ptr() % 64 == 0
        operand.tensor[(0,) * tensor.ndim] = 9
        assert (operand.is_written(), operand.strays()) == (True, 0)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="pages are fenced on Linux")
@pytest.mark.parametrize(
    ("fence", "at_bytes", "ends"),
    [("after", 64, True), ("after", -4, False), ("before", -4, True), ("before", 64, False)],
)
def test_access_outside_a_fenced_operand_ends_the_process(
    fence: Fence, at_bytes: int, ends: bool
) -> None:
    operand = Operand(torch.zeros(16), "cpu", fence)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(operand.tensor.data_ptr() + at_bytes, 4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) is ends
