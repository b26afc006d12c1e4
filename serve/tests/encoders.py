"""Tiny encoders with random weights, and the results of transformers for single texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from serve.tests.conftest import STDLIB
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

CONTEXT = 64
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
}
# Two layers of ten float32 roundings each, on either side, of values near one.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def write_encoder(path: Path, **settings: Any) -> Any:
    """Write an embedding model, and return the model of transformers."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES, **settings), add_pooling_layer=False).eval()
    return _write(path, model)


def write_classifier(path: Path, **settings: Any) -> Any:
    """Write a classifier, and return the model of transformers."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, **settings)).eval()
    # Scale the weights of the head: random weights give all texts nearly equal scores.
    with torch.no_grad():
        model.classifier.weight.mul_(50)
    return _write(path, model)


def _write(path: Path, model: Any) -> Any:
    model.save_pretrained(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(STDLIB)
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(path)
    return model


def outputs(model: Any, *texts: str) -> Any:
    """Return the outputs of transformers for one text or one pair of texts."""
    tokenizer: Any = AutoTokenizer.from_pretrained(STDLIB)
    with torch.no_grad():
        return model(**tokenizer(*texts, return_tensors="pt"))


def hidden_states(model: Any, text: str) -> torch.Tensor:
    """Return the last hidden states ``[T, H]`` of a text."""
    states: torch.Tensor = outputs(model, text).last_hidden_state[0]
    return states
