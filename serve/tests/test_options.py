"""No field is passed over: each one changes a response, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve.tests.conftest import NAME, Served, events

from interposer_engine import LanguageModel
from interposer_serve._requests import ChatBody, CompletionBody

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

WARM: dict[str, Any] = {"temperature": 1.5, "seed": 1}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
# What both requests ask for, and the value of the second one.
SAMPLED: dict[str, tuple[dict[str, Any], Any]] = {
    "n": (WARM, 2),
    "max_tokens": ({}, 3),
    "temperature": ({"seed": 1}, 2.0),
    "top_p": (WARM, 0.01),
    "top_k": (WARM, 1),
    "min_p": (WARM, 1.0),
    "repetition_penalty": ({}, 1.5),
    "presence_penalty": ({}, 2.0),
    "frequency_penalty": ({}, 2.0),
    "seed": (WARM, 2),
    "stop": ({}, "p"),
    "stop_token_ids": ({}, "the second token"),
    "ignore_eos": ({}, True),
    "min_tokens": ({"stop_token_ids": "the second token"}, 4),
    "logit_bias": ({}, {"7": 50.0}),
    "prompt_logprobs": ({}, 1),
    "response_format": ({}, {"type": "json_object"}),
    "structured_outputs": ({}, {"regex": "[a-c]{9}"}),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
}
COMPLETION = {
    **SAMPLED,
    "prompt": ({}, "class A"),
    "logprobs": ({}, 2),
    "echo": ({"logprobs": 0}, True),
}
CHAT = {
    **SAMPLED,
    "messages": ({}, [{"role": "user", "content": "class A"}]),
    "max_completion_tokens": ({"max_tokens": None}, 3),
    "logprobs": ({}, True),
    "top_logprobs": ({"logprobs": True}, 2),
    "tools": ({"max_tokens": 8}, TOOLS),
    "tool_choice": ({"tools": TOOLS}, "none"),
    "chat_template_kwargs": ({}, {"shout": True}),
    "reasoning_effort": ({}, "high"),
}


def told(answer: Any) -> Any:
    """Return the body of a response as JSON, without its ``id`` and ``created``."""
    assert answer.status == 200, answer.body
    found = events(answer.body) if isinstance(answer.body, str) else [answer.body]
    for each in found:
        for name in ("id", "created"):
            del each[name]
    return json.dumps(found)


@pytest.mark.landing(1)
@pytest.mark.parametrize("kind", ["complete", "chat"])
def test_each_field_changes_the_response_or_is_refused(
    served: Served, offline: LanguageModel, kind: str
) -> None:
    body, effects = (CompletionBody, COMPLETION) if kind == "complete" else (ChatBody, CHAT)
    # A salt changes the time that others need, and no answer: see test_prefixes.py.
    assert effects.keys() | {"model", "cache_salt"} == body.model_fields.keys()
    ask = getattr(served, kind)
    wrong_model = ask(model="other")
    assert (wrong_model.status, wrong_model.error["param"]) == (404, "model")
    messages = [{"role": "user", "content": "import os"}]
    prompt = offline.chat_prompt(messages) if kind == "chat" else "import os"
    second = list(offline.generate([prompt], max_new_tokens=2)[0].token_ids[1:])
    for field, (both, value) in effects.items():
        named = {"the second token": second}
        settings = {"max_tokens": 12, **{n: named.get(str(v), v) for n, v in both.items()}}
        with pytest.MonkeyPatch.context() as patch:
            if field == "ignore_eos":
                patch.setattr(served.lm.engine, "stop_token_ids", frozenset(second))
            before = told(ask(**settings)) if settings["max_tokens"] else None
            after = told(ask(**{**settings, field: named.get(str(value), value)}))
        assert after != before, field


def test_prompt_log_probabilities_match_the_engine(served: Served, offline: LanguageModel) -> None:
    prompt = "import os\nπ = 3\n"
    alone = offline.generate([prompt], max_new_tokens=3, prompt_logprobs=2)[0]
    spelled = [offline.tokenizer.decode([each]) for each in alone.prompt_token_ids]
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 3, "prompt_logprobs": 2, "n": 2}
    for choice in served.complete(**asked).body["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for found, wanted in zip(others, alone.prompt_logprobs, strict=True):
            own = found[str(wanted.token_id)]
            assert own["logprob"] == pytest.approx(wanted.logprob, abs=1e-4)
            assert own["rank"] == wanted.rank
            assert own["decoded_token"] == offline.tokenizer.decode([wanted.token_id])
            assert found.keys() >= {str(token) for token, _ in wanted.top_logprobs}
    messages = [{"role": "user", "content": "import os"}]
    count = len(offline.chat_prompt(messages))
    assert len(served.chat(max_tokens=1, prompt_logprobs=0).body["prompt_logprobs"]) == count

    echoed: dict[str, Any] = {"prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 2}
    (choice,) = served.complete(**echoed).body["choices"]
    assert choice["text"] == prompt + alone.text
    columns = choice["logprobs"]
    assert columns["tokens"][: len(spelled)] == spelled
    assert columns["token_logprobs"][0] is None
    logprobs = [*(each.logprob for each in alone.prompt_logprobs), *alone.logprobs]
    assert columns["token_logprobs"][1:] == pytest.approx(logprobs, abs=1e-4)
    assert columns["top_logprobs"][0] is None
    for values, logprob in zip(columns["top_logprobs"][1:], logprobs, strict=True):
        assert 2 <= len(values) <= 3
        assert max(values.values()) >= logprob - 1e-4
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert "\ufffd" in token or choice["text"][offset:].startswith(token)
    assert len(columns["tokens"]) == len(columns["text_offset"]) == len(spelled) + 3

    for n in (1, 2):
        found = events(served.complete(**echoed, n=n, stream=True).body)
        for index in range(n):
            parts = [p for e in found for p in e["choices"] if p["index"] == index]
            assert "".join(part["text"] for part in parts) == choice["text"]
            for name in ("tokens", "text_offset"):
                assert [v for part in parts for v in part["logprobs"][name]] == columns[name]
            values = [v for part in parts for v in part["logprobs"]["token_logprobs"]]
            assert values[1:] == pytest.approx(logprobs, abs=1e-4)


def test_prompts_are_scored_as_evaluations_do(served: Served, offline: LanguageModel) -> None:
    """Several prompts with one new token, of which continuations are read by their places."""
    prompts = [offline.tokenizer.encode(text) for text in ("import os", "import re\nx = 1")]
    asked = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1}
    body = served.ask("/v1/completions", {"model": NAME, **asked}).body
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        score = sum(choice["logprobs"]["token_logprobs"][1:-1])
        (wanted,) = offline.score(prompt[:1], [prompt[1:]])
        assert score == pytest.approx(sum(wanted), abs=1e-3)


@pytest.mark.parametrize("streams", [False, True])
def test_a_prompt_is_scored_without_new_tokens(
    served: Served, offline: LanguageModel, streams: bool
) -> None:
    """OpenAI's older API scores prompts like this, and evaluations use it."""
    prompts = [offline.tokenizer.encode(text) for text in ("import os", "import re\nx = 1")]
    settings: dict[str, Any] = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1}
    # The token that the engine samples is an end token, and must not be the reason for the end.
    first = offline.generate([prompts[0]], max_new_tokens=1)[0].token_ids
    settings["stop_token_ids"] = list(first)
    if streams:
        *chunks, last = events(
            served.complete(**settings, stream=True, stream_options={"include_usage": True}).body
        )
        choices, usage = [chunk["choices"][0] for chunk in chunks], last["usage"]
        choices.sort(key=lambda choice: choice["index"])
    else:
        body = served.complete(**settings).body
        choices, usage = body["choices"], body["usage"]
    num_prompt_tokens = sum(map(len, prompts))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt_tokens, 0)
    assert usage["total_tokens"] == num_prompt_tokens
    for prompt, choice in zip(prompts, choices, strict=True):
        assert choice["text"] == offline.tokenizer.decode(prompt)
        assert choice["finish_reason"] == "length"
        columns = choice["logprobs"]
        assert {len(column) for column in columns.values()} == {len(prompt)}
        (expected,) = offline.score(prompt[:1], [prompt[1:]])
        assert columns["token_logprobs"][0] is None
        assert columns["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


def test_prompt_logprobs_need_no_new_tokens(served: Served) -> None:
    scored, answered = (served.complete(prompt_logprobs=1, max_tokens=n).body for n in (0, 1))
    (choice,) = scored["choices"]
    assert choice["prompt_logprobs"] == answered["choices"][0]["prompt_logprobs"]
    assert (choice["text"], scored["usage"]["completion_tokens"]) == ("", 0)


def test_top_k_of_minus_one_keeps_all_tokens(served: Served) -> None:
    answers = [told(served.chat(max_tokens=8, **WARM, top_k=top_k)) for top_k in (-1, 0)]
    assert answers[0] == answers[1]
    messages = [{"role": "user", "content": "import os"}]
    body = {"model": NAME, "max_tokens": 2, "messages": messages, "top_k": -1}
    assert served.ask("/v1/messages", body).status == 200
