"""Decoders whose checkpoints have names of their own: GPT-2, OPT and GPT-NeoX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.conftest import example, write_checkpoint
from models.engine.tests.test_bad_checkpoints import edit_json
from models.tests.family_checkpoints import examples
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPTNeoXConfig, OPTConfig

from interposer.errors import CheckpointError, ConfigError, RequestError, UnsupportedModelError
from interposer_engine import load, quantize

WEIGHTS = "model.safetensors"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
NONE: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    sizes: Any = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 256}
    write_checkpoint(GPT2Config(**sizes, **NONE), tmp_path)
    return tmp_path


@pytest.fixture
def neox(tmp_path: Path) -> Path:
    sizes: Any = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 128}
    write_checkpoint(GPTNeoXConfig(**sizes, **NONE), tmp_path)
    return tmp_path


def test_early_gpt2_names_without_prefix_and_masks_are_read(gpt2: Path) -> None:
    expected = load(gpt2, dtype="float32").logits(TOKENS)
    tensors = load_file(gpt2 / WEIGHTS)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert "h.1.attn.c_attn.weight" in old
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128).tril() for i in range(2)}
    old |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    save_file(old, gpt2 / WEIGHTS)
    lm = load(gpt2, dtype="float32")
    assert torch.equal(lm.logits(TOKENS), expected)
    # The same tensor under both names is one that comes twice.
    again = {"transformer.ln_f.weight": old["ln_f.weight"].clone()}
    save_file({**old, **again}, gpt2 / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"'transformer\.ln_f\.weight' twice"):
        load(gpt2)
    negated = {name: -old[name] for name in ("h.0.ln_1.weight", "h.0.ln_1.bias")}
    lm.update_weights(negated)
    assert not torch.equal(lm.logits(TOKENS), expected)
    lm.update_weights({name: old[name] for name in negated})
    assert torch.equal(lm.logits(TOKENS), expected)


def test_a_mask_of_gpt_neox_is_not_read(neox: Path) -> None:
    expected = load(neox, dtype="float32").logits(TOKENS)
    tensors = load_file(neox / WEIGHTS)
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 128, 128).bool()}
    save_file({**tensors, **mask}, neox / WEIGHTS)
    assert torch.equal(load(neox, dtype="float32").logits(TOKENS), expected)
    renamed = {name.replace("embed_out", "lm_head"): tensor for name, tensor in tensors.items()}
    save_file(renamed, neox / WEIGHTS)
    assert torch.equal(load(neox, dtype="float32").logits(TOKENS), expected)


def test_the_shape_in_errors_is_that_of_the_file(gpt2: Path) -> None:
    tensors = load_file(gpt2 / WEIGHTS)
    name = "transformer.h.0.attn.c_attn.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, gpt2 / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"shape \[192, 64\].* asks for \[64, 192\]"):
        load(gpt2)


def test_transposed_weights_are_quantized_while_they_load(gpt2: Path) -> None:
    """Those of the last projection are square, so that no shape tells which way they lie."""
    expected = load(gpt2, dtype="float32").logits(TOKENS)
    logits = load(gpt2, dtype="float32", quantization="int8").logits(TOKENS)
    assert 0 < float((logits - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_transposed_weights_are_not_quantized_in_files(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"h\.0\.attn\.c_attn is stored as \[inputs, outputs\]"):
        quantize(gpt2, tmp_path / "quantized", "int8")


def test_a_prompt_can_end_at_the_last_learned_position(gpt2: Path) -> None:
    lm = load(gpt2, dtype="float32")
    assert lm.logits(list(range(128))).shape == (128, 256)
    with pytest.raises(RequestError, match="context of 128"):
        lm.logits(list(range(129)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("do_layer_norm_before", False),
        ("layer_norm_elementwise_affine", False),
        ("_remove_final_layer_norm", True),
        ("word_embed_proj_dim", 32),
    ],
)
def test_unsupported_opt_variants_are_refused(tmp_path: Path, field: str, value: object) -> None:
    sizes: Any = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, **NONE}
    sizes |= {"num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 64}
    config = OPTConfig(**sizes)
    write_checkpoint(config, tmp_path)
    edit_json(tmp_path / "config.json", **{field: value})
    with pytest.raises(UnsupportedModelError, match=rf"config\.json: {field}"):
        load(tmp_path)


def test_residuals_after_norms_are_refused(tmp_path: Path) -> None:
    write_checkpoint(example(examples.bloom, "released"), tmp_path)
    edit_json(tmp_path / "config.json", apply_residual_connection_post_layernorm=True)
    with pytest.raises(UnsupportedModelError, match="post_layernorm is not computed"):
        load(tmp_path)


def test_cross_attention_is_refused(gpt2: Path) -> None:
    edit_json(gpt2 / "config.json", add_cross_attention=True)
    with pytest.raises(UnsupportedModelError, match="add_cross_attention"):
        load(gpt2)
