"""Mixtures as transformers 4 wrote them, with packed experts and routers, and as 5 writes them.

Matrices are packed here, in the form of bitsandbytes, whose releases of 2026 find no experts in the
models of transformers 5.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from interposer.errors import CheckpointError
from interposer_engine import LanguageModel, load
from interposer_nf4._codebook_linear import dequantize
from interposer_nf4._codebooks import CODEBOOKS
from interposer_ops.layers.moe.experts import Experts, PlainExperts

TOKENIZER = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm" / "tokenizer.json"
TOKENS = [5, 42, 15, 3]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=4, intermediate_size=128, moe_intermediate_size=32
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=32),
}
ROUTERS = (".mlp.gate.weight", ".block_sparse_moe.gate.weight")
SETTINGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
}

Tensors = dict[str, torch.Tensor]
Packer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


@cache
def plain(family: str) -> tuple[dict[str, Any], Tensors]:
    """Return config and tensors as transformers 5 writes them."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        return config, load_file(Path(folder) / "model.safetensors")


def packed(kind: str, name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Return the tensors of one packed weight, and the float32 weight that they stand for."""
    if kind == "int8":
        largest = weight.abs().amax(1)
        codes = (weight / largest[:, None] * 127).round().to(torch.int8)
        layer = name.removesuffix(".weight")
        form = torch.tensor(0, dtype=torch.uint8)
        tensors = {name: codes, f"{layer}.SCB": largest, f"{layer}.weight_format": form}
        return tensors, codes.float() * (largest / 127)[:, None]
    quant_type = SETTINGS[kind]["bnb_4bit_quant_type"]
    codebook = torch.tensor(CODEBOOKS[quant_type])
    blocks = weight.view(-1, 64)
    scales = blocks.abs().amax(1)
    state: dict[str, Any] = {
        "quant_type": quant_type,
        "blocksize": 64,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    tensors = {f"{name}.absmax": scales, f"{name}.quant_map": codebook.clone()}
    if kind == "double":
        nested = torch.linspace(0, 1, 256)
        outer = scales.max().reshape(1)
        indices = (scales / outer * 255).round().clamp(1).to(torch.uint8)
        scales = nested[indices.long()] * outer + 0.25
        tensors[f"{name}.absmax"] = indices
        tensors |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": nested}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
    nearest = ((blocks / scales[:, None])[..., None] - codebook).abs().argmin(-1).to(torch.uint8)
    pairs = nearest.view(-1, 2)
    tensors[name] = pairs[:, :1] * 16 + pairs[:, 1:]
    tensors[f"{name}.quant_state.bitsandbytes__{quant_type}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    rows = tensors[name].view(weight.shape[0], -1)
    spread = scales.repeat_interleave(64).view(weight.shape)
    return tensors, dequantize(rows, spread, codebook, torch.float32)


def is_attention(name: str) -> bool:
    return ".self_attn." in name and name.endswith("_proj.weight")


def is_of_mixture(name: str) -> bool:
    return ".experts." in name or name.endswith(ROUTERS)


def write(folder: Path, family: str, kind: str, tensors: Tensors) -> Path:
    config, _ = plain(family)
    settings = {"quant_method": "bitsandbytes", **SETTINGS[kind]}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(TOKENIZER, folder)
    return folder


def both_forms(family: str, kind: str) -> tuple[Tensors, Tensors]:
    """Return the tensors of transformers 4, and of 5 with the weights that the former stand for."""
    older, newer = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in plain(family)[1].items():
        if not is_attention(name) and not is_of_mixture(name):
            older[name] = newer[name] = weight
            continue
        tensors, expected = packed(kind, name, weight)
        older |= tensors
        newer |= {name: expected} if is_of_mixture(name) else tensors
    return older, newer


def logits_of(lm: LanguageModel) -> torch.Tensor:
    return lm.logits(TOKENS)


@pytest.mark.landing(2)
@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("kind", list(SETTINGS))
def test_packed_experts_and_routers_are_dequantized(family: str, kind: str, tmp_path: Path) -> None:
    older, newer = both_forms(family, kind)
    actual = load(write(tmp_path / "older", family, kind, older), dtype="float32")
    expected = load(write(tmp_path / "newer", family, kind, newer), dtype="float32")
    assert torch.equal(logits_of(actual), logits_of(expected))
    experts = [layer for layer in actual.engine.model.modules() if isinstance(layer, Experts)]
    assert len(experts) == SIZES["num_hidden_layers"]
    assert all(isinstance(layer.method, PlainExperts) for layer in experts)


def test_plain_experts_of_transformers_5_stay_unchanged(tmp_path: Path) -> None:
    _, tensors = plain("qwen3")
    stored = dict(tensors)
    for name in filter(is_attention, tensors):
        del stored[name]
        stored |= packed("nf4", name, tensors[name])[0]
    actual = load(write(tmp_path / "stored", "qwen3", "nf4", stored), dtype="float32")
    with torch.no_grad():
        config = CONFIGS["qwen3"]()
        same = AutoModelForCausalLM.from_config(config)
        for name, weight in tensors.items():
            if is_attention(name):
                same.get_parameter(name).copy_(packed("nf4", name, weight)[1])
            elif not is_of_mixture(name):
                same.get_parameter(name).copy_(weight)
        for index, layer in enumerate(same.model.layers):
            prefix = f"model.layers.{index}.mlp"
            layer.mlp.gate.weight.copy_(tensors[f"{prefix}.gate.weight"])
            for expert in range(config.num_experts):
                gate, up, down = (
                    tensors[f"{prefix}.experts.{expert}.{part}_proj.weight"]
                    for part in ("gate", "up", "down")
                )
                layer.mlp.experts.gate_up_proj[expert].copy_(torch.cat((gate, up)))
                layer.mlp.experts.down_proj[expert].copy_(down)
        expected = same(torch.tensor([TOKENS])).logits[0]
    # Sums of up to 128 terms in float32, in another order, over two layers of such.
    torch.testing.assert_close(logits_of(actual), expected, atol=2e-4, rtol=0)


EXPERT = "model.layers.1.mlp.experts.2.down_proj"


@pytest.mark.landing(3)
@pytest.mark.parametrize(
    ("kind", "tensor", "change", "reason"),
    [
        ("nf4", "weight.absmax", None, "is missing, but the weight is packed"),
        ("nf4", "weight.absmax", lambda x: x[:-1].clone(), "must be 32 floats"),
        ("nf4", "weight", lambda x: x[:-2].clone(), "hold the values of 64 outputs and 32 inputs"),
        ("double", "weight.nested_absmax", None, "is missing, but the weight is packed"),
        ("int8", "SCB", None, "is missing, but the weight is packed"),
        ("int8", "SCB", lambda x: -x, "scales that are negative"),
        ("int8", "weight_format", lambda x: x + 1, "must be 0 for rows in order"),
    ],
)
def test_invalid_tensors_of_packed_experts_are_refused_with_their_name(
    kind: str, tensor: str, change: Callable[[Any], Any] | None, reason: str, tmp_path: Path
) -> None:
    tensors, _ = both_forms("qwen3", kind)
    name = f"{EXPERT}.{tensor}"
    stored = tensors.pop(name)
    if change is not None:
        tensors[name] = change(stored)
    with pytest.raises(CheckpointError, match=reason) as error:
        load(write(tmp_path / "stored", "qwen3", kind, tensors), dtype="float32")
    assert name in str(error.value)


def test_packed_int8_experts_without_weight_format_are_read(tmp_path: Path) -> None:
    older, newer = both_forms("qwen3", "int8")
    for name in [name for name in older if name.endswith("weight_format")]:
        del older[name]
        newer.pop(name, None)
    actual = load(write(tmp_path / "older", "qwen3", "int8", older), dtype="float32")
    expected = load(write(tmp_path / "newer", "qwen3", "int8", newer), dtype="float32")
    assert torch.equal(logits_of(actual), logits_of(expected))
