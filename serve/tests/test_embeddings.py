"""Vectors are those of the encoder without a server, by OpenAI's client too."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from serve.tests.conftest import STDLIB, Served, serving
from transformers import AutoTokenizer, BertConfig, BertModel

from interposer_adapt import Encoder, load_encoder

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

TEXTS = ["import os", "def main():\n    pass", "π"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """Return a tiny encoder with random weights."""
    path = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=4096, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    BertModel(config, add_pooling_layer=False).eval().save_pretrained(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(STDLIB)
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(path)
    return load_encoder(path)


@pytest.fixture(scope="module")
def served(encoder: Encoder) -> Iterator[Served]:
    with serving(encoder, "tiny") as running:
        yield running


def test_embeddings_match_the_encoder(served: Served, encoder: Encoder) -> None:
    expected = encoder.embed(TEXTS)
    body = served.ask("/v1/embeddings", {"model": "tiny", "input": TEXTS}).body
    vectors = torch.tensor([entry["embedding"] for entry in body["data"]])
    torch.testing.assert_close(vectors, expected)
    assert [entry["index"] for entry in body["data"]] == [0, 1, 2]
    count = sum(len(ids) for ids in encoder.tokenizer(TEXTS)["input_ids"])
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}


def test_the_openai_client_gets_embeddings(served: Served, encoder: Encoder) -> None:
    # It asks for base64 unless it is told otherwise.
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="tiny", input="import os")
    torch.testing.assert_close(
        torch.tensor([answer.data[0].embedding]), encoder.embed(["import os"])
    )


def test_concurrent_requests_get_their_own_vectors(served: Served, encoder: Encoder) -> None:
    texts = [f"x = {number}" for number in range(24)]

    def ask(text: str) -> Any:
        return served.ask("/v1/embeddings", {"model": "tiny", "input": text}).body["data"][0]

    with ThreadPoolExecutor(12) as clients:
        found = [entry["embedding"] for entry in clients.map(ask, texts)]
    alone = torch.cat([encoder.embed(text) for text in texts])
    torch.testing.assert_close(torch.tensor(found), alone)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input is []; allowed is a text, texts, token ids or a list of those"),
        ({"input": {"text": "a"}}, "allowed is a text, texts, token ids or a list of those"),
        ({"encoding_format": "int8"}, "allowed is 'float' or 'base64'"),
        ({"dimensions": 8}, "dimensions is 8, which is not honoured here"),
        ({"input": "x " * 200}, "tokens; allowed are 64"),
    ],
)
def test_unsupported_fields_are_refused(
    served: Served, fields: dict[str, Any], message: str
) -> None:
    answer = served.ask("/v1/embeddings", {"model": "tiny", "input": "a", **fields})
    assert (answer.status, message in answer.error["message"]) == (400, True), answer.body


def test_other_endpoints_work_with_an_encoder(served: Served) -> None:
    assert served.ask("/ready").status == 200
    assert served.ask("/v1/models").body["data"][0]["max_model_len"] == 64
    kinds = {row["kind"] for row in served.ask("/explanation").body["choices"]}
    assert "kernel" in kinds
    assert served.ask("/v1/embeddings", {"model": "other", "input": "a"}).status == 404
    assert "there are /, /explanation" in served.ask("/v1/completions", {}).error["message"]
