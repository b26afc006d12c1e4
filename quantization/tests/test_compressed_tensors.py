"""Checkpoints that the compressed-tensors library writes give the library's own logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor  # type: ignore[import-untyped]
from compressed_tensors.compressors.nvfp4.helpers import (  # type: ignore[import-untyped]
    unpack_fp4_from_uint8,
)
from compressed_tensors.quantization import (  # type: ignore[import-untyped]
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import (  # type: ignore[import-untyped]
    dequantize,
    fake_quantize,
)
from compressed_tensors.quantization.utils import (  # type: ignore[import-untyped]
    calculate_qparams,
    generate_gparam,
    is_module_quantized,
)
from loguru import logger
from safetensors.torch import load_file, save_file
from tests.landing import landing_sample
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from interposer import Config, explain
from interposer.errors import CheckpointError, ConfigError
from interposer_engine import load
from interposer_ops.layers.embedding import LMHead
from interposer_ops.layers.linear import Linear, PlainLinear
from interposer_ops.quantizers import quantize_int8_per_token
from interposer_quantization._compressed_tensors.scheme import CompressedTensors

# The library warns in its own log of any format but the one that it would take.
logger.disable("compressed_tensors")

Arguments = dict[str, Any]

PER_OUTPUT: Arguments = {"strategy": "channel"}
ONE_SCALE: Arguments = {"strategy": "tensor"}
GROUPS_OF_16: Arguments = {"strategy": "group", "group_size": 16}
GROUPS_OF_32: Arguments = {"strategy": "group", "group_size": 32}
ASYMMETRIC: Arguments = {"symmetric": False}
FLOAT: Arguments = {"type": "float"}
BLOCKS: Arguments = {**FLOAT, "strategy": "block", "block_structure": [16, 32]}
TOKENWISE: Arguments = {"strategy": "token", "dynamic": True}
NVFP4: Arguments = {
    **FLOAT,
    "num_bits": 4,
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}
MXFP4: Arguments = {**FLOAT, **GROUPS_OF_32, "num_bits": 4, "scale_dtype": torch.uint8}
MXFP8: Arguments = {**MXFP4, "num_bits": 8}
DYNAMIC: Arguments = {"dynamic": True}
INT4: Arguments = {**GROUPS_OF_32, "num_bits": 4}
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

# Settings of the weights by target, what is ignored, and the format; None takes the library's.
QUANTIZED: dict[str, tuple[dict[str, Arguments], list[str], str | None]] = {
    "per output": ({"Linear": PER_OUTPUT}, ["lm_head"], "int-quantized"),
    "per group": ({"Linear": GROUPS_OF_32}, ["lm_head"], "int-quantized"),
    "group size alone": ({"Linear": {"group_size": 32}}, ["lm_head"], "int-quantized"),
    "one scale, asymmetric": ({"Linear": ONE_SCALE | ASYMMETRIC}, ["lm_head"], "int-quantized"),
    "per output, asymmetric": ({"Linear": PER_OUTPUT | ASYMMETRIC}, ["lm_head"], "int-quantized"),
    "two groups": (
        {r"re:.*self_attn\..*": PER_OUTPUT, r"re:.*mlp\..*": GROUPS_OF_16},
        ["lm_head"],
        "int-quantized",
    ),
    "name before class": (
        {"Linear": PER_OUTPUT, "model.layers.1.mlp.down_proj": GROUPS_OF_32},
        ["lm_head"],
        "int-quantized",
    ),
    "some left plain": (
        {"Linear": GROUPS_OF_32},
        ["lm_head", "re:.*down_proj", *(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")],
        "int-quantized",
    ),
    "packed int4 per group": ({"Linear": INT4}, ["lm_head"], None),
    "packed int4 per group, asymmetric": ({"Linear": INT4 | ASYMMETRIC}, ["lm_head"], None),
    "packed int4 per output": ({"Linear": PER_OUTPUT | {"num_bits": 4}}, ["lm_head"], None),
    "packed int4, ordered": ({"Linear": INT4 | {"actorder": "weight"}}, ["lm_head"], None),
    "packed int8 per group": ({"Linear": GROUPS_OF_32}, ["lm_head"], None),
    "packed int8 per output, asymmetric": ({"Linear": PER_OUTPUT | ASYMMETRIC}, ["lm_head"], None),
    "packed int3": ({"Linear": GROUPS_OF_32 | {"num_bits": 3}}, ["lm_head"], None),
    "packed int5, asymmetric": (
        {"Linear": GROUPS_OF_16 | ASYMMETRIC | {"num_bits": 5}},
        ["lm_head"],
        None,
    ),
    "float8, weights alone": ({"Linear": FLOAT | PER_OUTPUT}, ["lm_head"], None),
    "float8 in blocks, weights alone": ({"Linear": BLOCKS}, ["lm_head"], None),
    "float8 with one scale, weights alone": ({"Linear": FLOAT | ONE_SCALE}, ["lm_head"], None),
    "nvfp4, weights alone": ({"Linear": NVFP4}, ["lm_head"], None),
    "mxfp4, weights alone": ({"Linear": MXFP4}, ["lm_head"], None),
    "mxfp8, weights alone": ({"Linear": MXFP8}, ["lm_head"], None),
    "head too, per output": ({"Linear": PER_OUTPUT}, [], "int-quantized"),
    "head too, packed int4": ({"Linear": INT4 | ASYMMETRIC}, [], None),
    "head otherwise": ({"Linear": INT4, "lm_head": FLOAT | PER_OUTPUT}, [], None),
    "head too, nvfp4": ({"Linear": NVFP4}, [], None),
    "mixed precision": (
        {r"re:.*self_attn\..*": INT4, r"re:.*mlp\..*": FLOAT | PER_OUTPUT},
        ["lm_head"],
        None,
    ),
}

# Weights, inputs, and the format that the library stores them in.
ROUNDED: dict[str, tuple[Arguments, Arguments, str]] = {
    "int8": (PER_OUTPUT, TOKENWISE, "int-quantized"),
    "int8, inputs asymmetric": (PER_OUTPUT, TOKENWISE | ASYMMETRIC, "int-quantized"),
    "int8, inputs static": (ONE_SCALE, ONE_SCALE, "int-quantized"),
    "int8, inputs static, asymmetric": (PER_OUTPUT, ONE_SCALE | ASYMMETRIC, "int-quantized"),
    "int8 per group": (GROUPS_OF_32, TOKENWISE, "int-quantized"),
    "int4, inputs int8": (INT4, TOKENWISE, "int-quantized"),
    "int4, inputs float8": (INT4, FLOAT | TOKENWISE, "int-quantized"),
    "packed int4, inputs float8": (INT4, FLOAT | TOKENWISE, "pack-quantized"),
    "int4 per output, inputs static": (
        PER_OUTPUT | ASYMMETRIC | {"num_bits": 4},
        ONE_SCALE | ASYMMETRIC,
        "int-quantized",
    ),
    "packed int4, inputs int8": (INT4 | ASYMMETRIC, TOKENWISE, "pack-quantized"),
    "packed int4, inputs int8, asymmetric": (INT4, TOKENWISE | ASYMMETRIC, "pack-quantized"),
    "float8 with one scale, inputs static": (
        FLOAT | ONE_SCALE,
        FLOAT | ONE_SCALE,
        "float-quantized",
    ),
    "float8": (FLOAT | PER_OUTPUT, FLOAT | TOKENWISE, "float-quantized"),
    "float8, inputs static": (FLOAT | PER_OUTPUT, FLOAT | ONE_SCALE, "float-quantized"),
    "float8 in blocks": (BLOCKS, FLOAT | GROUPS_OF_32 | DYNAMIC, "float-quantized"),
    "float8 in groups": (
        FLOAT | GROUPS_OF_32,
        FLOAT | GROUPS_OF_32 | DYNAMIC,
        "float-quantized",
    ),
    "float8 in blocks, inputs per token": (BLOCKS, FLOAT | TOKENWISE, "float-quantized"),
    "nvfp4": (NVFP4, NVFP4 | {"dynamic": "local"}, "nvfp4-pack-quantized"),
    "nvfp4, inputs float8": (NVFP4, FLOAT | TOKENWISE, "nvfp4-pack-quantized"),
    "mxfp4": (MXFP4, MXFP4 | DYNAMIC, "mxfp4-pack-quantized"),
    "mxfp4, inputs float8": (MXFP4, FLOAT | GROUPS_OF_32 | DYNAMIC, "mxfp4-pack-quantized"),
    "mxfp8": (MXFP8, MXFP8 | DYNAMIC, "mxfp8-quantized"),
}


def blocks_of(weight: torch.Tensor, args: Any) -> torch.Tensor:
    """Return a view of the weight; one scale holds for its last dimension."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "block":
        rows, columns = args.block_structure
        parted = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        blocks: torch.Tensor = parted.transpose(1, 2).flatten(2)
        return blocks
    size = args.group_size if args.group_size and args.group_size > 0 else weight.shape[1]
    groups: torch.Tensor = weight.unflatten(1, (-1, size))
    return groups


def quantized_linears(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, nn.Linear) and is_module_quantized(m)]


def calibrate(model: Any) -> None:
    """Set every scale and zero point of a model to what the library finds for its numbers."""
    quantized = quantized_linears(model)
    weights = torch.cat([module.weight.detach().flatten() for module in quantized])
    observed: dict[Any, torch.Tensor] = {}

    def look(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        observed[module] = arguments[0].detach()

    hooks = [module.register_forward_pre_hook(look) for module in quantized]
    for module in quantized:
        module.quantization_enabled = False
    with torch.inference_mode():
        model(torch.tensor([TOKENS]))
    for hook in hooks:
        hook.remove()
    for module in quantized:
        args, inputs = (
            module.quantization_scheme.weights,
            module.quantization_scheme.input_activations,
        )
        shared = None
        if hasattr(module, "weight_global_scale"):
            # One for all layers, as those need that run as one product.
            shared = generate_gparam(weights.min(), weights.max())
            module.weight_global_scale.data.copy_(shared)
        parts = blocks_of(module.weight.detach(), args)
        actual = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=shared)
        module.weight_scale.data.copy_(actual[0])
        module.weight_zero_point.data.copy_(actual[1])
        if hasattr(module, "input_global_scale"):
            x = observed[module]
            module.input_global_scale.data.copy_(generate_gparam(x.min(), x.max()))
        elif inputs is not None and not inputs.dynamic:
            scale, zero = calculate_qparams(observed[module].min(), observed[module].max(), inputs)
            module.input_scale.data.copy_(scale)
            module.input_zero_point.data.copy_(zero)


def write_quantized(
    path: Path,
    groups: Mapping[str, Mapping[str, Any]],
    ignore: list[str],
    storage: str | None = "int-quantized",
    dtype: torch.dtype = torch.float32,
    inputs: Arguments | None = None,
    cache: Arguments | None = None,
    **sizes: Any,
) -> Path:
    """Write a tiny Llama of random weights, quantized and stored by the library."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **sizes}), dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    activations = None if inputs is None else QuantizationArgs(**inputs)
    schemes = {
        f"group_{number}": QuantizationScheme(
            targets=[target], weights=QuantizationArgs(**weights), input_activations=activations
        )
        for number, (target, weights) in enumerate(groups.items())
    }
    scheme = None if cache is None else QuantizationArgs(**cache)
    config = QuantizationConfig(config_groups=schemes, ignore=ignore, kv_cache_scheme=scheme)
    apply_quantization_config(model, config, show_progress=False)
    calibrate(model)
    for name, parameter in model.named_parameters():
        if name.endswith(("k_scale", "v_scale")):
            parameter.data.fill_(0.02 if name.endswith("k_scale") else 0.01)
            # Where there are several, they differ.
            parameter.data *= 1 + torch.arange(len(parameter)).reshape(parameter.shape) / 3
    compressor = ModelCompressor.from_pretrained_model(model, storage)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(str(path))
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path / "tokenizer.json"))
    return path


def transformers_logits(path: Path) -> torch.Tensor:
    """Return the results of transformers with layers that the library decompresses."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0]  # type: ignore[no-any-return]


def library_model(path: Path, rounded: bool = True, exact: bool = True) -> Any:
    """Return the checkpoint with every layer decompressed by the library, in float32.

    Unlike what transformers loads, it has the formats that decompress to bfloat16, and packed zero
    points. Inputs are rounded by the library where ``rounded`` is true, weights of NVFP4 to
    bfloat16, as its compressor does it, where ``exact`` is false.
    """
    settings = json.loads((path / "config.json").read_text())
    model = AutoModelForCausalLM.from_config(LlamaConfig(**settings), dtype=torch.float32).eval()
    config = QuantizationConfig(**settings["quantization_config"])
    apply_quantization_config(model, config, show_progress=False)
    stored = load_file(path / "model.safetensors")
    modules: dict[str, Any] = dict(model.named_modules())
    linear = quantized_linears(model)
    for name, module in modules.items():
        own = {
            key.rpartition(".")[2]: tensor
            for key, tensor in stored.items()
            if key.rpartition(".")[0] == name
        }
        if is_module_quantized(module):
            module.quantization_enabled = rounded
        if module in linear:
            form = module.quantization_scheme.format or config.format
            compressor = BaseCompressor.get_value_from_registry(getattr(form, "value", form))
            if exact and "weight_global_scale" in own:
                own["weight"] = dequantize(
                    unpack_fp4_from_uint8(
                        own["weight_packed"], module.out_features, module.in_features
                    ).float(),
                    own["weight_scale"].float(),
                    args=module.quantization_scheme.weights,
                    global_scale=own["weight_global_scale"],
                )
            else:
                own = compressor.decompress(own, module.quantization_scheme)
        for key, parameter in module.named_parameters(recurse=False):
            if key in own and (key == "weight" or not key.startswith("weight")):
                parameter.data = own[key].to(torch.float32 if key == "weight" else own[key].dtype)
    return model


def library_logits(path: Path, rounded: bool = True) -> torch.Tensor:
    """Return the logits of the library's decompressed model."""
    with torch.inference_mode():
        return library_model(path, rounded)(torch.tensor([TOKENS])).logits[0]  # type: ignore[no-any-return]


def linears(path: Path, dtype: str, config: Config | None = None) -> dict[str, Linear]:
    model = load(path, dtype=dtype, config=config).engine.model
    return {layer.prefix: layer for layer in model.modules() if isinstance(layer, Linear)}


def dequantized_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the dequantized weights of the loaded layers, by the checkpoint's names of layers."""
    actual: dict[str, torch.Tensor] = {}
    finalize, finalize_head = Linear.finalize, LMHead.finalize

    def look(layer: Linear) -> None:
        weight = layer.method.dequantized(layer)
        if weight is not None:
            parent, sizes = layer.prefix.rpartition(".")[0], list(layer.parts.values())
            parts = zip(layer.parts, weight.split(sizes), strict=True)
            actual.update({f"{parent}.{part}": rows.clone() for part, rows in parts})
        finalize(layer)

    def look_at_head(head: LMHead) -> None:
        weight = head.method.dequantized(head)
        if weight is not None:
            actual[head.prefix] = weight.clone()
        finalize_head(head)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Linear, "finalize", look)
        patched.setattr(LMHead, "finalize", look_at_head)
        load(path, dtype="float32")
    return actual


def assert_weights_are_those_of_the_library(path: Path) -> None:
    """Compare the loaded weights with those that the library decompresses, bit for bit."""
    reference, actual = library_model(path, exact=False), dequantized_weights(path)
    linear = quantized_linears(reference)
    quantized = [name for name, module in reference.named_modules() if module in linear]
    assert set(quantized) == set(actual)
    assert len(quantized) > 8
    for name in quantized:
        module = reference.get_submodule(name)
        weight = actual[name].to(torch.float32)
        if module.quantization_scheme.format == "nvfp4-pack-quantized":
            # The library decompresses these to bfloat16, which rounds them.
            weight = weight.to(torch.bfloat16).float()
        assert torch.equal(weight, module.weight.float()), name


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory whose linear layers are quantized in groups of 32."""
    path = tmp_path_factory.mktemp("grouped")
    return write_quantized(path, *QUANTIZED["per group"], dtype=torch.bfloat16)


# What transformers cannot run: it expects zero points that are not packed, and multiplies float32
# by the bfloat16 that the library makes of formats with a scale of few bits.
ALONE = {
    "packed int4 per group, asymmetric",
    "packed int8 per output, asymmetric",
    "packed int5, asymmetric",
    "nvfp4, weights alone",
    "mxfp4, weights alone",
    "mxfp8, weights alone",
    "head too, packed int4",
    "head too, nvfp4",
}


@pytest.mark.landing(2)
@pytest.mark.parametrize("kind", landing_sample(QUANTIZED, every=3))
def test_weights_and_logits_match_compressed_tensors(kind: str, tmp_path: Path) -> None:
    path = write_quantized(tmp_path, *QUANTIZED[kind])
    assert_weights_are_those_of_the_library(path)
    expected = library_logits(path) if kind in ALONE else transformers_logits(path)
    actual = load(path, dtype="float32").logits(TOKENS)
    assert (actual - expected).abs().max() <= 1e-4
    assert expected.abs().max() > 1, "nothing is compared"


# Where inputs are rounded by another rule than the library's: int8 scales are max / 127, not
# max / 127.5; the exponents of microscaling are rounded down, not to the nearest.
OTHER_RULE = (
    *("int8", "int8 per group", "int4, inputs int8", "packed int4, inputs int8"),
    *("mxfp4", "mxfp8"),
)


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("kind", "ignore"),
    landing_sample(
        [*((kind, ["lm_head"]) for kind in ROUNDED), *((kind, []) for kind in ("int8", "float8"))],
        every=3,
    ),
)
def test_input_rounding_error_is_close_to_that_of_compressed_tensors(
    kind: str, ignore: list[str], tmp_path: Path
) -> None:
    weights, inputs, storage = ROUNDED[kind]
    path = write_quantized(tmp_path, {"Linear": weights}, ignore, storage, inputs=inputs)
    assert_weights_are_those_of_the_library(path)
    exact, expected = library_logits(path, rounded=False), library_logits(path)
    actual = load(path, dtype="float32").logits(TOKENS)
    noise = (expected - exact).norm()
    assert noise > 1e-3 * exact.norm(), "nothing is rounded"
    # Errors of rounding add up at random, so that two models of one noise differ a little in it.
    assert 0.75 * noise < (actual - exact).norm() < 1.25 * noise
    if kind not in OTHER_RULE:
        # A number halfway between two may go either way; all others are rounded alike.
        assert (actual - expected).norm() < 0.2 * noise


@pytest.mark.parametrize("kind", ["int4, inputs int8", "packed int4, inputs int8"])
def test_int4_weights_with_int8_inputs_use_w4a8_linear(kind: str, tmp_path: Path) -> None:
    """The library computes the same with the same scales of inputs."""
    weights, inputs, storage = ROUNDED[kind]
    path = write_quantized(tmp_path, {"Linear": weights}, ["lm_head"], storage, inputs=inputs)
    names = {choice["name"] for choice in explain(load(path, dtype="float32")).to_dict()["choices"]}
    assert {"w4a8_linear", "quantize_int8_per_token"} <= names
    assert "w4a16_linear" not in names
    reference = library_model(path)
    for prefix, layer in linears(path, "float32").items():
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(3))
        _, scale = quantize_int8_per_token(x)
        args = QuantizationArgs(**inputs)
        rounded = fake_quantize(x, scale, torch.zeros_like(scale), args).double()
        parent = prefix.rpartition(".")[0]
        parts = [reference.get_submodule(f"{parent}.{part}") for part in layer.parts]
        weight = torch.cat([part.weight for part in parts]).detach().double()
        offset = torch.zeros(len(weight), dtype=torch.float64)
        if parts[0].bias is not None:
            offset += torch.cat([part.bias for part in parts]).detach()
        expected = rounded @ weight.T + offset
        # Inputs, weights, sums and results are rounded to float32.
        terms = rounded.abs() @ weight.abs().T + offset.abs()
        bound = (layer.in_features + 4) * torch.finfo(torch.float32).eps * float(terms.max())
        assert ((layer(x) - expected).abs() <= bound).all()


@pytest.mark.landing(2)
@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_kv_cache_rounding_matches_compressed_tensors(
    strategy: str, kind: str, tmp_path: Path
) -> None:
    cache = {"type": kind, "strategy": strategy}
    path = write_quantized(tmp_path, {"Linear": INT4}, ["lm_head"], None, cache=cache)
    exact, expected = library_logits(path, rounded=False), library_logits(path)
    actual = load(path, dtype="float32").logits(TOKENS)
    noise = (expected - exact).norm()
    assert noise > 1e-2 * exact.norm(), "nothing is rounded"
    assert (actual - expected).norm() < 0.01 * noise
    scales = load_file(path / "model.safetensors")["model.layers.0.self_attn.k_scale"]
    assert (scales.numel() > 1) == (strategy == "attn_head")


@pytest.mark.parametrize("kind", ["float", "int"])
def test_quantized_cache_without_scales_is_refused(kind: str, tmp_path: Path) -> None:
    cache = {"type": kind, "strategy": "tensor"}
    path = write_quantized(tmp_path, {"Linear": INT4}, ["lm_head"], None, cache=cache)
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.0.self_attn.v_scale"]
    save_file(stored, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks the tensor '.*self_attn\.v_scale'"):
        load(path)


@pytest.mark.parametrize("kind", ["int8", "float8", "float8, inputs static"])
def test_reference_logits_match_transformers(kind: str, tmp_path: Path) -> None:
    weights, inputs, storage = ROUNDED[kind]
    path = write_quantized(tmp_path, {"Linear": weights}, ["lm_head"], storage, inputs=inputs)
    assert torch.equal(library_logits(path), transformers_logits(path))


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    "options", [{"storage": "naive-quantized"}, {"tie_word_embeddings": True}, {"mlp_bias": True}]
)
def test_variants_match_the_logits_of_compressed_tensors(options: Any, tmp_path: Path) -> None:
    groups, ignore, storage = QUANTIZED["per group"]
    path = write_quantized(tmp_path, groups, ignore, **{"storage": storage, **options})
    actual = load(path, dtype="float32").logits(TOKENS)
    assert (actual - transformers_logits(path)).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_finalized_layers_keep_the_stored_tensors(grouped: Path, dtype: str) -> None:
    stored = load_file(grouped / "model.safetensors")
    # Other kernels may hold what they prepared.
    layers = linears(grouped, dtype, Config(kernels={"w8a16_linear": "reference"}))
    assert len(layers) == 8
    for prefix, layer in layers.items():
        parent = prefix.rpartition(".")[0]
        for name in ("weight", "weight_scale"):
            rows = [stored[f"{parent}.{part}.{name}"] for part in layer.parts]
            expected = torch.cat(rows)
            actual = layer.get_parameter(name)
            assert actual.dtype == (torch.int8 if name == "weight" else torch.float32)
            assert torch.equal(actual, expected.to(actual.dtype))
    kept_bytes = sum(p.nbytes for layer in layers.values() for p in layer.parameters())
    weights = sum(t.nbytes for name, t in stored.items() if t.dtype == torch.int8)
    assert weights < kept_bytes < 1.5 * weights


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


def test_explanation_names_the_quantized_layers(tmp_path: Path) -> None:
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


def test_quantized_lm_head_uses_a_quantized_op(tmp_path: Path) -> None:
    path = write_quantized(tmp_path, *QUANTIZED["head too, packed int4"])
    places = {
        prefix: row.choice.request.name
        for row in explain(load(path, dtype="float32")).rows
        for prefix in row.prefixes
        if row.choice.request.kind == "kernel"
    }
    assert places["lm_head"] == "w4a16_linear"
    assert places["model.embed_tokens"] == "embedding"


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


@pytest.mark.landing(4)
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


def test_fused_layers_with_different_quantization_are_refused(tmp_path: Path) -> None:
    path = write_quantized(tmp_path, {"Linear": PER_OUTPUT}, ["lm_head", "re:.*k_proj"])
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert "model.layers.0.self_attn.qkv_proj" in message
    assert "model.layers.0.self_attn.q_proj: int8 per output (int-quantized)" in message
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
