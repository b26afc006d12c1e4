"""Only requests of the same client share the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serve.tests.conftest import Served, serving

from interposer_engine import load

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

PROMPT = "import os\nimport sys\n" * 12
MESSAGES = [{"role": "user", "content": PROMPT}]
# Path, fields, and the function that reads the number of cached tokens, of each API with chats.
APIS: dict[str, tuple[str, dict[str, Any], Callable[[Any], float]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 1},
        lambda usage: usage["prompt_tokens_details"]["cached_tokens"],
    ),
    "responses": (
        "/v1/responses",
        {"input": PROMPT, "max_output_tokens": 1},
        lambda usage: usage["input_tokens_details"]["cached_tokens"],
    ),
    "messages": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 1},
        lambda usage: usage["cache_read_input_tokens"],
    ),
}


def num_shared_tokens(served: Served, key: str, **fields: str) -> float:
    """Send a request, and return how many tokens of its prompt the prefix cache had."""
    name, headers = "interposer_shared_prompt_tokens", {"authorization": f"Bearer {key}"}
    before = metric(served, name, key)
    body = {"model": "stdlib-lm", "prompt": PROMPT, "max_tokens": 1, **fields}
    answer = served.ask("/v1/completions", body, **headers)
    assert answer.status == 200
    num_shared = metric(served, name, key) - before
    assert answer.body["usage"]["prompt_tokens_details"] == {"cached_tokens": num_shared}
    return num_shared


def metric(served: Served, name: str, key: str) -> float:
    lines = served.ask("/metrics", authorization=f"Bearer {key}").body.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}{{")]
    return float(line.split()[1])


def test_clients_with_different_keys_or_salts_share_no_prefix(chat_folder: Path) -> None:
    lm = load(chat_folder, "float32", cache_tokens=4096, prefix_cache=True)
    with serving(lm, keys=["first", "second"]) as served:
        assert num_shared_tokens(served, "first") == 0
        repeated = num_shared_tokens(served, "first")
        assert repeated > 50
        assert num_shared_tokens(served, "second") == 0
        assert num_shared_tokens(served, "second") == repeated
        assert num_shared_tokens(served, "first", cache_salt="a") == 0
        assert num_shared_tokens(served, "first", cache_salt="a") == repeated
        assert num_shared_tokens(served, "first", cache_salt="b") == 0


def test_without_keys_only_a_salt_keeps_requests_apart(chat_folder: Path) -> None:
    lm = load(chat_folder, "float32", cache_tokens=4096, prefix_cache=True)
    with serving(lm) as served:
        assert num_shared_tokens(served, "any") == 0
        assert num_shared_tokens(served, "other") > 50
        assert num_shared_tokens(served, "any", cache_salt="mine") == 0


def test_salts_separate_prefixes_in_each_api(chat_folder: Path) -> None:
    lm = load(chat_folder, "float32", cache_tokens=4096, prefix_cache=True)
    with serving(lm) as served:

        def num_cached(api: str, **fields: Any) -> float:
            path, body, cached_tokens = APIS[api]
            answer = served.ask(path, {"model": "stdlib-lm", **body, **fields})
            assert answer.status == 200, answer.body
            return cached_tokens(answer.body["usage"])

        for api in APIS:
            assert num_cached(api, cache_salt=api) == 0
            repeated = num_cached(api, cache_salt=api)
            assert repeated > 50
            assert num_cached(api, cache_salt=f"not {api}") == 0
        # All APIs write the same prompt, so a salt shares its pages between them.
        assert {num_cached(api, cache_salt="chat") for api in APIS} == {repeated}
        # A routing hint of OpenAI's clients separates nothing.
        assert num_cached("responses", cache_salt="chat", prompt_cache_key="a") == repeated
        for api, (path, body, _) in APIS.items():
            wrong = served.ask(path, {**body, "cache_salt": "a" * 1025})
            assert wrong.status == 400, api
            assert "allowed is a text of up to 1024 characters" in str(wrong.body), api
