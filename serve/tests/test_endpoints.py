"""Answers are those of the engine without a server, whole and streamed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serve.tests.conftest import NAME, Served, events

from interposer_engine import LanguageModel

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

WARM: Any = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
PROMPTS = ("def main():", "import os", "class A:\n", "x = [", "for i in range(")


def settings(index: int) -> dict[str, Any]:
    """Return sampling settings, which differ from request to request."""
    return {
        "max_tokens": 4 + index % 29,
        "temperature": (0.0, 0.7, 1.0, 1.3)[index % 4],
        "top_p": (1.0, 0.9)[index % 2],
        "top_k": (0, 40, 5)[index % 3],
        "min_p": (0.0, 0.02)[index // 2 % 2],
        "presence_penalty": (0.0, 0.5)[index // 3 % 2],
        "frequency_penalty": (0.0, -0.3)[index // 5 % 2],
        "repetition_penalty": (1.0, 1.1)[index // 4 % 2],
        "seed": 1000 + index,
    }


def expected(offline: LanguageModel, prompt: str, **asked: Any) -> Any:
    asked["max_new_tokens"] = asked.pop("max_tokens")
    return offline.generate([prompt], **asked)[0]


def test_32_concurrent_requests_get_the_same_answers_as_alone(
    served: Served, offline: LanguageModel
) -> None:
    def ask(index: int) -> Any:
        prompt = PROMPTS[index % len(PROMPTS)]
        asked = {"prompt": prompt, "logprobs": 0, **settings(index)}
        if index % 2:
            return served.complete(**asked).body["choices"][0]
        found = events(served.complete(**asked, stream=True).body)
        parts = [event["choices"][0] for event in found]
        logprobs = [lp for part in parts for lp in part["logprobs"]["token_logprobs"]]
        text = "".join(part["text"] for part in parts)
        reason = parts[-1]["finish_reason"]
        return {"text": text, "finish_reason": reason, "logprobs": {"token_logprobs": logprobs}}

    with ThreadPoolExecutor(32) as clients:
        found = list(clients.map(ask, range(32)))
    for index, choice in enumerate(found):
        alone = expected(offline, PROMPTS[index % len(PROMPTS)], **settings(index))
        assert choice["text"] == alone.text, index
        assert choice["finish_reason"] == alone.finish_reason
        # Rows of a larger batch may be summed in another order.
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(alone.logprobs, abs=1e-3)


def test_a_chat_answer_completes_the_rendered_prompt(
    served: Served, offline: LanguageModel
) -> None:
    messages = [{"role": "developer", "content": "Be"}, {"role": "user", "content": "import os"}]
    expected_messages = [{"role": "system", "content": "Be"}, messages[1]]
    prompt = offline.chat_prompt(expected_messages)
    alone = offline.chat(expected_messages, max_new_tokens=12, **WARM)
    parts = [{"type": "text", "text": "import"}, {"type": "text", "text": " os"}]
    for content in ("import os", parts):
        sent_messages = [messages[0], {"role": "user", "content": content}]
        body = served.chat(messages=sent_messages, max_completion_tokens=12, **WARM).body
        assert body["object"] == "chat.completion"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": alone.text},
                "logprobs": None,
                "finish_reason": alone.finish_reason,
            }
        ]
        spent = {"prompt_tokens": len(prompt), "completion_tokens": len(alone.token_ids)}
        details = {
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        assert body["usage"] == {**spent, "total_tokens": sum(spent.values()), **details}


def test_a_streamed_chat_adds_up_to_the_whole_answer(served: Served) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "logprobs": True, "n": 3, **WARM}
    whole_body = served.chat(**fields).body
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(served.chat(**fields, **options).body)
    assert last["choices"] == []
    assert last["usage"] == whole_body["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index, choice in enumerate(whole_body["choices"]):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == choice["message"]["content"]
        logprobs = [lp for part in parts for lp in (part["logprobs"] or {"content": []})["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1] == {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": choice["finish_reason"],
        }


def test_each_of_n_answers_has_the_next_seed(served: Served, offline: LanguageModel) -> None:
    body = served.complete(prompt=["x = [", "import os"], n=2, max_tokens=8, **WARM).body
    choices = [(choice["index"], choice["text"]) for choice in body["choices"]]
    alone = [
        expected(offline, prompt, max_tokens=8, **{**WARM, "seed": seed}).text
        for prompt in ("x = [", "import os")
        for seed in (7, 8)
    ]
    assert choices == list(enumerate(alone))


def test_token_ids_are_prompts_too(served: Served, offline: LanguageModel) -> None:
    ids = offline.tokenizer.encode("import os")
    texts = [served.complete(prompt=p, max_tokens=6).body["choices"] for p in (ids, [ids])]
    assert texts[0] == texts[1] == served.complete(max_tokens=6).body["choices"]


def test_log_probabilities_match_the_engine(served: Served, offline: LanguageModel) -> None:
    alone = expected(offline, "import os", max_tokens=6, temperature=0.0)
    logprobs = served.complete(max_tokens=6, logprobs=0).body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [offline.tokenizer.decode([i]) for i in alone.token_ids]
    assert "".join(logprobs["tokens"]) == alone.text
    assert logprobs["token_logprobs"] == pytest.approx(alone.logprobs, abs=1e-4)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert alone.text[offset:].startswith(token)


@pytest.mark.parametrize("stop", [" sys", [" sys", "nothing"]])
def test_stop_texts_end_an_answer(served: Served, stop: Any) -> None:
    full_text = served.complete(prompt="def main():", max_tokens=8).body["choices"][0]["text"]
    assert " sys" in full_text
    choice = served.complete(prompt="def main():", max_tokens=8, stop=stop).body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (full_text.partition(" sys")[0], "stop")
    streamed = served.complete(prompt="def main():", max_tokens=8, stop=stop, stream=True).body
    assert "".join(e["choices"][0]["text"] for e in events(streamed)) == choice["text"]


@pytest.mark.slow
def test_the_default_chat_length_is_the_context(served: Served) -> None:
    body = served.chat(ignore_eos=True).body
    assert body["usage"]["total_tokens"] == 1024
    assert body["choices"][0]["finish_reason"] == "length"
    assert served.complete().body["usage"]["completion_tokens"] == 16


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
]


def test_tools_are_rendered_and_calls_are_parsed(served: Served, offline: LanguageModel) -> None:
    messages = [{"role": "user", "content": "def main():"}]
    prompt = offline.chat_prompt(messages, tools=TOOLS)
    alone = offline.generate([prompt], max_new_tokens=24)[0]
    content, _, call = alone.text.partition("\n")
    assert call, "the model has to write a line for this test"
    fields = {"messages": messages, "tools": TOOLS, "max_tokens": 24}
    body = served.chat(**fields).body
    assert body["usage"]["prompt_tokens"] == len(prompt)
    (choice,) = body["choices"]
    (found,) = choice["message"]["tool_calls"]
    assert found["function"]["name"] == "look"
    arguments = json.loads(found["function"]["arguments"])
    # The response template takes both without white space around.
    told = choice["message"]["content"] or "", arguments["x"]
    assert told == (content.strip(), call.strip())

    parts = [event["choices"][0] for event in events(served.chat(**fields, stream=True).body)]
    (delta,) = [part["delta"] for part in parts if "tool_calls" in part["delta"]]
    streamed = delta["tool_calls"][0]
    assert (streamed["index"], streamed["function"]) == (0, found["function"])

    untold = served.chat(**fields, tool_choice="none").body["choices"][0]["message"]
    assert "tool_calls" not in untold

    # What was called and what came of it are messages of the next turn.
    turn = [*messages, choice["message"], {"role": "tool", "content": "7", "tool_call_id": "1"}]
    ids = served.ask("/tokenize", {"messages": turn, "tools": TOOLS}).body["tokens"]
    assert f"<call>{call.strip()}</call>[tool]7" in offline.tokenizer.decode(ids)


def test_texts_and_chats_are_tokenized(served: Served, offline: LanguageModel) -> None:
    ids = offline.tokenizer.encode("import os")
    tokenized = served.ask("/tokenize", {"prompt": "import os"}).body
    assert tokenized == {"count": len(ids), "max_model_len": 1024, "tokens": ids}
    messages = [{"role": "user", "content": "π"}]
    options = {"shout": True}
    fields = {"messages": messages, "chat_template_kwargs": options}
    assert served.ask("/tokenize", fields).body["tokens"] == offline.chat_prompt(
        messages, options=options
    )
    assert served.ask("/detokenize", {"tokens": ids}).body == {"prompt": "import os"}


def test_models_are_listed(served: Served) -> None:
    (entry,) = served.ask("/v1/models").body["data"]
    assert entry == served.ask(f"/v1/models/{NAME}").body
    assert (entry["id"], entry["max_model_len"]) == (NAME, 1024)
    assert served.ask("/v1/models/other").status == 404


def test_the_explanation_matches_the_model(served: Served, offline: LanguageModel) -> None:
    served_explanation = served.ask("/explanation").body
    assert {row["kind"] for row in served_explanation["choices"]} >= {
        "platform",
        "model",
        "kernel",
        "attention",
    }
    assert all(row["why"] for row in served_explanation["choices"])
