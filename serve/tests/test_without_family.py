"""A model of transformers that no installed family is for, behind the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.adapt.tests.test_without_family import FAMILIES
from models.conftest import write_checkpoint
from serve.tests.conftest import NAME, serving

from interposer_engine import load


@pytest.mark.process
def test_server_answers_match_the_model(tmp_path: Path) -> None:
    write_checkpoint(FAMILIES["falcon"](), tmp_path)
    expected = load(tmp_path, "float32", cache_tokens=512).generate(
        ["a text", "another"], max_new_tokens=12
    )
    with serving(load(tmp_path, "float32", cache_tokens=512)) as served:
        fields = {
            "model": NAME,
            "temperature": 0,
            "max_tokens": 12,
            "prompt": ["a text", "another"],
        }
        body = served.ask("/v1/completions", fields).body
    assert [choice["text"] for choice in body["choices"]] == [
        completion.text for completion in expected
    ]
