"""Mixtures with quantized experts compute what the library's decompressed weights do."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-untyped]
from compressed_tensors.compressors.nvfp4.helpers import (  # type: ignore[import-untyped]
    unpack_fp4_from_uint8,
)
from compressed_tensors.quantization import (  # type: ignore[import-untyped]
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.lifecycle.forward import (  # type: ignore[import-untyped]
    dequantize,
    fake_quantize,
)
from compressed_tensors.quantization.utils import (  # type: ignore[import-untyped]
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch.utils import _pytree
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from interposer import Config, ExpertsSpec, Site, explain, register
from interposer.errors import CheckpointError, ConfigError
from interposer.hookspecs import hookimpl
from interposer.records import LayerEntry
from interposer_engine import LanguageModel, load
from interposer_ops.experts import activated
from interposer_ops.layers.moe.dispatcher import ExpertDispatcher, LocalDispatcher
from interposer_ops.layers.moe.experts import Experts, take_matrices

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
Kind = tuple[dict[str, Any], dict[str, Any] | None, str, str]
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
FLOAT = {"type": "float"}
CHANNEL = {**FLOAT, "strategy": "channel"}
TENSOR = {**FLOAT, "strategy": "tensor"}
BLOCK = {**FLOAT, "strategy": "block", "block_structure": [16, 32]}
TOKENWISE = {**FLOAT, "strategy": "token", "dynamic": True}
NVFP4 = {
    **FLOAT,
    "num_bits": 4,
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}
MXFP8 = {**FLOAT, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
DYNAMIC = {"dynamic": True}
TOKENS_INT8 = {"strategy": "token", **DYNAMIC}
LOCAL = {**NVFP4, "dynamic": "local"}
# Weights, inputs, the format, the op.
AT_ONCE: dict[str, Kind] = {
    "int4": (INT4, None, "pack-quantized", "fused_experts_w4a16"),
    "float8 per output": (CHANNEL, None, "float-quantized", "fused_experts_fp8"),
    "float8 per tensor": (TENSOR, None, "float-quantized", "fused_experts_fp8"),
    "float8 in blocks": (BLOCK, None, "float-quantized", "fused_experts_fp8"),
}
# Of which no op computes all experts.
IN_TURN: dict[str, Kind] = {
    "int4, asymmetric": ({**INT4, "symmetric": False}, None, "pack-quantized", "w4a16_linear"),
    "packed int8": ({**INT4, "num_bits": 8}, None, "pack-quantized", "w8a16_linear"),
    "nvfp4": (NVFP4, None, "nvfp4-pack-quantized", "w8a16_linear"),
}
ROUNDED: dict[str, Kind] = {
    "int8": ({"strategy": "channel"}, TOKENS_INT8, "int-quantized", "int8_linear"),
    "float8": (CHANNEL, TOKENWISE, "float-quantized", "fp8_linear"),
    "mxfp8": (MXFP8, {**MXFP8, **DYNAMIC}, "mxfp8-quantized", "mxfp8_linear"),
    "nvfp4 by nvfp4": (NVFP4, LOCAL, "nvfp4-pack-quantized", "dequantize_nvfp4"),
}
# Scales of int8 are max / 127, not max / 127.5; exponents of microscaling are rounded down.
OTHER_RULE = ("int8", "mxfp8")
KINDS = AT_ONCE | IN_TURN | ROUNDED
TOKENS = [token * 37 % 128 for token in range(60)]
INPUT_SCALE = generate_gparam(torch.tensor(-4.0), torch.tensor(4.0))
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def scheme_of(kind: str) -> Any:
    weights, inputs, form, *_ = KINDS[kind]
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


def decompressed(stored: dict[str, torch.Tensor], scheme: Any, shape: Any) -> torch.Tensor:
    """Return the library's numbers, unlike its compressor without rounding them to bfloat16."""
    if "weight_global_scale" in stored:
        numbers = unpack_fp4_from_uint8(stored["weight_packed"], *shape).float()
        scale, shared = stored["weight_scale"].float(), stored["weight_global_scale"]
        return dequantize(numbers, scale, args=scheme.weights, global_scale=shared)  # type: ignore[no-any-return]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(dict(stored), scheme)["weight"].float()  # type: ignore[no-any-return]


def write(path: Path, kind: str, model: str, **settings: Any) -> tuple[Path, Path]:
    """Write a tiny mixture with experts quantized by the library, and their numbers."""
    torch.manual_seed(3)
    quantized, plain = path / "quantized", path / "plain"
    AutoModelForCausalLM.from_config(MODELS[model]()).save_pretrained(plain)
    scheme = scheme_of(kind)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored, expected = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if ".experts." not in name:
            stored[name] = expected[name] = tensor
            continue
        parts = blocks_of(tensor, scheme.weights)
        own, shared = {"weight": tensor}, {}
        if scheme.weights.strategy == "tensor_group":
            # Of gates and what they act on, which share it.
            shared["global_scale"] = generate_gparam(torch.tensor(-1.0), torch.tensor(1.0))
            own["weight_global_scale"] = shared["global_scale"]
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), scheme.weights, **shared)
        own |= {"weight_scale": scale, "weight_zero_point": zero}
        if scheme.input_activations is not None and shared:
            own["input_global_scale"] = INPUT_SCALE
        packed = compressor.compress(own, scheme)
        stored |= {f"{layer}.{key}": value.clone() for key, value in packed.items()}
        expected[name] = decompressed(packed, scheme, tensor.shape)
    config = json.loads((plain / "config.json").read_text())
    written = QuantizationConfig(config_groups={"group_0": scheme}, format=scheme.format)
    written = json.loads(written.model_dump_json()) | {"quantization_status": "compressed"}
    quantized.mkdir()
    for folder, tensors in ((quantized, stored), (plain, expected)):
        extra = {"quantization_config": settings or written} if folder is quantized else {}
        (folder / "config.json").write_text(json.dumps({**config, **extra}))
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return quantized, plain


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def assert_alike(quantized: Path, plain: Path, op: str) -> LanguageModel:
    lm, reference = load(quantized, dtype="float32"), load(plain, dtype="float32")
    expected = reference.logits(TOKENS)
    # Sums of float32 in another order, through two layers.
    assert (lm.logits(TOKENS) - expected).abs().max() <= 1e-4
    assert expected.abs().max() > 1, "nothing is compared"
    assert_computed_by(lm, op)
    return lm


def assert_computed_by(lm: LanguageModel, op: str) -> None:
    names = {row.choice.request.name for row in explain(lm).rows}
    assert op in names
    assert "fused_experts" not in names
    waiting = [row.choice for row in explain(lm).rows if row.choice.waits]
    if op.startswith("fused"):
        assert not waiting
        return
    assert [choice.request.name for choice in waiting] == ["moe_permute", "moe_unpermute"]
    assert all("one after the other" in note for choice in waiting for note in choice.notes)


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("kind", "model"), [("int4", "mixtral"), *product(AT_ONCE | IN_TURN, ["qwen3"])]
)
def test_logits_match_the_weights_that_compressed_tensors_decompresses(
    kind: str, model: str, tmp_path: Path
) -> None:
    path, plain = write(tmp_path, kind, model)
    lm = assert_alike(path, plain, KINDS[kind][3])
    if kind in IN_TURN:
        logits = lm.logits(TOKENS)
        lm.update_weights(load_file(path / "model.safetensors").items())
        assert torch.equal(lm.logits(TOKENS), logits)


def test_kernel_rule_selects_the_op_with_unquantized_inputs(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "float8", "qwen3")
    expected = load(plain, dtype="float32").logits(TOKENS)
    config = Config(kernels={"fused_experts_fp8": "reference"})
    lm = load(quantized, dtype="float32", config=config)
    assert (lm.logits(TOKENS) - expected).abs().max() <= 1e-4
    assert_computed_by(lm, "fused_experts_fp8")


def test_experts_with_only_a_reference_kernel_are_dequantized_once(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "packed int8", "qwen3")
    expected = load(plain, dtype="float32").logits(TOKENS)
    config = Config(kernels={"w8a16_linear": {"forbid": ["w8a16_linear_*"]}})
    lm = load(quantized, dtype="float32", config=config)
    assert (lm.logits(TOKENS) - expected).abs().max() <= 1e-4
    assert_computed_by(lm, "linear")
    rows = [row.choice for row in explain(lm).rows if row.choice.request.name == "w8a16_linear"]
    assert len(rows) == 2
    for choice in rows:
        assert choice.idle
        assert "dequantized once, while loading" in choice.notes[-1]


def test_experts_one_by_one_are_not_compiled(tmp_path: Path) -> None:
    config = Config(compile="eager")
    with pytest.raises(ConfigError, match=r"was requested, but a graph .*one after the other"):
        load(write(tmp_path, "int8", "qwen3")[0], dtype="float32", config=config)


@pytest.mark.parametrize(("method", "most"), [("int8", 0.1), ("fp8", 0.3)])
def test_plain_experts_are_quantized_during_loading(
    method: str, most: float, tmp_path: Path
) -> None:
    _, plain = write(tmp_path, "packed int8", "mixtral")
    exact, asked = load(plain, dtype="float32"), {"quant_method": method, "head": "plain"}
    lm = load(plain, dtype="float32", quantization=asked)
    expected = exact.logits(TOKENS)
    errors = (lm.logits(TOKENS) - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Some tokens are sent to other experts.
    assert 0 < errors.median() < most
    assert_computed_by(lm, f"{method}_linear")
    written = {f"{EXPERT}.weight": torch.zeros(96, 64)}
    with pytest.raises(CheckpointError, match="holds the tensor"):
        lm.update_weights(written.items())


class OfTheLibrary(Experts):
    """Plain experts whose inputs the library rounds, as ``KINDS[kind]`` has them."""

    kind = ""

    def finalize(self) -> None:
        held = take_matrices(self, self.spec)
        self.matrices = held["gate_up"], held["down"]

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(x)
        for expert, (first, second) in enumerate(zip(*self.matrices, strict=True)):
            shares = torch.where(expert_ids == expert, weights, 0).sum(1, keepdim=True)
            hidden = activated(self.rounded(x) @ first.T, "silu")
            result += shares * (self.rounded(hidden) @ second.T)
        return result

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        args = scheme_of(self.kind).input_activations
        shared = {"global_scale": INPUT_SCALE} if args.strategy == "tensor_group" else {}
        pair = compute_dynamic_scales_and_zp(x[None], args, self, **shared)
        return fake_quantize(x[None], *pair, args, **shared)[0]  # type: ignore[no-any-return]


class InputsOfTheLibrary:
    """A plugin by which all models have such experts."""

    @staticmethod
    @hookimpl
    def interposer_records() -> list[LayerEntry]:
        return [LayerEntry("experts", "of_the_library", f"{__name__}:OfTheLibrary")]


@pytest.mark.landing(1)
@pytest.mark.parametrize("kind", ROUNDED)
def test_input_rounding_matches_compressed_tensors(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, plain = write(tmp_path, kind, "qwen3")
    exact, lm = load(plain, dtype="float32").logits(TOKENS), load(quantized, dtype="float32")
    monkeypatch.setattr(OfTheLibrary, "kind", kind)
    with register(InputsOfTheLibrary, "of-the-library"):
        expected = load(plain, dtype="float32").logits(TOKENS)
    actual, noise = lm.logits(TOKENS), (expected - exact).norm()
    assert noise > 1e-3 * exact.norm(), "nothing is rounded"
    if kind in OTHER_RULE:
        assert 0.6 * noise < (actual - exact).norm() < 1.6 * noise
    else:
        # A number halfway between two may go either way; all others are rounded alike.
        assert (actual - expected).norm() < 0.05 * noise
    assert_computed_by(lm, KINDS[kind][3])


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


@pytest.mark.landing(2)
@pytest.mark.parametrize("kind", [None, "int4", "float8 per output", "int8"])
def test_a_replaced_layer_computes_a_model_in_stages(kind: str | None, tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, kind or "int4", "qwen3")
    path = quantized if kind else plain
    expected = load(path, dtype="float32").logits(TOKENS)
    with register(Stages, "stages"):
        lm = load(path, dtype="float32")
        # Sums of float32 in another order, through two layers.
        assert (lm.logits(TOKENS) - expected).abs().max() <= 1e-4
    names = {row.choice.request.name for row in explain(lm).rows}
    assert names >= {"moe_permute", "moe_unpermute", KINDS[kind][3] if kind else "grouped_linear"}
    assert "fused_experts" not in names


@pytest.mark.parametrize(
    ("kind", "block"), [("float8 in blocks", [16, 32]), ("float8 per tensor", None)]
)
def test_scales_are_read_under_the_names_of_transformers(
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
    if block:
        assert_alike(quantized, plain, "fused_experts_fp8")
    else:
        assert_computed_by(load(quantized, dtype="float32"), "fp8_linear")


def test_finalized_experts_keep_only_quantized_weights_and_scales(tmp_path: Path) -> None:
    lm = load(write(tmp_path, "int4", "qwen3")[0], dtype="bfloat16")
    for layer in lm.engine.model.modules():
        if isinstance(layer, Experts):
            assert list(layer.parameters()) == []
            leaves = _pytree.tree_leaves(layer.operands)
            kept_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            # 4.5 bits of each number; of 96 outputs, kernels may hold some blocks half empty.
            assert 3 * 4 * 96 * 64 * 4.5 / 8 <= kept_bytes < 3 * 4 * 96 * 64 * 6 / 8


@pytest.mark.landing(3)
@pytest.mark.parametrize(
    ("kind", "tensor", "value", "message"),
    [
        ("int4", "weight_scale", 0.0, "holds 192 scales that are zero"),
        ("int4", "weight_shape", 7, r"holds \[7, 7\], the config asks for \[96, 64\]"),
        ("float8 per output", "weight_scale", float("nan"), "holds 96 scales"),
        ("float8 per tensor", "weight_scale", float("inf"), "holds 1 scales"),
        ("int8", "weight_scale", 0.0, "96 of 96 scales are not positive"),
    ],
)
def test_invalid_expert_scales_are_refused(
    kind: str, tensor: str, value: float, message: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, kind, "qwen3")
    edit(path, lambda tensors: tensors[f"{EXPERT}.{tensor}"].fill_(value))
    with pytest.raises(CheckpointError, match=rf"experts\.2\.up_proj\.{tensor}: {message}"):
        load(path)


def test_gate_and_up_with_different_quantization_are_refused(tmp_path: Path) -> None:
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
        ({"group_size": 48, "num_bits": 8}, "groups of 48 do not divide its 64 inputs"),
    ],
)
def test_groups_that_do_not_divide_experts_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, "int4", "qwen3")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load(path)
