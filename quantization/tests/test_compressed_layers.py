"""Layers of compressed-tensors: the suite's checks, fused layers, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import (  # type: ignore[import-untyped]
    pack_to_int32,
)

from interposer import Config, Resolver, Site, current_registry, place
from interposer.errors import CheckpointError, ConfigError
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.quantized_linear import CodedProduct, StaticProduct
from interposer_quantization._compressed_tensors.examples import compressed_tensors_examples
from interposer_quantization._compressed_tensors.packed_linear import PackedIntLinear
from interposer_quantization._compressed_tensors.scheme import CompressedTensors
from interposer_quantization._compressed_tensors.stored import Inputs
from interposer_quantization._compressed_tensors.w4a8_linear import W4A8Linear
from interposer_testing import conformance

Settings = Mapping[str, Any]
EXAMPLES: Mapping[str, Settings] = compressed_tensors_examples()
SIZES = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
# What layers share that run as one product.
CONSTANT = {
    "input_scale": 0.015,
    "input_zero_point": 5,
    "input_global_scale": 1.25,
    "weight_global_scale": 0.75,
}


def site(
    settings: Settings, dtype: torch.dtype = torch.float32, kernels: Mapping[str, str] = {}
) -> Site:
    scheme = CompressedTensors.parse(settings)
    config = Config(canary="off", kernels=kernels)
    resolver = Resolver(current_registry(), place().device, config, scheme)
    return Site(resolver, "model.layers.0.self_attn", dtype)


def fill(layer: Linear, seed: int = 0) -> None:
    """Set every parameter to what may stand there, drawn at random."""
    for name, parameter in layer.named_parameters():
        generator = torch.Generator().manual_seed(0 if name == "weight_g_idx" else seed)
        sample = getattr(parameter, "sample", None)
        if sample is not None:
            parameter.data.copy_(sample(generator))
        elif name in CONSTANT:
            parameter.data.fill_(CONSTANT[name])
        elif parameter.is_floating_point():
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        else:
            bounds = torch.iinfo(parameter.dtype)
            drawn = torch.randint(bounds.min, bounds.max + 1, parameter.shape, generator=generator)
            parameter.data.copy_(drawn)


def built(label: str, parts: Mapping[str, int] | None = None, inputs: int = 256) -> Linear:
    at = site(EXAMPLES[label])
    if parts is None:
        return Linear(at.at("o_proj"), inputs, 128, bias=True)
    return MergedLinear(at.at("qkv_proj"), inputs, parts, bias=True)


def test_fused_kernel_exposes_quantizer_and_matmul() -> None:
    actual = set()
    num_scales = {"Fp8BlockLinear": 2, "Mxfp8Linear": 8}  # of a token; else one
    for label in EXAMPLES:
        layer = built(label)
        fill(layer)
        layer.finalize()
        kernel = layer.kernel
        if isinstance(kernel, CodedProduct):
            x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
            name = type(layer.method).__name__
            is_static = isinstance(kernel, StaticProduct)
            operands = list(layer.operands)
            if is_static:
                scales = operands.pop()
                codes = kernel.quantize(x, scales, *kernel.options)
                assert scales.shape == (1,)
            else:
                codes, scales = kernel.quantize(x, *kernel.options)
                assert scales.shape == (3, num_scales.get(name, 1))
            assert codes.dtype in (torch.int8, torch.float8_e4m3fn)
            assert torch.equal(layer(x), kernel.multiply(codes, scales, *operands))
            method: Any = layer.method
            assert kernel.product is method.bound.function
            actual.add((name, is_static))
    assert actual == {
        ("Int8Linear", False),
        ("Int8Linear", True),
        ("W4A8Linear", False),
        ("Fp8RowLinear", False),
        ("Fp8RowLinear", True),
        ("Fp8TensorLinear", True),
        ("Fp8BlockLinear", False),
        ("Mxfp8Linear", False),
    }


@pytest.mark.landing(8)
@pytest.mark.parametrize("label", EXAMPLES)
def test_fused_layer_equals_separate_layers(label: str) -> None:
    at = site(EXAMPLES[label])
    fused = MergedLinear(at.at("qkv_proj"), 256, SIZES, bias=True)
    parts = {name: Linear(at.at(name), 256, size, bias=True) for name, size in SIZES.items()}
    for seed, part in enumerate(parts.values()):
        fill(part, seed)
    for name, parameter in fused.named_parameters():
        pieces = [part.get_parameter(name).data for part in parts.values()]
        assert all(parameter.dtype == piece.dtype for piece in pieces)
        parameter.data.copy_(torch.cat(pieces))
    weight = fused.method.dequantized(fused)
    assert weight is not None
    singles = [part.method.dequantized(part) for part in parts.values()]
    assert torch.equal(weight, torch.cat([single for single in singles if single is not None]))
    for layer in (fused, *parts.values()):
        layer.finalize()
    x = 4 * torch.randn(3, 256, generator=torch.Generator().manual_seed(9))
    outputs = torch.cat([part(x) for part in parts.values()], -1)
    # Both round the input alike, to at most twice its size, and may add up in different orders.
    magnitude = float((2 * x.double().abs() @ weight.abs().T).max()) + 2
    bound = 2 * 257 * torch.finfo(torch.float32).eps * magnitude
    assert ((fused(x) - outputs).abs() <= bound).all()
    assert not torch.equal(outputs[:, :128], outputs[:, 256:384])


def test_conformance_suite_runs_the_examples() -> None:
    # The trials themselves are run in ops/tests/test_conformance.py, among all that is installed.
    trials = [
        trial
        for trial in conformance(
            current_registry(), place().device, distribution="interposer-quantization"
        )
        if trial.aspect == "scheme" and trial.request.name == "compressed-tensors"
    ]
    assert {trial.label for trial in trials if trial.verdict} == set(EXAMPLES)


@pytest.mark.parametrize(
    ("label", "num_bytes"),
    [
        ("packed int4 per group", 128 * 256 // 2 + 128 * 2 * 4),
        ("packed int3 per group", 128 * 256 // 2 + 128 * 2 * 4),
        ("packed int8 per group, asymmetric", 128 * 256 + 128 * 8 * (4 + 1)),
        ("packed int4, inputs int8", 128 * 256 // 2 + 128 * 2 * 4),
        ("int4, inputs int8, asymmetric", 128 * 256 // 2 + 128 * 2 * 4),
        ("int4 per output, inputs static, asymmetric", 128 * 256 // 2 + 128 * (4 + 1) + 4 + 4),
        ("int8, inputs static, asymmetric", 128 * 256 + 128 * 4 + 4 + 4),
        ("nvfp4", 128 * 256 // 2 + 128 * 16 + 4 + 4),
        ("nvfp4, inputs not quantized", 128 * 256 + 128 * 16 * 4),
    ],
)
def test_finalized_layer_keeps_only_the_kernel_operands(label: str, num_bytes: int) -> None:
    # Others may hold what they prepared.
    at = site(EXAMPLES[label], kernels={"*": "reference"})
    layer = Linear(at.at("o_proj"), 256, 128)
    fill(layer)
    layer.finalize()
    operands = [each for each in layer.operands if isinstance(each, torch.Tensor)]
    assert sum(operand.nbytes for operand in operands) == num_bytes
    addresses = {operand.data_ptr() for operand in operands}
    for name, parameter in layer.named_parameters():
        assert parameter.data_ptr() in addresses, name


ORDERED = "packed int4 per group, act order"


@pytest.mark.parametrize("fused", [False, True])
def test_inputs_are_multiplied_in_the_group_of_g_idx(fused: bool) -> None:
    """The library no longer writes such an order, so the checkpoint is written here."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-8, 8, (128, 64), generator=generator, dtype=torch.int8)
    zeros = torch.randint(-8, 8, (128, 2), generator=generator, dtype=torch.int8)
    scales = torch.rand(128, 2, generator=generator) + 0.5
    groups = torch.randperm(64, generator=generator) // 32
    expected = (codes - zeros[:, groups]).double() * scales[:, groups].double()
    parts = {"q_proj": 64, "k_proj": 32, "v_proj": 32} if fused else None
    layer = built(ORDERED, parts, inputs=64)
    num_parts = 3 if fused else 1
    stored = {
        "weight_packed": pack_to_int32(codes, 4),
        "weight_zero_point": pack_to_int32(zeros, 4, packed_dim=0),
        "weight_scale": scales,
        "weight_g_idx": groups.to(torch.int32).repeat(num_parts),
        "weight_shape": torch.tensor([[size, 64] for size in layer.parts.values()]).flatten(),
        "bias": torch.zeros(128),
    }
    assert set(stored) == {name for name, _ in layer.named_parameters()}
    for name, tensor in stored.items():
        layer.get_parameter(name).data.copy_(tensor)
    actual = layer.method.dequantized(layer)
    assert actual is not None
    assert torch.equal(actual, expected)
    layer.finalize()
    x = torch.randn(5, 64, generator=generator)
    torch.testing.assert_close(layer(x).double(), x.double() @ expected.T, rtol=1e-5, atol=1e-4)


def test_w4a8_linear_matches_fake_quantized_inputs() -> None:
    """Both ways to multiply by inputs of 8 bits, of which one has an op of both operands."""
    at = site(EXAMPLES["packed int4, act order, inputs int8"])
    layer = Linear(at.at("o_proj"), 256, 128, bias=True)
    assert isinstance(layer.method, W4A8Linear)
    other = copy.deepcopy(layer)
    weights = layer.method.stored.weights
    inputs = Inputs("int", 8, True, "token", None, static=False, exponents=False)
    other.method = PackedIntLinear(weights, inputs)
    other.method.create_weights(other, at.at("o_proj"), 256, 128, bias=True)
    fill(layer)
    fill(other)
    layer.finalize()
    other.finalize()
    x = 4 * torch.randn(7, 256, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(layer(x), other(x), rtol=1e-5, atol=1e-3)
    # Of 16 bits, inputs are rounded twice by the other way.
    torch.testing.assert_close(layer(x.bfloat16()).float(), layer(x.bfloat16().float()))


@pytest.mark.parametrize("name", ["weight", "weight_zero_point"])
def test_values_with_more_bits_than_stated_are_refused(name: str) -> None:
    layer = built("int4 per output, inputs static, asymmetric", SIZES)
    fill(layer)
    layer.get_parameter(name).data[300, 0] = 8
    message = rf"k_proj\.{name}.* from -8 to 8, but 4-bit values are from -8 to 7"
    with pytest.raises(CheckpointError, match=message):
        layer.finalize()


def test_unassigned_group_indices_mean_consecutive_groups() -> None:
    layer = built(ORDERED)
    fill(layer)
    layer.get_parameter("weight_g_idx").data.fill_(-1)
    actual = layer.method.dequantized(layer)
    layer.get_parameter("weight_g_idx").data.copy_(torch.arange(256) // 32)
    assert actual is not None
    expected = layer.method.dequantized(layer)
    assert expected is not None
    assert torch.equal(actual, expected)
    layer.finalize()
    assert len(layer.operands) == 4, "inputs that are in order need not be sorted"


def test_negative_scales_are_accepted() -> None:
    layer = built("packed int4 per group")
    fill(layer)
    layer.get_parameter("weight_scale").data.neg_()
    weight = layer.method.dequantized(layer)
    layer.get_parameter("bias").data.zero_()
    layer.finalize()
    assert weight is not None
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.T, rtol=1e-5, atol=1e-3)


WRONG = {"zero": 0.0, "not a number": torch.nan, "infinite": torch.inf}
SCALED = {
    "int8 per output": "weight_scale",
    "int8 with one scale, asymmetric": "weight_scale",
    "packed int4 per group": "weight_scale",
    "int8, inputs int8": "weight_scale",
    "int8, inputs static": "input_scale",
    "float8 with one scale, inputs static": "input_scale",
    "float8 per output": "weight_scale",
    "float8 in blocks": "weight_scale",
    "float8, inputs not quantized": "weight_scale",
    "nvfp4": "input_global_scale",
    "nvfp4, inputs not quantized": "weight_global_scale",
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("label", SCALED)
def test_scales_that_are_zero_or_not_finite_are_refused(label: str, wrong: str) -> None:
    layer, name = built(label, SIZES), SCALED[label]
    fill(layer)
    layer.get_parameter(name).data[-1] = WRONG[wrong]
    with pytest.raises(CheckpointError, match=rf"self_attn\.v_proj\.{name}.* not positive numbers"):
        layer.finalize()


@pytest.mark.parametrize("label", ["nvfp4", "nvfp4, inputs not quantized"])
def test_block_scales_may_be_zero_but_must_be_numbers(label: str) -> None:
    layer = built(label)
    fill(layer)
    layer.get_parameter("weight_scale").data[3, 2] = 0
    zeroed = copy.deepcopy(layer)
    zeroed.finalize()
    assert zeroed(torch.ones(1, 256)).isfinite().all()
    layer.get_parameter("weight_scale").data[3, 2] = torch.nan
    with pytest.raises(CheckpointError, match=r"weight_scale.* first is nan at \[3, 2\]"):
        layer.finalize()


@pytest.mark.parametrize(
    "label", ["mxfp4", "mxfp4, inputs not quantized", "mxfp8", "mxfp8, inputs not quantized"]
)
def test_nan_exponents_are_refused(label: str) -> None:
    layer = built(label, SIZES)
    fill(layer)
    layer.get_parameter("weight_scale").data[256 + 2, 1] = 255
    with pytest.raises(CheckpointError, match=r"k_proj\.weight_scale.* not a number.* \[2, 1\]"):
        layer.finalize()


def spoil(name: str, place: Any, value: Any) -> Callable[[Linear], None]:
    def change(layer: Linear) -> None:
        layer.get_parameter(name).data[place] = value

    return change


@pytest.mark.parametrize(
    ("label", "change", "message"),
    [
        ("nvfp4", spoil("weight_global_scale", 1, 0.5), "k_proj.weight_global_scale = 0.5"),
        ("nvfp4", spoil("input_global_scale", 2, 0.5), "v_proj.input_global_scale = 0.5"),
        ("int8, inputs static", spoil("input_scale", 1, 0.5), "k_proj.input_scale = 0.5"),
        (
            "int8, inputs static, asymmetric",
            spoil("input_zero_point", 2, -7),
            "v_proj.input_zero_point = -7",
        ),
        (
            "packed int4 per group",
            spoil("weight_shape", 2, 64),
            r"k_proj.weight_shape.* holds \[64, 256\], the config asks for \[128, 256\]",
        ),
        (
            ORDERED,
            spoil("weight_g_idx", 3, 8),
            "q_proj.weight_g_idx.* holds the group 8 for input 3",
        ),
        (
            ORDERED,
            spoil("weight_g_idx", slice(512, 518), 1),
            r"v_proj.*assigns \d+ inputs to group",
        ),
        (
            ORDERED,
            spoil("weight_g_idx", slice(256, 512), torch.arange(256).int() // 32),
            "k_proj.weight_g_idx.* differs from .*q_proj.weight_g_idx",
        ),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(
    label: str, change: Callable[[Linear], None], message: str
) -> None:
    layer = built(label, SIZES)
    fill(layer)
    change(layer)
    with pytest.raises(CheckpointError, match=message):
        layer.finalize()


@pytest.mark.parametrize(
    ("label", "inputs", "parts", "message"),
    [
        ("int8 per group", 48, None, "groups of 32 do not divide its 48 inputs"),
        ("packed int4 per group", 192, None, "groups of 128 do not divide its 192 inputs"),
        (
            "int4 per output, inputs static, asymmetric",
            33,
            None,
            "has 33 inputs, but 4-bit weights with int8 inputs need an even number",
        ),
        ("nvfp4", 40, None, "groups of 16 do not divide its 40 inputs"),
        ("nvfp4, inputs not quantized", 40, None, "groups of 16 do not divide"),
        ("mxfp4", 48, None, "groups of 32 do not divide its 48 inputs"),
        ("mxfp8", 48, None, "groups of 32 do not divide its 48 inputs"),
        ("mxfp8, inputs not quantized", 48, None, "groups of 32 do not divide"),
        (
            "packed int4 per output, asymmetric",
            64,
            {"q_proj": 64, "k_proj": 12},
            "zero points of k_proj, 12 of 4 bits, do not fill words",
        ),
        ("float8 in blocks", 256, {"q_proj": 128, "k_proj": 64}, "blocks of 128 rows"),
        ("float8 in blocks, inputs per token", 256, {"q_proj": 192, "k_proj": 64}, "name them in"),
    ],
)
def test_sizes_that_the_format_cannot_store_are_refused(
    label: str, inputs: int, parts: Mapping[str, int] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built(label, parts, inputs)


def test_ambiguous_packing_is_refused() -> None:
    settings = copy.deepcopy(dict(EXAMPLES["packed int3 per group"]))
    settings["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "group_size": None}
    with pytest.raises(ConfigError, match=r"20 weights of 3 bits a row can be packed in two ways"):
        Linear(site(settings).at("o_proj"), 20, 64)


def test_unfused_layer_may_leave_an_int32_partly_empty() -> None:
    layer = Linear(site(EXAMPLES["packed int4 per output, asymmetric"]).at("o_proj"), 30, 12)
    assert layer.get_parameter("weight_packed").shape == (12, 4)
    assert layer.get_parameter("weight_zero_point").shape == (2, 1)
    fill(layer)
    weight = layer.method.dequantized(layer)
    layer.finalize()
    assert weight is not None
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.T, rtol=1e-5, atol=1e-3)
