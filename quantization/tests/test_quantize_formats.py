"""Weights are rounded and stored bit for bit as the compressed-tensors library would.

The library computes in the dtype of the weight, so it gets float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-untyped]
from compressed_tensors.quantization import (  # type: ignore[import-untyped]
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.utils import (  # type: ignore[import-untyped]
    calculate_qparams,
    generate_gparam,
)
from hypothesis import given
from hypothesis import strategies as st
from loguru import logger

from interposer.errors import ConfigError, UnknownNameError
from interposer_quantization.writing._integer_formats import IntegerFormat
from interposer_quantization.writing._schemes import SCHEMES, quantization_config, weight_format
from interposer_quantization.writing._second_order import (
    Curvature,
    SecondMoments,
    second_order_rounded,
)
from interposer_quantization.writing._weight_format import Grid, WeightFormat, tensor_peak

# The library warns in its own log of any format but the one that it would take.
logger.disable("compressed_tensors")

FORMATS: dict[str, WeightFormat] = {
    "fp8": weight_format("fp8"),
    "int8": weight_format("int8"),
    "int8 weights only": weight_format("int8", activations="none"),
    "int4": weight_format("int4", 32),
    "w4a8": weight_format("w4a8", 32),
    "w4a8 asymmetric": weight_format("int4", 16, asymmetric=True, activations="int8"),
    "int4 asymmetric": weight_format("int4", 16, asymmetric=True),
    "int4 per output": IntegerFormat(4, None),
    "mxfp8": weight_format("mxfp8"),
    "mxfp4": weight_format("mxfp4"),
    "nvfp4": weight_format("nvfp4"),
}
each_format = pytest.mark.parametrize("chosen", FORMATS.values(), ids=FORMATS)


def random_weight(seed: int, rows: int = 24, columns: int = 96) -> torch.Tensor:
    """Return weights of which some groups are much smaller than others."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, columns // 16, generator=generator) * 0.9 + 0.1
    weight = torch.randn(rows, columns, generator=generator)
    return weight * sizes.pow(3).repeat_interleave(16, 1)


def library_scheme(chosen: WeightFormat) -> Any:
    config = quantization_config(chosen, ["lm_head"])
    return QuantizationConfig.model_validate(config).config_groups["group_0"]


def library_tensors(chosen: WeightFormat, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the library's tensors for a float32 weight, with its own scales."""
    scheme = library_scheme(chosen)
    groups = chosen.groups(weight)
    low, high = groups.amin(-1), groups.amax(-1)
    state = {"weight": weight}
    global_scale = None
    if chosen.storage.startswith("nvfp4"):
        global_scale = generate_gparam(weight.amin(), weight.amax())
        state["weight_global_scale"] = global_scale
    scale, zero = calculate_qparams(low, high, scheme.weights, global_scale)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    if scheme.weights.symmetric:
        del state["weight_zero_point"]
    compressor = BaseCompressor.get_value_from_registry(chosen.storage)
    return dict(compressor.compress(state, scheme))


@each_format
def test_tensors_match_compressed_tensors(chosen: WeightFormat) -> None:
    weight = random_weight(1)
    actual, expected = chosen.rounded(weight), library_tensors(chosen, weight)
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        # Compared as bytes: nothing may differ in the sign of a zero either.
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_read_matches_compressed_tensors(chosen: WeightFormat, dtype: torch.dtype) -> None:
    tensors = chosen.rounded(random_weight(2).to(dtype))
    compressor = BaseCompressor.get_value_from_registry(chosen.storage)
    stored = dict(tensors)
    if chosen.storage in ("pack-quantized", "float-quantized", "int-quantized"):
        stored["weight_scale"] = stored["weight_scale"].float()
    expected = compressor.decompress(stored, library_scheme(chosen))["weight"]
    # Of 4-bit floats and powers of two the library makes bfloat16.
    assert torch.equal(chosen.read(tensors).to(expected.dtype), expected)


@each_format
def test_settings_match_compressed_tensors(chosen: WeightFormat) -> None:
    config = quantization_config(chosen, ["lm_head"])
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.ignore == ["lm_head"]
    written = parsed.model_dump()
    group = config["config_groups"]["group_0"]
    assert written["config_groups"]["group_0"]["weights"] == group["weights"]
    assert written["config_groups"]["group_0"]["input_activations"] == group["input_activations"]
    assert written["format"] == chosen.storage
    scheme = QuantizationScheme(targets=["Linear"], weights=parsed.config_groups["group_0"].weights)
    assert isinstance(scheme.weights, QuantizationArgs)


@each_format
def test_layout_matches_the_rounded_tensors(chosen: WeightFormat) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        actual = chosen.rounded(random_weight(3, rows=21).to(dtype))
        planned = chosen.layout((21, 96), dtype)
        assert [(n, t.shape, t.dtype) for n, t in actual.items()] == [
            (n, t.shape, t.dtype) for n, t in planned.items()
        ]


@each_format
def test_weight_of_zeros_stays_zero(chosen: WeightFormat) -> None:
    weight = torch.zeros(8, 96)
    tensors = chosen.rounded(weight)
    assert torch.equal(chosen.read(tensors), weight)
    assert (tensors["weight_scale"].float() > 0).all()


@pytest.mark.landing(8)
@each_format
@given(seed=st.integers(0, 2**32), exponent=st.integers(-12, 3))
def test_each_value_is_rounded_to_the_nearest_grid_value(
    chosen: WeightFormat, seed: int, exponent: int
) -> None:
    weight = random_weight(seed, 4, 32) * 2.0**exponent
    groups = chosen.groups(weight)
    grid = chosen.fitted(groups, weight.dtype, chosen.tensor_scale(tensor_peak(weight)))
    error = (chosen.snapped(groups, grid) - groups).abs()
    # All codes there are, as multiples of the step.
    codes = torch.arange(-256.0, 256.5, 0.5)
    if "float" in chosen.weight_settings()["type"]:
        bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        codes = torch.cat((codes / 4, bits[bits.isfinite()]))
    possible = chosen._rounded(codes).unique()
    zero = torch.zeros_like(grid.scale) if grid.zero is None else grid.zero
    numbers = (possible - zero.unsqueeze(-1)) * grid.step.unsqueeze(-1)
    least = (groups.unsqueeze(-1) - numbers.unsqueeze(2)).abs().amin(-1)
    # Two roundings of float32, of the quotient and of the product, at either side.
    slack = 4 * torch.finfo(torch.float32).eps * groups.abs().amax()
    assert (error <= least + slack).all()


@given(rows=st.integers(1, 70), groups=st.integers(1, 5), asymmetric=st.booleans())
def test_weights_of_any_shape_are_packed(rows: int, groups: int, asymmetric: bool) -> None:
    chosen = weight_format("int4", 3, asymmetric=asymmetric)
    weight = torch.randn(rows, 3 * groups, generator=torch.Generator().manual_seed(rows))
    actual, expected = chosen.rounded(weight), library_tensors(chosen, weight)
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name
    largest_step = float(chosen.fitted(chosen.groups(weight), weight.dtype).scale.max())
    # Half a step, and as much again at the upper end, where there is no code for -lowest.
    assert (chosen.read(actual) - weight).abs().max() <= largest_step * 1.001


def test_fused_layers_share_the_peak() -> None:
    chosen = weight_format("nvfp4")
    small, large = random_weight(4), 10 * random_weight(5)
    peak = torch.maximum(tensor_peak(small), tensor_peak(large))
    shared = chosen.rounded(small, peak)["weight_global_scale"]
    assert torch.equal(shared, chosen.rounded(large)["weight_global_scale"])
    assert not torch.equal(shared, chosen.rounded(small)["weight_global_scale"])


def correlated(seed: int, tokens: int, features: int) -> torch.Tensor:
    """Return inputs that depend on each other, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator)
    sizes = torch.rand(features, generator=generator).pow(3) * 4
    return torch.randn(tokens, features, generator=generator) @ mixing * sizes


def moments_of(inputs: torch.Tensor) -> torch.Tensor:
    moments = SecondMoments(inputs.shape[1])
    for part in inputs.split(100):
        moments.add(part)
    return moments.mean()


@pytest.mark.landing(11)
@each_format
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_reduces_the_output_error(chosen: WeightFormat, act_order: bool) -> None:
    weight, inputs = random_weight(6), correlated(7, 1000, 96)
    nearest = chosen.read(chosen.rounded(weight))
    tensors = second_order_rounded(
        chosen, weight, Curvature(moments_of(inputs), act_order=act_order)
    )
    unseen = correlated(7, 2000, 96)[1000:]
    exact = unseen @ weight.T
    error = (unseen @ chosen.read(tensors).T - exact).norm()
    assert error < 0.9 * (unseen @ nearest.T - exact).norm()


@pytest.mark.landing(12)
@each_format
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_with_independent_inputs_rounds_to_nearest(
    chosen: WeightFormat, act_order: bool
) -> None:
    weight = random_weight(8)
    tensors = second_order_rounded(chosen, weight, Curvature(torch.eye(96), act_order=act_order))
    groups = chosen.groups(weight)
    grid = chosen.fitted(
        groups, weight.dtype, chosen.tensor_scale(tensor_peak(weight)), torch.ones(groups.shape[1:])
    )
    for name, tensor in chosen.stored(weight, grid, weight.dtype).items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_compensates_errors_in_later_columns(act_order: bool) -> None:
    """Compare with the paper's equations (2) and (3), one column at a time, in float64."""
    chosen = IntegerFormat(8, None)
    weight, moments = random_weight(9, 6, 32), moments_of(correlated(10, 400, 32))
    importance = (moments.diagonal() + 0.01 * moments.diagonal().mean()).view(1, -1)
    grid = chosen.fitted(chosen.groups(weight), weight.dtype, None, importance)
    hessian = moments.double() + 0.01 * moments.double().diagonal().mean() * torch.eye(32)
    rest, left = weight.double(), list(range(32))
    if act_order:
        left = moments.diagonal().argsort(descending=True).tolist()
    expected = torch.empty_like(rest)
    while left:
        column = left[0]
        inverse = torch.linalg.inv(hessian[left][:, left])
        exact = rest[:, column : column + 1]
        nearest = chosen.snapped(exact.float().unsqueeze(1), grid).squeeze(1).double()
        expected[:, column : column + 1] = nearest
        rest[:, left] -= (exact - nearest) / inverse[0, 0] * inverse[0]
        left = left[1:]
    actual = chosen.read(
        second_order_rounded(chosen, weight, Curvature(moments, act_order=act_order))
    )
    # A number between two codes may go either way for a difference in the last bit; one does so
    # seldom, but then the rest of its row follows.
    same = (actual == expected.float()).all(1)
    assert same.float().mean() >= 5 / 6


def test_inputs_that_never_occur_keep_their_weights() -> None:
    chosen = weight_format("int8")
    weight, inputs = random_weight(11), correlated(12, 500, 96)
    inputs[:, 17] = 0
    # Within what the narrowest of all grids that are tried can hold.
    weight[:, 17] = weight.abs().amax(1) / 2
    tensors = second_order_rounded(chosen, weight, Curvature(moments_of(inputs)))
    step = tensors["weight_scale"].squeeze(1)
    assert ((chosen.read(tensors) - weight)[:, 17].abs() <= step * 0.501).all()


def test_moments_without_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="no input"):
        SecondMoments(8).mean()
    with pytest.raises(ValueError, match="not finite"):
        Curvature(torch.full((96, 96), torch.inf))


def test_low_importance_of_an_outlier_shrinks_the_scale() -> None:
    chosen = weight_format("int4", 32)
    groups = torch.full((1, 1, 32), 0.5)
    groups[..., 0] = 10.0
    importance = torch.ones(1, 32)
    importance[0, 0] = 1e-6
    plain = chosen.fitted(groups, groups.dtype)
    weighted = chosen.fitted(groups, groups.dtype, None, importance)
    assert isinstance(weighted, Grid)
    assert weighted.scale < plain.scale


def test_invalid_scheme_options_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="nearest first: 'int4'"):
        weight_format("int5")
    for options in ({"group_size": 64}, {"asymmetric": True}, {"activations": "none"}):
        with pytest.raises(ConfigError, match=r"int[48] .*: nvfp4 is 4-bit floats"):
            weight_format("nvfp4", **options)
    with pytest.raises(ConfigError, match=r"Only int8 and int4 allow a choice .*: w4a8 is 4 bits"):
        weight_format("w4a8", activations="none")
    with pytest.raises(UnknownNameError, match=r"Unknown activations 'int4'.*'int8'"):
        weight_format("int4", activations="int4")
    with pytest.raises(ConfigError, match="must be positive"):
        weight_format("int4", 0)
    assert set(SCHEMES) == {"fp8", "int8", "int4", "w4a8", "mxfp8", "mxfp4", "nvfp4"}


def test_activations_option_decides_if_inputs_are_quantized() -> None:
    for scheme, activations, rounded in (
        ("int8", None, True),
        ("int8", "none", False),
        ("int4", None, False),
        ("int4", "int8", True),
        ("w4a8", None, True),
    ):
        chosen = weight_format(scheme, activations=activations)
        assert (chosen.input_settings() is not None) == rounded, (scheme, activations)
        assert chosen.storage == ("int-quantized" if rounded else "pack-quantized")
    assert quantization_config(weight_format("w4a8"), []) == quantization_config(
        weight_format("int4", activations="int8"), []
    )
