"""Pipelines of transformers with adapted models."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    pipeline,
)

from interposer_adapt import adapt

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
Built = tuple[Any, Any, dict[str, Any]]
"""A pipeline, what it gets, and options of the call."""


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(64)}
    words_tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    words_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words_tokenizer, pad_token="w0")


def features() -> Built:
    model = BertModel(BertConfig(**SIZES, vocab_size=64)).eval()
    texts = ["w1 w2 w3 w4 w5", "w6", "w7 w8"]
    return pipeline("feature-extraction", model=model, tokenizer=tokenizer()), texts, {}


def batched_features() -> Built:
    pipe, texts, _ = features()
    return pipe, texts, {"batch_size": 3}


def speech() -> Built:
    convolutions: dict[str, Any] = {
        "conv_dim": (16, 16),
        "conv_kernel": (10, 3),
        "conv_stride": (5, 2),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    }
    config = Wav2Vec2Config(**SIZES, **convolutions, vocab_size=64, pad_token_id=0)
    pipe = pipeline(
        "automatic-speech-recognition",
        model=Wav2Vec2ForCTC(config).eval(),
        feature_extractor=Wav2Vec2FeatureExtractor(),
        tokenizer=tokenizer(),
    )
    return pipe, np.sin(np.arange(4000) / 9).astype(np.float32), {}


def images() -> Built:
    if find_spec("PIL") is None:
        pytest.skip("needs the package pillow. Try: make test-libraries")
    from PIL import Image

    more: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_labels": 5}
    config = ViTConfig(**SIZES, **more)
    size = {"height": 16, "width": 16}
    pipe = pipeline(
        "image-classification",
        model=ViTForImageClassification(config).eval(),
        image_processor=ViTImageProcessor(size=size),
    )
    pixels = np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8)
    return pipe, Image.fromarray(pixels), {}


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    "build", [features, batched_features, speech, pytest.param(images, marks=pytest.mark.slow)]
)
def test_a_pipeline_returns_the_same(build: Callable[[], Built]) -> None:
    torch.manual_seed(0)
    pipe, inputs, options = build()
    expected = pipe(inputs, **options)
    adapted = adapt(pipe.model)
    actual = pipe(inputs, **options)
    assert sum(place.is_bound for place in adapted.places) >= 20
    assert same(actual, expected)


def same(actual: Any, expected: Any) -> bool:
    """Say whether results agree: texts as they are, float32 numbers of some twenty operations."""
    if isinstance(expected, float):
        # Numbers of one result are of the order of 1.
        return bool(abs(actual - expected) <= 2e-5 * max(1.0, abs(expected)))
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(
            same(actual[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return bool(actual == expected)
