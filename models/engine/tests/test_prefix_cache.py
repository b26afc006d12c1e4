"""Prompts that begin alike share pages: equal tokens, fewer of them computed, nothing leaked."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.conftest import CONFIGS, example, write_checkpoint
from models.engine.tests.test_adapters import tuned
from models.tests.family_checkpoints import examples
from tests.landing import num_examples
from transformers import AutoModelForCausalLM

from interposer import explain
from interposer.errors import ConfigError
from interposer_engine import LanguageModel, PrefixCache, SamplingParams, Speculation, load
from interposer_engine._sequence import TokenSequence


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


def test_a_common_prefix_is_computed_once(
    model: Path, plain: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, computed = shared(model), []
    forward = lm.engine.runner.forward

    def noted(batch: Any, *given: Any) -> torch.Tensor:
        computed.append(len(batch.token_ids))
        return forward(batch, *given)

    monkeypatch.setattr(lm.engine.runner, "forward", noted)
    first, second = tokens(200, 1), tokens(200, 1)[:180] + tokens(7, 2)
    for prompt, count in ((first, 200), (second, 187 - 180), (first, 1)):
        computed.clear()
        (done,) = lm.generate([prompt], max_new_tokens=5, ignore_eos=True)
        assert computed == [count, 1, 1, 1, 1]
        (expected,) = plain.generate([prompt], max_new_tokens=5, ignore_eos=True)
        assert done.token_ids == expected.token_ids
    assert lm.engine.prefixes is not None
    said = "379 of 587 prompt tokens were in the cache (64.6%), 0 pages were evicted"
    assert str(lm.engine.prefixes) == said
    assert f"prefix cache: {said}" in explain(lm).notes
    assert plain.engine.prefixes is None


def test_answers_are_cached_as_prefixes(model: Path, plain: LanguageModel) -> None:
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
    assert lm.engine.prefixes.shared_tokens == 30 + 40 - 1


KINDS: dict[str, Callable[[], Any]] = {
    "all": lambda: example(examples.olmo2, "grouped"),
    "windows": lambda: example(examples.gemma3, "mixed"),
    "only windows": CONFIGS["mistral"],
    "states": lambda: example(examples.mamba2, "grouped"),
    "convolutions and attention": lambda: example(examples.lfm2, "mixed"),
    "rules and attention": lambda: example(examples.qwen3_next, "some"),
}
FP8 = Path(__file__).parents[3] / "quantization/tests/modelopt_checkpoints/fp8-cache"


@dataclass
class Pair:
    """A model with a prefix cache of little room and a file behind it, and one without."""

    shared: LanguageModel
    plain: LanguageModel


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    recorded = {}
    root = tmp_path_factory.mktemp("kinds")
    for name, config in KINDS.items():
        write_checkpoint(config(), root / name)
    for name in [*KINDS, "8 bits"]:
        path = FP8 if name == "8 bits" else root / name
        kept = PrefixCache(state_bytes=2**18, offload_bytes=2**22, offload_dir=root)
        small = {"cache_tokens": 192, "max_sequences": 3, "max_step_tokens": 48}
        recorded[name] = Pair(
            shared(path, prefix_cache=kept, **small),
            load(path, dtype="float32", cache_tokens=2048, max_sequences=8),
        )
    return recorded


@settings(
    max_examples=num_examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), name=st.sampled_from([*KINDS, "8 bits"]))
def test_any_schedule_gives_the_tokens_of_a_plain_engine(
    pairs: dict[str, Pair], name: str, data: st.DataObject
) -> None:
    """Joins, leaves and preemption, in a cache that is too small for all of them."""
    lm, plain = pairs[name].shared, pairs[name].plain
    engine, size = lm.engine, lm.engine.model.config.vocab_size
    longest = 40 if name == "8 bits" else 90
    running: list[TokenSequence] = []
    for _ in range(data.draw(st.integers(1, 5))):
        seed, count = data.draw(st.integers(0, 1)), data.draw(st.integers(1, longest))
        more = data.draw(st.integers(1, 16))
        prompt = [token % size for token in tokens(count, seed)]
        if data.draw(st.booleans()):
            prompt[-1] = 3
        params = SamplingParams(max_new_tokens=more, ignore_eos=True)
        running += [engine.add(prompt, params) for _ in range(data.draw(st.integers(1, 3)))]
        for _ in range(data.draw(st.integers(0, 12))):
            engine.step()
        if data.draw(st.integers(0, 3)) == 0:
            engine.cancel(data.draw(st.sampled_from(running)))
    while engine.busy:
        engine.step()
    assert all(pool.num_free == pool.num_pages for pool in engine.pools)
    params_of = [sequence.params for sequence in running]
    expected = plain.generate([sequence.prompt for sequence in running], params_of)
    for sequence, wanted in zip(running, expected, strict=True):
        params = sequence.params
        left = sequence.finish_reason == "cancelled"
        count = len(sequence.output) if left else params.max_new_tokens
        assert sequence.output == list(wanted.token_ids)[:count]
        assert sequence.logprobs == pytest.approx(list(wanted.logprobs)[:count], abs=2e-3)


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", [*KINDS, "8 bits"])
def test_evicted_pages_are_restored(pairs: dict[str, Pair], name: str) -> None:
    lm, plain = pairs[name].shared, pairs[name].plain
    lm.engine.forget_prefixes()
    counts = lm.engine.prefixes
    assert counts is not None
    size, before = lm.engine.model.config.vocab_size, counts.restored_pages
    length = 44 if name == "8 bits" else 150
    prompts = [[token % size for token in tokens(length, seed)] for seed in range(3, 9)]
    for prompt in prompts * 2:
        actual = lm.generate([prompt], max_new_tokens=4, ignore_eos=True)
        expected = plain.generate([prompt], max_new_tokens=4, ignore_eos=True)
        assert actual[0].token_ids == expected[0].token_ids
    assert counts.restored_pages > before


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_requests_with_and_without_an_adapter_share_nothing(model: Path, tmp_path: Path) -> None:
    tuned(
        AutoModelForCausalLM.from_pretrained(model),
        tmp_path,
        3,
        r=4,
        target_modules=["q_proj", "up_proj"],
    )
    lm = shared(model)
    answers: dict[str | None, tuple[int, ...]] = {}
    lm.load_adapter("one", tmp_path)
    prompt = tokens(60, 9)
    for _ in range(2):
        for name in (None, "one"):
            (done,) = lm.generate([prompt], adapter=name, max_new_tokens=6, ignore_eos=True)
            assert answers.setdefault(name, done.token_ids) == done.token_ids
    assert lm.engine.prefixes is not None
    assert lm.engine.prefixes.shared_tokens == 2 * 59


def test_speculation_works_with_a_prefix_cache(model: Path, plain: LanguageModel) -> None:
    # Whether guesses pay is a matter of time, of which a busy machine has its own.
    lm = shared(model, speculation=Speculation("ngram", adaptive=False))
    prompt = [1, 2, 3, 4, 5, 6, 7] * 8
    for end in ([], [9], [9, 8], []):
        (done,) = lm.generate([prompt + end], max_new_tokens=30, ignore_eos=True)
        (expected,) = plain.generate([prompt + end], max_new_tokens=30, ignore_eos=True)
        assert done.token_ids == expected.token_ids
    assert lm.speculation is not None
    assert lm.speculation.drafted_steps


def test_new_weights_empty_the_prefix_cache(model: Path) -> None:
    lm, prompt = shared(model), tokens(64, 4)
    lm.generate([prompt], max_new_tokens=2)
    name = "model.norm.weight"
    lm.update_weights({name: 2 * torch.ones(64)})
    lm.generate([prompt], max_new_tokens=2)
    assert lm.engine.prefixes is not None
    assert lm.engine.prefixes.shared_tokens == 0
    lm.generate([prompt], max_new_tokens=2)
    assert lm.engine.prefixes.shared_tokens == 63


def test_memory_of_the_prefix_cache_follows_the_settings(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> None:
    root = tmp_path_factory.mktemp("spaces")
    spaces, folder = root / "model", root / "folder"
    write_checkpoint(example(examples.mamba2, "grouped"), spaces)
    usual = load(spaces, dtype="float32", cache_tokens=256, max_sequences=3)
    row = usual.engine.runner.cache_bytes // 4
    folder.mkdir()
    kept = PrefixCache(state_bytes=5 * row + 1, offload_bytes=2**20, offload_dir=folder)
    lm = shared(spaces, cache_tokens=256, max_sequences=3, prefix_cache=kept)
    assert not [*folder.iterdir()]  # the file has no name
    notes = explain(lm).notes
    expected = f"5 checkpoints of states, {5 * row / 2**20:.1f} MiB of these, 1.0 MiB of a file in"
    assert [note for note in notes if expected in note]
    states = f"beside {9 * row / 2**20:.1f} MiB of recurrent states"
    assert [note for note in notes if states in note]
    for wrong, said in (
        (PrefixCache(state_bytes=row - 1), f"a checkpoint takes {row}. Try: {16 * row}"),
        (PrefixCache(offload_bytes=64), "the cache lies in host memory already"),
        (PrefixCache(offload_bytes=64, offload_dir=folder / "none"), "cannot take 64 bytes: No "),
        (PrefixCache(offload_bytes=2**62, offload_dir=folder), "cannot take 4611686018427387904"),
        (PrefixCache(offload_bytes=64, offload_dir=folder), "holds no page of each kind"),
        ("yes", "prefix_cache is of the type str. Try: True"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            shared(spaces, prefix_cache=wrong)
    for fields in ({"state_bytes": -1}, {"offload_bytes": None}, {"offload_bytes": True}):
        with pytest.raises(ConfigError, match="must be an integer of at least 0"):
            PrefixCache(**fields)
    with pytest.raises(ConfigError, match=r"nothing says how large .* Try: offload_bytes"):
        PrefixCache(offload_dir=folder)
    assert shared(model, prefix_cache=PrefixCache()).engine.prefixes is not None
