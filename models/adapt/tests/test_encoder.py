"""Vectors and classes of texts, compared with the model's results for single texts."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

import interposer
from interposer.errors import (
    CheckpointError,
    RequestError,
    UnknownNameError,
    UnsupportedModelError,
)
from interposer_adapt import load_encoder

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BERT = BertConfig(**SIZES, max_position_embeddings=128)
QWEN = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
TEXTS = ["a cat sits", "", "a much longer text than that of the cat, which is all it is", "π"]
# Two layers of ten float32 roundings each, on either side, of values near one.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def tokenizer(side: str) -> PreTrainedTokenizerFast:
    """Return one of bytes, with tokens around a text, that pads on a side."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[CLS]", "[SEP]", *alphabet])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="[PAD]", cls_token="[CLS]", padding_side=side
    )


def write(path: Path, config: Any, kind: Any = AutoModel, side: str = "right") -> Any:
    """Write a checkpoint of random weights, and return its model."""
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    tokenizer(side).save_pretrained(path)
    return model


def say(path: Path, pooling: dict[str, Any], unit: bool = False, **more: Any) -> None:
    """Write the files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if unit else [])]
    folders = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, folder) in enumerate(zip(kinds, folders, strict=False))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in more.items():
        (path / f"{name}.json").write_text(json.dumps(content))


def hidden_of(model: Any, side: str, text: str) -> torch.Tensor:
    """Return ``[T, H]`` of one text alone."""
    with torch.no_grad():
        out = model(**tokenizer(side)(text, return_tensors="pt"))
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


ALONE = {
    "cls": lambda h: h[0],
    "lasttoken": lambda h: h[-1],
    "max": lambda h: h.max(0).values,
    "mean": lambda h: h.mean(0),
    "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
    "weightedmean": lambda h: (
        (h * torch.arange(1, len(h) + 1)[:, None]).sum(0) / (len(h) * (len(h) + 1) / 2)
    ),
}


@pytest.mark.landing(2)
@pytest.mark.parametrize("mode", sorted(ALONE))
@pytest.mark.parametrize(("config", "side"), [(BERT, "right"), (QWEN, "left")])
def test_batched_vectors_equal_the_vectors_of_single_texts(
    tmp_path: Path, config: Any, side: str, mode: str
) -> None:
    model = write(tmp_path, config, side=side)
    say(tmp_path, {"pooling_mode": mode})
    encoder = load_encoder(tmp_path)
    assert all(place.is_bound for place in encoder.adapted.places if place.kind == "Linear")
    expected = torch.stack([ALONE[mode](hidden_of(model, side, text)) for text in TEXTS])
    torch.testing.assert_close(encoder.embed(TEXTS, batch_size=3), expected, **CLOSE)
    torch.testing.assert_close(encoder.embed(TEXTS[0]), expected[:1], **CLOSE)


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    model = write(tmp_path, BERT)
    older = {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}
    say(tmp_path, {**older, "pooling_mode_mean_tokens": False}, unit=True)
    (actual,) = load_encoder(tmp_path).embed(TEXTS[2])
    hidden = hidden_of(model, "right", TEXTS[2])
    expected = torch.cat([hidden[0], hidden.max(0).values])
    torch.testing.assert_close(actual, expected / expected.norm(), **CLOSE)


def test_pooling_defaults_to_the_mean(tmp_path: Path) -> None:
    model = write(tmp_path, BERT)
    (actual,) = load_encoder(tmp_path).embed("a cat")
    torch.testing.assert_close(actual, hidden_of(model, "right", "a cat").mean(0), **CLOSE)


def test_texts_are_truncated_and_prefixed_as_the_checkpoint_states(tmp_path: Path) -> None:
    write(tmp_path, BERT)
    say(
        tmp_path,
        {"pooling_mode": "mean"},
        sentence_bert_config={"max_seq_length": 8},
        config_sentence_transformers={
            "prompts": {"query": "query: ", "none": ""},
            "default_prompt_name": "query",
        },
    )
    encoder = load_encoder(tmp_path)
    unprompted = encoder.embed(["query: cat", "query: car"], prompt="none")
    assert torch.equal(encoder.embed(["cat", "car"]), unprompted)
    assert torch.equal(unprompted[0], unprompted[1])  # eight tokens are those around six bytes
    with pytest.raises(UnknownNameError, match="passage"):
        encoder.embed("cat", prompt="passage")


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_class_probabilities_equal_transformers(tmp_path: Path, problem: str) -> None:
    labels = {0: "cat", 1: "dog", 2: "car"}
    settings: dict[str, Any] = {**SIZES, "id2label": labels, "problem_type": problem}
    config = BertConfig(**settings)
    model = write(tmp_path, config, AutoModelForSequenceClassification)
    encoder = load_encoder(tmp_path)
    pairs = [("a cat", "a dog"), ("a", "a much longer text"), ("", "b")]
    for texts in (TEXTS, pairs):
        actual = encoder.classify(texts, batch_size=2)
        for text, chances in zip(texts, actual, strict=True):
            segments = text if isinstance(text, tuple) else (text,)
            with torch.no_grad():
                logits = model(**tokenizer("right")(*segments, return_tensors="pt")).logits[0]
            single = problem.startswith("single")
            expected = logits.softmax(0) if single else logits.sigmoid()
            assert [*chances] == ["cat", "dog", "car"]
            torch.testing.assert_close(torch.tensor([*chances.values()]), expected, **CLOSE)


def test_a_model_with_one_label_scores_pairs(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SIZES, "num_labels": 1}
    config = BertConfig(**settings)
    model = write(tmp_path, config, AutoModelForSequenceClassification)
    ((label, score),) = load_encoder(tmp_path).classify(("a cat", "a dog"))[0].items()
    with torch.no_grad():
        logit = model(**tokenizer("right")("a cat", "a dog", return_tensors="pt")).logits[0, 0]
    assert label == "LABEL_0"
    assert score == pytest.approx(float(logit.sigmoid()), rel=1e-4)


@pytest.mark.parametrize(("config", "side"), [(BERT, "right"), (QWEN, "left")])
def test_token_ids_have_the_vectors_of_their_text(tmp_path: Path, config: Any, side: str) -> None:
    model = write(tmp_path, config, side=side)
    encoder = load_encoder(tmp_path)
    ids = [encoder.tokenizer(text)["input_ids"] for text in TEXTS]
    states = [hidden_of(model, side, text) for text in TEXTS]
    expected = torch.stack([hidden.mean(0) for hidden in states])
    torch.testing.assert_close(encoder.embed(ids), expected, **CLOSE)
    for texts in (TEXTS, ids):
        assert encoder.count_tokens(texts) == [len(tokens) for tokens in ids]
        for actual, hidden in zip(encoder.embed_tokens(texts), states, strict=True):
            torch.testing.assert_close(actual, hidden, **CLOSE)
    with pytest.raises(RequestError, match="Token id 300 is outside the vocabulary of 300"):
        encoder.embed([[1, 300]])


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        (None, torch.sigmoid),
        ("torch.nn.modules.linear.Identity", lambda logit: logit),
        ("torch.nn.modules.activation.Tanh", torch.tanh),
    ],
)
def test_scores_have_the_activation_of_sentence_transformers(
    tmp_path: Path, name: str | None, activation: Any
) -> None:
    settings: dict[str, Any] = {**SIZES, "num_labels": 1}
    if name is not None:
        settings["sentence_transformers"] = {"activation_fn": name}
    model = write(tmp_path, BertConfig(**settings), AutoModelForSequenceClassification)
    encoder = load_encoder(tmp_path)
    pairs = [("a cat", "a dog"), ("a", "a much longer text")]
    expected = []
    for pair in pairs:
        with torch.no_grad():
            inputs = tokenizer("right")(*pair, return_tensors="pt")
            expected.append(float(activation(model(**inputs).logits[0, 0])))
    assert encoder.score(pairs) == pytest.approx(expected, abs=1e-5)
    assert encoder.count_tokens(pairs) == [len(a + b) + 3 for a, b in pairs]


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SIZES, "num_labels": 1}
    settings["sentence_transformers"] = {"activation_fn": "os.system"}
    config = BertConfig(**settings)
    write(tmp_path, config, AutoModelForSequenceClassification)
    with pytest.raises(UnsupportedModelError, match=r"names the activation 'os\.system'; known"):
        load_encoder(tmp_path)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "vectors", BERT)
    vectors = load_encoder(tmp_path / "vectors")
    for bad, message in (
        ([], "There are no texts"),
        ([3], "Text 0 is 3"),
        ({"a": 1}, "texts is {'a': 1} of the type dict, must be a text or a list"),
        (b"a", "texts is b'a' of the type bytes"),
        (["a", ("a", "b")], "mixed"),
        (["a", [1]], "mixed"),
        ([[]], r"Text 0 is \[\], must be a text, its token ids"),
    ):
        with pytest.raises(RequestError, match=message):
            vectors.embed(bad)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="batch_size is 0"):
        vectors.embed("a", batch_size=0)
    with pytest.raises(RequestError, match=r"no classes. Try: encoder\.embed"):
        vectors.classify("a")
    with pytest.raises(RequestError, match="has 0 labels; a cross-encoder has one"):
        vectors.score(("a", "b"))
    write(tmp_path / "classes", BERT, AutoModelForSequenceClassification)
    with pytest.raises(RequestError, match=r"classifies texts. Try: encoder\.classify"):
        load_encoder(tmp_path / "classes").embed("a")


def test_unsupported_checkpoints_are_refused(tmp_path: Path) -> None:
    write(tmp_path, BERT)
    say(tmp_path, {"pooling_mode": "median"})
    with pytest.raises(UnsupportedModelError, match="median"):
        load_encoder(tmp_path)
    say(tmp_path, {"pooling_mode_mean_tokens": False})
    with pytest.raises(UnsupportedModelError, match="names no pooling mode; known are cls"):
        load_encoder(tmp_path)
    (tmp_path / "modules.json").write_text('[{"path": "2_Dense", "type": "a.Dense"}]')
    with pytest.raises(UnsupportedModelError, match="has a 'Dense'"):
        load_encoder(tmp_path)
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match="is no list of modules"):
        load_encoder(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_encoder(tmp_path / "none")


def test_weights_can_be_quantized(tmp_path: Path) -> None:
    write(tmp_path, BERT)
    plain, quantized = load_encoder(tmp_path), load_encoder(tmp_path, quantization="int8")
    near = torch.cosine_similarity(plain.embed(TEXTS), quantized.embed(TEXTS))
    assert float(near.min()) > 0.999
    assert "int8" in str(interposer.explain(quantized.adapted))


def test_a_closed_encoder_frees_the_weights_and_refuses_texts(tmp_path: Path) -> None:
    write(tmp_path, BERT)
    with load_encoder(tmp_path) as encoder:
        assert repr(encoder).startswith(f"<Encoder {tmp_path}: BertModel, 0.")
        assert "float32 on cpu (cpu: " in repr(encoder)
        model = weakref.ref(encoder.adapted.model)
    assert model() is None
    assert repr(encoder) == "<Encoder: closed>"
    encoder.close()  # again does nothing
    with pytest.raises(RequestError, match=r"was closed\. Try: load it again"), encoder:
        pass
    with pytest.raises(RequestError, match=r"was closed\. Try: load it again"):
        encoder.embed("a text")
