"""Fields of quantization_config are read as transformers means them, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from interposer.errors import ConfigError, UnknownNameError
from interposer_nf4._bitsandbytes import BitsAndBytes
from interposer_nf4._codebooks import QuantType
from interposer_nf4._eight_bit import EightBitLinear
from interposer_nf4._examples import bitsandbytes_examples
from interposer_nf4._four_bit import FourBitLinear
from interposer_nf4._settings import EightBit, FourBit, Settings

FOUR: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
EIGHT: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
NAME = "model.layers.11.mlp.gate_proj"


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_settings_that_transformers_writes_are_read(quant_type: QuantType, double: bool) -> None:
    written = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.float32,
    ).to_dict()
    assert Settings.parse(written).weights(NAME) == FourBit(quant_type, double)
    written = BitsAndBytesConfig(load_in_8bit=True).to_dict()
    assert Settings.parse(written).weights(NAME) == EightBit()


def test_defaults_equal_transformers() -> None:
    assert Settings.parse(FOUR).weights(NAME) == FourBit("fp4", False)
    assert BitsAndBytesConfig(load_in_4bit=True).bnb_4bit_quant_type == "fp4"


@pytest.mark.parametrize(
    "skipped",
    [
        None,
        [],
        ["lm_head"],
        ["gate_proj"],
        ["model.layers.1"],
        ["model.layers.11"],
        [r"model\.layers\.\d+\.mlp"],
        ["model.layers.11.mlp.gate"],
        ["mlp"],
        ["a|model"],
        ["proj"],
    ],
)
def test_skipped_modules_match_as_in_transformers(skipped: list[str] | None) -> None:
    settings = Settings.parse({**FOUR, "llm_int8_skip_modules": skipped})
    for name in (NAME, "model.layers.1.self_attn.q_proj"):
        assert (settings.weights(name) is not None) == should_convert_module(name, skipped)


def test_head_is_plain_unless_modules_are_listed() -> None:
    assert Settings.parse(FOUR).weights("lm_head") is None
    assert Settings.parse({**FOUR, "llm_int8_skip_modules": []}).weights("lm_head") is not None


REFUSED = {
    "both widths": ({**FOUR, "load_in_8bit": True}, "both of load_in_4bit and load_in_8bit"),
    "no width": ({"quant_method": "bitsandbytes"}, "neither of load_in_4bit and load_in_8bit"),
    "another type": ({**FOUR, "bnb_4bit_quant_type": "nf2"}, "bnb_4bit_quant_type = 'nf2'"),
    "no flag": ({**FOUR, "bnb_4bit_use_double_quant": "yes"}, "bnb_4bit_use_double_quant = 'yes'"),
    "no dtype": ({**FOUR, "bnb_4bit_compute_dtype": "int4"}, "bnb_4bit_compute_dtype = 'int4'"),
    "no storage": ({**FOUR, "bnb_4bit_quant_storage": "int3"}, "bnb_4bit_quant_storage = 'int3'"),
    "no list": ({**FOUR, "llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules = 'lm_head'"),
    "no pattern": ({**FOUR, "llm_int8_skip_modules": ["("]}, "not a regular expression"),
    "wide weights": ({**EIGHT, "llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight = Tr"),
    "two answers": (
        {**FOUR, "_load_in_4bit": False},
        "load_in_4bit is True and that _load_in",
    ),
    "another method": ({**FOUR, "quant_method": "bnb"}, "quant_method = 'bnb'"),
}


@pytest.mark.parametrize(("settings", "text"), REFUSED.values(), ids=list(REFUSED))
def test_settings_are_refused_with_a_reason(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BitsAndBytes.parse(settings)
    assert text in str(caught.value)
    assert "Try: " in str(caught.value)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"'bnb_4bit_blocksize' in quantization_config"):
        BitsAndBytes.parse({**FOUR, "bnb_4bit_blocksize": 128})


def test_skipping_only_some_fused_layers_is_refused() -> None:
    scheme = BitsAndBytes.parse({**FOUR, "llm_int8_skip_modules": ["q_proj"]})
    parts = ("q_proj", "k_proj", "v_proj")
    with pytest.raises(ConfigError) as caught:
        scheme.linear_method("model.layers.0.self_attn.qkv_proj", parts)
    for line in (
        "  model.layers.0.self_attn.q_proj: not quantized",
        "  model.layers.0.self_attn.k_proj: fp4",
        "Try: name all of them in llm_int8_skip_modules when quantizing, or none",
    ):
        assert line in str(caught.value).splitlines()


def test_every_example_quantizes() -> None:
    examples = bitsandbytes_examples()
    methods = {
        label: type(BitsAndBytes.parse(settings).linear_method(NAME, ("gate_proj",)))
        for label, settings in examples.items()
    }
    assert methods == {
        label: EightBitLinear if label == "int8" else FourBitLinear for label in examples
    }
