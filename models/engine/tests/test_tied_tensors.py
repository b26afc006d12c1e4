"""A tied model whose checkpoint stores another head than the table, or the head alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tests.family_checkpoints import examples, write_family
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from interposer import explain
from interposer.errors import CheckpointError
from interposer_engine import load

TOKENS = list(range(3, 40))
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    config = LlamaConfig(**sizes, num_attention_heads=2, vocab_size=64, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def expected(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        logits: torch.Tensor = peer(torch.tensor([TOKENS])).logits[0]
        return logits


def test_a_stored_head_that_differs_is_used_and_noted(tied: Path) -> None:
    rewrite(tied, lambda tensors: tensors.update({HEAD: torch.randn(64, 32)}))
    lm = load(tied, dtype="float32", cache_tokens=64)
    torch.testing.assert_close(lm.logits(TOKENS), expected(tied), rtol=1e-4, atol=1e-4)
    assert any("'lm_head.weight' of the checkpoint differs" in note for note in explain(lm).notes)


def test_a_stored_head_that_equals_the_table_stays_tied(tied: Path) -> None:
    rewrite(tied, lambda tensors: tensors.update({HEAD: tensors[TABLE].clone()}))
    lm = load(tied, dtype="float32", cache_tokens=64)
    torch.testing.assert_close(lm.logits(TOKENS), expected(tied), rtol=1e-4, atol=1e-4)
    assert not any("differs" in note for note in explain(lm).notes)


def test_a_stored_head_also_fills_a_missing_tied_table(tied: Path) -> None:
    rewrite(tied, lambda tensors: tensors.update({HEAD: tensors.pop(TABLE)}))
    logits = load(tied, dtype="float32", cache_tokens=64).logits(TOKENS)
    torch.testing.assert_close(logits, expected(tied), rtol=1e-4, atol=1e-4)


def test_other_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    """A decoder and an encoder share BART's table, which its head is tied to."""
    folder = write_family(tmp_path / "bart", next(iter(examples.bart().values())))
    (table,) = (n for n in load_file(folder / "model.safetensors") if n.endswith("shared.weight"))
    rewrite(folder, lambda tensors: tensors.update({HEAD: tensors[table] + 1}))
    with pytest.raises(CheckpointError, match=rf"'{HEAD}', which differs from '{table}'"):
        load(folder)
