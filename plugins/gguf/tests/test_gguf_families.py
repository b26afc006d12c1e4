"""Models of each architecture, written as llama.cpp converts them, compute what they computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.gguf_models import FIELDS, MIXTURES, NAMES, rounded, write
from tests.gguf_models import make as make_model
from transformers import AutoModelForCausalLM

from interposer_gguf._architectures import ARCHITECTURES
from interposer_models import load

Q8 = gguf.GGMLQuantizationType.Q8_0
TOKENS = list(range(3, 45))
NUM_NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes a model of random weights, and returns its directory."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            make_model(made[kind], kind)
        return made[kind]

    return make


@pytest.mark.parametrize("kind", FIELDS)
def test_the_file_is_the_model(folder: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    source, path = folder(kind), tmp_path / "model.gguf"
    write(source, path, kind)
    options: Any = {"dtype": "float32", "cache_tokens": 64, "max_sequences": 1}
    expected = load(source, **options).logits(TOKENS)
    found = load(path, **options).logits(TOKENS)
    # Gemma's norms are stored with 1 added, and rounded so.
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", ["gpt2", "phi3", "glm4", "starcoder2"])
def test_blocks_of_fused_and_transposed_matrices_are_read(
    folder: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    source, path = folder(kind), tmp_path / "model.gguf"
    write(source, path, kind, Q8)
    options: Any = {"dtype": "float32", "cache_tokens": 64, "max_sequences": 1}
    expected = load(source, **options).logits(TOKENS)
    difference = (
        load(path, **options).logits(TOKENS) - expected
    ).abs().max() / expected.abs().max()
    assert 0 < float(difference) < 0.1


@pytest.mark.parametrize("stored_as", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_file_with_experts_computes_what_transformers_does(
    folder: Callable[[str], Path], tmp_path: Path, kind: str, stored_as: str
) -> None:
    number = gguf.GGMLQuantizationType[stored_as]
    source, path = rounded(folder(kind), tmp_path / "rounded", number), tmp_path / "model.gguf"
    write(source, path, kind, number)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ours = load(path, dtype="float32", cache_tokens=64, max_sequences=1)
    with torch.inference_mode():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    bound = 2e-5 * float(expected.abs().max())
    torch.testing.assert_close(ours.logits(TOKENS), expected, atol=bound, rtol=0)
    tokens = TOKENS[:8]
    for _ in range(NUM_NEW):
        with torch.inference_mode():
            tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
    (completion,) = ours.generate([TOKENS[:8]], max_new_tokens=NUM_NEW)
    # The toy tokenizers name token 0 as the end, which transformers is not told.
    assert list(completion.token_ids) == until_end(tokens[8:])


@pytest.mark.parametrize("stored_as", ["F32", "Q8_0"])
def test_keys_and_values_of_every_head_are_read(
    folder: Callable[[str], Path], tmp_path: Path, stored_as: str
) -> None:
    number = gguf.GGMLQuantizationType[stored_as]
    source = rounded(folder("deepseek_v3"), tmp_path / "rounded", number, older=True)
    write(source, tmp_path / "model.gguf", "deepseek_v3", number, older=True)
    options: Any = {"dtype": "float32", "cache_tokens": 64, "max_sequences": 1}
    expected = load(source, **options).logits(TOKENS)
    found = load(tmp_path / "model.gguf", **options).logits(TOKENS)
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


def test_blocks_that_predict_further_tokens_are_left_out(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    write(folder("glm4_moe"), tmp_path / "model.gguf", "glm4_moe", further=1)
    options: Any = {"dtype": "float32", "cache_tokens": 64, "max_sequences": 1}
    expected = load(folder("glm4_moe"), **options).logits(TOKENS)
    found = load(tmp_path / "model.gguf", **options).logits(TOKENS)
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


def test_every_architecture_is_tried() -> None:
    tried = {NAMES.get(kind, kind) for kind in FIELDS}
    assert tried == set(ARCHITECTURES)
