"""Vectors, scores and classes over HTTP equal the results of transformers for single texts."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from serve.tests.attacks import NUM_ITEMS, nested
from serve.tests.conftest import Served, serving
from serve.tests.encoders import (
    CLOSE,
    CONTEXT,
    hidden_states,
    outputs,
    write_classifier,
    write_encoder,
)
from tests.waiting import WAIT_SECONDS
from torch.nn.functional import cosine_similarity

from interposer_adapt import load_encoder
from interposer_serve import Limits

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

TEXTS = ["import os", "def main():\n    pass", "π"]
LABELS = ["code", "prose", "data"]
EMBEDDING_PATHS = {
    *("/pooling", "/v1/embeddings", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
}
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def embedding_model(folder: Path) -> Any:
    return write_encoder(folder / "embedding")


@pytest.fixture(scope="module")
def embedding(folder: Path, embedding_model: Any) -> Iterator[Served]:
    with serving(load_encoder(folder / "embedding"), "tiny") as running:
        yield running


@pytest.fixture(scope="module")
def cross_encoder_model(folder: Path) -> Any:
    return write_classifier(folder / "cross", num_labels=1)


@pytest.fixture(scope="module")
def cross_encoder(folder: Path, cross_encoder_model: Any) -> Iterator[Served]:
    with serving(load_encoder(folder / "cross"), "tiny") as running:
        yield running


@pytest.fixture(scope="module")
def classifier_model(folder: Path) -> Any:
    return write_classifier(folder / "classifier", id2label=dict(enumerate(LABELS)))


@pytest.fixture(scope="module")
def classifier(folder: Path, classifier_model: Any) -> Iterator[Served]:
    with serving(load_encoder(folder / "classifier"), "tiny") as running:
        yield running


def token_ids(served: Served, text: str) -> list[int]:
    encoder: Any = served.lm
    ids: list[int] = encoder.tokenizer(text)["input_ids"]
    return ids


def ask(served: Served, path: str, **fields: Any) -> Any:
    answer = served.ask(path, {"model": "tiny", **fields})
    assert answer.status == 200, answer.body
    return answer.body


def refused(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    answer = served.ask(path, {"model": "tiny", **fields})
    assert answer.status == 400, answer.body
    return answer.error


def test_embeddings_of_token_ids_equal_those_of_their_text(
    embedding: Served, embedding_model: Any
) -> None:
    ids = [token_ids(embedding, text) for text in TEXTS]
    expected = torch.stack([hidden_states(embedding_model, text).mean(0) for text in TEXTS])
    body = ask(embedding, "/v1/embeddings", input=ids)
    vectors = torch.tensor([entry["embedding"] for entry in body["data"]])
    torch.testing.assert_close(vectors, expected, **CLOSE)
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    single = ask(embedding, "/v1/embeddings", input=ids[0])["data"]
    torch.testing.assert_close(torch.tensor(single[0]["embedding"]), expected[0], **CLOSE)
    assert len(single) == 1


@pytest.mark.parametrize(
    ("value", "message", "code"),
    [
        ([4096], "Token id 4096 is outside the vocabulary of 4096", None),
        ([[1], [2**40]], "is outside the vocabulary", None),
        ([1] * (CONTEXT + 1), f"65 tokens; allowed are {CONTEXT}", "context_length_exceeded"),
        ([[1] * (CONTEXT + 1)], f"65 tokens; allowed are {CONTEXT}", "context_length_exceeded"),
        ([1] * 10 * CONTEXT, "640 tokens; allowed are", "context_length_exceeded"),
        ("x " * 200, "tokens; allowed are", "context_length_exceeded"),
        ([-1], "texts, token ids or a list of those", "invalid_value"),
        ([[]], "input[0] has no tokens", "invalid_value"),
        ([[1], "a"], "texts, token ids or a list of those", "invalid_value"),
        ([1.5], "texts, token ids or a list of those", "invalid_value"),
        ([["a"]], "texts, token ids or a list of those", "invalid_value"),
        (["a"] * 2049, "2049 items; allowed are 2048", "too_many_items"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_wrong_inputs_are_refused(
    embedding: Served, path: str, value: Any, message: str, code: str | None
) -> None:
    error = refused(embedding, path, input=value)
    assert message in error["message"]
    assert error["code"] == code


def test_dimensions_are_allowed_if_the_checkpoint_states_them(tmp_path: Path) -> None:
    model = write_encoder(tmp_path, matryoshka_dimensions=[8, 16])
    expected = hidden_states(model, "import os").mean(0)[:8]
    with serving(load_encoder(tmp_path), "tiny") as served:
        (entry,) = ask(served, "/v1/embeddings", input="import os", dimensions=8)["data"]
        torch.testing.assert_close(torch.tensor(entry["embedding"]), expected, **CLOSE)
        error = refused(served, "/v1/embeddings", input="a", dimensions=9)
        assert (
            "dimensions is 9, which is not honoured here; allowed is one of [8, 16]"
            in (error["message"])
        )


def test_pooling_returns_vectors_of_texts_and_of_tokens(
    embedding: Served, embedding_model: Any
) -> None:
    states = [hidden_states(embedding_model, text) for text in TEXTS]
    for fields in ({}, {"task": "embed"}):
        body = ask(embedding, "/pooling", input=TEXTS, **fields)
        vectors = torch.tensor([entry["data"] for entry in body["data"]])
        torch.testing.assert_close(vectors, torch.stack([h.mean(0) for h in states]), **CLOSE)
    body = ask(embedding, "/pooling", input=TEXTS, task="token_embed")
    assert (body["object"], body["model"], body["id"][:5]) == ("list", "tiny", "pool-")
    for index, (entry, expected) in enumerate(zip(body["data"], states, strict=True)):
        assert (entry["index"], entry["object"]) == (index, "pooling")
        torch.testing.assert_close(torch.tensor(entry["data"]), expected, **CLOSE)
    (entry,) = ask(
        embedding, "/pooling", input=TEXTS[1], task="token_embed", encoding_format="base64"
    )["data"]
    values = np.frombuffer(base64.b64decode(entry["data"]), "<f4").reshape(-1, 32)
    torch.testing.assert_close(torch.from_numpy(values.copy()), states[1], **CLOSE)


def test_token_vectors_have_a_size_limit(
    embedding: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interposer_serve._vectors._MAX_TOKEN_VALUES", 32)
    error = refused(embedding, "/pooling", input=[1, 2], task="token_embed")
    assert "input has 2 tokens; allowed are 1 in one request" in error["message"]
    assert ask(embedding, "/pooling", input=[1], task="token_embed")["usage"]["total_tokens"] == 1


def test_a_classifier_pools_probabilities(classifier: Served, classifier_model: Any) -> None:
    expected = [outputs(classifier_model, text).logits[0].softmax(0) for text in TEXTS]
    body = ask(classifier, "/pooling", input=TEXTS, task="classify")
    probabilities = torch.tensor([entry["data"] for entry in body["data"]])
    torch.testing.assert_close(probabilities, torch.stack(expected), **CLOSE)
    error = refused(classifier, "/pooling", input="a", task="embed")
    assert error["message"] == (
        "task is 'embed', which this model cannot do; allowed is 'classify'"
    )


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_classes_equal_transformers(classifier: Served, classifier_model: Any, path: str) -> None:
    body = ask(classifier, path, input=TEXTS)
    for text, entry in zip(TEXTS, body["data"], strict=True):
        expected = outputs(classifier_model, text).logits[0].softmax(0)
        torch.testing.assert_close(torch.tensor(entry["probs"]), expected, **CLOSE)
        assert entry["label"] == LABELS[int(expected.argmax())]
        assert entry["num_classes"] == 3
    ids = [token_ids(classifier, text) for text in TEXTS]
    assert ask(classifier, path, input=ids)["data"][1]["label"] == body["data"][1]["label"]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_of_an_embedding_model_are_cosine_similarities(
    embedding: Served, embedding_model: Any, path: str
) -> None:
    vectors = [hidden_states(embedding_model, text).mean(0) for text in TEXTS]
    one_to_many = ask(embedding, path, text_1=TEXTS[0], text_2=TEXTS)
    expected = [float(cosine_similarity(vectors[0], vector, dim=0)) for vector in vectors]
    scores = [entry["score"] for entry in one_to_many["data"]]
    assert scores == pytest.approx(expected, abs=1e-5)
    many_to_many = ask(embedding, path, text_1=TEXTS, text_2=TEXTS[::-1])
    expected = [
        float(cosine_similarity(a, b, dim=0)) for a, b in zip(vectors, vectors[::-1], strict=True)
    ]
    assert [entry["score"] for entry in many_to_many["data"]] == pytest.approx(expected, abs=1e-5)
    assert ask(embedding, path, text_1="a", text_2="a")["data"][0]["score"] == pytest.approx(1)


def test_scores_of_a_cross_encoder_equal_transformers(
    cross_encoder: Served, cross_encoder_model: Any
) -> None:
    expected = [
        float(outputs(cross_encoder_model, TEXTS[0], text).logits.sigmoid()) for text in TEXTS
    ]
    body = ask(cross_encoder, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    assert [entry["score"] for entry in body["data"]] == pytest.approx(expected, abs=1e-5)
    encoder: Any = cross_encoder.lm
    pairs = [encoder.tokenizer(TEXTS[0], text)["input_ids"] for text in TEXTS]
    assert body["usage"]["prompt_tokens"] == sum(map(len, pairs))


@pytest.mark.parametrize(
    "settings",
    [
        {"sentence_transformers": {"activation_fn": IDENTITY}},
        {"sbert_ce_default_activation_function": IDENTITY},
    ],
)
def test_scores_use_the_activation_that_the_checkpoint_names(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = write_classifier(tmp_path, num_labels=1, **settings)
    expected = float(outputs(model, "import os", "π").logits)
    with serving(load_encoder(tmp_path), "tiny") as served:
        (entry,) = ask(served, "/v1/score", text_1="import os", text_2="π")["data"]
    assert entry["score"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_sorted_by_their_scores(
    cross_encoder: Served, cross_encoder_model: Any, path: str
) -> None:
    expected = [
        float(outputs(cross_encoder_model, "import os", text).logits.sigmoid()) for text in TEXTS
    ]
    order = sorted(range(3), key=expected.__getitem__, reverse=True)
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    body = ask(cross_encoder, path, query="import os", documents=documents)
    assert [result["index"] for result in body["results"]] == order
    for result in body["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
        assert result["document"] == {"text": TEXTS[result["index"]]}
    assert body["usage"]["total_tokens"] > 0
    fields = {"query": "import os", "documents": documents, "top_n": 2, "return_documents": False}
    body = ask(cross_encoder, path, **fields)
    assert [[*result] for result in body["results"]] == [["index", "relevance_score"]] * 2
    assert [result["index"] for result in body["results"]] == order[:2]


def test_an_embedding_model_reranks_by_similarity(embedding: Served) -> None:
    body = ask(embedding, "/v1/rerank", query="import os", documents=[*TEXTS[1:], "import os"])
    assert body["results"][0]["index"] == 2
    assert body["results"][0]["relevance_score"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "text_1 has 2 texts"),
        ("/v1/score", {"text_1": [], "text_2": ["a"]}, "text_1", "a text or a list of texts"),
        ("/v1/score", {"text_1": "a", "text_2": 3}, "text_2", "a text or a list of texts"),
        ("/v1/score", {"text_1": "a"}, "text_2", "text_2 is missing"),
        ("/v1/score", {"text_1": "a", "text_2": "x " * 200}, "text_2", "tokens; allowed are 64"),
        ("/v1/score", {"text_1": "a", "text_2": ["a"] * 2049}, "text_2", "allowed are 2048"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "allowed is a text"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "not empty"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents", "a list of texts"),
        ("/v1/rerank", {"query": "a", "documents": [{}]}, "documents", "objects with a text"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents", "with a text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top": 1}, "top", "Unknown field 'top'"),
        ("/v1/rerank", {"query": "a", "documents": ["x " * 200]}, "documents", "allowed are 64"),
        ("/v1/rerank", {"query": "x" * 10**6, "documents": ["a"]}, "query", "1000000 characters"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "x" * 10**6}]}, "documents", "10000"),
        ("/pooling", {"input": "a", "task": "plugin"}, "task", "allowed is 'embed', 'token_embed'"),
    ],
)
def test_wrong_fields_are_refused(
    embedding: Served,
    cross_encoder: Served,
    path: str,
    fields: dict[str, Any],
    param: str,
    message: str,
) -> None:
    for served in (embedding, cross_encoder):
        error = refused(served, path, **fields)
        assert message in error["message"]
        assert error["param"] == param


def test_a_model_has_only_the_endpoints_of_its_tasks(
    embedding: Served, cross_encoder: Served, classifier: Served
) -> None:
    classes = {"/pooling", "/classify", "/v1/classify"}
    expected = [
        (embedding, EMBEDDING_PATHS),
        (cross_encoder, EMBEDDING_PATHS - {"/v1/embeddings"} | classes),
        (classifier, classes),
    ]
    for served, paths in expected:
        document = served.ask("/openapi.json").body
        assert {path for path, item in document["paths"].items() if "post" in item} == paths
        for path in EMBEDDING_PATHS | classes:
            answer = served.ask(path, {})
            assert answer.status == (400 if path in paths else 404)
            if path not in paths:
                listed = answer.error["message"].partition("; there are ")[2].split(", ")
                assert paths <= {*listed}
                assert path not in listed


def test_models_list_the_capabilities_of_encoders(
    embedding: Served, cross_encoder: Served, classifier: Served
) -> None:
    expected = [
        (embedding, ["embedding", "score", "rerank"]),
        (cross_encoder, ["classification", "score", "rerank"]),
        (classifier, ["classification"]),
    ]
    for served, capabilities in expected:
        (entry,) = served.ask("/v1/models").body["data"]
        assert entry["capabilities"] == capabilities
        assert (entry["max_model_len"], entry["dtype"]) == (CONTEXT, "float32")


def test_the_context_is_that_of_the_positions(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    encoder = load_encoder(tmp_path)
    encoder.tokenizer.model_max_length = 10**30  # of tokenizers without a limit
    with serving(encoder, "tiny") as served:
        assert served.ask("/v1/models").body["data"][0]["max_model_len"] == CONTEXT


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/pooling", {"input": "a"}),
    ],
)
def test_the_endpoints_share_the_size_limits(
    embedding: Served, path: str, fields: dict[str, Any]
) -> None:
    with serving(embedding.lm, "tiny", limits=Limits(prompt_tokens=1)) as served:
        long_text = {name: "import os" for name in fields if name in ("input", "text_1", "query")}
        error = refused(served, path, **{**fields, **long_text})
        assert "allowed are 1" in error["message"]
        assert error["code"] == "context_length_exceeded"
    with serving(embedding.lm, "tiny", limits=Limits(body_bytes=20)) as served:
        answer = served.ask(path, {"model": "tiny", **fields})
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_requests_beyond_queue_and_deadline_are_refused(
    embedding: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, may_end = threading.Event(), threading.Event()

    def count_tokens(*_: Any) -> list[int]:
        starts.set()
        may_end.wait(WAIT_SECONDS)
        return [1, 1]

    body = {"model": "tiny", "text_1": "a", "text_2": "b"}
    monkeypatch.setattr(embedding.lm, "count_tokens", count_tokens)
    limits = Limits(queue=0)
    with serving(embedding.lm, "tiny", limits=limits) as served, ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.ask, "/v1/score", body)
        assert starts.wait(WAIT_SECONDS)
        answer = served.ask("/v1/score", body)
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        may_end.set()
        assert running.result().status == 200
    may_end.clear()
    with serving(embedding.lm, "tiny", limits=Limits(deadline_seconds=0.1)) as served:
        answer = served.ask("/v1/score", body)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        may_end.set()


@pytest.mark.parametrize(
    ("path", "content", "reason"),
    [
        ("/v1/embeddings", f'{{"input": [{"1," * NUM_ITEMS}1]}}', "tokens; allowed are 64"),
        ("/v1/embeddings", f'{{"input": [{"[1]," * NUM_ITEMS}[1]]}}', "objects and lists"),
        ("/pooling", f'{{"input": {nested(200)}}}', "levels deep"),
        ("/v1/rerank", f'{{"documents": [{"{}," * NUM_ITEMS}1]}}', "objects and lists"),
        ("/v1/rerank", f'{{"documents": [{"1," * NUM_ITEMS}1]}}', "tokens; allowed are 64"),
        ("/v1/score", f'{{"text_2": ["{"x " * NUM_ITEMS}"]}}', "characters"),
    ],
    ids=["token ids", "lists", "nested", "objects", "numbers", "long text"],
)
def test_costly_bodies_are_refused(
    embedding: Served, cross_encoder: Served, path: str, content: str, reason: str
) -> None:
    for served in (embedding, cross_encoder):
        if path != "/v1/embeddings" or served is embedding:
            answer = served.ask(path, content.encode())
            assert (answer.status, reason in answer.error["message"]) == (400, True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = ["input", "task", "encoding_format", "dimensions", "text_1", "text_2", "query"]
FIELDS += ["documents", "top_n", "return_documents", "metadata"]


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_no_body_makes_the_server_fail(cross_encoder: Served, body: dict[str, Any]) -> None:
    valid: dict[str, dict[str, Any]] = {
        "/pooling": {"input": "a"},
        "/v1/classify": {"input": "a"},
        "/v1/score": {"text_1": "a", "text_2": "b"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
    }
    for path, fields in valid.items():
        for content in ({**fields, **body}, {**body, **fields}):
            known = {name: value for name, value in content.items() if name in fields}
            for sent in (content, known):
                assert cross_encoder.ask(path, {"model": "tiny", **sent}).status in (200, 400)
