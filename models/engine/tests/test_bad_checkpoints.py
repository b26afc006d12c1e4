"""Every spoiled checkpoint gets one clear error that names the fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tests.family_checkpoints import family_configs, write_config
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from interposer.errors import CheckpointError, UnknownNameError, UnsupportedModelError
from interposer_engine import AsyncLanguageModel, load, plan
from interposer_engine._tokenizer import TextTokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            content.pop(name, None)
        else:
            content[name] = value
    path.write_text(json.dumps(content))


def edit_weights(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path / WEIGHTS)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist\nTry: give the folder"):
        load(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is neither the folder of a model nor a file"):
        load(tmp_path / "file")


def test_missing_config(copied: Path) -> None:
    (copied / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing\nTry: give the folder"):
        load(copied)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"a": \x00}', "3", "[" * 100_000])
def test_corrupt_config(copied: Path, text: str) -> None:
    (copied / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        load(copied)
    assert "copy it again" in caught.value.mend


@pytest.mark.landing(18)
@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("hidden_size", "sixty-four", "hidden_size"),
        ("hidden_size", -64, "hidden_size"),
        ("num_attention_heads", 0, ""),
        ("num_key_value_heads", 3, "num_key_value_heads 3"),
        ("num_hidden_layers", [3], ""),
        ("vocab_size", None, "vocab_size"),
        ("rms_norm_eps", 0.0, "rms_norm_eps"),
        ("head_dim", 15, "even"),
        ("hidden_size", 10**30, "hidden_size"),
        ("vocab_size", 10**18, "vocab_size"),
        ("num_attention_heads", 10**9, "num_attention_heads"),
        ("max_position_embeddings", 10**12, "max_position_embeddings"),
        ("num_hidden_layers", 0, "num_hidden_layers"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps"),
        ("rms_norm_eps", float("inf"), "rms_norm_eps"),
        ("partial_rotary_factor", 1e-9, "rotated part of a head is 0"),
        ("rope_parameters", {"rope_theta": float("inf")}, "rope_theta"),
        ("rope_parameters", {"rope_type": "linear"}, "'factor'"),
        ("rope_parameters", {"rope_type": "linear", "factor": float("nan")}, "'factor' is nan"),
        ("rope_parameters", {"rope_type": "linear", "factor": "two"}, "'factor' is 'two'"),
        ("rope_parameters", {"rope_type": "linear", "factor": 0}, "'factor' is 0"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2, "beta_fast": -1}, "'beta_fast'"),
        ("rope_parameters", {"half": {"rope_type": "default"}}, "layer type 'half' are not"),
        ("rope_parameters", {"full_attention": {"rope_theta": "x"}}, "full_attention is 'x'"),
        ("architectures", [["LlamaForCausalLM"]], "not supported"),
        ("rope_parameters", "fast", ""),
        ("layer_types", ["full_attention", "odd"], "layer_types"),
    ],
)
def test_unusable_field(copied: Path, field: str, value: object, named: str) -> None:
    edit_json(copied / "config.json", **{field: value})
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        load(copied)
    assert named in str(caught.value)


def test_unknown_rope_type(copied: Path) -> None:
    edit_json(copied / "config.json", rope_parameters={"rope_type": "lama3", "rope_theta": 1e4})
    with pytest.raises(UnknownNameError, match=r"'lama3'.*nearest first: 'llama3'"):
        load(copied)


def test_unknown_activation(copied: Path) -> None:
    edit_json(copied / "config.json", hidden_act="sillu")
    with pytest.raises(UnknownNameError, match=r"'sillu'.*nearest first: 'silu'"):
        load(copied)


def test_an_unsupported_architecture_names_the_nearest_supported_ones(copied: Path) -> None:
    edit_json(copied / "config.json", architectures=["Qwen9ForCausalLM"])
    with pytest.raises(UnsupportedModelError) as caught:
        load(copied)
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in str(caught.value)
    assert "LlamaForCausalLM" not in str(caught.value)


def test_unknown_quantization_method(copied: Path) -> None:
    edit_json(copied / "config.json", quantization_config={"quant_method": "sorcery"})
    with pytest.raises(UnknownNameError, match="quantization method 'sorcery'"):
        load(copied)


def test_missing_weights(copied: Path) -> None:
    (copied / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        load(copied)


@pytest.mark.landing(4)
@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated_weights(copied: Path, kept: float) -> None:
    content = (copied / WEIGHTS).read_bytes()
    size = int(kept * len(content)) if isinstance(kept, float) else kept
    (copied / WEIGHTS).write_bytes(content[:size])
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        load(copied)


def test_missing_tensor(copied: Path) -> None:
    edit_weights(copied, **{"model.layers.1.self_attn.k_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks .*layers\.1\.self_attn\.k_proj\.weight"):
        load(copied)


def test_unexpected_tensor(copied: Path) -> None:
    edit_weights(copied, **{"model.layers.9.mlp.up_proj.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"layers\.9\.mlp\.up_proj\.weight.*no place"):
        load(copied)


def test_wrong_shape_of_a_merged_part(copied: Path) -> None:
    edit_weights(copied, **{"model.layers.0.self_attn.v_proj.weight": torch.zeros(16, 64)})
    with pytest.raises(CheckpointError, match=r"v_proj.*\[16, 64\].*asks for \[32, 64\]"):
        load(copied)


def test_wrong_kind_of_dtype(copied: Path) -> None:
    zeros = torch.zeros(64, dtype=torch.int8)
    edit_weights(copied, **{"model.norm.weight": zeros})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*int8.*expected"):
        load(copied)


def test_index_names_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name}.*missing"):
        load(sharded)


def test_index_names_a_missing_tensor(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.layers.7.input_layernorm.weight"] = next(
        iter(index["weight_map"].values())
    )
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"layers\.7\.input_layernorm\.weight.*lacks it"):
        load(sharded)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_index_that_leaves_the_directory(sharded: Path, name: str) -> None:
    edit_json(sharded / INDEX, weight_map={"model.norm.weight": name})
    with pytest.raises(CheckpointError, match="outside the directory"):
        load(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, ["a"], {"model.norm.weight": 3}])
def test_index_without_a_usable_weight_map(sharded: Path, weight_map: object) -> None:
    edit_json(sharded / INDEX, weight_map=weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        load(sharded)


def test_shards_give_the_same_logits_as_one_file(sharded: Path, llama: Path) -> None:
    token_ids = [3, 1, 4, 1, 5, 9, 2, 6]
    assert torch.equal(load(sharded).logits(token_ids), load(llama).logits(token_ids))


@pytest.mark.parametrize("dtype", ["float17", "int8", "half", "torch.float63"])
def test_unknown_dtype(llama: Path, dtype: str) -> None:
    with pytest.raises(UnknownNameError, match="dtype"):
        load(llama, dtype=dtype)


def test_corrupt_tokenizer(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{}")
    lm = load(copied, cache_tokens=64)
    for prompt in ("text", [1, 2]):
        with pytest.raises(CheckpointError, match="not a valid tokenizer"):
            lm.generate([prompt], max_new_tokens=1)
    assert not lm.engine.busy
    with pytest.raises(CheckpointError, match="not a valid tokenizer"):
        AsyncLanguageModel(lm)


def test_tokenizer_files_that_transformers_cannot_read(copied: Path) -> None:
    (copied / "tokenizer.json").unlink()
    (copied / "vocab.json").write_text("spoiled")
    (copied / "merges.txt").write_text("")
    (copied / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load(copied, cache_tokens=64).tokenizer.encode("text")


def test_truncation_and_padding_of_a_training_run_are_left_out(copied: Path) -> None:
    path = copied / "tokenizer.json"
    whole = TextTokenizer(copied).encode("import os")
    fast = Tokenizer.from_file(str(path))
    fast.enable_truncation(4)
    fast.enable_padding(length=32)
    fast.save(str(path))
    assert TextTokenizer(copied).encode("import os") == whole


def test_a_failed_load_can_be_repeated_after_the_mend(copied: Path) -> None:
    content = (copied / WEIGHTS).read_bytes()
    (copied / WEIGHTS).write_bytes(content[:-100])
    with pytest.raises(CheckpointError):
        load(copied)
    (copied / WEIGHTS).write_bytes(content)
    assert load(copied).logits([1, 2]).shape == (2, 256)


@pytest.mark.landing(4)
@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("bamba", "hidden_act"),
        ("falcon_h1", "hidden_act"),
        ("mamba2", "hidden_act"),
        ("nemotron_h", "mamba_hidden_act"),
        ("qwen3_5", "hidden_act"),
        ("qwen3_5_moe", "hidden_act"),
        ("qwen3_next", "hidden_act"),
    ],
)
def test_convolutions_with_another_activation(family: str, field: str, tmp_path: Path) -> None:
    config = next(config for name, config in family_configs() if name.startswith(f"{family}-"))
    write_config(tmp_path, {**config, field: "gelu"})
    with pytest.raises(CheckpointError, match=f"{field} is 'gelu', .*'silu'"):
        plan(tmp_path, platform="cpu")
    write_config(tmp_path, {**config, field: "swish"})
    plan(tmp_path, platform="cpu")
