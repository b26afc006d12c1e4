"""Guessed tokens: the same tokens, or the same distribution, as without, in fewer steps."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.conftest import CONFIGS, SIZES, example, write_checkpoint
from models.engine.tests.test_windowed_caches import loaded, spoil, unwindowed
from models.tests.family_checkpoints import examples
from models.tests.schedules import beside_one_that_leaves, kinds_of_requests
from tests.adapter_files import write_adapter
from tests.landing import num_examples
from tests.tape import TapePlatform
from transformers import LlamaConfig

from interposer import Config, explain, register
from interposer.errors import ConfigError
from interposer.hookspecs import hookimpl
from interposer.records import PlatformEntry, Record
from interposer_engine import Constraint, LanguageModel, SamplingParams, Speculation, load
from interposer_engine._speculation.speculator import DraftCostModel, Speculator

SMALL: dict[str, Any] = {"cache_tokens": 144, "max_sequences": 3, "max_step_tokens": 40}
# What each request asks for; of the last ones, more than the model's logits decides.
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "seed": 4},
    {"temperature": 0.5, "seed": 5, "repetition_penalty": 1.5},
    {"frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0}},
    {"top_logprobs": 2},
    {"min_tokens": 1},
    {"constraint": Constraint.regex("[a-z]{30}")},
)


def always(draft: str | Path | LanguageModel = "ngram", tokens: int = 4) -> Speculation:
    return Speculation(draft, tokens, adaptive=False)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model that guesses badly."""
    path = tmp_path_factory.mktemp("other")
    write_checkpoint(
        LlamaConfig(**{**SIZES, "num_hidden_layers": 1, "num_attention_heads": 2}), path
    )
    return path


@pytest.fixture(scope="module")
def plain(llama: Path) -> LanguageModel:
    return load(llama, "float32", cache_tokens=2048)


@pytest.fixture(scope="module")
def guessing(llama: Path, other: Path) -> dict[str, LanguageModel]:
    """Models in caches so small that sequences are preempted."""
    drafts: dict[str, Any] = {"ngram": "ngram", "same": llama, "other": other}
    made = {n: load(llama, "float32", speculation=always(d), **SMALL) for n, d in drafts.items()}
    few = load(other, "float32", cache_tokens=48, max_step_tokens=7)  # for some sequences only
    made["few pages"] = load(llama, "float32", speculation=always(few, tokens=2), **SMALL)
    return made


def idle(lm: LanguageModel) -> bool:
    return not lm.engine.busy and all(pool.num_free == pool.num_pages for pool in lm.engine.pools)


def prompts_of(lengths: Any) -> list[list[int]]:
    return [[(place * number) % 7 + 1 for place in range(n)] for number, n in enumerate(lengths, 2)]


@settings(
    max_examples=num_examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=kinds_of_requests(KINDS),
    leaver=st.integers(0, 20),
    name=st.sampled_from(["ngram", "same", "other", "few pages"]),
)
def test_any_schedule_gives_the_tokens_of_plain_decoding(
    plain: LanguageModel,
    guessing: dict[str, LanguageModel],
    requests: list[tuple[int, int, dict[str, Any]]],
    leaver: int,
    name: str,
) -> None:
    lm = guessing[name]
    prompts = prompts_of(length for length, _, _ in requests)
    params = [SamplingParams(max_new_tokens=count, **kind) for _, count, kind in requests]
    expected = plain.generate(prompts, params)
    actual = beside_one_that_leaves(lm, prompts, params, leaver)
    for one, two in zip(expected, actual, strict=True):
        assert two.token_ids == one.token_ids
        assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert two.finish_reason == one.finish_reason
        assert [[i for i, _ in top] for top in two.top_logprobs] == [
            [i for i, _ in top] for top in one.top_logprobs
        ]
    assert idle(lm)


def test_a_draft_that_is_the_model_is_accepted_and_saves_steps(
    llama: Path, plain: LanguageModel
) -> None:
    for kind in KINDS[:3]:
        lm = load(llama, "float32", cache_tokens=512, speculation=always(plain))
        (actual,) = lm.generate([[1, 2, 3]], max_new_tokens=41, **kind)
        assert (
            actual.token_ids == plain.generate([[1, 2, 3]], max_new_tokens=41, **kind)[0].token_ids
        )
        counts = lm.speculation
        assert counts is not None
        assert (counts.acceptance, counts.drafted_steps, counts.drafted_tokens) == (1, 8, 32)
    assert idle(plain)


def test_repeated_text_is_found_by_prompt_lookup(llama: Path, plain: LanguageModel) -> None:
    lm = load(llama, "float32", cache_tokens=512, speculation=always())
    bias = {9: 100.0}  # makes the output repeat, and is nothing that guesses are made for
    assert lm.generate([[1, 2]], max_new_tokens=8, logit_bias=bias)
    counts = lm.speculation
    assert counts is not None
    assert counts.drafted_tokens == 0
    tokens = tokens_of(lm, [1, 2, 3], 60)
    prompt = [1, 2, 3, *tokens, 1, 2, 3]
    assert tokens_of(lm, prompt, 40) == tokens_of(plain, prompt, 40)
    assert 0 < counts.accepted_tokens <= counts.drafted_tokens
    assert counts.plain_steps + counts.drafted_steps + counts.accepted_tokens <= 7 + 59 + 39
    assert "up to 4 tokens by prompt lookup" in str(explain(lm))


def tokens_of(lm: LanguageModel, prompt: list[int], count: int, **kind: Any) -> tuple[int, ...]:
    return lm.generate([prompt], max_new_tokens=count, **kind)[0].token_ids


def repeated_prompt(lm: LanguageModel, top_k: int) -> list[int]:
    """Return a prompt of which each likely next token is found again, with a likely one behind."""
    prompt, known = [5], set[int]()
    for _ in range(20):
        missing = {*lm.logits(prompt)[-1].topk(top_k).indices.tolist()} - known
        if not missing:
            break
        for token in sorted(missing):
            behind = lm.logits([*prompt, token])[-1].argmax()
            prompt = [5, token, int(behind), *prompt]
        known |= missing
    return prompt


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "model"])
def test_unseeded_requests_are_drawn_from_the_distribution(
    llama: Path, plain: LanguageModel, name: str
) -> None:
    draft: Any = "ngram"
    if name == "model":
        draft = load(llama, "float32", cache_tokens=8192, max_step_tokens=8192)
        # Right now and then, as the model itself and one without a tie to it are not.
        noise = torch.randn(256, generator=torch.Generator().manual_seed(1)) / 2
        compute = draft.engine.runner.compute
        draft.engine.runner.compute = lambda chunks: compute(chunks) + noise
    # All prompts of a batch are computed in one step, so that the others have guesses.
    lm = load(llama, "float32", cache_tokens=8192, max_step_tokens=8192, speculation=always(draft))
    assert_drawn_from_the_distribution(lm, plain, repeated_prompt(plain, 3))


def assert_drawn_from_the_distribution(
    lm: LanguageModel, plain: LanguageModel, prompt: list[int]
) -> None:
    """Of 3 tokens of 3 each, the 27 outcomes are as often as their probabilities say."""
    top_k, count = 3, 1280
    outcomes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for front, chance in outcomes.items():
            values, ids = plain.logits([*prompt, *front])[-1].topk(top_k)
            for share, token in zip(values.softmax(-1).tolist(), ids.tolist(), strict=True):
                grown[*front, token] = chance * share
        outcomes = grown
    params = SamplingParams(temperature=1.0, top_k=top_k, max_new_tokens=4)
    actual = [each.token_ids[:3] for each in lm.generate([prompt] * count, params)]
    counts = lm.speculation
    assert counts is not None
    assert counts.drafted_tokens > 200
    assert 0.02 < counts.acceptance < 0.9
    statistic = sum(
        (actual.count(outcome) - count * chance) ** 2 / (count * chance)
        for outcome, chance in outcomes.items()
    )
    # 81.6 is exceeded once in ten million times with 26 degrees of freedom.
    assert statistic < 81.6
    assert not {*actual} - {*outcomes}


def test_draft_tokens_have_other_noise_than_their_verification(
    llama: Path, plain: LanguageModel
) -> None:
    """The same noise would favour what it drew before; here each guess is accepted."""
    lm = load(llama, "float32", cache_tokens=512, speculation=always(plain))
    sequence = lm.engine.add([1, 2, 3], SamplingParams(max_new_tokens=41, temperature=1.0))
    while lm.engine.busy:
        lm.engine.step()
    counts = lm.speculation
    assert counts is not None
    assert counts.acceptance == 1
    same = tokens_of(plain, [1, 2, 3], 41, temperature=1.0, seed=sequence.seed)
    assert same[0] == sequence.output[0]
    assert [*same] != sequence.output


@pytest.mark.landing(1)
@pytest.mark.parametrize(("family", "page_size"), [("all", 4), ("some", 2)])
@pytest.mark.parametrize("name", ["ngram", "same"])
def test_windows_keep_the_pages_that_rejected_draft_tokens_need(
    tmp_path: Path, family: str, page_size: int, name: str
) -> None:
    config = CONFIGS["mistral"]() if family == "all" else example(examples.gemma3, "mixed")
    write_checkpoint(config, tmp_path)
    plain = loaded(tmp_path, page_size, cache_tokens=1024)
    prompts = prompts_of((70, 3, 40, 20))
    kinds: tuple[dict[str, Any], ...]
    kinds = ({}, {"temperature": 1.0, "seed": 1}, {}, {"temperature": 3.0, "seed": 2})
    params = [SamplingParams(max_new_tokens=50, **kind) for kind in kinds]
    expected = plain.generate(prompts, params)
    drafts: list[Any] = ["ngram"]
    if name == "same":
        # They are right but for what is spoilt, and so keep what they need as well, or not.
        drafts = [loaded(tmp_path, page_size, cache_tokens=512), unwindowed(tmp_path)]
    counts = []
    for draft in drafts:
        if name == "same":
            spoil_drafts(draft)
        lm = loaded(tmp_path, page_size, speculation=always(draft), **SMALL)
        spoil(lm)
        actual = lm.generate(prompts, params)
        assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
        told = lm.speculation
        assert told is not None
        assert 0 < told.accepted_tokens < told.drafted_tokens
        counts.append(told)
        assert idle(lm)
    assert counts[0] == counts[-1]


def spoil_drafts(draft: LanguageModel) -> None:
    """Let a draft guess wrong every now and then, so that guesses are taken back."""
    compute, calls = draft.engine.runner.compute, itertools.count()

    def spoilt(chunks: Any) -> torch.Tensor:
        logits = compute(chunks)
        return logits.flip(-1) if next(calls) % 5 == 3 else logits

    draft.engine.runner.compute = spoilt  # type: ignore[method-assign]


def test_stop_texts_and_tokens_end_within_accepted_draft_tokens(
    llama: Path, plain: LanguageModel
) -> None:
    lm = load(llama, "float32", cache_tokens=512, speculation=always(plain, tokens=7))
    (whole,) = plain.generate(["abc"], max_new_tokens=20)
    for count in range(2, 12):
        stop = {"stop_token_ids": (whole.token_ids[count],)}
        assert told(lm, **stop) == told(plain, **stop)
        text = {"stop": (lm.tokenizer.decode([whole.token_ids[count]]),)}
        assert told(lm, **text) == told(plain, **text)
    assert idle(lm)


def told(lm: LanguageModel, **kind: Any) -> tuple[Any, ...]:
    (actual,) = lm.generate(["abc"], max_new_tokens=20, **kind)
    return actual.text, actual.token_ids, len(actual.logprobs), actual.finish_reason


def test_adapters_are_verified_with(llama: Path, plain: LanguageModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "own", {"model.layers.0.self_attn.o_proj": (64, 64)})
    lms = [load(llama, "float32", cache_tokens=512, speculation=s) for s in (None, always(plain))]
    recorded = []
    for lm in lms:
        lm.load_adapter("own", folder)
        params = [SamplingParams(max_new_tokens=20, adapter=name) for name in ("own", None)]
        recorded.append([each.token_ids for each in lm.generate([[1, 2], [1, 2]], params)])
    assert recorded[0] == recorded[1]
    assert recorded[0][0] != recorded[0][1]


def test_graphs_replay_steps_without_draft_tokens(llama: Path, plain: LanguageModel) -> None:
    class Tapes:
        @staticmethod
        @hookimpl
        def interposer_records() -> list[Record]:
            return [PlatformEntry("tape", "tests.tape:TapePlatform")]

    plugins = ("interposer-models", "interposer-ops", "interposer-quantization")
    config = Config(graphs="auto", platform="tape", plugins=plugins, canary="off")
    with register(Tapes, "tapes"):
        TapePlatform.captured = TapePlatform.replayed = 0
        lm = load(llama, "float32", config=config, cache_tokens=512, speculation=always())
        actual = lm.generate(prompts_of((9, 30)), max_new_tokens=30)
    expected = plain.generate(prompts_of((9, 30)), max_new_tokens=30)
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    counts = lm.speculation
    assert counts is not None
    assert counts.drafted_steps > 0
    assert TapePlatform.replayed == counts.plain_steps > 0


@given(
    texts=st.lists(
        st.tuples(
            st.floats(1, 2),  # of ``scale``, the plain steps that one with guesses takes
            st.floats(0, 1),  # that the plain step behind takes more
            st.floats(0, 0.5),  # that a guess takes of which nothing comes
            st.floats(0, 1),  # chance that one comes
            st.floats(0, 1),  # chance that a token is taken
        ),
        min_size=1,
        max_size=6,
    ),
    scale=st.floats(0.6, 3.0),
    seed=st.integers(0, 99),
)
def test_drafting_loses_at_most_a_small_fraction_of_any_period(
    texts: list[tuple[float, ...]], scale: float, seed: int
) -> None:
    """Whatever was gained long before, 0.97 of plain decoding is the least that is left."""
    balance, generator = DraftCostModel(), Random(seed)
    lost, spent, behind = [0.0], [0.0], 0.0
    dearest = 0.0
    for times, effect, guess, chance, taken in texts:
        cost = scale * times
        dearest = max(dearest, cost + guess + effect)
        for _ in range(400):
            tokens, seconds = 1, 1.0 + behind
            resting = balance.skips_measurement()
            asked = not resting and balance.allows_drafts(1)
            if resting:
                behind = 0.0
            elif asked and generator.random() < chance:
                tokens += next((n for n in range(4) if generator.random() >= taken), 4)
                seconds, behind = cost + guess, effect
                balance.record_drafted_step(1, seconds - guess, tokens, guess)
            else:
                behind, tried = 0.0, guess if asked else 0.0
                balance.record_plain_step(1, seconds, tried)
                seconds += tried
            lost.append(lost[-1] + seconds - tokens)
            spent.append(spent[-1] + seconds)
    # One such step is not counted, as it is the first; another begins before it is known to lose.
    least = lost[0] - 0.01 * spent[0]
    for far, time in zip(lost, spent, strict=True):
        assert far - 0.01 * time - least <= 4 + 2 * dearest
        least = min(least, far - 0.01 * time)
    assert lost[-1] <= 0.01 * spent[-1] + 2 * dearest


def test_a_single_slow_step_does_not_pause_drafting() -> None:
    balance, drafted = DraftCostModel(), 0
    for place in range(1000):
        if balance.skips_measurement():
            continue
        if balance.allows_drafts(1):
            balance.record_drafted_step(1, 100.0 if place % 50 == 20 else 1.2, 3, 0.0)
            drafted += 1
        else:
            balance.record_plain_step(1, 1.0, 0.0)
    assert drafted > 900


def test_drafting_continues_while_it_gains_and_pauses_while_it_loses() -> None:
    for taken, cost, low, high in ((3, 1.2, 0.9, 1.0), (1, 1.2, 0.0, 0.12), (2, 3.0, 0.0, 0.03)):
        balance, drafted = DraftCostModel(), 0
        for _ in range(1000):
            if balance.skips_measurement():
                continue
            if balance.allows_drafts(5):
                balance.record_drafted_step(5, cost, 5 * taken, 0.0)
                drafted += 1
            else:
                balance.record_plain_step(5, 1.0, 0.0)
        assert low <= drafted / 1000 <= high


@pytest.mark.parametrize("tokens", [-1, 0, 65, 1.5, True, "4"])
def test_an_invalid_number_of_draft_tokens_is_refused(tokens: Any) -> None:
    with pytest.raises(ConfigError, match=f"is {tokens!r}, must be an integer from 1 to 64"):
        Speculation(tokens=tokens)


def test_unusable_draft_models_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Speculation is 5, must be 'ngram', 'heads', a path"):
        Speculation(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"of the type int. Try: 'ngram'"):
        load(llama, speculation=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'ngrams', must be 'ngram', 'heads', or the folder"):
        load(llama, speculation="ngrams")
    small = {**SIZES, "num_hidden_layers": 1, "vocab_size": 300}
    write_checkpoint(LlamaConfig(**small), tmp_path / "larger")
    for folder in (tmp_path / "larger", llama):
        (folder / "tokenizer.json").rename(folder / "kept.json")
    try:
        with pytest.raises(ConfigError, match=r"another vocabulary than .*: 300 and 256 tokens"):
            load(llama, cache_tokens=64, speculation=str(tmp_path / "larger"))
    finally:
        for folder in (tmp_path / "larger", llama):
            (folder / "kept.json").rename(folder / "tokenizer.json")
    # The same tokenizer with a padded vocabulary is none.
    padded = Speculation(tmp_path / "larger", adaptive=False)
    lm = load(llama, "float32", cache_tokens=64, speculation=padded)
    assert len(lm.generate([[1, 2]], max_new_tokens=9)[0].token_ids) == 9
    back = load(tmp_path / "larger", "float32", cache_tokens=64, speculation=always(llama))
    assert len(back.generate([[1, 299], [3]], max_new_tokens=9)[0].token_ids) == 9
    text = (tmp_path / "larger" / "tokenizer.json").read_text()
    swapped = text.replace('"a": 64', '"a": 65').replace('"b": 65', '"b": 64')
    text_of = (tmp_path / "larger" / "tokenizer.json").write_text
    text_of(swapped if swapped != text else text.replace('"a":', '"\u4e00":'))
    with pytest.raises(
        ConfigError, match=r"another vocabulary.*: 2 tokens differ. Try: a draft of"
    ):
        load(llama, cache_tokens=64, speculation=tmp_path / "larger")


RECURRENT = {"mamba2": "biased", "falcon_h1": "factors", "qwen3_next": "some", "lfm2": "biased"}


@pytest.mark.landing(1)
@pytest.mark.parametrize("family", RECURRENT)
def test_states_are_restored_after_rejected_draft_tokens(tmp_path: Path, family: str) -> None:
    """As targets and as drafts, beside requests without guesses, preempted, and that end early."""
    write_checkpoint(example(getattr(examples, family), RECURRENT[family]), tmp_path)
    plain = load(tmp_path, "float32", cache_tokens=1024)
    prompts = prompts_of((40, 3, 25, 9))
    kinds: tuple[dict[str, Any], ...]
    kinds = ({}, {"temperature": 1.0, "seed": 1}, {"frequency_penalty": 0.5}, {})
    params = [
        SamplingParams(max_new_tokens=count, ignore_eos=True, **kind)
        for count, kind in zip((30, 24, 12, 7), kinds, strict=True)
    ]
    expected = [each.token_ids for each in plain.generate(prompts, params)]
    same = load(tmp_path, "float32", cache_tokens=1024)
    for draft in ("ngram", same):
        if draft is same:
            spoil_drafts(same)
        lm = load(tmp_path, "float32", speculation=always(draft), **SMALL)
        assert [each.token_ids for each in lm.generate(prompts, params)] == expected
        assert idle(lm)
    counts = lm.speculation
    assert counts is not None
    assert 20 < counts.accepted_tokens < counts.drafted_tokens
    assert idle(same)


def timed(lm: LanguageModel, step_seconds: float, draft_seconds: float) -> None:
    """Give the speculation of a model a clock that only its steps and drafts advance."""
    engine, now = lm.engine, 0.0
    loaded = engine.speculation
    assert isinstance(loaded, Speculator)
    proposer, compute, propose = loaded._proposer, engine.runner.compute, loaded._proposer.propose

    def computed(*arguments: Any) -> Any:
        nonlocal now
        now += step_seconds
        return compute(*arguments)

    def proposed(*arguments: Any) -> Any:
        nonlocal now
        now += draft_seconds
        return propose(*arguments)

    engine.runner.compute = computed  # type: ignore[assignment, method-assign]
    proposer.propose = proposed  # type: ignore[assignment, method-assign]
    engine.speculation = Speculator(
        engine, proposer, loaded._sampling, 4, DraftCostModel(), loaded._saved, clock=lambda: now
    )


def test_drafts_that_cost_more_than_they_gain_are_paused(
    llama: Path, other: Path, plain: LanguageModel
) -> None:
    lm = load(llama, "float32", cache_tokens=512, speculation=str(other))
    timed(lm, step_seconds=1.0, draft_seconds=4.0)
    assert tokens_of(lm, [1, 2], 60) == tokens_of(plain, [1, 2], 60)
    figures = lm.speculation
    assert figures is not None
    # The first drafted step of a size is not counted; the second one costs too much.
    assert figures.drafted_steps <= 2
    assert figures.plain_steps > 40
    assert plain.speculation is None


def test_drafts_that_gain_are_not_paused(llama: Path, plain: LanguageModel) -> None:
    lm = load(llama, "float32", cache_tokens=512, speculation=str(llama))
    timed(lm, step_seconds=1.0, draft_seconds=0.5)
    assert tokens_of(lm, [1, 2], 60) == tokens_of(plain, [1, 2], 60)
    figures = lm.speculation
    assert figures is not None
    assert figures.plain_steps == 4  # three before the first draft, and the last token
    assert figures.drafted_steps > 10


class Recorder(DraftCostModel):
    """A cost model that allows every second step to have drafts and records what was measured."""

    def __init__(self) -> None:
        super().__init__()
        self.is_allowed = False
        self.measured: list[tuple[str, float, float]] = []

    def skips_measurement(self) -> bool:
        return False

    def allows_drafts(self, num_sequences: int) -> bool:
        self.is_allowed = not self.is_allowed
        return self.is_allowed

    def record_plain_step(
        self, num_sequences: int, seconds: float, drafting_seconds: float
    ) -> None:
        kind = "allowed" if self.is_allowed else "not allowed"
        self.measured.append((f"plain, {kind}", seconds, drafting_seconds))

    def record_drafted_step(
        self, num_sequences: int, seconds: float, num_tokens: int, drafting_seconds: float
    ) -> None:
        self.measured.append(("drafted", seconds, drafting_seconds))


def test_drafting_and_verification_are_measured_separately(llama: Path) -> None:
    lm = load(llama, "float32", cache_tokens=512, speculation=str(llama))
    loaded, recorder = lm.engine.speculation, Recorder()
    assert isinstance(loaded, Speculator)
    readings: list[float] = []

    def clock() -> float:
        readings.append(2.0 ** len(readings))
        return readings[-1]

    lm.engine.speculation = Speculator(
        lm.engine, loaded._proposer, loaded._sampling, 4, recorder, clock=clock
    )
    stream = lm.stream([1, 2], max_new_tokens=30, ignore_eos=True)
    while recorder.measured[-1:] != [("drafted", 2.0, 1.0)]:
        readings.clear()  # so that each step reads 1, 2, 4 and 8 s
        assert next(stream, None) is not None, recorder.measured
    readings.clear()
    while recorder.measured[-1][0] == "drafted":
        assert next(stream, None) is not None, recorder.measured
    assert recorder.measured[-1] == ("plain, not allowed", 1.0, 2.0)
    stream.close()  # type: ignore[attr-defined]
