"""Latent attention by keys and values of every head, against the same with projections absorbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.tests.conftest import example, write_checkpoint

from interposer import Config, Resolver, Site, current_registry, place
from interposer_models import load
from interposer_models._decoder import expanded_attention
from interposer_models._decoder.expanded_attention import ExpandedAttention, pieces_of
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
def always(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Expand whatever the lengths are, 40 tokens of the cache at a time; note how often."""
    calls: list[int] = []
    plain = ExpandedAttention.__call__

    def noted(self: ExpandedAttention, query: torch.Tensor, *given: Any) -> torch.Tensor:
        calls.append(len(query))
        return plain(self, query, *given)

    monkeypatch.setattr(ExpandedAttention, "__call__", noted)
    monkeypatch.setattr(ExpandedAttention, "pays", lambda self, batch: True)
    monkeypatch.setattr(expanded_attention, "_PIECE_TOKENS", 40)
    return calls


@pytest.mark.parametrize("step_tokens", [512, 48])
def test_both_forms_give_the_same(
    model: Path, always: list[int], monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    """Prompts at once and in chunks behind others, beside decodes, in a batch and alone."""
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (130, 1, 57)]
    options: dict[str, Any] = {"dtype": "float32", "cache_tokens": 2048}
    lm = load(model, **options, max_step_tokens=step_tokens)
    expanded = [each.token_ids for each in lm.generate(prompts, max_new_tokens=8, ignore_eos=True)]
    logits = lm.logits(prompts[0])
    assert always
    monkeypatch.setattr(ExpandedAttention, "pays", lambda self, batch: False)
    count = len(always)
    plain = load(model, **options)
    absorbed = [
        each.token_ids for each in plain.generate(prompts, max_new_tokens=8, ignore_eos=True)
    ]
    assert expanded == absorbed
    assert len(always) == count
    torch.testing.assert_close(logits, plain.logits(prompts[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("starts", "lengths", "pays"),
    [
        ([0], [2048], True),
        ([0], [1024], True),
        ([0], [200], False),  # shorter than any that pays
        ([0], [512], False),  # a product of large matrices for few readers
        ([8192], [2048], True),
        ([8192], [64], False),
        ([0, 6000, 6000, 6000], [1024, 1, 1, 1], False),  # a chunk beside decodes
        ([0, 0], [2048, 1], True),
    ],
)
def test_it_is_chosen_where_many_tokens_read_what_is_made(
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


def test_pieces_hold_each_earlier_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded_attention, "_PIECE_TOKENS", 24)
    starts, lengths = [37, 0, 8], [2, 5, 1]
    tables = [torch.tensor([9, 3, 11]), torch.tensor([1]), torch.tensor([7])]
    pieces = pieces_of(paged_batch(tables, starts, lengths, 16), 16)
    found: list[list[int]] = [[], [], []]
    for piece in pieces:
        parts = piece.slots.split(piece.starts.diff().tolist())
        assert piece.longest == max(len(part) for part in parts)
        for own, part in zip(found, parts, strict=True):
            own += part.tolist()
    assert found[0] == [*range(144, 160), *range(48, 64), *range(176, 181)]
    assert found[1:] == [[], [*range(112, 120)]]
    assert len(pieces) == 3
