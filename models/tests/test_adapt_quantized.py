"""Models that are quantized while they are adapted: as the loader quantizes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from interposer.errors import ConfigError, UnknownNameError
from interposer_models import adapt, load

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3-tied": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
}
METHODS: list[Any] = [
    "int8",
    {"quant_method": "int4", "group_size": 16, "head": "plain"},
    "w4a8",
    {"quant_method": "fp8", "strategy": "channel"},
]


def saved(name: str, path: Path) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.save(str(path / "tokenizer.json"))
    return model


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_it_equals_what_the_loader_gives(name: str, method: Any, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    ids = torch.randint(1, 128, (19,), generator=torch.Generator().manual_seed(1))
    plain = model(ids[None]).logits[0]
    expected = load(tmp_path, quantization=method).logits(ids.tolist())
    adapted = adapt(model, quantization=method)
    found = model(ids[None]).logits[0]
    lost = (expected - plain).norm()
    # Both round weights to the same codes. What is left are sums in another order; where inputs are
    # rounded too, one that lies at a boundary may go either way, which costs a part of the loss.
    assert lost > 0
    assert (found - expected).norm() <= 0.1 * lost
    with pytest.raises(ConfigError, match="plain ones are gone"):
        adapted.restore()
    with pytest.raises(ConfigError, match="was given up when it was quantized"):
        model.model.layers[0].mlp.up_proj.weight.double()
    assert model.model.layers[0].mlp.up_proj.weight.shape == (96, 64)


def test_an_unknown_method_is_named() -> None:
    model: Any = AutoModelForCausalLM.from_config(CONFIGS["llama"]()).eval()
    with pytest.raises(UnknownNameError, match="int8"):
        adapt(model, quantization="int9")
    assert not hasattr(model, "_interposer_adapted")
