"""Requests: bad ones are refused whole, good ones join, leave, stop and share the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples

from interposer.errors import ConfigError, RequestError
from interposer_engine import LanguageModel, SamplingParams, load

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"


@pytest.fixture(scope="module")
def lm(llama: Path) -> LanguageModel:
    return load(llama, dtype="float32", cache_tokens=1024)


def idle(lm: LanguageModel) -> bool:
    pool = lm.engine.pool
    return pool.num_free == pool.num_pages and not lm.engine.busy


def test_an_empty_text_is_refused_where_the_tokenizer_adds_a_token() -> None:
    lm = load(SHIPPED, max_sequences=1)
    assert len(lm.tokenizer.encode("")) == 1
    with pytest.raises(RequestError, match="prompt is empty"):
        lm.generate(["def f(x):", ""])
    assert idle(lm)


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt(lm: LanguageModel, prompt: str | list[int]) -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        lm.generate([prompt])
    with pytest.raises(RequestError, match="prompt is empty"):
        lm.stream(prompt)
    assert idle(lm)


@pytest.mark.parametrize("token_id", [-1, 256, 10**9])
def test_token_outside_the_vocabulary(lm: LanguageModel, token_id: int) -> None:
    with pytest.raises(RequestError, match=f"{token_id} is outside the vocabulary of 256"):
        lm.generate([[1, token_id]])
    with pytest.raises(RequestError, match="outside the vocabulary"):
        lm.logits([token_id])


@pytest.mark.parametrize("token_id", [1.0, 1.5, True, "a", None, [1]])
def test_token_that_is_no_integer(lm: LanguageModel, token_id: Any) -> None:
    with pytest.raises(RequestError, match=r"is not an integer.*tokenizer\.encode"):
        lm.generate([[1, token_id]])
    with pytest.raises(RequestError, match="is not an integer"):
        lm.logits([token_id])
    assert idle(lm)


@pytest.mark.parametrize("prompts", [None, 5, [1, 2], [None], b"ab", [b"ab"]])
def test_prompt_that_is_neither_text_nor_tokens(lm: LanguageModel, prompts: Any) -> None:
    with pytest.raises(RequestError, match="must be a text or a list"):
        lm.generate(prompts)
    assert idle(lm)


def test_prompt_with_half_a_surrogate_pair(lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"'\\udcff' at 1, which is no character"):
        lm.generate("a\udcff")


def test_token_ids_in_a_tensor(lm: LanguageModel) -> None:
    tokens: Any = torch.tensor([5, 6])
    assert lm.generate([tokens]) == lm.generate([[5, 6]])
    assert torch.equal(lm.logits(tokens), lm.logits([5, 6]))


@pytest.mark.parametrize("name", ["cache_tokens", "max_sequences", "max_step_tokens"])
@pytest.mark.parametrize("size", [0, -1, 1.5, "x"])
def test_size_that_is_not_positive(llama: Path, name: str, size: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {size!r}, must be an integer of at least 1"):
        load(llama, **{name: size})


def test_cache_larger_than_the_memory(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache_tokens is 1000000000000000, the free memory"):
        load(llama, cache_tokens=10**15)


def test_prompt_longer_than_the_context(lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"512 tokens, the model's context is 512.*511"):
        lm.generate([[1] * 512])
    with pytest.raises(RequestError, match="exceed the model's context of 512"):
        lm.logits([1] * 513)
    (completion,) = lm.generate([[1] * 511], max_new_tokens=8)
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")


def test_request_that_never_fits_the_cache(llama: Path) -> None:
    small = load(llama, cache_tokens=64)
    with pytest.raises(RequestError, match=r"needs 100 cached tokens.*holds 64.*cache_tokens=100"):
        small.generate([[1] * 50], max_new_tokens=50)
    with pytest.raises(RequestError, match="cached tokens"):
        small.logits([1] * 65)


def test_one_bad_prompt_refuses_the_whole_call(lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match="empty"):
        lm.generate([[1, 2], [], [3]])
    assert idle(lm)


def test_bad_parameters_run_nothing(lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match="temperature"):
        lm.generate(["a"], temperature=float("nan"))
    with pytest.raises(RequestError, match="not both"):
        lm.generate(["a"], SamplingParams(), temperature=1.0)
    with pytest.raises(RequestError, match="2 params were given for 1 prompts"):
        lm.generate(["a"], [SamplingParams()] * 2)
    with pytest.raises(RequestError, match="must be SamplingParams"):
        lm.generate(["a"], {"temperature": 1.0})  # type: ignore[arg-type]
    assert idle(lm)


def test_no_prompts_give_no_completions(lm: LanguageModel) -> None:
    assert lm.generate([]) == []


def test_stream_yields_the_text_that_generate_returns(lm: LanguageModel) -> None:
    (whole,) = lm.generate("def f", max_new_tokens=20)
    deltas = list(lm.stream("def f", max_new_tokens=20))
    assert tuple(delta.token_id for delta in deltas) == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.finish_reason for delta in deltas] == [None] * 19 + ["length"]


def test_closing_a_stream_frees_its_pages(lm: LanguageModel) -> None:
    stream = lm.stream("def f", max_new_tokens=50)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert idle(lm)


def test_a_stream_that_never_started_frees_its_request(lm: LanguageModel) -> None:
    lm.stream("def f").close()  # type: ignore[attr-defined]
    assert idle(lm)
    lm.stream("def f")  # dropped at once
    assert idle(lm)


def test_open_streams_and_other_requests_lose_no_token(lm: LanguageModel) -> None:
    alone = [list(lm.stream(prompt, max_new_tokens=20)) for prompt in ("abc", "xyz")]
    first, second = (lm.stream(prompt, max_new_tokens=20) for prompt in ("abc", "xyz"))
    started = next(first)
    (whole,) = lm.generate("xyz", max_new_tokens=8)
    assert whole.token_ids == tuple(delta.token_id for delta in alone[1][:8])
    lm.engine.step()
    mixed = list(zip(first, second, strict=False))
    rest = [delta.token_id for delta in (started, *(pair[0] for pair in mixed))]
    assert rest == [delta.token_id for delta in alone[0]]
    told = [pair[1] for pair in mixed] + list(second)
    assert [delta.token_id for delta in told] == [delta.token_id for delta in alone[1]]
    assert [delta.finish_reason for delta in told] == [None] * 19 + ["length"]
    assert "".join(delta.text for delta in told) == "".join(delta.text for delta in alone[1])
    assert idle(lm)


@pytest.mark.landing(3)
@pytest.mark.parametrize("end", [2, 3, 5, 9])
def test_stop_text_at_the_very_start_is_never_streamed(lm: LanguageModel, end: int) -> None:
    (whole,) = lm.generate("x", max_new_tokens=40)
    deltas = list(lm.stream("x", max_new_tokens=40, stop=(whole.text[:end],)))
    assert "".join(delta.text for delta in deltas) == ""
    assert deltas[-1].finish_reason == "stop"
    longer = (whole.text[:end] + "\0" * 100_000,)
    deltas = list(lm.stream("x", max_new_tokens=40, stop=longer))
    assert "".join(delta.text for delta in deltas) == whole.text


def test_stop_text_is_cut_and_never_streamed(lm: LanguageModel) -> None:
    (whole,) = lm.generate("x", max_new_tokens=40)
    stop = whole.text[7:10]
    expected = whole.text[: whole.text.index(stop)]
    (cut,) = lm.generate("x", max_new_tokens=40, stop=(stop,))
    assert (cut.text, cut.finish_reason) == (expected, "stop")
    deltas = list(lm.stream("x", max_new_tokens=40, stop=(stop,)))
    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].finish_reason == "stop"
    assert idle(lm)


def test_stop_token_ends_the_request(lm: LanguageModel) -> None:
    (whole,) = lm.generate([[5, 6]], max_new_tokens=30)
    token = whole.token_ids[4]
    first = whole.token_ids.index(token)
    (cut,) = lm.generate([[5, 6]], max_new_tokens=30, stop_token_ids=(token,))
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert cut.finish_reason == "stop"


def test_a_seed_gives_the_same_tokens_in_any_batch(lm: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=24, temperature=1.2, top_p=0.9, seed=11)
    (alone,) = lm.generate([[9, 8, 7]], params)
    others = SamplingParams(max_new_tokens=31, temperature=0.7, seed=4)
    crowd = lm.generate([[1] * 40, [9, 8, 7], [2, 3]], [others, params, others])
    assert crowd[1].token_ids == alone.token_ids
    (again,) = lm.generate([[9, 8, 7]], params.model_copy(update={"seed": 12}))
    assert again.token_ids != alone.token_ids


def test_logprobs_equal_the_logits(lm: LanguageModel) -> None:
    (completion,) = lm.generate([[1, 2, 3]], max_new_tokens=5)
    tokens = [1, 2, 3, *completion.token_ids]
    table = lm.logits(tokens).log_softmax(-1)
    expected = [float(table[2 + i, token]) for i, token in enumerate(completion.token_ids)]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_scores_equal_the_logits(lm: LanguageModel) -> None:
    (said,) = lm.generate([[1, 2, 3]], max_new_tokens=5, ignore_eos=True)
    likely, other = lm.score([1, 2, 3], [said.token_ids, (7, 8)])
    assert likely == pytest.approx(said.logprobs, abs=1e-4)
    table = lm.logits([1, 2, 3, 7, 8]).log_softmax(-1)
    assert other == pytest.approx([float(table[2, 7]), float(table[3, 8])], abs=1e-6)
    front, tokens = (lm.tokenizer.encode(text) for text in ("a b", "a b c d"))
    assert lm.score("a b", [" c d"]) == lm.score(front, [tokens[len(front) :]])


@pytest.mark.parametrize(
    ("prompt", "continuation", "reason"),
    [
        ("", "a", "'a' adds no token to the prompt ''"),
        ("a", "", "'' adds no token to the prompt 'a'"),
        ([], [1], "adds no token"),
        ("a", [1], "only one is a text"),
        ([1], [2] * 5000, "exceed the model's context"),
        ([1], [-1], "-1"),
    ],
)
def test_invalid_scores_are_refused(
    lm: LanguageModel, prompt: Any, continuation: Any, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        lm.score(prompt, [continuation])


def test_preempted_requests_still_give_the_same_tokens(llama: Path) -> None:
    roomy = load(llama, dtype="float32")
    tight = load(llama, dtype="float32", cache_tokens=96)
    prompts = [[1] * 30, [2] * 20, [3] * 25]
    expected = roomy.generate(prompts, max_new_tokens=40)
    assert [c.token_ids for c in tight.generate(prompts, max_new_tokens=40)] == [
        c.token_ids for c in expected
    ]
    assert tight.engine.pool.num_free == tight.engine.pool.num_pages


@settings(max_examples=num_examples(25))
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=6
    ),
    step_tokens=st.integers(1, 64),
    max_sequences=st.integers(1, 4),
)
def test_any_schedule_gives_each_request_its_own_tokens(
    lm: LanguageModel,
    requests: list[tuple[int, int, int]],
    step_tokens: int,
    max_sequences: int,
) -> None:
    scheduler = lm.engine.scheduler
    before = scheduler.max_step_tokens, scheduler.max_sequences
    prompts = [[(7 * i + j) % 256 for j in range(n)] for i, (n, _, _) in enumerate(requests)]
    alone = [
        lm.generate([prompt], max_new_tokens=count)[0].token_ids
        for prompt, (_, count, _) in zip(prompts, requests, strict=True)
    ]
    try:
        scheduler.max_step_tokens, scheduler.max_sequences = step_tokens, max_sequences
        sequences = []
        for prompt, (_, count, pause) in zip(prompts, requests, strict=True):
            sequences.append(lm.engine.add(prompt, SamplingParams(max_new_tokens=count)))
            for _ in range(pause):
                lm.engine.step()
        while lm.engine.busy:
            lm.engine.step()
    finally:
        scheduler.max_step_tokens, scheduler.max_sequences = before
    # A chunked prompt may round differently in the last bit, which no tie here is near to.
    assert [tuple(sequence.output) for sequence in sequences] == alone
    assert idle(lm)


def test_the_events_of_a_step_are_the_new_tokens(lm: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=2, ignore_eos=True, top_logprobs=2)
    sequence = lm.engine.add([1, 2, 3], params)
    events = [*lm.engine.step(), *lm.engine.step()]
    assert [event.sequence for event in events] == [sequence] * 2
    assert [event.token_id for event in events] == sequence.output
    assert [event.logprob for event in events] == sequence.logprobs
    assert [event.top_logprobs for event in events] == sequence.top_logprobs
    assert [event.finish_reason for event in events] == [None, "length"]


def test_a_stream_gets_tokens_of_steps_that_another_request_makes(lm: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    stream = lm.start([1, 2, 3], params)
    lm.generate([[9, 8]], params)
    assert stream.num_unread == 4
    deltas = [stream.read() for _ in range(4)]
    assert stream.ended
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "length"]
    (alone,) = lm.generate([[1, 2, 3]], params)
    assert tuple(delta.token_id for delta in deltas) == alone.token_ids


@pytest.mark.parametrize("stop", [(), ("zz", "\x01\x02\x03")])
def test_a_delta_states_where_its_text_starts(lm: LanguageModel, stop: tuple[str, ...]) -> None:
    text = ""
    for delta in lm.stream("import os", max_new_tokens=40, temperature=1.5, seed=1, stop=stop):
        assert delta.offset == len(text)
        text += delta.text
    assert text


def test_memory_for_positions_is_taken_as_they_are_used(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**24}))
    lm = load(copied, dtype="float32", cache_tokens=8192, max_sequences=1)
    decoder = lm.engine.model.model
    few, tokens = len(decoder.tables[0][0]), [position * 37 % 256 for position in range(5000)]
    assert few < len(tokens)
    short = lm.logits(tokens[:few])
    assert len(decoder.tables[0][0]) == few
    long = lm.logits(tokens)
    assert len(tokens) <= len(decoder.tables[0][0]) < 2**24
    torch.testing.assert_close(long[:few], short, rtol=1e-4, atol=1e-4)
    # What comes behind depends on where it stands.
    assert not torch.allclose(long[-1], lm.logits(tokens[-1:])[0], atol=1e-2)


def test_a_bias_favours_and_rules_out_tokens(lm: LanguageModel) -> None:
    free = lm.generate([[1, 2]], max_new_tokens=4)[0]
    first = free.token_ids[0]
    assert lm.generate([[1, 2]], logit_bias={77: 100.0})[0].token_ids == (77,) * 16
    assert first not in lm.generate([[1, 2]], logit_bias={first: -100.0})[0].token_ids
    # Biases come before penalties and draws, and the probability is of what they leave.
    fields: dict[str, Any] = {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.1}
    forced = lm.generate([[1, 2]], logit_bias={77: 100.0}, **fields)[0]
    assert set(forced.token_ids) == {77}
    assert forced.logprobs == pytest.approx([0.0] * 16, abs=1e-3)
    with pytest.raises(RequestError, match="256, which is outside the vocabulary of 256"):
        lm.generate([[1]], logit_bias={256: 1.0})
    assert idle(lm)


@pytest.mark.parametrize("least", [0, 1, 5, 9])
def test_end_tokens_cannot_come_before_min_tokens(lm: LanguageModel, least: int) -> None:
    params = SamplingParams(
        logit_bias={7: 90.0, 9: 80.0}, stop_token_ids=(7, 10**6), min_tokens=least
    )
    free = SamplingParams(max_new_tokens=9)
    actual, beside = lm.generate([[1, 2], [3]], [params, free])
    assert actual.token_ids == (9,) * least + (7,)
    assert actual.finish_reason == "stop"
    assert beside == lm.generate([[3]], free)[0]
    every = tuple(range(256))
    with pytest.raises(RequestError, match="min_tokens rules out every token"):
        lm.generate([[1]], stop_token_ids=every, min_tokens=1)


def test_the_likeliest_tokens_are_reported(lm: LanguageModel) -> None:
    prompts = [[1, 2, 3], [4, 5]]
    asked = SamplingParams(max_new_tokens=5, top_logprobs=20, presence_penalty=0.7)
    few = SamplingParams(max_new_tokens=5, temperature=0.9, seed=1, top_logprobs=2)
    actual = lm.generate([*prompts, [9]], [asked, few, SamplingParams(max_new_tokens=5)])
    assert actual[2].top_logprobs == ()
    for completion, count in zip(actual, (20, 2), strict=False):
        assert [len(likely) for likely in completion.top_logprobs] == [count] * 5
    for token, logprob, likely in zip(
        actual[0].token_ids, actual[0].logprobs, actual[0].top_logprobs, strict=True
    ):
        assert likely[0][0] == token
        assert likely[0][1] == pytest.approx(logprob, abs=1e-4)
        assert [value for _, value in likely] == sorted((v for _, v in likely), reverse=True)
    first = lm.logits(prompts[1])[-1].log_softmax(-1).topk(2)
    assert [token for token, _ in actual[1].top_logprobs[0]] == first.indices.tolist()
    values = [value for _, value in actual[1].top_logprobs[0]]
    assert values == pytest.approx(first.values.tolist(), abs=1e-4)
    deltas = list(lm.stream(prompts[1], few))
    assert tuple(delta.top_logprobs for delta in deltas) == actual[1].top_logprobs
