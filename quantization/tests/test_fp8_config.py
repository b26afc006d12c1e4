"""Settings of checkpoints of 8-bit floats mean what their writers mean; the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from transformers import FbgemmFp8Config, FineGrainedFP8Config
from transformers.quantizers.quantizers_utils import should_convert_module

from interposer.errors import ConfigError, UnknownNameError
from interposer_quantization._fp8.config import FbgemmSettings, Fp8Settings
from interposer_quantization._fp8.scheme import FbgemmFp8, Fp8

# As the writers of published checkpoints state them.
DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V3_1 = {**DEEPSEEK_V3, "scale_fmt": "ue8m0"}
AUTO_FP8 = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
MISTRAL = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["model.vision_tower", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}
LLAMA_405B = {
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.q_proj"],
    "quant_method": "fbgemm_fp8",
}


def of_transformers(config: Any) -> dict[str, Any]:
    """Return the config.json of transformers, with lists for arrays."""
    written = {**config.to_dict(), "quant_method": str(config.to_dict()["quant_method"].value)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in written.items()}


@pytest.mark.parametrize(
    ("stated", "blocks", "names"),
    [
        (DEEPSEEK_V3, [128, 128], ("weight_scale_inv", "activation_scale")),
        (DEEPSEEK_V3_1, [128, 128], ("weight_scale_inv", "activation_scale")),
        (AUTO_FP8, None, ("weight_scale", "input_scale")),
        (MISTRAL, None, ("weight_scale_inv", "activation_scale")),
    ],
)
def test_published_settings_are_read(
    stated: dict[str, Any], blocks: list[int] | None, names: tuple[str, str]
) -> None:
    parsed = Fp8Settings.parse(stated)
    assert parsed.weight_block_size == blocks
    assert parsed.scale_names == names
    assert parsed.activation_scheme == stated["activation_scheme"]


@pytest.mark.parametrize(
    "config",
    [
        FineGrainedFP8Config(),
        FineGrainedFP8Config(weight_block_size=(64, 32), modules_to_not_convert=["lm_head"]),
        FineGrainedFP8Config("static", None),  # type: ignore[arg-type]
    ],
)
def test_settings_that_transformers_writes_are_read(config: FineGrainedFP8Config) -> None:
    parsed = Fp8Settings.parse(of_transformers(config))
    blocks = config.weight_block_size
    assert parsed.weight_block_size == (None if blocks is None else list(blocks))
    assert parsed.activation_scheme == config.activation_scheme
    assert parsed.left_out == (config.modules_to_not_convert or [])


def test_settings_of_fbgemm_are_read() -> None:
    assert FbgemmSettings.parse(LLAMA_405B).activation_scale_ub == 1200
    written = of_transformers(FbgemmFp8Config(activation_scale_ub=800.0))
    assert FbgemmSettings.parse(written).activation_scale_ub == 800


# What is stated besides the method, and what the error has to say.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"activation_scheme": "per_token"}, r"activation_scheme = 'per_token': .*'dynamic'.*'static'"),
    ({"weight_block_size": [128]}, "weight_block_size"),
    ({"weight_block_size": [128, 128, 128]}, "weight_block_size"),
    ({"weight_block_size": [0, 128]}, "weight_block_size.0 = 0: .*greater than 0"),
    ({"weight_block_size": [128.0, 128]}, "weight_block_size.0 = 128.0"),
    ({"weight_block_size": 128}, "weight_block_size = 128"),
    (
        {"weight_block_size": [128, 128], "activation_scheme": "static"},
        r"'static' does not go with weight_block_size \[128, 128\]; blocks take 'dynamic'",
    ),
    ({"scale_fmt": "ue8m0"}, "'ue8m0' goes with a weight_block_size only"),
    ({"scale_fmt": "e5m3"}, "scale_fmt = 'e5m3'"),
    ({"fmt": "e5m2"}, "fmt = 'e5m2': .*'e4m3'"),
    ({"dequantize": True}, "dequantize = True"),
    ({"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
    ({"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
    ({"kv_cache_scheme": "static"}, "kv_cache_scheme = 'static'"),
    ({"modules_to_not_convert": ["("]}, "not a regular expression"),
    ({"modules_to_not_convert": [""]}, "modules_to_not_convert.0 = ''"),
    ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
    (
        {"modules_to_not_convert": ["lm_head"], "ignored_layers": ["gate"]},
        r"modules_to_not_convert \['lm_head'\] and ignored_layers \['gate'\] .* state one",
    ),
    ({"quant_method": "mxfp8"}, "quant_method = 'mxfp8'"),
]


@pytest.mark.parametrize(("stated", "message"), REFUSED)
def test_everything_else_is_refused(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Fp8.parse({"quant_method": "fp8", **stated})
    assert "Supported: weights of float8_e4m3fn" in str(caught.value)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf"), None, "1200"])
def test_bound_of_fbgemm_must_be_a_positive_number(bound: Any) -> None:
    with pytest.raises(ConfigError, match="activation_scale_ub") as caught:
        FbgemmFp8.parse({"activation_scale_ub": bound})
    assert "Supported: 'activation_scale_ub', a positive number" in str(caught.value)


def test_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="Known, nearest first") as caught:
        Fp8.parse({"weight_blocks_size": [128, 128]})
    assert caught.value.known[0] == "weight_block_size"
    with pytest.raises(UnknownNameError) as caught:
        FbgemmFp8.parse({"activation_scheme": "static"})
    assert "weight_block_size" not in caught.value.known


def test_both_names_of_the_exclusion_list_may_be_stated() -> None:
    parsed = Fp8Settings.parse({"modules_to_not_convert": ["a", "b"], "ignored_layers": ["b", "a"]})
    assert parsed.left_out == ["a", "b"]


WORDS = ("model", "layers", "1", "11", "mlp", "gate", "gate_proj", "self_attn", "o_proj", "fc1")
NAMES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(".".join)
PATTERNS = NAMES | st.sampled_from(
    ["model.layers.*.mlp", "layers.1", r"model\.layers\.1", "o_proj|gate", "_proj", ".*mlp", "l.*s"]
)


@given(names=st.lists(NAMES, max_size=5), patterns=st.lists(PATTERNS, max_size=3))
@settings(max_examples=num_examples(300))
def test_exclusion_of_layers_follows_transformers(names: list[str], patterns: list[str]) -> None:
    for parsed in (
        Fp8Settings.parse({"modules_to_not_convert": patterns}),
        Fp8Settings.parse({"ignored_layers": patterns}),
        FbgemmSettings.parse({"modules_to_not_convert": patterns}),
    ):
        for name in names:
            assert (parsed.stored(name) is not None) == should_convert_module(name, patterns)


def test_fused_layers_are_quantized_together() -> None:
    scheme = Fp8.parse({"modules_to_not_convert": ["k_proj"]})
    with pytest.raises(ConfigError) as caught:
        scheme.linear_method("model.layers.0.self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"))
    message = str(caught.value)
    assert "model.layers.0.self_attn.qkv_proj" in message
    assert "q_proj: float8_e4m3fn" in message
    assert "k_proj: not quantized" in message
    assert scheme.linear_method("model.layers.0.self_attn.k_proj", ("k_proj",)) is None
