"""What a step draws by is carried on from the one before, and is what it would be if built anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.conftest import CONFIGS, write_checkpoint
from tests.landing import num_examples

from interposer_engine import LanguageModel, SamplingParams, _sampling, _sampling_params, load
from interposer_engine._sampling import (
    RequestEdits,
    SamplingState,
    penalties_of,
    sampling_batch,
)
from interposer_engine._sampling_fields import LogitEdit
from interposer_engine._sequence import TokenSequence
from interposer_ops.layers.sampler import SamplingBatch
from interposer_ops.sampling import mask_min_p

VOCAB_SIZE = 30
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_k": 5},
    {"repetition_penalty": 1.3},
    {"temperature": 1.2, "min_p": 0.1, "presence_penalty": 0.5},
    {"frequency_penalty": 1.0, "min_tokens": 3},
)
tokens = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[list[int], list[list[int]]]]:
    """Draw steps: which of six sequences draw in them, and how many tokens each gets before."""
    return draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True),
                st.lists(st.lists(tokens, max_size=2), min_size=6, max_size=6),
            ),
            min_size=1,
            max_size=8,
        )
    )


@settings(max_examples=num_examples(150), deadline=None)
@given(
    kinds=st.lists(st.sampled_from(PARAMS), min_size=6, max_size=6),
    prompts=st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=6, max_size=6),
    steps=schedules(),
)
def test_any_schedule_gives_the_batches_of_a_new_state(
    kinds: list[dict[str, Any]],
    prompts: list[list[int]],
    steps: list[tuple[list[int], list[list[int]]]],
) -> None:
    sequences = [
        TokenSequence(number, prompt, SamplingParams(**kind), seed=number)
        for number, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]
    state = SamplingState(VOCAB_SIZE, "cpu")
    for drawing, new in steps:
        for sequence, more in zip(sequences, new, strict=True):
            sequence.output += more
        chosen = [sequences[number] for number in drawing]
        if all(sequence.params.takes_likeliest for sequence in chosen):
            continue  # they need no parameters
        expected = sampling_batch(chosen, VOCAB_SIZE, "cpu")
        actual = state.batch(chosen)
        if any(sequence.params.is_penalised for sequence in chosen):
            held = penalties_of(chosen, VOCAB_SIZE, "cpu")
            assert actual.penalties is not None
            assert torch.equal(actual.penalties.output_counts, held.output_counts)
            assert torch.equal(actual.penalties.prompt_mask, held.prompt_mask)
            assert torch.equal(actual.penalties.repetition, held.repetition)
            assert torch.equal(actual.penalties.presence, held.presence)
            assert torch.equal(actual.penalties.frequency, held.frequency)
        else:
            assert actual.penalties is None
        for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "steps"):
            one, other = getattr(actual, name), getattr(expected, name)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(CONFIGS["llama"](), path)
    return load(path, "float32", platform="cpu", cache_tokens=2048)


def test_steps_of_the_same_requests_write_no_parameter_anew(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingBatch] = []
    forward = lm.engine.sampler.forward

    def noted(logits: torch.Tensor, batch: SamplingBatch) -> Any:
        seen.append(batch)
        return forward(logits, batch)

    monkeypatch.setattr(lm.engine.sampler, "forward", noted)
    common: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "seed": 1}
    params = [
        SamplingParams(max_new_tokens=4, **common),
        SamplingParams(max_new_tokens=8, presence_penalty=1.0, **common),
    ]
    lm.generate([[1, 2], [3]], params)
    assert len(seen) == 8
    assert len({id(batch) for batch in seen}) == 2  # both run, then one of them
    assert seen[-1].steps.tolist() == [7]


def test_a_field_with_an_edit_op_edits_the_rows_that_differ_from_its_default(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def marked(kind: type[Any]) -> dict[str, Any]:
        return {"min_p": LogitEdit("mask_min_p")} if kind is LogitEdit else {}

    for module in (_sampling, _sampling_params):
        monkeypatch.setattr(module, "marked_fields", marked)
    vocab_size = lm.engine.model.config.vocab_size
    edits = RequestEdits(lm.engine.sampler, vocab_size, frozenset(), "cpu")
    params = [SamplingParams(), SamplingParams(min_p=0.5)]
    assert [p.takes_logits_alone for p in params] == [True, False]
    for each in params:
        edits.prepare(each, None)
    sequences = [TokenSequence(row, [1], p, seed=0) for row, p in enumerate(params)]
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(0))
    edited = edits.edit(sequences, logits, SamplingBatch.greedy(2, "cpu"), None)
    assert torch.equal(edited, mask_min_p(logits, torch.tensor([0.0, 0.5])))
    assert torch.equal(edited[0], logits[0])
    assert edited[1].isinf().any()
