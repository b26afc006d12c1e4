"""OpenAI's own client, as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from serve.tests.conftest import NAME, Served, serving
from serve.tests.test_endpoints import TOOLS
from tests.waiting import wait_until

from interposer_engine import LanguageModel

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

MESSAGES: Any = [{"role": "user", "content": "import os"}]


@pytest.fixture(scope="module")
def keyed(lm: LanguageModel) -> Iterator[Served]:
    with serving(lm, keys=["secret"]) as running:
        yield running


@pytest.fixture
def client(keyed: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "interposer"


def test_chats_are_answered(client: openai.OpenAI, offline: LanguageModel) -> None:
    # The client makes an error of a stream that a limit ended.
    settings: Any = {"temperature": 0.8, "seed": 5}
    end = offline.chat(MESSAGES, max_new_tokens=9, **settings).token_ids[-1]
    alone = offline.chat(MESSAGES, max_new_tokens=20, stop_token_ids=[end], **settings)
    assert alone.finish_reason == "stop"
    fields: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 20, "logprobs": True}
    fields |= {**settings, "extra_body": {"stop_token_ids": [end]}}
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].message.content == alone.text
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert [t.logprob for t in tokens] == pytest.approx(alone.logprobs, abs=1e-3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(alone.token_ids)
    with client.chat.completions.stream(**fields) as stream:
        for event in stream:
            if event.type == "content.delta":
                text = event.snapshot
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == alone.text


def test_completions_are_written(client: openai.OpenAI, offline: LanguageModel) -> None:
    alone = offline.generate(["def main():"], max_new_tokens=9)[0]
    parts = client.completions.create(
        model=NAME, prompt="def main():", max_tokens=9, stream=True, extra_body={"top_k": 5}
    )
    assert "".join(part.choices[0].text for part in parts) == alone.text


def test_calls_of_tools_arrive(client: openai.OpenAI, offline: LanguageModel) -> None:
    messages: Any = [{"role": "user", "content": "def main():"}]
    prompt = offline.chat_prompt(messages, tools=TOOLS)
    end = offline.generate([prompt], max_new_tokens=24)[0].token_ids[-1]
    fields: Any = {"model": NAME, "messages": messages, "tools": TOOLS, "max_tokens": 30}
    fields["extra_body"] = {"stop_token_ids": [end]}
    choice = client.chat.completions.create(**fields).choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert calls is not None
    assert calls[0].type == "function"
    with client.chat.completions.stream(**fields) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == calls[0].function.arguments


def test_refusals_are_errors_of_the_client(client: openai.OpenAI, keyed: Served) -> None:
    fields: Any = {"model": NAME, "messages": MESSAGES}
    with pytest.raises(openai.BadRequestError, match="logit_bias is") as refused:
        client.chat.completions.create(**fields, logit_bias={"5": 101})
    assert refused.value.param == "logit_bias"
    with pytest.raises(openai.NotFoundError, match="model is 'gpt'"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    stranger = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="guess", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError, match="missing or unknown"):
        stranger.models.list()


def test_a_stream_that_is_closed_is_cancelled(client: openai.OpenAI, lm: LanguageModel) -> None:
    fields: Any = {"model": NAME, "messages": MESSAGES, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**fields, stream=True) as stream:
        next(iter(stream))
    wait_until(lambda: not lm.engine.scheduler.running)


def test_concurrent_requests_are_answered(keyed: Served) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{keyed.url}/v1", api_key="secret") as client:
            fields: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 9}
            answers = [client.chat.completions.create(**fields) for _ in range(16)]
            return [a.choices[0].message.content for a in await asyncio.gather(*answers)]

    answers = asyncio.run(ask())
    assert answers == [answers[0]] * 16


class Fruit(BaseModel):
    name: Literal["apple", "pear"]
    count: int = Field(ge=0, le=9)


def test_answers_are_parsed_as_the_requested_class(client: openai.OpenAI) -> None:
    fields: Any = {"model": NAME, "messages": MESSAGES, "response_format": Fruit, "max_tokens": 90}
    choice = client.chat.completions.parse(**fields).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Fruit)
    with client.chat.completions.stream(**fields) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed


def test_likely_tokens_arrive(client: openai.OpenAI, offline: LanguageModel) -> None:
    alone = offline.chat(MESSAGES, max_new_tokens=5, top_logprobs=4)
    fields: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 5, "logprobs": True}
    logprobs = client.chat.completions.create(**fields, top_logprobs=4).choices[0].logprobs
    assert logprobs is not None
    for entry, likely in zip(logprobs.content or [], alone.top_logprobs, strict=True):
        assert [t.token for t in entry.top_logprobs] == [
            offline.tokenizer.decode([token]) for token, _ in likely
        ]
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(
            [value for _, value in likely], abs=1e-3
        )
