"""Prompts that begin alike share pages: equal tokens, fewer of them computed, nothing leaked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.tests.conftest import example, write_checkpoint

from interposer.errors import ConfigError
from interposer_models import LanguageModel, SamplingParams, load
from interposer_models._engine.prefix_pages import PrefixPool
from interposer_models._engine.sequence import Sequence
from interposer_models._families import examples

PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prefixes") / "model"
    write_checkpoint(example(examples.olmo2, "grouped"), path)
    return path


def shared(path: Path, **options: Any) -> LanguageModel:
    return load(path, dtype="float32", **{"cache_tokens": 1024, "prefix_cache": True, **options})


@pytest.fixture(scope="module")
def plain(model: Path) -> LanguageModel:
    return load(model, dtype="float32", cache_tokens=2048)


def tokens(count: int, seed: int) -> list[int]:
    return [random.Random(f"{seed} {place}").randrange(256) for place in range(count)]


def test_a_common_beginning_is_computed_once(
    model: Path, plain: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, computed = shared(model), []
    forward = lm.engine.runner.forward

    def noted(batch: Any, *given: Any) -> torch.Tensor:
        computed.append(len(batch.token_ids))
        return forward(batch, *given)

    monkeypatch.setattr(lm.engine.runner, "forward", noted)
    first, second = tokens(200, 1), tokens(200, 1)[:180] + tokens(7, 2)
    for prompt, count in ((first, 200), (second, 187 - 176), (first, 200 - 192)):
        computed.clear()
        (done,) = lm.generate([prompt], max_new_tokens=5, ignore_eos=True)
        assert computed == [count, 1, 1, 1, 1]
        (wanted,) = plain.generate([prompt], max_new_tokens=5, ignore_eos=True)
        assert done.token_ids == wanted.token_ids
    assert lm.engine.prefixes is not None
    assert lm.engine.prefixes.shared_tokens == 176 + 192
    assert str(lm.engine.prefixes) == (
        "368 of 587 prompt tokens were in the cache (62.7%), 0 pages were given up"
    )
    assert plain.engine.prefixes is None


def test_answers_are_beginnings_too(model: Path, plain: LanguageModel) -> None:
    """As those of a conversation, whose next prompt holds the answer before."""
    lm, prompt = shared(model), tokens(30, 3)
    (answer,) = lm.generate([prompt], max_new_tokens=40, ignore_eos=True)
    again = [*prompt, *answer.token_ids, 5, 6]
    done = lm.generate([again], max_new_tokens=8, ignore_eos=True)
    assert (
        done[0].token_ids == plain.generate([again], max_new_tokens=8, ignore_eos=True)[0].token_ids
    )
    assert lm.engine.prefixes is not None
    # The last token of the answer was never computed.
    assert lm.engine.prefixes.shared_tokens == (30 + 40 - 1) // PAGE * PAGE


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_schedule_gives_the_tokens_of_a_plain_engine(
    model: Path, plain: LanguageModel, data: st.DataObject
) -> None:
    """Joins, leaves and preemption, in a cache that is too small for all of them."""
    room = data.draw(st.sampled_from([96, 160, 512]))
    step = data.draw(st.sampled_from([7, 64]))
    lm = shared(model, cache_tokens=room, max_step_tokens=step, max_sequences=4)
    engine, running = lm.engine, []
    for _ in range(data.draw(st.integers(1, 8))):
        seed, count = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 60))
        more = data.draw(st.integers(1, 20))
        params = SamplingParams(max_new_tokens=more, ignore_eos=True)
        running.append(engine.add(tokens(count, seed), params))
        for _ in range(data.draw(st.integers(0, 12))):
            engine.step()
        if data.draw(st.booleans()):
            engine.cancel(running[data.draw(st.integers(0, len(running) - 1))])
    while engine.busy:
        engine.step()
    assert engine.pool.num_free == engine.pool.num_pages
    for sequence in running:
        (wanted,) = plain.generate(
            [sequence.prompt], max_new_tokens=sequence.params.max_new_tokens, ignore_eos=True
        )
        assert sequence.output == list(wanted.token_ids)[: len(sequence.output)]
        assert sequence.finish_reason == "cancelled" or len(sequence.output) == len(
            wanted.token_ids
        )


def test_pages_are_given_up_for_others_the_oldest_and_last_first() -> None:
    pool = PrefixPool(6, PAGE)

    def run(seed: int, count: int) -> Sequence:
        sequence = Sequence(seed, tokens(count, seed), SamplingParams(), 0)
        pool.join(sequence)
        assert pool.extend(sequence.pages[0], count)
        first, sequence.num_computed = sequence.num_computed, count
        pool.learn(sequence, first)
        return sequence

    old, new = run(1, 33), run(2, 17)  # three pages, two of them whole, and two with one
    for sequence in (old, new):
        pool.release(sequence.pages[0])
    assert pool.num_free == 6
    other = run(3, 64)  # four pages: three that hold nothing, and the last whole one of the old
    assert pool.statistics.evicted_pages == 1
    pool.release(other.pages[0])
    assert run(1, 33).num_shared == PAGE  # it takes two more pages, one of them that of the new
    assert pool.statistics.evicted_pages == 3
    assert run(2, 17).num_shared == 0


def test_new_weights_forget(model: Path) -> None:
    lm, prompt = shared(model), tokens(64, 4)
    lm.generate([prompt], max_new_tokens=2)
    name = "model.norm.weight"
    lm.update_weights({name: 2 * torch.ones(64)})
    lm.generate([prompt], max_new_tokens=2)
    assert lm.engine.prefixes is not None
    assert lm.engine.prefixes.shared_tokens == 0
    lm.generate([prompt], max_new_tokens=2)
    assert lm.engine.prefixes.shared_tokens == 48


def test_an_adapter_has_beginnings_of_its_own() -> None:
    pool = PrefixPool(8, PAGE)
    found = []
    for adapter in (None, 0, 1, 0):
        sequence = Sequence(0, tokens(40, 1), SamplingParams(), 0, adapter=adapter)
        pool.join(sequence)
        found.append(sequence.num_shared)
        assert pool.extend(sequence.pages[0], 40)
        sequence.num_computed = 40
        pool.learn(sequence, 0)
        pool.release(sequence.pages[0])
    assert found[:3] == [0, 0, 0]
    assert found[3] > 0


@pytest.mark.parametrize(
    ("family", "label", "reason"),
    [
        (examples.gemma3, "mixed", "has layers with windows"),
        (examples.mamba2, "biased", "keeps a state of each sequence"),
    ],
)
def test_models_that_keep_more_than_pages_are_refused(
    family: Any, label: str, reason: str, tmp_path: Path
) -> None:
    write_checkpoint(example(family, label), tmp_path)
    with pytest.raises(ConfigError, match=reason):
        shared(tmp_path)
