"""Mixtures with quantized experts compute what the library's decompressed weights do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-untyped]
from compressed_tensors.quantization import (  # type: ignore[import-untyped]
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.utils import (  # type: ignore[import-untyped]
    calculate_qparams,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch.utils import _pytree
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from interposer import ExpertsSpec, Site, explain, register
from interposer.errors import CheckpointError, ConfigError
from interposer.hookspecs import hookimpl
from interposer.records import LayerEntry
from interposer_models import load
from interposer_ops.layers.expert_stages import ExpertDispatcher, LocalDispatcher
from interposer_ops.layers.experts import Experts

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
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
FLOAT = {"type": "float"}
CHANNEL = {**FLOAT, "strategy": "channel"}
TENSOR = {**FLOAT, "strategy": "tensor"}
BLOCK = {**FLOAT, "strategy": "block", "block_structure": [16, 32]}
TOKENWISE = {**FLOAT, "strategy": "token", "dynamic": True}
# Weights, inputs, the format, the op.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str, str]] = {
    "int4": (INT4, None, "pack-quantized", "fused_experts_w4a16"),
    "float8 per output": (CHANNEL, TOKENWISE, "float-quantized", "fused_experts_fp8"),
    "float8 per tensor": (TENSOR, None, "float-quantized", "fused_experts_fp8"),
    "float8 in blocks": (BLOCK, None, "float-quantized", "fused_experts_fp8"),
}
TOKENS = [token * 37 % 128 for token in range(60)]
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def scheme_of(kind: str) -> Any:
    weights, inputs, form, _ = KINDS[kind]
    return QuantizationScheme(
        targets=["re:.*experts.*"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
        format=form,
    )


def blocks_of(weight: torch.Tensor, args: Any) -> torch.Tensor:
    """Return a view of the weight; one scale holds for its last dimension."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "block":
        rows, columns = args.block_structure
        parted = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        blocks: torch.Tensor = parted.transpose(1, 2).flatten(2)
        return blocks
    groups: torch.Tensor = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    return groups


def write(path: Path, kind: str, model: str, **settings: Any) -> tuple[Path, Path]:
    """Write a tiny mixture with experts quantized by the library, and their numbers."""
    torch.manual_seed(3)
    quantized, plain = path / "quantized", path / "plain"
    AutoModelForCausalLM.from_config(MODELS[model]()).save_pretrained(plain)
    scheme = scheme_of(kind)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if ".experts." not in name:
            stored[name] = meant[name] = tensor
            continue
        parts = blocks_of(tensor, scheme.weights)
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), scheme.weights)
        own = {"weight": tensor, "weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(own, scheme)
        stored |= {f"{layer}.{key}": value.clone() for key, value in packed.items()}
        meant[name] = compressor.decompress(dict(packed), scheme)["weight"].float()
    config = json.loads((plain / "config.json").read_text())
    written = QuantizationConfig(config_groups={"group_0": scheme}, format=scheme.format)
    written = json.loads(written.model_dump_json()) | {"quantization_status": "compressed"}
    quantized.mkdir()
    for folder, tensors in ((quantized, stored), (plain, meant)):
        extra = {"quantization_config": settings or written} if folder is quantized else {}
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return quantized, plain


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def assert_alike(quantized: Path, plain: Path, op: str) -> None:
    lm, reference = load(quantized, dtype="float32"), load(plain, dtype="float32")
    expected = reference.logits(TOKENS)
    # Sums of float32 in another order, through two layers.
    assert (lm.logits(TOKENS) - expected).abs().max() <= 1e-4
    assert expected.abs().max() > 1, "nothing is compared"
    names = {row.choice.request.name for row in explain(lm).rows}
    assert op in names
    assert "fused_experts" not in names


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_what_the_library_decompresses(
    kind: str, model: str, tmp_path: Path
) -> None:
    assert_alike(*write(tmp_path, kind, model), KINDS[kind][-1])


class Staged(Experts):
    """Sorts tokens by expert before the kernel gets them."""

    def __init__(
        self, site: Site, spec: ExpertsSpec, dispatcher: ExpertDispatcher | None = None
    ) -> None:
        super().__init__(site, spec, dispatcher or LocalDispatcher(site, spec))


class Stages:
    """A plugin by which all models compute their experts in stages."""

    @staticmethod
    @hookimpl
    def interposer_records() -> list[LayerEntry]:
        return [LayerEntry("experts", "staged", f"{__name__}:Staged")]


@pytest.mark.parametrize("kind", [None, "int4", "float8 per output"])
def test_a_replaced_layer_computes_a_model_in_stages(kind: str | None, tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, kind or "int4", "qwen3")
    path = quantized if kind else plain
    expected = load(path, dtype="float32").logits(TOKENS)
    with register(Stages, "stages"):
        lm = load(path, dtype="float32")
        # Sums of float32 in another order, through two layers.
        assert (lm.logits(TOKENS) - expected).abs().max() <= 1e-4
    names = {row.choice.request.name for row in explain(lm).rows}
    assert names >= {"moe_permute", "moe_unpermute", KINDS[kind][-1] if kind else "grouped_linear"}
    assert "fused_experts" not in names


@pytest.mark.parametrize(
    ("kind", "block"), [("float8 in blocks", [16, 32]), ("float8 per tensor", None)]
)
def test_blocks_are_read_under_the_names_of_transformers(
    kind: str, block: list[int] | None, tmp_path: Path
) -> None:
    settings = {
        "quant_method": "fp8",
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"],
    }
    quantized, plain = write(tmp_path, kind, "qwen3", **settings)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[f"{name}_inv"] = tensors.pop(name)

    edit(quantized, rename)
    assert_alike(quantized, plain, "fused_experts_fp8")


def test_only_codes_and_scales_are_held(tmp_path: Path) -> None:
    lm = load(write(tmp_path, "int4", "qwen3")[0], dtype="bfloat16")
    for layer in lm.engine.model.modules():
        if isinstance(layer, Experts):
            assert list(layer.parameters()) == []
            leaves = _pytree.tree_leaves(layer.operands)
            held = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            # 4.5 bits of each number; of 96 outputs, kernels may hold some blocks half empty.
            assert 3 * 4 * 96 * 64 * 4.5 / 8 <= held < 3 * 4 * 96 * 64 * 6 / 8


@pytest.mark.parametrize(
    ("kind", "tensor", "value", "message"),
    [
        ("int4", "weight_scale", 0.0, "holds 192 scales that are zero"),
        ("int4", "weight_shape", 7, r"holds \[7, 7\], the config asks for \[96, 64\]"),
        ("float8 per output", "weight_scale", float("nan"), "holds 96 scales"),
        ("float8 per tensor", "weight_scale", float("inf"), "holds 1 scales"),
    ],
)
def test_what_makes_no_weight_is_refused(
    kind: str, tensor: str, value: float, message: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, kind, "qwen3")
    edit(path, lambda tensors: tensors[f"{EXPERT}.{tensor}"].fill_(value))
    with pytest.raises(CheckpointError, match=rf"experts\.2\.up_proj\.{tensor}: {message}"):
        load(path)


def test_experts_are_quantized_alike(tmp_path: Path) -> None:
    path, _ = write(tmp_path, "int4", "qwen3")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"] = [EXPERT]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"quantized in different ways:(.|\n)*experts\.2\.up_proj"
    ):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 48}, "groups of 48 do not divide its 64 inputs"),
        ({"symmetric": False}, "no op multiplies by experts of"),
        ({"num_bits": 8}, "no op multiplies by experts of"),
    ],
)
def test_experts_without_an_op_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, "int4", "qwen3")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load(path)
