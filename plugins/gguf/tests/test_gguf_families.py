"""Models of each architecture, written as llama.cpp converts them, compute what they computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.gguf_kinds import FIELDS, HYBRIDS, NAMES, OTHERS
from tests.gguf_models import make as make_model
from tests.gguf_models import rounded, write
from tests.landing import landing_sample
from transformers import AutoModelForCausalLM

from interposer import explain
from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_engine import load
from interposer_gguf._architectures import ARCHITECTURES
from interposer_gguf._checkpoint import GGUFCheckpoint

Q8, MXFP4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.MXFP4
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "ernie4_5_moe", "hunyuan_v1_moe"]
MIXTURES += ["minimax_m2", "glm4_moe", "deepseek_v2", "deepseek_v3"]
TOKENS = list(range(3, 45))
NUM_NEW = 12
# Layers that stay in blocks, of those that only these architectures have.
HELD = {
    "qwen3_next": (
        "model.layers.0.linear_attn.in_proj_qkv",
        "model.layers.0.linear_attn.in_proj_b",
        "model.layers.0.mlp.experts.5.up_proj",
        "model.layers.0.mlp.shared_expert.down_proj",
    ),
    "qwen3_5_text": (
        *(f"model.layers.0.linear_attn.in_proj_{name}" for name in ("qkv", "z", "a", "b")),
        "model.layers.0.linear_attn.out_proj",
        "model.layers.3.self_attn.q_proj",
    ),
    "qwen3_5_moe_text": ("model.layers.0.mlp.experts.0.down_proj",),
    "mamba2": (
        "backbone.embeddings",
        "backbone.layers.0.mixer.in_proj",
        "backbone.layers.0.mixer.out_proj",
    ),
    "nemotron_h": ("backbone.layers.1.mixer.up_proj", "backbone.layers.2.mixer.q_proj"),
    "nemotron_h_moe": (
        "backbone.layers.1.mixer.experts.7.down_proj",
        "backbone.layers.1.mixer.fc1_latent_proj",
        "backbone.layers.1.mixer.shared_experts.up_proj",
    ),
    "bamba": ("model.layers.0.mamba.in_proj", "model.layers.1.self_attn.k_proj"),
    "falcon_h1": ("model.layers.0.mamba.out_proj", "model.layers.0.feed_forward.gate_proj"),
    "lfm2": (
        "model.layers.0.conv.in_proj",
        "model.layers.0.feed_forward.w3",
        "model.layers.1.self_attn.out_proj",
    ),
    "gpt_oss": ("model.layers.0.self_attn.q_proj",),
    "llama4_text": ("model.layers.1.feed_forward.shared_expert.down_proj",),
    "olmo3": ("model.layers.0.self_attn.q_proj",),
    "bloom": (
        "transformer.word_embeddings",
        "transformer.h.0.self_attention.query_key_value",
        "transformer.h.0.mlp.dense_4h_to_h",
    ),
    "gpt_neox": (
        "gpt_neox.embed_in",
        "embed_out",
        "gpt_neox.layers.0.attention.dense",
        "gpt_neox.layers.0.mlp.dense_h_to_4h",
    ),
    "gemma4_text": (
        "model.embed_tokens_per_layer",
        "model.per_layer_model_projection",
        "model.layers.0.per_layer_input_gate",
        "model.layers.0.per_layer_projection",
    ),
    "deepseek_v32": (
        "model.layers.0.self_attn.indexer.wq_b",
        "model.layers.0.self_attn.indexer.wk",
    ),
    "mistral3": ("model.layers.0.self_attn.q_proj",),
}
BAD: list[tuple[str, dict[str, Any], str, type[Exception], str]] = [
    ("mistral3", {"attention.temperature_scale": 0.1}, "", UnsupportedModelError, "temperature_sc"),
    (
        "llama4_text",
        {"attention.sliding_window": 9},
        "",
        UnsupportedModelError,
        "has attention chunks",
    ),
    ("lfm2", {"attention.sliding_window": 9}, "", UnsupportedModelError, "not supported for LFM2"),
    ("lfm2", {"attention.head_count_kv": [0, 2]}, "", CheckpointError, "= 2 values, must be 3"),
    ("lfm2", {"shortconv.l_cache": None}, "", CheckpointError, "lacks .*'lfm2.shortconv.l_cache'"),
    ("bamba", {"rope.scaling.finetuned": False}, "", UnsupportedModelError, "a hybrid Granite"),
    ("mamba2", {"ssm.time_step_rank": 7}, "", CheckpointError, "128, not a multiple of its 7"),
    ("mamba2", {"ssm.state_size": None}, "", CheckpointError, "lacks .*'mamba2.ssm.state_size'"),
    ("mamba2", {}, "blk.1.ssm_a", CheckpointError, "lacks the tensor 'backbone.layers.1.mixer.A"),
    ("qwen3_5_text", {"ssm.group_count": 3}, "", CheckpointError, "each must be a multiple"),
    ("qwen3_next", {"ssm.state_size": 24}, "", CheckpointError, "has shape"),
    (
        "qwen3_next",
        {"ssm.group_count": 1, "ssm.time_step_rank": 3},
        "",
        CheckpointError,
        "multiple",
    ),
    ("nemotron_h", {"feed_forward_length": None}, "", CheckpointError, "'nemotron_h.feed_forward"),
    ("nemotron_h_moe", {"expert_shared_count": 2}, "", UnsupportedModelError, "of more than 1"),
    (
        "gemma4_text",
        {"attention.sliding_window_pattern": None},
        "",
        CheckpointError,
        "lacks the me",
    ),
    ("gemma4_text", {}, "rope_freqs.weight", CheckpointError, "lacks the tensor 'rope_freqs.wei"),
    ("gpt_oss", {}, "blk.1.ffn_up_exps.bias", CheckpointError, "without 'blk.1.ffn_up_exps.bias'"),
    ("gpt_oss", {}, "blk.0.attn_sinks.weight", CheckpointError, "'model.layers.0.self_attn.sinks'"),
    ("qwen3_5_text", {"ssm.time_step_rank": 8}, "", CheckpointError, "'blk.0.ssm.*contradicts"),
    ("bloom", {"attention.head_count": 5}, "", CheckpointError, "not a multiple of 5 heads"),
    ("deepseek_v32", {"attention.indexer.top_k": None}, "", CheckpointError, "indexer.top_k'"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a model of random weights, and returns its directory."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            make_model(made[kind], kind)
        return made[kind]

    return make


@pytest.mark.parametrize("kind", landing_sample(FIELDS, every=3))
def test_the_file_loads_as_the_model(
    folder: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    source, path = folder(kind), tmp_path / "model.gguf"
    write(source, path, kind)
    options: Any = {"dtype": "float32", "cache_tokens": 64, "max_sequences": 1}
    expected = load(source, **options).logits(TOKENS)
    actual = load(path, **options).logits(TOKENS)
    # Gemma's norms are stored with 1 added, and rounded so.
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


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


@pytest.mark.landing(4)
@pytest.mark.parametrize("stored_as", landing_sample(["F32", "F16", "Q8_0"], every=3, first=2))
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_moe_file_agrees_with_transformers(
    folder: Callable[[str], Path], tmp_path: Path, kind: str, stored_as: str
) -> None:
    number = gguf.GGMLQuantizationType[stored_as]
    source, path = (
        rounded(folder(kind), tmp_path / "rounded", kind, number),
        tmp_path / "model.gguf",
    )
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


@pytest.mark.landing(1)
@pytest.mark.parametrize("stored_as", ["F32", "Q8_0"])
def test_keys_and_values_of_every_head_are_read(
    folder: Callable[[str], Path], tmp_path: Path, stored_as: str
) -> None:
    number = gguf.GGMLQuantizationType[stored_as]
    source = rounded(folder("deepseek_v3"), tmp_path / "rounded", "deepseek_v3", number, older=True)
    write(source, tmp_path / "model.gguf", "deepseek_v3", number, older=True)
    options: Any = {"dtype": "float32", "cache_tokens": 64, "max_sequences": 1}
    expected = load(source, **options).logits(TOKENS)
    actual = load(tmp_path / "model.gguf", **options).logits(TOKENS)
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


def test_mtp_blocks_are_not_loaded(folder: Callable[[str], Path], tmp_path: Path) -> None:
    write(folder("glm4_moe"), tmp_path / "model.gguf", "glm4_moe", further=1)
    options: Any = {"dtype": "float32", "cache_tokens": 64, "max_sequences": 1}
    expected = load(folder("glm4_moe"), **options).logits(TOKENS)
    actual = load(tmp_path / "model.gguf", **options).logits(TOKENS)
    torch.testing.assert_close(actual, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.landing(1)
@pytest.mark.parametrize("kind", landing_sample(HELD, every=3))
def test_blocks_dequantize_to_the_expected_values(
    folder: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    source, paths = folder(kind), (tmp_path / "blocks.gguf", tmp_path / "numbers.gguf")
    write(source, paths[0], kind, Q8)
    write(source, paths[1], kind, Q8, as_numbers=True)
    formats_by_layer = GGUFCheckpoint.open(paths[0]).config["quantization_config"]["tensors"]
    assert {*HELD[kind]} <= formats_by_layer.keys()
    assert_alike(paths)


def test_experts_of_gpt_oss_stay_in_four_bits(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source, paths = folder("gpt_oss"), (tmp_path / "blocks.gguf", tmp_path / "numbers.gguf")
    write(source, paths[0], "gpt_oss", MXFP4)
    write(source, paths[1], "gpt_oss", MXFP4, as_numbers=True)
    formats_by_layer = GGUFCheckpoint.open(paths[0]).config["quantization_config"]["tensors"]
    assert formats_by_layer == {f"model.layers.{index}.mlp.experts": "mxfp4" for index in range(5)}
    ops = {row.choice.request.name for row in explain(assert_alike(paths)).rows}
    assert "fused_experts_mxfp4" in ops


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("kind", "sizes"), [("gpt_oss", {"intermediate_size": 80}), ("qwen3_moe", {})]
)
def test_other_experts_of_four_bits_are_dequantized(
    tmp_path: Path, kind: str, sizes: dict[str, int]
) -> None:
    paths = tmp_path / "blocks.gguf", tmp_path / "numbers.gguf"
    make_model(tmp_path, kind, **sizes)
    write(tmp_path, paths[0], kind, MXFP4)
    write(tmp_path, paths[1], kind, MXFP4, as_numbers=True)
    assert "quantization_config" not in GGUFCheckpoint.open(paths[0]).config
    assert_alike(paths)


def test_heads_that_blocks_do_not_divide_are_dequantized(tmp_path: Path) -> None:
    paths = tmp_path / "blocks.gguf", tmp_path / "numbers.gguf"
    make_model(tmp_path, "qwen3_5_text", linear_value_head_dim=16)
    write(tmp_path, paths[0], "qwen3_5_text", Q8)
    write(tmp_path, paths[1], "qwen3_5_text", Q8, as_numbers=True)
    formats_by_layer = GGUFCheckpoint.open(paths[0]).config["quantization_config"]["tensors"]
    assert "model.layers.0.linear_attn.in_proj_z" in formats_by_layer
    assert "model.layers.0.linear_attn.out_proj" not in formats_by_layer
    assert_alike(paths)


@pytest.mark.parametrize("stored_as", ["F32", "Q8_0"])
def test_projections_by_key_head_are_read(
    folder: Callable[[str], Path], tmp_path: Path, stored_as: str
) -> None:
    """The first files of Qwen3-Next have them as its checkpoints do."""
    source, number = folder("qwen3_next"), gguf.GGMLQuantizationType[stored_as]
    paths = tmp_path / "older.gguf", tmp_path / "newer.gguf"
    write(source, paths[0], "qwen3_next", number, older=True)
    write(source, paths[1], "qwen3_next", number)
    assert "blk.0.ssm_in.weight" in GGUFCheckpoint.open(paths[0]).file.tensors
    assert_alike(paths)


@pytest.mark.parametrize(("kind", "changes", "without", "error", "reason"), BAD)
def test_unsupported_options_raise_with_the_reason(
    folder: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
    without: str,
    error: type[Exception],
    reason: str,
) -> None:
    write(folder(kind), tmp_path / "bad.gguf", kind, changes=changes, without=without)
    with pytest.raises(error, match=rf"bad\.gguf: .*{reason}"):
        load(tmp_path / "bad.gguf", dtype="float32", cache_tokens=64, max_sequences=1)


def assert_alike(paths: tuple[Path, Path]) -> Any:
    """Check that two files give the same logits, and return the model of the first."""
    options: Any = {"dtype": "float32", "cache_tokens": 64, "max_sequences": 1}
    lm = load(paths[0], **options)
    expected = load(paths[1], **options).logits(TOKENS)
    bound = 2e-5 * float(expected.abs().max())
    torch.testing.assert_close(lm.logits(TOKENS), expected, atol=bound, rtol=0)
    return lm


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


def test_every_architecture_is_tested() -> None:
    tried = {NAMES.get(kind, kind) for kind in FIELDS}
    assert tried == set(ARCHITECTURES)
    assert HELD.keys() == {*HYBRIDS, *OTHERS}
