"""The shipped model is a real one: small, and it compresses source that it has never seen."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from interposer_engine import load

EXAMPLES = Path(__file__).parents[1] / "examples"
SHIPPED = EXAMPLES / "models" / "stdlib-lm"


@pytest.fixture(scope="module")
def corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stdlib_corpus", EXAMPLES / "stdlib_corpus.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["stdlib_corpus"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bits_per_byte(corpus: ModuleType, files: list[Path]) -> float:
    lm = load(SHIPPED, dtype="float32", max_sequences=1)
    (end_of_text,) = lm.tokenizer.encode("")

    def encode(text: str) -> list[int]:
        return lm.tokenizer.encode(text)[1:]

    def logits(token_ids: list[int]) -> object:
        return lm.logits(token_ids).numpy()

    bits: float = corpus.bits_per_byte(logits, encode, end_of_text, files)
    return bits


def test_it_takes_at_most_16_mb() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) <= 16e6


@pytest.mark.slow
def test_a_tenth_of_the_files_is_held_out(corpus: ModuleType) -> None:
    held_out, training = set(corpus.held_out_files()), set(corpus.training_files())
    assert held_out.isdisjoint(training)
    assert 0.07 < len(held_out) / len(held_out | training) < 0.14


@pytest.mark.slow
def test_it_compresses_a_part_of_the_held_out_files_better_than_xz(corpus: ModuleType) -> None:
    # Tables of encodings resemble each other too much to say anything.
    distinct = [file for file in corpus.held_out_files() if file.parent.name != "encodings"]
    files = [file for file in distinct if 2000 < file.stat().st_size < 12000][:4]
    assert len(files) == 4
    assert bits_per_byte(corpus, files) < min(corpus.xz_bits_per_byte(files)) - 0.3


@pytest.mark.slow
def test_it_compresses_all_held_out_files_better_than_xz(corpus: ModuleType) -> None:
    files = corpus.held_out_files()
    assert bits_per_byte(corpus, files) < min(corpus.xz_bits_per_byte(files)) - 0.3
