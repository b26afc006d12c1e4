"""Models of each architecture, written as llama.cpp converts them, compute what they computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from interposer.errors import UnsupportedModelError
from interposer_gguf._architectures import ARCHITECTURES
from interposer_models import load

Q8 = gguf.GGMLQuantizationType.Q8_0
TOKENS = list(range(3, 45))
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEADS, HALF = {"head_dim": 16}, {"head_dim": 32}
WINDOW = {"sliding_window": 24}
FACTORS = {"short_factor": [1.0, 1.5] * 4, "long_factor": [1.0, 3.0] * 4}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-4}
FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {**HALF, **WINDOW, "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-5},
    "gemma3_text": {**HALF, **WINDOW, "query_pre_attn_scalar": 32, "num_hidden_layers": 6},
    "cohere2": {**WINDOW, "logit_scale": 0.5, "layer_norm_eps": 1e-4},
    "olmo2": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.5,
        "residual_multiplier": 0.7,
    },
    "glm4": {**HEADS, "rms_norm_eps": 1e-5},
    "exaone4": {**HEADS, **WINDOW},
    "smollm3": {"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}},
    "starcoder2": {"norm_epsilon": 1e-4, "sliding_window": None},
    "gpt2": GPT2,
    "hunyuan_v1_dense": HEADS,
    "ernie4_5": {**HEADS, "use_bias": False},
    "phi3": {
        "rope_parameters": {**LONG, "original_max_position_embeddings": 8},
        "original_max_position_embeddings": 8,
    },
}
NAMES = {"hunyuan_v1_dense": "hunyuan-dense", "gemma3_text": "gemma3"}
MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
TABLE = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows as llama.cpp has those that it rotates in pairs."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_metadata(writer: gguf.GGUFWriter, config: Any, rope: dict[str, Any]) -> None:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", heads))
    writer.add_key_length(size)
    writer.add_value_length(size)
    for field in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"):
        if hasattr(config, field):
            writer.add_layer_norm_eps(getattr(config, field))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if rope.get("rope_theta"):
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for field, key in MULTIPLIERS.items():
        if getattr(config, field, None) is not None:
            writer.add_float32(f"{writer.arch}.{key}", getattr(config, field))


def write(folder: Path, path: Path, kind: str, stored_as: Any = None) -> None:
    """Write a model directory as llama.cpp's conversion of its architecture does."""
    name, config = NAMES.get(kind, kind), AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, name)
    rope = getattr(config, "rope_parameters", None) or {}
    flat = rope.get("full_attention", rope)
    add_metadata(writer, config, flat)
    table = gguf.get_tensor_name_map(TABLE[name], config.num_hidden_layers)
    for key, tensor in load_file(folder / "model.safetensors").items():
        stored = table.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        values = tensor.float().numpy()
        if kind.startswith("gemma") and key.endswith("norm.weight"):
            values = values + 1
        if kind in ("granite", "smollm3") and ".q_proj." in key:
            values = permuted(values, config.num_attention_heads)
        if kind in ("granite", "smollm3") and ".k_proj." in key:
            values = permuted(values, config.num_key_value_heads)
        if kind == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = np.ascontiguousarray(values.T)
        form = gguf.GGMLQuantizationType.F32
        if stored_as is not None and values.ndim == 2 and values.shape[1] % 32 == 0:
            form = stored_as
        writer.add_tensor(stored, gguf.quants.quantize(values, form), raw_dtype=form)
    for field in ("short_factor", "long_factor"):
        if field in flat:
            values = np.array(flat[field], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{field.removesuffix('_factor')}.weight", values)
    if "long_factor" in flat:
        writer.add_rope_scaling_orig_ctx_len(flat["original_max_position_embeddings"])
        magnitude = (1 + np.log(64 / 8) / np.log(8)) ** 0.5
        writer.add_rope_scaling_attn_factors(float(magnitude))
    words = ["a", "b", "ab", *(f"w{i}" for i in range(3, config.vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes a model of random weights, and returns its directory."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            torch.manual_seed(0)
            sizes = {} if kind == "gpt2" else SIZES
            special = {"bos_token_id": None, "eos_token_id": None, "vocab_size": 128}
            config = AutoConfig.for_model(kind, **{**sizes, **special, **FIELDS[kind]})
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for key, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    torch.nn.init.normal_(parameter, 0.0 if "bias" in key else 1.0, 0.2)
            model.save_pretrained(made[kind])
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


def test_every_architecture_is_tried() -> None:
    tried = {NAMES.get(kind, kind) for kind in FIELDS}
    assert tried | {"llama", "qwen2", "qwen3"} == set(ARCHITECTURES)


def test_experts_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2moe")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="architecture 'qwen2moe'; read are qwen2,"):
        load(path)
