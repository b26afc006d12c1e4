"""What is kept of prompts is shared with the same client alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve.tests.conftest import Served, serving

from interposer_models import load

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

PROMPT = "import os\nimport sys\n" * 12


def shared(served: Served, key: str, **fields: str) -> float:
    """Return how many tokens of its prompt a request finds computed."""
    name, headers = "interposer_shared_prompt_tokens", {"authorization": f"Bearer {key}"}
    before = metric(served, name, key)
    body = {"model": "stdlib-lm", "prompt": PROMPT, "max_tokens": 1, **fields}
    assert served.ask("/v1/completions", body, **headers).status == 200
    return metric(served, name, key) - before


def metric(served: Served, name: str, key: str) -> float:
    lines = served.ask("/metrics", authorization=f"Bearer {key}").body.splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return float(line.split()[1])


def test_another_client_cannot_find_out_what_was_asked(chat_folder: Path) -> None:
    lm = load(chat_folder, "float32", cache_tokens=4096, prefix_cache=True)
    with serving(lm, keys=["first", "second"]) as served:
        assert shared(served, "first") == 0
        again = shared(served, "first")
        assert again > 50
        assert shared(served, "second") == 0
        assert shared(served, "second") == again
        assert shared(served, "first", cache_salt="a") == 0
        assert shared(served, "first", cache_salt="a") == again
        assert shared(served, "first", cache_salt="b") == 0


def test_without_keys_all_share_but_who_asks_for_a_salt(chat_folder: Path) -> None:
    lm = load(chat_folder, "float32", cache_tokens=4096, prefix_cache=True)
    with serving(lm) as served:
        assert shared(served, "any") == 0
        assert shared(served, "other") > 50
        assert shared(served, "any", cache_salt="mine") == 0
