"""ModelOpt's fields mean what they mean there, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from interposer.errors import ConfigError, UnknownNameError
from interposer_quantization._compressed_tensors.fp8_linear import Fp8WeightLinear
from interposer_quantization._compressed_tensors.mx_linear import Mxfp8Linear
from interposer_quantization._compressed_tensors.nvfp4_linear import (
    Nvfp4Linear,
    Nvfp4WeightLinear,
)
from interposer_quantization._fp8.linear import Fp8RowLinear, Fp8TensorLinear
from interposer_quantization._modelopt.config import Settings, Stored
from interposer_quantization._modelopt.input_scale import ScaledInputLinear
from interposer_quantization._modelopt.scheme import ModelOpt
from interposer_quantization._modelopt.weights import Int8WeightLinear

PLACE = "model.layers.3.self_attn"
QKV = ("q_proj", "k_proj", "v_proj")
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
AWQ = {"quant_algo": "W4A16_AWQ", "group_size": 128, "pre_quant_scale": True}
NUMBERS_OF_NVFP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
NUMBERS_OF_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}


def of_file(**quantization: Any) -> dict[str, Any]:
    """Return the settings where hf_quant_config.json alone says something."""
    return {"quant_method": "modelopt", "quantization": quantization}


def of_config(**settings: Any) -> dict[str, Any]:
    """Return the settings where config.json alone says something."""
    return {"quant_method": "modelopt", "producer": {"name": "modelopt"}, **settings}


def group(numbers: dict[str, Any], *targets: str) -> dict[str, Any]:
    return {"weights": numbers, "input_activations": numbers, "targets": list(targets)}


@pytest.mark.parametrize(
    ("algorithm", "method"),
    [
        ({"quant_algo": "FP8"}, Fp8TensorLinear),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, Fp8RowLinear),
        (NVFP4, Nvfp4Linear),
        ({"quant_algo": "MXFP8", "group_size": 32}, Mxfp8Linear),
        ({"quant_algo": "fp8_pb_wo"}, Fp8WeightLinear),
        ({"quant_algo": "FP8_PB_WO"}, Fp8WeightLinear),
        ({"quant_algo": "W8A16"}, Int8WeightLinear),
        ({"quant_algo": "W4A16_NVFP4", "group_size": 16}, Nvfp4WeightLinear),
        (AWQ, ScaledInputLinear),
        ({"quant_algo": "NVFP4_AWQ", "pre_quant_scale": True}, ScaledInputLinear),
    ],
)
def test_every_algorithm_has_a_linear_method(algorithm: dict[str, Any], method: type) -> None:
    for settings in (of_file(**algorithm), of_config(**algorithm)):
        actual = ModelOpt.parse(settings).linear_method(f"{PLACE}.qkv_proj", QKV)
        assert type(actual) is method


@pytest.mark.parametrize(
    ("glob", "left_out"),
    [
        ("lm_head", False),
        (PLACE, True),
        (f"{PLACE}*", True),
        (f"{PLACE}.*", True),
        (f"{PLACE}.q_proj", True),
        ("model.layers.3*", True),
        ("*.q_proj", True),
        ("model.layers.3.self", False),
        ("model.layers.[12].*", False),
        ("MODEL*", False),
        ("q_proj", False),
    ],
)
def test_glob_excludes_all_layers_inside_a_matching_module(glob: str, left_out: bool) -> None:
    for settings in (
        of_file(**NVFP4, exclude_modules=["x", glob]),
        of_config(**NVFP4, ignore=["x", glob]),
    ):
        actual = Settings.parse(settings).stored(f"{PLACE}.q_proj")
        assert actual == (None if left_out else Stored("NVFP4", 16))


def test_mixed_precision_quantizes_the_listed_layers() -> None:
    layers: dict[str, Any] = {f"{PLACE}.{part}": {"quant_algo": "FP8"} for part in QKV}
    layers[f"{PLACE}.o_proj"] = NVFP4
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    groups = {
        "group_0": group(NUMBERS_OF_FP8, *(f"{PLACE}.{part}" for part in QKV)),
        "group_1": group(NUMBERS_OF_NVFP4, f"{PLACE}.o_proj"),
    }
    for settings in (of_file(**mixed), of_config(**mixed, config_groups=groups)):
        scheme = ModelOpt.parse(settings)
        assert type(scheme.linear_method(f"{PLACE}.qkv_proj", QKV)) is Fp8TensorLinear
        assert type(scheme.linear_method(f"{PLACE}.o_proj", ("o_proj",))) is Nvfp4Linear
        assert scheme.linear_method("model.layers.3.mlp.down_proj", ("down_proj",)) is None
    del layers[f"{PLACE}.k_proj"]
    with pytest.raises(ConfigError, match=f"{PLACE}.k_proj: not quantized"):
        ModelOpt.parse(of_file(**mixed)).linear_method(f"{PLACE}.qkv_proj", QKV)


def test_group_size_may_be_in_hf_quant_config_alone() -> None:
    for settings in (
        of_config(quant_algo="W4A16_AWQ", quantization=AWQ),
        of_config(**AWQ, quantization={**AWQ, "group_size": None}),
    ):
        actual = Settings.parse(settings).stored(f"{PLACE}.q_proj")
        assert actual == Stored("W4A16_AWQ", 128)
    assert str(actual) == "W4A16_AWQ in groups of 128"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            of_file(**NVFP4, kv_cache_quant_algo="NVFP4"),
            "quantization.kv_cache_quant_algo = 'NVFP4': Input should be 'FP8'",
        ),
        (
            of_config(**NVFP4, kv_cache_scheme={"num_bits": 4, "type": "float"}),
            "kv_cache_scheme.num_bits = 4: Input should be 8",
        ),
        (of_file(quant_algo="W4A8_AWQ"), "quantization.quant_algo = 'W4A8_AWQ': Input should be"),
        (of_config(quant_algo="NVFP4_SVD"), "quant_algo = 'NVFP4_SVD': Input should be 'FP8', "),
        (of_file(quant_algo="W4A16_AWQ"), "W4A16_AWQ needs group_size, which hf_quant_config.json"),
        (of_config(quant_algo="W4A16_AWQ"), "W4A16_AWQ needs group_size, which hf_quant_config.j"),
        (of_file(**{**AWQ, "group_size": 0}), "group_size 0 must be positive"),
        (of_file(**{**AWQ, "has_zero_point": True}), "quantization.has_zero_point = True"),
        (
            of_file(
                quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A16_AWQ"}}
            ),
            "quantization.quantized_layers.a",
        ),
        (
            of_config(**{**AWQ, "group_size": 64}, quantization=AWQ),
            "group_size 64 of config.json contradicts group_size 128",
        ),
        (of_file(), "quantization.quant_algo = missing"),
        (of_config(ignore=[]), "neither config.json nor hf_quant_config.json says quant_algo"),
        (of_file(quant_algo="NVFP4", group_size=32), "group_size 32 does not go with NVFP4"),
        (of_file(quant_algo="FP8", group_size=128), "group_size 128 does not go with FP8"),
        (
            of_file(**NVFP4, pre_quant_scale=True),
            "pre_quant_scale does not go with NVFP4, but with NVFP4_AWQ, W4A16_AWQ",
        ),
        (of_file(**NVFP4, lora_rank=8), "quantization.lora_rank = 8"),
        (of_file(quant_algo="MIXED_PRECISION"), "quantized_layers goes with quant_algo"),
        (
            of_file(**NVFP4, quantized_layers={"a": {"quant_algo": "FP8"}}),
            "quantized_layers goes with quant_algo 'MIXED_PRECISION' and no other",
        ),
        (
            of_file(quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W8A8"}}),
            "quantized_layers.a.quant_algo = 'W8A8'",
        ),
        (
            of_config(quant_algo="FP8", config_groups={"g": group(NUMBERS_OF_NVFP4, "Linear")}),
            "config_groups has weights of 4 bits (float) and group_size 16, but FP8 has 8 (float)",
        ),
        (
            of_config(
                quant_algo="MIXED_PRECISION",
                quantized_layers={"a": {"quant_algo": "FP8"}},
                config_groups={"g": group(NUMBERS_OF_NVFP4, "a")},
            ),
            "config_groups has weights of 4 bits",
        ),
    ],
)
def test_unsupported_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelOpt.parse(settings)
    assert message in str(caught.value)
    assert "Supported: quant_algo FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO" in str(caught.value)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="quant_algorithm") as caught:
        ModelOpt.parse(of_config(**NVFP4, quant_algorithm="NVFP4"))
    assert caught.value.known[0] == "quant_algo"
