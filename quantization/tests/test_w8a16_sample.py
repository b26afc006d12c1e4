"""The sample of the int8 linear, and what its reference promises."""

from __future__ import annotations

import pytest
import torch

from interposer import Case, OpEntry
from interposer.op import Dims
from interposer.testing import check_kernel
from interposer_quantization.plugin import interposer_records
from interposer_quantization.quantized_linear import w8a16_linear

(RECORD,) = (record for record in interposer_records() if isinstance(record, OpEntry))
DTYPES = (torch.float32, torch.bfloat16)
DIMS: tuple[Dims, ...] = (
    {"in_features": 256, "out_features": 96, "group_size": 32, "num_groups": 8},
    {"in_features": 127, "out_features": 37, "group_size": 127, "num_groups": 1},
)


def sampled(dtype: torch.dtype, num_tokens: int, dims: Dims = DIMS[0]) -> Case:
    assert w8a16_linear.sample is not None
    return w8a16_linear.sample(dtype, dims, num_tokens, 0)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sample_is_a_case_of_its_dims(dims: Dims, dtype: torch.dtype) -> None:
    case = sampled(dtype, 3, dims)
    assert case.dims == dims
    assert case.arguments["x"].shape == (3, dims["in_features"])
    assert case.arguments["scale"].shape == (dims["out_features"], dims["num_groups"])
    assert check_kernel(w8a16_linear, w8a16_linear.reference, case) == []


def test_a_sample_shows_a_wrong_kernel() -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: None) -> object:
        return w8a16_linear.reference(x, weight, scale.roll(1, 1), bias)

    faults = check_kernel(w8a16_linear, wrong, sampled(torch.float32, 3))
    assert {fault.check for fault in faults} == {"value"}


def test_the_weights_are_the_same_for_any_number_of_tokens() -> None:
    one, many = (sampled(torch.bfloat16, count).arguments for count in (1, 64))
    assert torch.equal(one["weight"], many["weight"])
    assert torch.equal(one["scale"], many["scale"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_keeps_its_promises(dtype: torch.dtype) -> None:
    assert RECORD.properties == {"deterministic", "graph_safe", "traceable"}
    compiled = torch.compile(w8a16_linear.reference, fullgraph=True, backend="eager")
    for count in (1, 7, 64):
        arguments = sampled(dtype, count).arguments
        first = w8a16_linear.reference(**arguments)
        assert torch.equal(first, w8a16_linear.reference(**arguments))
        assert torch.equal(first, compiled(**arguments))
        # Fake tensors have no values, so that whatever waits for one raises.
        assert w8a16_linear.fake(**arguments).shape == first.shape
