"""Mixtures of experts packed by GPTQ, AWQ or auto-round compute by their codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch.utils import _pytree
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from interposer import explain
from interposer.errors import CheckpointError, ConfigError
from interposer_engine import load
from interposer_ops.layers.moe.experts import Experts
from interposer_quantization._weights.int_packing import AWQ_ORDER, pack_int32

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3MoeConfig(
        **SIZES,
        intermediate_size=96,
        moe_intermediate_size=96,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=4),
}
GROUP, MIDDLE, ONES = 32, 8, 0x11111111
WEIGHTS = {"bits": 4, "group_size": GROUP}
EXPERTS_ONLY: dict[str, Any] = {"-:.*self_attn": {}}
KINDS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", **WEIGHTS, "desc_act": False, "dynamic": EXPERTS_ONLY},
    "gptq_v2": {
        "quant_method": "gptq",
        **WEIGHTS,
        "checkpoint_format": "gptq_v2",
        "dynamic": EXPERTS_ONLY,
    },
    "awq": {
        "quant_method": "awq",
        **WEIGHTS,
        "zero_point": False,
        "modules_to_not_convert": ["self_attn"],
    },
    "auto-round": {
        "quant_method": "auto-round",
        **WEIGHTS,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {".*self_attn.*": {"bits": 16}},
    },
}
TOKENS = [token * 37 % 128 for token in range(60)]
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def packed(weight: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the stored tensors of a weight ``[O, I]``, and their numbers."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-MIDDLE, MIDDLE - 1)
    expected = (codes * scales.float()[..., None]).flatten(1)
    unsigned = (codes + MIDDLE).flatten(1).to(torch.uint8)
    middles = torch.full(scales.T.shape, MIDDLE, dtype=torch.uint8)
    if kind == "awq":
        words = pack_int32(unsigned.T.contiguous(), 4, AWQ_ORDER)
        zeros = pack_int32(middles, 4, AWQ_ORDER)
    else:
        words = pack_int32(unsigned, 4).T
        zeros = pack_int32(middles, 4) - (0 if kind == "gptq_v2" else ONES)
    stored = {"qweight": words, "qzeros": zeros, "scales": scales.T}
    if kind == "gptq":
        stored["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    return stored, expected


def write(path: Path, kind: str, model: str = "qwen3") -> tuple[Path, Path]:
    """Write a tiny mixture with packed experts, and one with their numbers."""
    torch.manual_seed(3)
    quantized, plain = path / "quantized", path / "plain"
    AutoModelForCausalLM.from_config(MODELS[model]()).save_pretrained(plain)
    stored, expected = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if ".experts." not in name:
            stored[name] = expected[name] = tensor
            continue
        parts, expected[name] = packed(tensor, kind)
        layer = name.removesuffix(".weight")
        stored |= {f"{layer}.{key}": value for key, value in parts.items()}
    config = json.loads((plain / "config.json").read_text())
    quantized.mkdir()
    for folder, tensors in ((quantized, stored), (plain, expected)):
        extra = {"quantization_config": KINDS[kind]} if folder is quantized else {}
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return quantized, plain


def edit(path: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors[name])
    save_file(tensors, path / "model.safetensors")


def configure(path: Path, **settings: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"].update(settings)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("kind", "model"), [*((kind, "qwen3") for kind in KINDS), ("gptq", "mixtral")]
)
def test_logits_equal_the_dequantized_experts(kind: str, model: str, tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, kind, model)
    lm, reference = load(quantized, dtype="float32"), load(plain, dtype="float32")
    expected = reference.logits(TOKENS)
    # Sums of float32 in another order, through two layers.
    assert (lm.logits(TOKENS) - expected).abs().max() <= 1e-4
    assert expected.abs().max() > 1, "nothing is compared"
    names = {row.choice.request.name for row in explain(lm).rows}
    assert "fused_experts_w4a16" in names
    assert "fused_experts" not in names
    lm.update_weights(load_file(quantized / "model.safetensors").items())
    assert (lm.logits(TOKENS) - expected).abs().max() <= 1e-4
    for layer in lm.engine.model.modules():
        if isinstance(layer, Experts):
            assert list(layer.parameters()) == []
            leaves = _pytree.tree_leaves(layer.operands)
            kept_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            # At most five bits of each number; of 96 outputs, kernels may hold blocks half empty.
            assert 3 * 4 * 96 * 64 * 4.5 / 8 <= kept_bytes < 3 * 4 * 96 * 64 * 7 / 8


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("gptq", {"sym": False}),
        ("gptq", {"desc_act": True}),
        ("awq", {"zero_point": True}),
        ("auto-round", {"sym": False}),
    ],
)
def test_experts_without_a_fused_op_run_expert_by_expert(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    quantized, plain = write(tmp_path, kind)
    configure(quantized, **settings)
    expected = load(plain, dtype="float32").logits(TOKENS)
    if settings.get("desc_act"):
        tensors = load_file(quantized / "model.safetensors")
        for name in [name for name in tensors if name.endswith(("g_idx", "scales"))]:
            # The last groups come first, with their scales.
            tensors[name] = tensors[name].flip(0).contiguous()
        save_file(tensors, quantized / "model.safetensors")
    lm = load(quantized, dtype="float32")
    assert (lm.logits(TOKENS) - expected).abs().max() <= 1e-4
    assert "w4a16_linear" in {row.choice.request.name for row in explain(lm).rows}


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        ("scales", lambda scales: scales.zero_(), "holds 192 scales that are zero"),
        ("qzeros", lambda zeros: zeros.add_(1), "holds the zero point 9, but all are 8"),
        (
            "g_idx",
            lambda groups: groups[:2].copy_(torch.tensor([0, 1])),
            r"holds the group 1 for input 1: groups of experts have to follow",
        ),
    ],
)
def test_invalid_expert_tensors_are_refused(
    tensor: str, change: Callable[[torch.Tensor], object], message: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, "gptq")
    edit(path, f"{EXPERT}.{tensor}", change)
    with pytest.raises(CheckpointError, match=rf"experts\.2\.up_proj\.{tensor}: {message}"):
        load(path)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("gptq", {"group_size": 48}, "groups of 48 do not divide its 64 inputs"),
        (
            "gptq",
            {"dynamic": {**EXPERTS_ONLY, r"-:.*experts\.2\.up_proj": {}}},
            r"quantized in different ways:(.|\n)*experts\.2\.up_proj: not quantized",
        ),
    ],
)
def test_expert_sizes_that_the_packing_cannot_store_are_refused(
    kind: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, kind)
    configure(path, **settings)
    with pytest.raises(ConfigError, match=message):
        load(path)
