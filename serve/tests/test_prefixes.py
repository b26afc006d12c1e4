"""Only requests of the same client share the prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve.tests.conftest import Served, serving

from interposer_engine import load

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

PROMPT = "import os\nimport sys\n" * 12


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
