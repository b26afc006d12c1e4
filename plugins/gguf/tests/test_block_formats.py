"""Blocks stand for the numbers that the library ``gguf`` finds in them, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer.errors import UnknownNameError
from interposer_gguf import _kernels as kernels
from interposer_gguf._block_formats import FORMATS, BlockFormat, format_named
from interposer_gguf._cases import gguf_linear_sample, random_rows
from interposer_gguf._linear import gguf_linear
from interposer_ops.cases import w4a16_linear_sample, w8a16_linear_sample
from interposer_ops.quantized_linear import w4a16_linear, w8a16_linear
from interposer_testing import check_kernel

each_format = pytest.mark.parametrize("layout", FORMATS.values(), ids=FORMATS)
STEPS = 3


@each_format
def test_formats_agree_with_the_gguf_library(layout: BlockFormat) -> None:
    kind = gguf.GGMLQuantizationType[layout.name.upper()]
    assert kind.value == layout.number
    assert gguf.GGML_QUANT_SIZES[kind] == (layout.size, layout.num_bytes)


@pytest.mark.landing(5)
@each_format
@given(data=st.data())
def test_random_bytes_dequantize_as_in_the_gguf_library(
    layout: BlockFormat, data: st.DataObject
) -> None:
    num_rows, num_blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    size = num_rows * num_blocks * layout.num_bytes
    content = data.draw(st.binary(min_size=size, max_size=size))
    rows = np.frombuffer(content, np.uint8).reshape(num_rows, -1)
    kind = gguf.GGMLQuantizationType[layout.name.upper()]
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, kind)
    actual = layout.dequantized(torch.from_numpy(rows.copy()), torch.float32).numpy()
    same = expected.view(np.uint32) == actual.view(np.uint32)
    assert (same | (np.isnan(expected) & np.isnan(actual))).all()


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_blocks_quantized_by_the_gguf_library_are_close_to_the_floats(name: str) -> None:
    layout = format_named(name)
    values = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    rows = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[name.upper()])
    actual = layout.dequantized(torch.from_numpy(rows), torch.float32)
    largest = values.abs().amax()
    # A step is at most the whole range, twice the largest number, by the steps between codes.
    step = 2 * largest / (layout.highest - layout.lowest)
    assert (actual - values).abs().max() <= step
    assert (actual - values).abs().max() > 0


@each_format
def test_quantized_values_times_scales_are_the_dequantized_values(layout: BlockFormat) -> None:
    rows = random_rows(layout, 4, 512, torch.Generator().manual_seed(1))
    codes, (scale, offset) = layout.quantized(rows), layout.scales(rows, torch.float32)
    assert int(codes.min()) >= layout.lowest
    assert int(codes.max()) <= layout.highest
    numbers = codes.float() * scale.repeat_interleave(layout.group_size, 1)
    if offset is not None:
        numbers = numbers + offset.repeat_interleave(layout.group_size, 1)
    assert torch.equal(numbers, layout.dequantized(rows, torch.float32))


@pytest.mark.landing(4)
@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_agrees_over_several_steps(layout: BlockFormat, dtype: torch.dtype) -> None:
    dims: dict[str, int | float | str | bool] = {
        "in_features": 1024,
        "out_features": STEPS * kernels.STEP_NUMEL // 1024 - 5,
        "stored_as": layout.name,
    }
    case = gguf_linear_sample(dtype, dims, 3, 0)
    assert check_kernel(gguf_linear, kernels.gguf_linear, case) == []
    assert check_kernel(gguf_linear, kernels.gguf_linear, case, prepare=kernels.pack_halves) == []


@each_format
def test_preparation_needs_no_more_memory(layout: BlockFormat) -> None:
    for in_features in (256, 256 + layout.size):
        rows = random_rows(layout, 5, in_features, torch.Generator().manual_seed(0))
        prepared = kernels.pack_halves(rows, None, layout.name)["weight"]
        parts = prepared if isinstance(prepared, tuple) else (prepared,)
        assert sum(part.nbytes for part in parts) == rows.nbytes


@pytest.mark.parametrize("asymmetric", [False, True])
def test_kernels_of_other_ops_agree_over_several_steps(asymmetric: bool) -> None:
    dims: dict[str, int | float | str | bool] = {
        "in_features": 1024,
        "out_features": STEPS * kernels.STEP_NUMEL // 1024 - 5,
        "group_size": 32,
        "num_groups": 32,
        "asymmetric": asymmetric,
        "scale_dtype": "float32",
    }
    four = w4a16_linear_sample(torch.float32, dims, 3, 0)
    eight = w8a16_linear_sample(torch.float32, dims, 3, 0)
    assert check_kernel(w4a16_linear, kernels.w4a16_linear, four) == []
    assert check_kernel(w8a16_linear, kernels.w8a16_linear, eight) == []


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"'iq4_xs'.*nearest first: 'q4_"):
        gguf_linear(torch.zeros(1, 32), torch.zeros(1, 18, dtype=torch.uint8), None, "iq4_xs")
