"""Plain weights that become 8-bit floats while they load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.landing import num_examples

from interposer import Config, Resolver, Site, current_registry, explain, place
from interposer.errors import CheckpointError, ConfigError, UnknownNameError
from interposer_engine import load, plan
from interposer_ops.layers.linear import Linear, MergedLinear, PlainLinear
from interposer_quantization._online.fp8 import OnlineFp8, online_fp8_examples
from interposer_testing import conformance

MODEL = Path(__file__).parents[2] / "examples/models/stdlib-lm"
WEIGHTS = "model.safetensors"
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
TEXT = "import os\nimport sys\n\n\ndef main(path: str) -> int:\n    "

Settings = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def site(scheme: Settings, dtype: torch.dtype = torch.float32) -> Site:
    config = Config(canary="off", kernels={"fp8_linear": "reference"})
    resolver = Resolver(current_registry(), place().device, config, OnlineFp8.parse(scheme))
    return Site(resolver, "block", dtype)


def filled(
    scheme: Settings, weight: torch.Tensor, parts: Mapping[str, int] | None = None
) -> Linear:
    at = site(scheme, weight.dtype)
    sizes = parts or {"o_proj": weight.shape[0]}
    layer = MergedLinear(at.at("o_proj"), weight.shape[1], sizes)
    assert {name: p.dtype for name, p in layer.named_parameters()} == {"weight": weight.dtype}
    layer.get_parameter("weight").data.copy_(weight)
    return layer


def dequantized(layer: Linear) -> torch.Tensor:
    weight = layer.method.dequantized(layer)
    assert weight is not None
    return weight


def peaks(weight: torch.Tensor, scheme: Settings, rows: list[int]) -> torch.Tensor:
    """Return the largest magnitude of all that share a scale with each number."""
    strategy, magnitude = scheme.get("strategy", "channel"), weight.double().abs()
    if strategy == "channel":
        return magnitude.amax(1, keepdim=True).expand_as(weight)
    height, width = (max(weight.shape), weight.shape[1])
    if strategy == "block":
        height, width = scheme.get("weight_block_size", [128, 128])
    shared = torch.empty_like(magnitude)
    for part, out in zip(magnitude.split(rows), shared.split(rows), strict=True):
        for top in range(0, part.shape[0], height):
            for left in range(0, part.shape[1], width):
                block = slice(top, top + height), slice(left, left + width)
                out[block] = part[block].amax()
    return shared


@settings(max_examples=num_examples(40))
@given(
    scheme=st.sampled_from([dict(settings) for settings in online_fp8_examples().values()]),
    outputs=st.integers(1, 4).map(lambda n: 64 * n),
    inputs=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-7, 1.0, 1e4]),
    seed=st.integers(0, 2**32),
)
def test_weights_are_rounded_to_the_nearest_multiple_of_the_scale(
    scheme: Settings, outputs: int, inputs: int, dtype: torch.dtype, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (size * torch.randn(outputs, inputs, generator=generator)).clamp(-6e4, 6e4).to(dtype)
    weight[:: outputs // 3 + 1] = 0
    actual = dequantized(filled(scheme, weight))
    shared = peaks(weight, scheme, [outputs])
    # Three bits after the leading one, of which the last one is halved; below 2**-6 the steps are
    # 2**-9. The quotient and the scale are rounded to float32 before.
    bound = weight.double().abs() * (2**-4 + 2**-22) + shared / LARGEST * (2**-10 + 2**-22)
    assert ((actual - weight.double()).abs() <= bound).all()
    fullest = weight.double().abs() == shared
    exact = (actual - weight.double()).abs() <= 2**-22 * shared
    assert exact[fullest].all()


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_zeros_and_tiny_weights_get_a_positive_scale(strategy: str) -> None:
    weight = torch.zeros(128, 128)
    weight[3] = torch.finfo(torch.float32).smallest_normal
    weight[5] = torch.finfo(torch.float32).smallest_normal * 2**-20
    layer = filled({"strategy": strategy}, weight)
    assert (dequantized(layer) - weight.double()).abs().max() <= torch.finfo(torch.float32).tiny
    layer.finalize()
    assert layer(torch.ones(1, 128)).isfinite().all()


def test_chunked_quantization_equals_quantization_row_by_row() -> None:
    weight = torch.randn(2304, 2048, generator=torch.Generator().manual_seed(0))
    for strategy in ("channel", "block"):
        scheme = {"strategy": strategy}
        rows = torch.cat([dequantized(filled(scheme, part)) for part in weight.split(256)])
        assert torch.equal(dequantized(filled(scheme, weight)), rows)
    whole = dequantized(filled({"strategy": "tensor"}, weight))
    scale = weight.abs().amax() / LARGEST
    assert torch.equal(whole, (weight / scale).to(FP8).double() * scale.double())


@pytest.mark.parametrize("scheme", online_fp8_examples().values())
def test_fused_layer_is_quantized_like_separate_layers(scheme: Settings) -> None:
    sizes = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    weight = torch.randn(512, 96, generator=torch.Generator().manual_seed(0))
    weight[256:] *= 7
    parts = [
        dequantized(filled(scheme, part, {name: size}))
        for part, (name, size) in zip(weight.split([256, 128, 128]), sizes.items(), strict=True)
    ]
    assert torch.equal(dequantized(filled(scheme, weight, sizes)), torch.cat(parts))


def test_finalize_frees_the_plain_weight() -> None:
    layer = filled({}, torch.randn(64, 96))
    layer.finalize()
    kept_tensors = [
        t for t in (*layer.parameters(), *layer.operands) if isinstance(t, torch.Tensor)
    ]
    assert {tensor.dtype for tensor in kept_tensors if tensor.numel() == 64 * 96} == {FP8}


def in_rows(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / LARGEST
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale}


def as_one(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax() / LARGEST
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale}


def in_blocks(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
    scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
    codes = (blocks / scale).to(FP8).flatten(2).flatten(0, 1)
    return {"weight": codes, "weight_scale_inv": scale.flatten(2).flatten(0, 1)}


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("asked", "written", "quantize"),
    [
        ("fp8", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1e9}, in_rows),
        (
            {"quant_method": "fp8", "strategy": "tensor"},
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            as_one,
        ),
        (
            {"quant_method": "fp8", "strategy": "block", "weight_block_size": [16, 16]},
            {"quant_method": "fp8", "weight_block_size": [16, 16]},
            in_blocks,
        ),
    ],
)
def test_quantizing_on_load_equals_the_quantized_checkpoint(
    tmp_path: Path,
    asked: str | Settings,
    written: Settings,
    quantize: Callable[[torch.Tensor], Tensors],
) -> None:
    stored: Tensors = {}
    for name, tensor in load_file(MODEL / WEIGHTS).items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            parts = quantize(tensor.float()).items()
            stored |= {f"{layer}.{key}": value.contiguous() for key, value in parts}
        else:
            stored[name] = tensor
    save_file(stored, tmp_path / WEIGHTS)
    facts = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | {"quantization_config": written}))
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    expected = load(tmp_path, dtype="float32", cache_tokens=64)
    # What is written leaves the head as it is.
    asked = {"quant_method": asked} if isinstance(asked, str) else asked
    asked = {**asked, "head": "plain"}
    lm = load(MODEL, dtype="float32", cache_tokens=64, quantization=asked)
    token_ids = lm.tokenizer.encode(TEXT)
    assert torch.equal(lm.logits(token_ids), expected.logits(token_ids))


@pytest.mark.landing(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_weights_are_cast_to_the_model_dtype_before_quantization(
    tmp_path: Path, dtype: torch.dtype, computed: torch.dtype
) -> None:
    models = []
    for name, last in (("stored", dtype), ("converted", computed)):
        (tmp_path / name).mkdir()
        tensors = load_file(MODEL / WEIGHTS).items()
        save_file({key: t.to(dtype).to(last) for key, t in tensors}, tmp_path / name / WEIGHTS)
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(MODEL / file, tmp_path / name)
        models.append(load(tmp_path / name, computed, cache_tokens=64, quantization="fp8"))
    token_ids = models[0].tokenizer.encode(TEXT)
    actual, expected = (lm.logits(token_ids) for lm in models)
    assert torch.equal(actual, expected)
    chosen = {row.choice.request.name for row in explain(models[0]).rows}
    assert {"online_fp8", "fp8_linear", "quantize_fp8_per_token"} <= chosen


def test_excluded_layers_stay_plain() -> None:
    left_out = [r"model\.layers\.0", "down_proj"]
    asked = {"quant_method": "fp8", "modules_to_not_convert": left_out}
    model = plan(MODEL, quantization=asked).model
    for layer in model.modules():
        if isinstance(layer, Linear):
            plain = "layers.0." in layer.prefix or layer.prefix.endswith("down_proj")
            assert isinstance(layer.method, PlainLinear) == plain


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ("int3", UnknownNameError, r"Unknown method 'int3' for quantization .*: 'int[48]'"),
        ({"quant_method": "gptq"}, UnknownNameError, "Unknown method 'gptq' for quantization"),
        ({"strategy": "block"}, ConfigError, "with the name as 'quant_method'"),
        ({"quant_method": "fp8", "strategy": "row"}, ConfigError, r"strategy = 'row'"),
        ({"quant_method": "fp8", "weight_block_size": [1, 2]}, ConfigError, "goes with 'block'"),
        ({"quant_method": "fp8", "block": 2}, UnknownNameError, "(?s)'block' .*'strategy'"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["q_proj"]},
            ConfigError,
            r"layers\.0\.self_attn\.qkv_proj fuses layers .*\n.*q_proj: not quantized",
        ),
        (
            {"quant_method": "fp8", "strategy": "block", "weight_block_size": [100, 128]},
            ConfigError,
            "blocks of 100 rows do not divide",
        ),
    ],
)
def test_invalid_settings_are_refused_before_weights_are_read(
    asked: str | Settings, error: type[ConfigError], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(MODEL, quantization=asked)


def quantized(tmp_path: Path, method: str) -> Path:
    facts = json.loads((MODEL / "config.json").read_text())
    settings = {"quant_method": method, "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(facts | {"quantization_config": settings}))
    save_file({}, tmp_path / WEIGHTS)
    return tmp_path


def test_quantized_checkpoint_is_refused_with_both_method_names(tmp_path: Path) -> None:
    path = quantized(tmp_path, "gptq")
    with pytest.raises(ConfigError, match=r"quantized by 'gptq' already, .*quantization='fp8'"):
        plan(path, quantization="fp8")


def test_checkpoint_in_the_requested_format_is_loaded_unchanged(tmp_path: Path) -> None:
    path = quantized(tmp_path, "fp8")
    scheme = plan(path, quantization="fp8").resolver.scheme
    assert scheme is not None
    assert scheme.method == "fp8"
    with pytest.raises(ConfigError, match="quantized by 'fp8' already"):
        plan(path, quantization={"quant_method": "fp8", "strategy": "tensor"})


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused_with_their_tensor_name(value: float) -> None:
    weight = torch.randn(512, 96)
    weight[300, 7] = value
    layer = filled({}, weight, {"q_proj": 256, "k_proj": 128, "v_proj": 128})
    with pytest.raises(CheckpointError, match=rf"block\.k_proj\.weight: holds {value}, which"):
        layer.finalize()


def test_conformance_suite_runs_the_examples() -> None:
    # The trials themselves are run in ops/tests/test_conformance.py, among all that is installed.
    trials = [
        trial
        for trial in conformance(
            current_registry(), place().device, distribution="interposer-quantization"
        )
        if trial.aspect == "scheme" and trial.request.name == "online_fp8"
    ]
    assert {trial.label for trial in trials if trial.verdict} == set(online_fp8_examples())
