"""Checkpoints that the compressed-tensors library writes give the library's own logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor  # type: ignore[import-untyped]
from compressed_tensors.quantization import (  # type: ignore[import-untyped]
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import (  # type: ignore[import-untyped]
    calculate_qparams,
    is_module_quantized,
)
from loguru import logger
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig

from interposer import explain
from interposer.errors import CheckpointError, ConfigError
from interposer_models import load
from interposer_ops.layers.linear import Linear, PlainLinear
from interposer_quantization.compressed_tensors import CompressedTensors

# The library warns in its own log of any format but the one that it would take.
logger.disable("compressed_tensors")

PER_OUTPUT = {"strategy": "channel"}
GROUPS_OF_16 = {"strategy": "group", "group_size": 16}
GROUPS_OF_32 = {"strategy": "group", "group_size": 32}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "attention_bias": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOKENS = [token * 37 % 128 for token in range(60)]

# Settings of the weights by target, and what is ignored.
QUANTIZED: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {
    "per output": ({"Linear": PER_OUTPUT}, ["lm_head"]),
    "per group": ({"Linear": GROUPS_OF_32}, ["lm_head"]),
    "group size alone": ({"Linear": {"group_size": 32}}, ["lm_head"]),
    "two groups": (
        {r"re:.*self_attn\..*": PER_OUTPUT, r"re:.*mlp\..*": GROUPS_OF_16},
        ["lm_head"],
    ),
    "name before class": (
        {"Linear": PER_OUTPUT, "model.layers.1.mlp.down_proj": GROUPS_OF_32},
        ["lm_head"],
    ),
    "some left plain": (
        {"Linear": GROUPS_OF_32},
        ["lm_head", "re:.*down_proj", *(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")],
    ),
}


def write_quantized(
    path: Path,
    groups: Mapping[str, Mapping[str, Any]],
    ignore: list[str],
    storage: str | None = "int-quantized",
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> Path:
    """Write a tiny Llama of random weights, quantized and stored by the library."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **sizes}), dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    schemes = {
        f"group_{number}": QuantizationScheme(targets=[target], weights=QuantizationArgs(**weights))
        for number, (target, weights) in enumerate(groups.items())
    }
    config = QuantizationConfig(config_groups=schemes, ignore=ignore)
    apply_quantization_config(model, config, show_progress=False)
    for module in filter(is_module_quantized, model.modules()):
        grouped = module.weight.detach().unflatten(1, (module.weight_scale.shape[1], -1))
        scheme = module.quantization_scheme
        scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
        module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model, storage)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(str(path))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    return path


def library_logits(path: Path) -> torch.Tensor:
    """Return what the library's dequantized model computes in transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]  # type: ignore[no-any-return]


def linears(path: Path, dtype: str) -> dict[str, Linear]:
    model = load(path, dtype=dtype).engine.model
    return {layer.prefix: layer for layer in model.modules() if isinstance(layer, Linear)}


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose linear layers are quantized in groups of 32."""
    path = tmp_path_factory.mktemp("grouped")
    return write_quantized(path, *QUANTIZED["per group"], dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_logits_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    path = write_quantized(tmp_path, *QUANTIZED[kind])
    expected = library_logits(path)
    assert (load(path, dtype="float32").logits(TOKENS) - expected).abs().max() <= 1e-4
    assert expected.abs().max() > 1, "nothing is compared"


@pytest.mark.parametrize(
    "options", [{"storage": "naive-quantized"}, {"tie_word_embeddings": True}, {"mlp_bias": True}]
)
def test_variants_give_the_logits_of_the_library(options: Any, tmp_path: Path) -> None:
    path = write_quantized(tmp_path, *QUANTIZED["per group"], **options)
    found = load(path, dtype="float32").logits(TOKENS)
    assert (found - library_logits(path)).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_held_as_they_are_stored(grouped: Path, dtype: str) -> None:
    stored = load_file(grouped / "model.safetensors")
    layers = linears(grouped, dtype)
    assert len(layers) == 8
    for prefix, layer in layers.items():
        parent = prefix.rpartition(".")[0]
        for name in ("weight", "weight_scale"):
            rows = [stored[f"{parent}.{part}.{name}"] for part in layer.parts]
            expected = torch.cat(rows)
            found = layer.get_parameter(name)
            assert found.dtype == (torch.int8 if name == "weight" else torch.float32)
            assert torch.equal(found, expected.to(found.dtype))
    held = sum(p.nbytes for layer in layers.values() for p in layer.parameters())
    weights = sum(t.nbytes for name, t in stored.items() if t.dtype == torch.int8)
    assert weights < held < 1.5 * weights


def test_bfloat16_logits_are_close_to_float32(grouped: Path) -> None:
    exact = load(grouped, dtype="float32").logits(TOKENS)
    error = load(grouped, dtype="bfloat16").logits(TOKENS) - exact
    assert error.norm() <= 0.03 * exact.norm()


def test_ignored_layers_stay_plain(tmp_path: Path) -> None:
    path = write_quantized(tmp_path, *QUANTIZED["some left plain"])
    plain = {
        prefix
        for prefix, layer in linears(path, "float32").items()
        if isinstance(layer.method, PlainLinear)
    }
    assert plain == {
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
    }


def test_explanation_says_where_weights_are_quantized(tmp_path: Path) -> None:
    path = write_quantized(tmp_path, *QUANTIZED["some left plain"])
    choices = explain(load(path, dtype="float32")).to_dict()["choices"]
    (scheme,) = (choice for choice in choices if choice["kind"] == "scheme")
    assert (scheme["name"], scheme["provider"]) == ("compressed-tensors", "interposer-quantization")
    kernels = [choice for choice in choices if choice["kind"] == "kernel"]
    places = {
        op: {place for kernel in kernels if kernel["name"] == op for place in kernel["places"]}
        for op in ("w8a16_linear", "linear")
    }
    assert "model.layers.1.self_attn.qkv_proj" in places["w8a16_linear"]
    assert "model.layers.0.self_attn.qkv_proj" in places["linear"]
    assert not places["w8a16_linear"] & places["linear"]
    sizes = {k["dims"]["group_size"] for k in kernels if k["name"] == "w8a16_linear"}
    assert sizes == {32}


def test_the_format_that_the_library_prefers_is_refused_with_a_way_out(tmp_path: Path) -> None:
    path = write_quantized(tmp_path, *QUANTIZED["per group"], storage=None)
    with pytest.raises(ConfigError, match="pack-quantized") as caught:
        load(path)
    assert 'ModelCompressor.from_pretrained_model(model, "int-quantized")' in str(caught.value)


def test_quantized_head_is_refused(tmp_path: Path) -> None:
    path = write_quantized(tmp_path, {"Linear": PER_OUTPUT}, [])
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight"):
        load(path)


Tensors = dict[str, torch.Tensor]
SCALE = "model.layers.1.self_attn.k_proj.weight_scale"
WEIGHT = "model.layers.1.self_attn.k_proj.weight"


def without_scale(tensors: Tensors) -> None:
    del tensors[SCALE]


def with_scale_per_output(tensors: Tensors) -> None:
    tensors[SCALE] = tensors[SCALE][:, :1].contiguous()


def with_integer_scale(tensors: Tensors) -> None:
    tensors[SCALE] = tensors[SCALE].to(torch.int32)


def with_plain_weight(tensors: Tensors) -> None:
    tensors[WEIGHT] = tensors[WEIGHT].float()


def with_zero_point(tensors: Tensors) -> None:
    name = SCALE.replace("weight_scale", "weight_zero_point")
    tensors[name] = torch.zeros(tensors[SCALE].shape, dtype=torch.int8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without_scale, f"lacks the tensor '{SCALE}'"),
        (with_scale_per_output, rf"'{SCALE}' has shape \[32, 1\], .* \[32, 2\]"),
        (with_integer_scale, f"'{SCALE}' is stored as torch.int32"),
        (with_plain_weight, f"'{WEIGHT}' is stored as torch.float32, expected torch.int8"),
        (with_zero_point, "weight_zero_point', which the model has no place for"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(
    grouped: Path, tmp_path: Path, edit: Callable[[Tensors], None], message: str
) -> None:
    shutil.copytree(grouped, tmp_path, dirs_exist_ok=True)
    tensors = load_file(grouped / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_fused_layers_must_be_quantized_alike(tmp_path: Path) -> None:
    path = write_quantized(tmp_path, {"Linear": PER_OUTPUT}, ["lm_head", "re:.*k_proj"])
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert "model.layers.0.self_attn.qkv_proj" in message
    assert "model.layers.0.self_attn.q_proj: int8 per output" in message
    assert "model.layers.0.self_attn.k_proj: not quantized" in message


def test_fused_layers_must_share_a_group_size() -> None:
    groups = {
        "group_0": {"targets": ["re:.*gate_proj"], "weights": GROUPS_OF_16},
        "group_1": {"targets": ["re:.*up_proj"], "weights": GROUPS_OF_32},
    }
    scheme = CompressedTensors.parse(
        {"config_groups": groups, "format": "int-quantized", "quantization_status": "compressed"}
    )
    with pytest.raises(ConfigError, match=r"mlp\.up_proj: int8 per group of 32 inputs"):
        scheme.linear_method("mlp.gate_up_proj", ("gate_proj", "up_proj"))
    assert scheme.linear_method("mlp.down_proj", ("down_proj",)) is None
