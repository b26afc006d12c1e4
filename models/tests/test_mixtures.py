"""Mixtures whose checkpoints store each expert by itself: Mixtral and Qwen3-MoE.

That they compute what transformers computes is among the tests of ``test_parity``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, Qwen3MoeConfig

from interposer import Config, explain
from interposer.errors import CheckpointError
from interposer_engine import load, plan, quantize
from interposer_models.families import DecoderFamily, Mixtral, Qwen2, Qwen3Moe
from interposer_ops.layers.moe.experts import Experts

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
F = TypeVar("F", bound=DecoderFamily)
EXPERT = "model.layers.0.mlp.experts.3"


@pytest.fixture
def copied(qwen3_moe: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    for source in qwen3_moe.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    return tmp_path


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({n: v for n, v in config.items() if v != "absent"}))


def parsed(family: type[F], **fields: Any) -> F:
    return family.parse({**SIZES, **fields}, "config.json")


def token_ids(count: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def test_tokens_equal_the_reference(qwen3_moe: Path) -> None:
    prompts = [token_ids(5), token_ids(70)]
    reference = Config(kernels={"fused_experts": "reference"})
    tokens = []
    for config in (None, reference):
        lm = load(qwen3_moe, dtype="float32", cache_tokens=1024, config=config)
        tokens.append([c.token_ids for c in lm.generate(prompts, max_new_tokens=32)])
    assert tokens[0] == tokens[1]


def test_omitted_fields_have_the_defaults_of_transformers() -> None:
    mixtral: Any = MixtralConfig(**SIZES)
    qwen: Any = Qwen3MoeConfig(**SIZES)
    both: list[tuple[Mixtral | Qwen3Moe, Any]] = [
        (parsed(Mixtral), mixtral),
        (parsed(Qwen3Moe), qwen),
    ]
    for ours, peer in both:
        assert ours.num_local_experts == peer.num_local_experts
        assert ours.num_experts_per_tok == peer.num_experts_per_tok
        assert ours.rms_norm_eps == peer.rms_norm_eps
        assert ours.rope_theta == peer.rope_parameters["rope_theta"]
        assert ours.head_size == peer.hidden_size // peer.num_attention_heads
        assert ours.windows == (peer.sliding_window,) * 4 == (None,) * 4
    assert parsed(Mixtral).expert_size == mixtral.intermediate_size
    sparse = parsed(Qwen3Moe)
    assert all(sparse.has_experts(index) for index in range(4))
    assert sparse.expert_size == qwen.moe_intermediate_size
    assert sparse.norm_topk_prob == qwen.norm_topk_prob


def test_some_layers_have_a_dense_mlp() -> None:
    def sparse(**fields: Any) -> list[bool]:
        return [parsed(Qwen3Moe, **fields).has_experts(index) for index in range(4)]

    assert sparse(decoder_sparse_step=2) == [False, True, False, True]
    assert sparse(decoder_sparse_step=3) == [False, False, True, False]
    assert sparse(mlp_only_layers=[0, 3]) == [False, True, True, False]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[1]) == [False, False, False, True]


def test_windows_hold_for_all_layers() -> None:
    """Unlike in Qwen2, whatever ``max_window_layers`` says."""
    sliding = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3}
    assert parsed(Qwen3Moe, **sliding).windows == (24,) * 4
    assert parsed(Qwen2, **sliding).windows == (None, None, None, 24)


def test_the_count_of_experts_has_two_names(copied: Path) -> None:
    """Released checkpoints have the one, those that transformers writes now the other."""
    expected = load(copied, dtype="float32", cache_tokens=1024).logits(token_ids(20))
    edit_config(copied, num_local_experts="absent", num_experts=6)
    logits = load(copied, dtype="float32", cache_tokens=1024).logits(token_ids(20))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', experts compute with 'silu'"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 exceeds num_local_experts 6"),
        (
            {"moe_intermediate_size": 2**24, "hidden_size": 2**24},
            "exceed the limit of 281474976710656 elements",
        ),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_impossible_moe_configs_are_refused(
    copied: Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(copied, **changes)
    with pytest.raises(CheckpointError, match=message):
        plan(copied)


def test_a_missing_expert_is_named(copied: Path) -> None:
    file = copied / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"{EXPERT}.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"lacks the tensor '{EXPERT}.up_proj.weight'"):
        load(copied)


def test_an_expert_of_another_size_is_named(copied: Path) -> None:
    file = copied / "model.safetensors"
    tensors = load_file(file)
    name = f"{EXPERT}.down_proj.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, file)
    with pytest.raises(
        CheckpointError, match=rf"'{name}' has shape \[64, 47\], the config asks for \[64, 48\]"
    ):
        load(copied)


@pytest.mark.landing(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_expert_weights_are_updated_in_place(copied: Path, dtype: str) -> None:
    lm = load(copied, dtype=dtype, cache_tokens=1024)
    ids, before = token_ids(40), lm.logits(token_ids(40))
    (layer, *_) = [m for m in lm.engine.model.modules() if isinstance(m, Experts)]
    assert list(layer.parameters()) == []
    old_operands = layer.operands
    tensors = load_file(copied / "model.safetensors")
    first = {n: t for n, t in tensors.items() if n.startswith("model.layers.0.mlp.experts.")}
    assert len(first) == 3 * 6
    updated = {n: t.flip(0) for n, t in first.items()}
    assert lm.update_weights(updated) == ()
    assert layer.operands is old_operands
    changed = lm.logits(ids)
    assert not torch.equal(changed, before)
    tensors |= {name: tensor.contiguous() for name, tensor in updated.items()}
    save_file(tensors, copied / "model.safetensors")
    assert torch.equal(changed, load(copied, dtype=dtype, cache_tokens=1024).logits(ids))
    assert lm.update_weights(first) == ()
    assert torch.equal(lm.logits(ids), before)
    with pytest.raises(CheckpointError, match="goes together with"):
        lm.update_weights({f"{EXPERT}.up_proj.weight": first[f"{EXPERT}.up_proj.weight"]})


def test_linear_layers_of_moe_models_are_quantized(qwen3_moe: Path, tmp_path: Path) -> None:
    """The written settings say that routers and experts are plain."""
    result = quantize(qwen3_moe, tmp_path / "out", "int8")
    settings = json.loads((result.path / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", r"re:.*\.gate$", r"re:.*\.experts\."]
    lm = load(result.path, dtype="float32", cache_tokens=1024)
    names = {row.choice.request.name for row in explain(lm).rows}
    assert {"fused_experts", "int8_linear"} <= names
    expected = load(qwen3_moe, dtype="float32", cache_tokens=1024).logits(token_ids(9))
    assert (lm.logits(token_ids(9)) - expected).norm() < 0.1 * expected.norm()
