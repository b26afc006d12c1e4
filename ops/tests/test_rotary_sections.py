"""Rotation by three positions against the models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb as apply_halves
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from interposer_ops.rotary import multimodal_rotary_embedding, rotary_embedding, rotary_tables

TOKENS = 11
POSITIONS = torch.randint(0, 60, (3, TOKENS), generator=torch.Generator().manual_seed(0))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tables(half: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    cos, sin = rotary_tables(POSITIONS.flatten(), frequencies, 1.0)
    return cos.view(3, TOKENS, half), sin.view(3, TOKENS, half)


@pytest.mark.parametrize(
    ("config", "embedding", "sections", "interleaved"),
    [
        (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, [16, 24, 24], False),
        (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, [5, 2, 1], False),
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, [24, 20, 20], True),
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, [4, 2, 2], True),
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, [7, 1, 3], True),
    ],
)
def test_rotation_is_that_of_the_models(
    config: Any, embedding: Any, sections: list[int], interleaved: bool
) -> None:
    half = sum(sections)
    settings = config(
        hidden_size=8 * half,
        num_attention_heads=4,
        head_dim=2 * half,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": sections,
        },
    )
    query, key = numbers(TOKENS, 4, 2 * half), numbers(TOKENS, 2, 2 * half, seed=1)
    cos, sin = embedding(settings)(query, POSITIONS[:, None])
    theirs = apply_halves(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    ours = multimodal_rotary_embedding(query, key, *tables(half), sections, interleaved)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_text_turns_as_it_does_without_sections(interleaved: bool) -> None:
    query, key = numbers(TOKENS, 3, 20), numbers(TOKENS, 1, 20, seed=1)
    cos, sin = (table[:1].expand(3, -1, -1) for table in tables(9))
    found = multimodal_rotary_embedding(query, key, cos, sin, [3, 3, 3], interleaved)
    expected = rotary_embedding(query, key, cos[0], sin[0])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
