"""Checkpoints in forms that were published, which transformers loads, and refusals of others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from interposer import explain
from interposer.errors import CheckpointError, UnknownNameError
from interposer_engine import load

TOKENS = list(range(3, 40))
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
HUNYUAN = {**SIZES, "num_experts": 4, "moe_topk": 2}
ERNIE = {**SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}


def written(folder: Path, kind: str, fields: dict[str, Any] = SIZES, **others: object) -> Path:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **fields, **others)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def restate(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, Any]]) -> None:
    edited = edit(load_file(folder / WEIGHTS))
    save_file(edited, folder / WEIGHTS, metadata={"format": "pt"})


def hunyuan_lists(folder: Path) -> None:
    restate(written(folder, "hunyuan_v1_moe", HUNYUAN), moe_topk=[2, 2], num_experts=[4, 4])


def ernie_prediction_layers(folder: Path) -> None:
    mtp_tensors = {"model.mtp_block.0.input_layernorm.weight": torch.ones(32)}
    rewrite(written(folder, "ernie4_5_moe", ERNIE), lambda tensors: {**tensors, **mtp_tensors})


def decoder_alone(folder: Path) -> None:
    written(folder, "qwen3", tie_word_embeddings=True)
    rewrite(folder, lambda all_: {n.removeprefix("model."): t for n, t in all_.items()})


def stale_index(folder: Path) -> None:
    names = load_file(written(folder, "llama") / WEIGHTS)
    shards = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    "write", [hunyuan_lists, ernie_prediction_layers, decoder_alone, stale_index]
)
def test_a_published_form_has_the_logits_of_transformers(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    if write is hunyuan_lists:  # transformers takes a list of one of both fields
        restate(tmp_path, num_experts=4)
    with torch.no_grad():
        peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        expected = peer(torch.tensor([TOKENS])).logits[0]
    logits = load(tmp_path, dtype="float32", cache_tokens=64).logits(TOKENS)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_lists_of_different_numbers_are_refused(tmp_path: Path) -> None:
    hunyuan_lists(tmp_path)
    restate(tmp_path, moe_topk=[2, 1])
    with pytest.raises(CheckpointError, match=r"json: moe_topk is \[2, 1\].*\nTry: .*adapt"):
        load(tmp_path)


def test_the_long_factors_of_longrope_are_noted(tmp_path: Path) -> None:
    factors = {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
    rope = {"rope_type": "longrope", **factors, "original_max_position_embeddings": 64}
    written(tmp_path, "llama", rope_parameters=rope)
    notes = explain(load(tmp_path, dtype="float32", cache_tokens=64)).notes
    assert any("the short ones for sequences of up to 64 tokens" in note for note in notes)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return written(tmp_path / "llama", "llama")


@pytest.mark.landing(4)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "an adapter was saved.*merge_and_unload"),
        ("base_model.model.lm_head.weight", "PEFT wraps"),
        ("module.lm_head.weight", "wraps.*model.module"),
        ("model.layers.0.mlp.up_proj.qweight", "quantized layer.*quantization_config"),
        ("vision_tower.patch.weight", "encoder of images.*architectures"),
        ("model.layers.9.mlp.up_proj.weight", "no place for\nTry: .*num_hidden_layers"),
    ],
)
def test_an_unknown_tensor_is_named_with_its_file(llama: Path, name: str, reason: str) -> None:
    rewrite(llama, lambda tensors: {**tensors, name: torch.zeros(2)})
    with pytest.raises(
        CheckpointError, match=rf"(?s)model\.safetensors: holds.*'{name}'.*{reason}"
    ):
        load(llama)


def test_shards_without_an_index_name_the_index(llama: Path) -> None:
    (llama / WEIGHTS).rename(llama / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=rf"holds neither.*\nTry: copy {INDEX} again"):
        load(llama)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("consolidated.safetensors", "download the files of transformers' format: consolidated"),
        ("weights.safetensors", rf"rename .* to {WEIGHTS}: there is weights\.safetensors"),
    ],
)
def test_weights_under_another_name_are_refused_with_advice(
    llama: Path, name: str, mend: str
) -> None:
    (llama / WEIGHTS).rename(llama / name)
    with pytest.raises(CheckpointError, match=rf"holds neither.*\nTry: {mend}"):
        load(llama)


def test_the_folder_of_an_adapter_names_the_base_model(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/b"}))
    shutil.copy(llama / WEIGHTS, folder / "adapter_model.safetensors")
    for config in (None, llama / "config.json"):  # some trainers save that of the base model too
        if config is not None:
            shutil.copy(config, folder)
        mend = r"LoRA adapter.*\nTry: load 'a/b' with adapters="
        with pytest.raises(CheckpointError, match=mend):
            load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "sillu"),
        ("rope_parameters", {"rope_type": "lama3", "rope_theta": 1e4}),
        ("rope_scaling", {"rope_type": "lama3", "factor": 2.0}),
    ],
)
def test_an_unknown_name_error_states_file_and_field(
    llama: Path, field: str, value: object
) -> None:
    restate(llama, **{field: value})
    pattern = rf"in {field} of .*config\.json.*nearest first.*\nTry: correct the field, or .*adapt"
    with pytest.raises(UnknownNameError, match=pattern):
        load(llama)
