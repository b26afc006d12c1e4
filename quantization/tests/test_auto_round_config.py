"""Settings of auto-round mean what its own reader takes them for; the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from interposer.errors import ConfigError, UnknownNameError
from interposer_quantization._auto_round.config import Settings, Stored
from interposer_quantization._auto_round.scheme import INC, AutoRound
from interposer_quantization._awq import config as awq_config
from interposer_quantization._gptq import config as gptq_config

PLAIN: dict[str, Any] = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
}
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"
GPTQ = gptq_config.Weights(4, 128, symmetric=True, ordered=True, zeros_minus_one=True)
OF_8_BITS = gptq_config.Weights(8, 128, symmetric=True, ordered=True, zeros_minus_one=True)


def stored(name: str, **settings: Any) -> Stored | None:
    return Settings.parse({**PLAIN, **settings}).stored(name)


@pytest.mark.parametrize(
    ("form", "zeros_minus_one"),
    [
        ("auto", True),
        ("auto_gptq", True),
        ("auto_round:gptq", True),
        ("auto_round:auto_gptq", True),
        ("auto_round:gptqmodel", False),
        ("auto_round", False),
    ],
)
def test_packing_format_decides_if_zero_points_are_stored_minus_one(
    form: str, zeros_minus_one: bool
) -> None:
    expected = gptq_config.Weights(
        4, 128, symmetric=True, ordered=True, zeros_minus_one=zeros_minus_one
    )
    assert stored(Q, packing_format=form) == expected


@pytest.mark.parametrize("form", ["auto_awq", "auto_round:awq", "auto_round:auto_awq"])
def test_awq_packing_is_read(form: str) -> None:
    assert stored(Q, packing_format=form, group_size=-1, sym=False) == awq_config.Weights(
        None, symmetric=False
    )


@pytest.mark.parametrize(
    ("rules", "q", "down"),
    [
        ({Q: {"bits": 8}}, OF_8_BITS, GPTQ),
        ({DOWN: {"bits": 16, "data_type": "fp"}}, GPTQ, None),
        ({".*q_proj.*": {"bits": 8}}, OF_8_BITS, GPTQ),
        # It need not match from the start.
        ({r"layers\.[0-2]\.mlp": {"bits": 8}}, GPTQ, OF_8_BITS),
        # The first one that matches, unless the layer is named.
        ({".*proj": {"bits": 8}, ".*q_proj": {"bits": 16}}, OF_8_BITS, OF_8_BITS),
        ({".*proj": {"bits": 16}, Q: {"bits": 8}}, OF_8_BITS, None),
        # A name is a whole one, and what it leaves out holds as for all.
        ({"model.layers.1.self_attn.q": {"bits": 8}}, GPTQ, GPTQ),
        ({Q: {"bits": 8, "group_size": None, "sym": None}}, OF_8_BITS, GPTQ),
    ],
)
def test_extra_config_overrides_settings_of_some_layers(
    rules: dict[str, Any], q: Stored | None, down: Stored | None
) -> None:
    assert (stored(Q, extra_config=rules), stored(DOWN, extra_config=rules)) == (q, down)


@pytest.mark.parametrize(
    "blocks", ["model.layers.0,model.layers.1.self", ["model.layers.1.self"], [["a"], [Q]]]
)
def test_layers_outside_the_blocks_stay_plain_unless_named(blocks: Any) -> None:
    for name in ("block_name_to_quantize", "to_quant_block_names"):
        assert stored(Q, **{name: blocks}) == GPTQ
        assert stored(DOWN, **{name: blocks}) is None
        rules = {DOWN: {"bits": 8}}
        assert stored(DOWN, **{name: blocks}, extra_config=rules) == OF_8_BITS


def test_excluded_layers_stay_plain() -> None:
    settings = {"modules_to_not_convert": [r"q_pro.$"], "extra_config": {Q: {"bits": 8}}}
    assert stored(Q, **settings) is None
    assert stored(DOWN, **settings) == GPTQ


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 2}, "bits = 2: Input should be 4 or 8"),
        ({"bits": 3}, "bits = 3: "),
        ({"data_type": "mx_fp"}, "data_type = 'mx_fp'"),
        ({"packing_format": "auto_round:fp8_static"}, "packing_format = 'auto_round:fp8_static'"),
        ({"group_size": 0}, "group_size = 0: must be positive, or -1"),
        ({"act_bits": 8}, "act_bits = 8"),
        ({"static_kv_dtype": "fp8"}, "static_kv_dtype = 'fp8'"),
        ({"extra_config": {Q: {"bits": 3}}}, f"extra_config.{Q}.bits = 3"),
        ({"extra_config": {"(": {"bits": 4}}}, "not a regular expression"),
        ({"extra_config": {Q: {"width": 4}}}, f"extra_config.{Q}.width = 4"),
        ({"extra_config": {Q: {"data_type": "nv_fp"}}}, "data_type 'nv_fp' is not read"),
        (
            {"bits": 8, "packing_format": "auto_round:auto_awq"},
            "packing_format 'auto_round:auto_awq' has 4 bits, not 8",
        ),
        (
            {"packing_format": "auto_round:auto_awq", "extra_config": {Q: {"bits": 8}}},
            f"has 4 bits, not 8 of '{Q}'",
        ),
    ],
)
def test_unsupported_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AutoRound.parse({**PLAIN, **settings})
    assert message in str(caught.value)
    assert "Supported: bits 4 or 8, by layer" in str(caught.value)


def test_calibration_settings_are_ignored_and_unknown_ones_refused() -> None:
    with pytest.raises(UnknownNameError, match="group_sise") as caught:
        INC.parse({**PLAIN, "quant_method": "inc", "group_sise": 64})
    assert caught.value.known[0] == "group_size"
    searched = {"iters": 200, "autoround_version": "0.16.0", "enable_quanted_input": False}
    assert isinstance(INC.parse({**PLAIN, "quant_method": "inc", **searched}), INC)


def test_missing_packing_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="packing_format = missing"):
        AutoRound.parse({k: v for k, v in PLAIN.items() if k != "packing_format"})
