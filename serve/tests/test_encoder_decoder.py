"""An encoder-decoder behind the server: a prompt is what its encoder reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.tests.test_encoder_decoder import greedy_of, written
from serve.tests.conftest import NAME, events, serving

from interposer_engine import load


@pytest.mark.process
def test_completions_depend_on_the_encoder_input(tmp_path: Path) -> None:
    model = written("mbart", tmp_path)
    lm = load(tmp_path, "float32", platform="cpu", cache_tokens=640, max_sequences=4)
    source = lm.tokenizer.encode("a text")
    expected = lm.tokenizer.decode(greedy_of(model, source, 12))
    fields: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    with serving(lm) as served:
        body = served.ask("/v1/completions", {**fields, "prompt": "a text"}).body
        assert body["choices"][0]["text"] == expected
        assert body["usage"]["prompt_tokens"] == len(source)
        streamed = served.ask("/v1/completions", {**fields, "prompt": source, "stream": True}).body
        assert "".join(e["choices"][0]["text"] for e in events(streamed)) == expected
        # The context is the decoder's: a source as long as it leaves room for an answer.
        long = served.ask("/v1/completions", {**fields, "prompt": [5] * 256})
        assert (long.status, long.body["usage"]["completion_tokens"]) == (200, 12)
        longer = served.ask("/v1/completions", {**fields, "prompt": [5] * 257})
        assert longer.status == 400
        assert "The encoder input has 257 tokens, the encoder takes 256" in longer.error["message"]
        chat = served.chat()
        assert chat.status == 400
        assert "holds no chat template" in chat.error["message"]
