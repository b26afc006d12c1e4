"""Latent attention with expanded keys and values, compared with absorbed projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.conftest import example, write_checkpoint

from interposer import Config, Resolver, Site, current_registry, place
from interposer_engine import load
from interposer_models._decoder import attention as expanded_attention
from interposer_models._decoder.attention import ExpandedAttention, cached_chunks
from interposer_models._families import examples
from interposer_testing import attention_specs
from interposer_testing.workload import paged_batch

SPEC = next(spec for _, spec in attention_specs(quick=True) if spec.latent)


@pytest.fixture(scope="module", params=["groups", "one"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deepseek") / "model"
    write_checkpoint(example(examples.deepseek_v3, request.param), path)
    return path


@pytest.fixture
def expansion_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Always expand, 40 cached tokens at a time, and record the query lengths of the calls."""
    calls: list[int] = []
    original = ExpandedAttention.__call__

    def recording_call(
        self: ExpandedAttention, query: torch.Tensor, *arguments: Any
    ) -> torch.Tensor:
        calls.append(len(query))
        return original(self, query, *arguments)

    monkeypatch.setattr(ExpandedAttention, "__call__", recording_call)
    monkeypatch.setattr(ExpandedAttention, "pays", lambda self, batch: True)
    monkeypatch.setattr(expanded_attention, "_CHUNK_TOKENS", 40)
    return calls


@pytest.mark.landing(1)
@pytest.mark.parametrize("step_tokens", [512, 48])
def test_expanded_and_absorbed_attention_agree(
    model: Path, expansion_calls: list[int], monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    """Run prompts at once and in chunks, with decodes in the same step, as a batch and alone."""
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (130, 1, 57)]
    options: dict[str, Any] = {"dtype": "float32", "cache_tokens": 2048}
    lm = load(model, **options, max_step_tokens=step_tokens)
    expanded = [
        completion.token_ids
        for completion in lm.generate(prompts, max_new_tokens=8, ignore_eos=True)
    ]
    logits = lm.logits(prompts[0])
    assert expansion_calls
    monkeypatch.setattr(ExpandedAttention, "pays", lambda self, batch: False)
    count = len(expansion_calls)
    plain = load(model, **options)
    absorbed = [
        completion.token_ids
        for completion in plain.generate(prompts, max_new_tokens=8, ignore_eos=True)
    ]
    assert expanded == absorbed
    assert len(expansion_calls) == count
    torch.testing.assert_close(logits, plain.logits(prompts[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.landing(4)
@pytest.mark.parametrize(
    ("starts", "lengths", "pays"),
    [
        ([0], [2048], True),
        ([0], [1024], True),
        ([0], [200], False),  # too short to pay off
        ([0], [512], False),  # the expansion costs more than its few query tokens save
        ([8192], [2048], True),
        ([8192], [64], False),
        ([0, 6000, 6000, 6000], [1024, 1, 1, 1], False),  # a prefill chunk and decode tokens
        ([0, 0], [2048, 1], True),
    ],
)
def test_expansion_is_chosen_if_many_tokens_read_the_cache(
    starts: list[int], lengths: list[int], pays: bool
) -> None:
    """The sizes are those of DeepSeek-V2-Lite."""
    spec = next(
        spec for label, spec in attention_specs() if label.startswith("latent 512+64 page 16")
    )
    resolver = Resolver(current_registry(), place().device, Config())
    attention = ExpandedAttention(Site(resolver, "attn", spec.dtype), spec, 128, 128)
    tables = [torch.arange(-(-(a + b) // 16)) for a, b in zip(starts, lengths, strict=True)]
    assert attention.pays(paged_batch(tables, starts, lengths, 16)) is pays


def test_chunks_contain_each_cached_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded_attention, "_CHUNK_TOKENS", 24)
    starts, lengths = [37, 0, 8], [2, 5, 1]
    tables = [torch.tensor([9, 3, 11]), torch.tensor([1]), torch.tensor([7])]
    chunks = cached_chunks(paged_batch(tables, starts, lengths, 16), 16)
    positions: list[list[int]] = [[], [], []]
    for chunk in chunks:
        parts = chunk.slots.split(chunk.starts.diff().tolist())
        assert chunk.longest == max(len(part) for part in parts)
        for sequence_positions, part in zip(positions, parts, strict=True):
            sequence_positions += part.tolist()
    assert positions[0] == [*range(144, 160), *range(48, 64), *range(176, 181)]
    assert positions[1:] == [[], [*range(112, 120)]]
    assert len(chunks) == 3
