"""Every spelling of the rotary embedding in config.json means what it means to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from interposer.errors import CheckpointError
from interposer_engine import load

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
FAMILIES = {"Llama": SIZES, "Gemma3": {**SIZES, **TYPES}, "Olmo3": {**SIZES, **TYPES}}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA4 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "rope_type": "longrope",
    "long_factor": [1.0 + index / 4 for index in range(8)],
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 8,
}
TOKENS = [token * 7 % 64 for token in range(80)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, sizes in FAMILIES.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            {"Gemma3": "gemma3_text"}.get(name, name.lower()), **sizes
        )
        folders[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[name])
    return folders


def restated(folder: Path, target: Path, removed: str, **fields: object) -> Path:
    """Write the model with other fields of config.json to ``target``, and return that."""
    config = json.loads((folder / "config.json").read_text())
    fields_left = {name: value for name, value in config.items() if name not in removed.split()}
    (target / "config.json").write_text(json.dumps({**fields_left, **fields}))
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    return target


def nested(**full: object) -> dict[str, Any]:
    return {"full_attention": {"rope_type": "default", **full}}


@pytest.mark.landing(3)
@pytest.mark.parametrize(
    ("family", "removed", "fields"),
    [
        ("Olmo3", "rope_parameters", {"rope_theta": 5e5, "rope_scaling": YARN}),
        ("Olmo3", "rope_parameters", {"rope_scaling": LINEAR}),
        ("Olmo3", "", {"rope_scaling": YARN}),
        ("Olmo3", "", {"rope_parameters": None, "rope_scaling": LINEAR}),
        ("Gemma3", "rope_parameters", {"rope_theta": 2e5, "rope_local_base_freq": 2e3}),
        ("Gemma3", "", {"rope_scaling": LINEAR}),
        ("Gemma3", "", {"rope_parameters": nested(**LINEAR)}),
        ("Gemma3", "", {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}),
        ("Llama", "", {"rope_scaling": YARN}),
        ("Llama", "", {"rope_scaling": {}}),
        ("Llama", "", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e4}),
        ("Llama", "rope_parameters", {"rope_scaling": LLAMA4, "rope_theta": 5e5}),
        ("Llama", "rope_parameters", {"rope_scaling": LONG}),
        ("Llama", "rope_parameters", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
        (
            "Llama",
            "rope_parameters",
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rotary_fields_mean_the_same_as_in_transformers(
    folders: dict[str, Path], tmp_path: Path, family: str, removed: str, fields: dict[str, object]
) -> None:
    path = restated(folders[family], tmp_path, removed, **fields)
    peer = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad():
        expected = peer.eval()(torch.tensor([TOKENS])).logits[0]
    logits = load(path, dtype="float32", cache_tokens=128).logits(TOKENS)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        # transformers would compute with the base 10,000 of a config that states none.
        (
            "Llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": YARN},
            r"rope_scaling and rope_parameters are both set.*rope_theta 500000\.0.*\nTry: move",
        ),
        ("Olmo3", {"rope_parameters": YARN}, "rope_parameters is flat.*'yarn'.*\nTry: state"),
        ("Gemma3", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters is flat.*\nTry: st"),
        ("Gemma3", {"rope_scaling": nested(**LINEAR)}, "rope_scaling is nested.*\nTry: name"),
        (
            "Gemma3",
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling has.*\nTry: name",
        ),
        (
            "Olmo3",
            {"rope_theta": 1e6, "rope_parameters": None},
            "rope_theta is 1000000.0 outside.*\nTry: state rope_theta within",
        ),
        ("Gemma3", {"rope_parameters": nested(partial_rotary_factor=0.5)}, "rope_parameters has"),
    ],
)
def test_a_value_that_transformers_would_drop_is_refused(
    folders: dict[str, Path], tmp_path: Path, family: str, fields: dict[str, object], named: str
) -> None:
    path = restated(folders[family], tmp_path, "", **fields)
    with pytest.raises(CheckpointError, match=rf"config\.json: {named}"):
        load(path)
