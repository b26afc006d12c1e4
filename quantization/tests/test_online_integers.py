"""Plain weights that become integers while they load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.landing import num_examples

from interposer import Config, QuantizationScheme, Resolver, Site, current_registry, explain, place
from interposer.errors import CheckpointError, ConfigError, UnknownNameError
from interposer.records import SchemeEntry, load_target
from interposer_engine import load, plan, quantize
from interposer_ops.layers.linear import Linear, MergedLinear, PlainLinear
from interposer_quantization._online.integers import (
    online_int4_examples,
    online_int8_examples,
    online_w4a8_examples,
)
from interposer_quantization.plugin import interposer_records
from interposer_quantization.writing._schemes import SCHEMES
from interposer_testing import conformance

MODEL = Path(__file__).parents[2] / "examples/models/stdlib-lm"
TEXT = "import os\nimport sys\n\n\ndef main(path: str) -> int:\n    "
NO_DOWN: dict[str, Any] = {"modules_to_not_convert": ["down_proj"]}
ENTRIES = {
    record.method.removeprefix("online_"): record
    for record in interposer_records()
    if isinstance(record, SchemeEntry) and record.method.startswith("online_")
}
INTEGERS = [
    dict(asked)
    for examples in (online_int8_examples, online_int4_examples, online_w4a8_examples)
    for asked in examples().values()
]

Settings = dict[str, Any]


def scheme_of(asked: Mapping[str, Any]) -> QuantizationScheme:
    chosen: type[QuantizationScheme] = load_target(
        ENTRIES[asked["quant_method"].removeprefix("online_")].target
    )
    return chosen.parse(asked)


def filled(
    asked: Mapping[str, Any], weight: torch.Tensor, parts: Mapping[str, int] | None = None
) -> Linear:
    config = Config(canary="off", kernels={"*": "reference"})
    resolver = Resolver(current_registry(), place().device, config, scheme_of(asked))
    at = Site(resolver, "block", weight.dtype).at("o_proj")
    layer = MergedLinear(at, weight.shape[1], parts or {"o_proj": weight.shape[0]})
    assert {name: p.dtype for name, p in layer.named_parameters()} == {"weight": weight.dtype}
    layer.get_parameter("weight").data.copy_(weight)
    return layer


def dequantized(layer: Linear) -> torch.Tensor:
    weight = layer.method.dequantized(layer)
    assert weight is not None
    return weight


def test_method_names_match_the_schemes_of_interposer_quantize() -> None:
    assert {"fp8", "int8", "int4", "w4a8"} == set(ENTRIES) <= set(SCHEMES)


@settings(max_examples=num_examples(25), deadline=None)
@given(
    asked=st.sampled_from(INTEGERS),
    outputs=st.integers(1, 40),
    groups=st.integers(1, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 2**32),
)
def test_weights_are_rounded_to_the_nearest_multiple_of_the_scale(
    asked: Settings, outputs: int, groups: int, dtype: torch.dtype, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = size * torch.randn(outputs, 32 * groups, generator=generator)
    weight = weight.clamp(-6e4, 6e4).to(dtype)
    weight[:: outputs // 3 + 1] = 0
    actual = dequantized(filled(asked, weight))
    wide, bits = weight.double(), 8 if asked["quant_method"] == "online_int8" else 4
    shared = 32 * groups
    if bits == 4:
        shared = asked.get("group_size") or next(n for n in (128, 64, 32) if shared % n == 0)
    parts = wide.unflatten(1, (-1, shared))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    span = high - low if asked.get("asymmetric") else 2 * torch.maximum(-low, high)
    # The range of numbers is that of all codes; a zero point moves it by half of one at most.
    steps = (span / (2**bits - 1)).unsqueeze(-1).expand_as(parts).flatten(1)
    farthest = (1.0 if asked.get("asymmetric") else 0.5) * steps
    # The scale and the quotient are rounded to float32 before; the smallest are subnormal there.
    bound = farthest + 2**-21 * wide.abs() + 2**-149 * 2**bits
    assert ((actual - wide).abs() <= bound).all()


@pytest.mark.landing(5)
@pytest.mark.parametrize("asked", INTEGERS)
def test_fused_layer_is_quantized_like_separate_layers(asked: Settings) -> None:
    sizes = {"q_proj": 130, "k_proj": 66, "v_proj": 65}
    weight = torch.randn(261, 96, generator=torch.Generator().manual_seed(0))
    weight[130:] *= 7
    parts = [
        dequantized(filled(asked, part, {name: size}))
        for part, (name, size) in zip(weight.split([130, 66, 65]), sizes.items(), strict=True)
    ]
    assert torch.equal(dequantized(filled(asked, weight, sizes)), torch.cat(parts))


def test_chunked_quantization_equals_quantization_row_by_row() -> None:
    weight = torch.randn(2304, 2048, generator=torch.Generator().manual_seed(0))
    asked = {"quant_method": "online_w4a8", "asymmetric": True}
    rows = torch.cat([dequantized(filled(asked, part)) for part in weight.split(256)])
    assert torch.equal(dequantized(filled(asked, weight)), rows)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("int8", 64 * 256 + 64 * 4),
        ("int4", 64 * 256 // 2 + 64 * 2 * 4),
        ("w4a8", 64 * 256 // 2 + 64 * 2 * 4),
    ],
)
def test_finalized_layer_keeps_only_the_kernel_operands(name: str, num_bytes: int) -> None:
    layer = filled({"quant_method": f"online_{name}"}, torch.randn(64, 256))
    layer.finalize()
    kept_tensors = {
        each.data_ptr(): each.nbytes
        for each in (*layer.parameters(), *layer.operands)
        if isinstance(each, torch.Tensor)
    }
    assert sum(kept_tensors.values()) == num_bytes


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model in float32, which scales are stored in then."""
    path = tmp_path_factory.mktemp("plain")
    weights = load_file(MODEL / "model.safetensors").items()
    save_file({name: tensor.float() for name, tensor in weights}, path / "model.safetensors")
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(MODEL / file, path)
    return path


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("asked", "written"),
    [
        ("int8", {"scheme": "int8"}),
        (
            {"quant_method": "int8", "activations": "none"},
            {"scheme": "int8", "activations": "none"},
        ),
        ({"quant_method": "int4", "group_size": 16}, {"scheme": "int4", "group_size": 16}),
        (
            {"quant_method": "w4a8", "asymmetric": True, **NO_DOWN},
            {"scheme": "w4a8", "asymmetric": True},
        ),
    ],
)
def test_quantizing_on_load_equals_the_quantized_checkpoint(
    plain: Path, tmp_path: Path, asked: str | Settings, written: Settings
) -> None:
    ignore = ["re:.*down_proj"] if "modules_to_not_convert" in asked else []
    # What is written leaves the head as it is.
    asked = {"quant_method": asked} if isinstance(asked, str) else asked
    asked = {**asked, "head": "plain"}
    quantize(plain, tmp_path / "written", ignore=ignore, **written)
    expected = load(tmp_path / "written", dtype="float32", cache_tokens=64)
    lm = load(plain, dtype="float32", cache_tokens=64, quantization=asked)
    token_ids = lm.tokenizer.encode(TEXT)
    assert torch.equal(lm.logits(token_ids), expected.logits(token_ids))


@pytest.mark.parametrize(
    ("asked", "ops"),
    [
        ("int8", {"int8_linear", "quantize_int8_per_token"}),
        ("int4", {"w4a16_linear"}),
        ("w4a8", {"w4a8_linear", "quantize_int8_per_token"}),
        ({"quant_method": "int4", "activations": "int8"}, {"w4a8_linear"}),
    ],
)
def test_default_group_size_is_the_largest_that_divides_the_inputs(
    asked: str | Settings, ops: set[str]
) -> None:
    rows = explain(MODEL, quantization=asked).rows
    assert ops <= {row.choice.request.name for row in rows}
    sizes = {
        row.choice.request.dims["in_features"]: row.choice.request.dims["group_size"]
        for row in rows
        if "group_size" in row.choice.request.dims and "lm_head" not in row.prefixes
        if "in_features" in row.choice.request.dims
    }
    assert sizes == ({256: 128, 688: 16} if "w4a" in str(ops) else {})


def test_excluded_layers_stay_plain() -> None:
    model = plan(MODEL, quantization={"quant_method": "int4", **NO_DOWN}).model
    for layer in model.modules():
        if isinstance(layer, Linear):
            is_plain = layer.prefix.endswith("down_proj")
            assert isinstance(layer.method, PlainLinear) == is_plain


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"quant_method": "int8", "group_size": 32}, ConfigError, "group size goes with int4"),
        ({"quant_method": "int8", "asymmetric": True}, ConfigError, "Zero points go with int4"),
        ({"quant_method": "w4a8", "activations": "none"}, ConfigError, "Only int8 and int4"),
        ({"quant_method": "int4", "activations": "fp8"}, ConfigError, "'int8' or 'none'"),
        ({"quant_method": "int4", "bits": 4}, UnknownNameError, "(?s)'bits' .*'group_size'"),
        ({"quant_method": "int4", "group_size": 0}, ConfigError, "group_size = 0"),
        (
            {"quant_method": "int4", "group_size": 128},
            ConfigError,
            r"mlp\.down_proj: groups of 128 do not divide its 688 inputs",
        ),
        (
            {"quant_method": "int4", "modules_to_not_convert": ["q_proj"]},
            ConfigError,
            r"self_attn\.qkv_proj fuses layers .*\n.*q_proj: not quantized",
        ),
    ],
)
def test_invalid_settings_are_refused_before_weights_are_read(
    asked: Settings, error: type[ConfigError], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(MODEL, quantization=asked)


def test_inputs_that_no_group_divides_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"o_proj: no groups of 128, 64, 32, 16 divide its 40"):
        filled({"quant_method": "online_int4"}, torch.zeros(8, 40))
    filled({"quant_method": "online_int4", "group_size": 8}, torch.zeros(8, 40)).finalize()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused_with_their_tensor_name(value: float) -> None:
    weight = torch.randn(512, 96)
    weight[300, 7] = value
    sizes = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    layer = filled({"quant_method": "online_w4a8"}, weight, sizes)
    with pytest.raises(CheckpointError, match=rf"block\.k_proj\.weight: holds {value}, which"):
        layer.finalize()


@pytest.mark.parametrize("name", ["int8", "int4", "w4a8"])
def test_conformance_suite_runs_the_examples(name: str) -> None:
    # The trials themselves are run in ops/tests/test_conformance.py, among all that is installed.
    trials = [
        trial
        for trial in conformance(
            current_registry(), place().device, distribution="interposer-quantization"
        )
        if trial.aspect == "scheme" and trial.request.name == f"online_{name}"
    ]
    assert any(trial.verdict for trial in trials)
