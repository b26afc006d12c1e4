"""Tables of rotary angles against those of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import (
    apply_rotary_pos_emb as apply_partial_rotary_pos_emb,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from interposer.errors import ConfigError, UnknownNameError
from interposer_ops.rotary import ROPE_TYPES, rotary_embedding, rotary_frequencies, rotary_table

HEAD_SIZE = 64
POSITIONS = 512
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5},
    "yarn, factor below one": {**YARN, "factor": 0.5},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
}
HEADS = {
    "query": torch.randn(POSITIONS, 4, HEAD_SIZE, generator=torch.Generator().manual_seed(0)),
    "key": torch.randn(POSITIONS, 2, HEAD_SIZE, generator=torch.Generator().manual_seed(1)),
}


def rotated(rotary_size: int, theta: float, scaling: dict[str, Any] | None) -> torch.Tensor:
    cos, sin = rotary_table(POSITIONS, rotary_size, theta, scaling)
    assert cos.shape == sin.shape == (POSITIONS, rotary_size // 2)
    assert cos.dtype == sin.dtype == torch.float32
    return torch.cat(rotary_embedding(HEADS["query"], HEADS["key"], cos, sin), dim=1)


def rotated_by_transformers(embedding: Any, apply: Any) -> torch.Tensor:
    cos, sin = embedding(HEADS["query"], torch.arange(POSITIONS)[None])
    query, key = (HEADS[name].transpose(0, 1)[None] for name in ("query", "key"))
    both = apply(query, key, cos, sin)
    return torch.cat([heads[0].transpose(0, 1) for heads in both], dim=1)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_rotation_equals_transformers(scaling: dict[str, Any], theta: float) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        head_dim=HEAD_SIZE,
        max_position_embeddings=POSITIONS,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    expected = rotated_by_transformers(LlamaRotaryEmbedding(config), apply_rotary_pos_emb)
    # An angle of 512 has a float32 rounding of 3e-5.
    torch.testing.assert_close(rotated(HEAD_SIZE, theta, scaling), expected, rtol=0, atol=5e-4)


def test_partial_rotation_equals_transformers() -> None:
    config = GPTNeoXConfig(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    )
    embedding = GPTNeoXRotaryEmbedding(config)
    expected = rotated_by_transformers(embedding, apply_partial_rotary_pos_emb)
    actual = rotated(HEAD_SIZE // 4, 10000.0, None)
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-4)


def test_no_scaling_is_the_default() -> None:
    for plain, named in zip(
        rotary_table(9, 8, 10000.0), rotary_table(9, 8, 10000.0, SCALINGS["default"]), strict=True
    ):
        assert torch.equal(plain, named)


def test_the_older_name_of_the_type_is_known() -> None:
    frequencies, magnitude = rotary_frequencies(8, 10000.0, {"type": "linear", "factor": 2.0})
    assert torch.equal(frequencies, rotary_frequencies(8, 10000.0)[0] / 2)
    assert magnitude == 1.0


def test_the_slowest_angle_turns_once_in_a_wavelength() -> None:
    frequencies, _ = rotary_frequencies(4, 100.0)
    assert frequencies.tolist() == pytest.approx([1.0, 0.1])
    cos, sin = rotary_table(3, 4, 100.0)
    assert cos[2].tolist() == pytest.approx([math.cos(2), math.cos(0.2)])
    assert sin[0].tolist() == [0.0, 0.0]


def test_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError) as raised:
        rotary_frequencies(8, 10000.0, {"rope_type": "yarm"})
    assert raised.value.known[0] == "yarn"
    assert set(raised.value.known) == set(ROPE_TYPES)


@pytest.mark.parametrize(("scaling", "missing"), [(LLAMA3, "low_freq_factor"), (YARN, "factor")])
def test_a_missing_parameter_is_named(scaling: dict[str, Any], missing: str) -> None:
    incomplete = {name: value for name, value in scaling.items() if name != missing}
    with pytest.raises(ConfigError, match=missing):
        rotary_frequencies(8, 10000.0, incomplete)


@pytest.mark.parametrize("size", [0, 7, -2])
def test_the_size_must_be_positive_and_even(size: int) -> None:
    with pytest.raises(ConfigError, match=str(size)):
        rotary_frequencies(size, 10000.0)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(HEAD_SIZE // 2)],
    "long_factor": [1.0 + 0.5 * i for i in range(HEAD_SIZE // 2)],
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize("num_positions", [None, 1, 128, 129, 512])
@pytest.mark.parametrize(
    "options", [{"factor": 32.0}, {"factor": 0.5}, {"factor": 2.0, "attention_factor": 1.3}, {}]
)
def test_longrope_equals_transformers(num_positions: int | None, options: dict[str, float]) -> None:
    config = LlamaConfig(
        hidden_size=4 * HEAD_SIZE,
        num_attention_heads=4,
        head_dim=HEAD_SIZE,
        max_position_embeddings=POSITIONS,
        rope_parameters={**LONGROPE, **options, "rope_theta": 10000.0},
    )
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=num_positions)
    scaling = {**LONGROPE, **options, "max_position_embeddings": POSITIONS}
    actual, magnitude = rotary_frequencies(HEAD_SIZE, 10000.0, scaling, num_positions)
    torch.testing.assert_close(actual, expected)
    assert magnitude == pytest.approx(factor)


def test_all_positions_of_a_table_use_one_set_of_factors() -> None:
    scaling = {**LONGROPE, "factor": 4.0}
    long, _ = rotary_frequencies(HEAD_SIZE, 10000.0, scaling, 129)
    cos, _ = rotary_table(129, HEAD_SIZE, 10000.0, scaling)
    magnitude = math.sqrt(1 + math.log(4) / math.log(128))
    torch.testing.assert_close(cos[1], long.cos() * magnitude)
    short, _ = rotary_table(128, HEAD_SIZE, 10000.0, scaling)
    assert not torch.equal(short, cos[:128])


@pytest.mark.parametrize("factors", [[1.0], None, "1.0", [0.0] * (HEAD_SIZE // 2)])
def test_factors_must_be_as_many_positive_numbers_as_frequencies(factors: Any) -> None:
    with pytest.raises(ConfigError, match="short_factor"):
        rotary_frequencies(HEAD_SIZE, 10000.0, {**LONGROPE, "factor": 2.0, "short_factor": factors})
