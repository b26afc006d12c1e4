"""Checkpoints of 8-bit floats: constants of layers, and results of the model.

Those with blocks are quantized by transformers' own code, which runs without an accelerator; the
model that it would build of them does not. The others follow the published formats.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from interposer import Case, Config, Tolerance, explain
from interposer.errors import CheckpointError
from interposer_engine import LanguageModel, load
from interposer_ops.layers.linear import Linear, PlainLinear

MODEL = Path(__file__).parents[2] / "examples/models/stdlib-lm"
WEIGHTS = "model.safetensors"
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
TEXT = "import os\nimport sys\n\n\ndef main(path: str) -> int:\n    "
# What a kernel prepares is its own affair; the reference takes weights as they are.
AS_STORED = Config(kernels={"*": "reference"})
NUM_LINEARS = 24  # four products in each of six blocks

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[str, torch.Tensor], Tensors]


def in_blocks_by_transformers(rows: int, columns: int) -> Quantize:
    """Return a function from a layer's name and weight to what transformers stores for it."""
    config = FineGrainedFP8Config(weight_block_size=(rows, columns))
    convert = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert

    def quantize(layer: str, weight: torch.Tensor) -> Tensors:
        stored: Tensors = convert({f"{layer}.weight": weight})  # type: ignore[arg-type]
        return stored

    return quantize


def in_blocks_of_128(power_of_two: bool, layer: str, weight: torch.Tensor) -> Tensors:
    """Return blocks as DeepSeek stores them, of which the last may be smaller."""
    out_features, in_features = weight.shape
    missing = (0, -in_features % 128, 0, -out_features % 128)
    padded = torch.nn.functional.pad(weight.float(), missing)
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = blocks.abs().amax((1, 3)) / LARGEST
    if power_of_two:
        scales = 2.0 ** scales.log2().ceil()
    codes = (blocks / scales[:, None, :, None]).to(FP8).flatten(2).flatten(0, 1)
    codes = codes[:out_features, :in_features].contiguous()
    return {f"{layer}.weight": codes, f"{layer}.weight_scale_inv": scales}


def input_scale(layer: str) -> float:
    """Return a scale that fits every input of a layer in these tests; fused ones share it."""
    return (48 if "down_proj" in layer else 8) / LARGEST


def per_tensor(layer: str, weight: torch.Tensor) -> Tensors:
    """Return the tensors that AutoFP8 stores."""
    scale = weight.float().abs().amax() / LARGEST
    return {
        f"{layer}.weight": (weight.float() / scale).to(FP8),
        f"{layer}.weight_scale": scale,
        f"{layer}.input_scale": torch.tensor(input_scale(layer)),
    }


def per_tensor_dynamic(layer: str, weight: torch.Tensor) -> Tensors:
    """Return the tensors of AutoFP8 with dynamic scales of inputs, as arrays of one number."""
    stored = per_tensor(layer, weight)
    scale = stored[f"{layer}.weight_scale"].reshape(1)
    return {f"{layer}.weight": stored[f"{layer}.weight"], f"{layer}.weight_scale": scale}


def per_tensor_of_transformers(layer: str, weight: torch.Tensor) -> Tensors:
    """Return the tensors of transformers, with scales of inputs that saturate the largest."""
    stored = per_tensor(layer, weight)
    return {
        f"{layer}.weight": stored[f"{layer}.weight"],
        f"{layer}.weight_scale_inv": stored[f"{layer}.weight_scale"],
        f"{layer}.activation_scale": stored[f"{layer}.input_scale"] / 4,
    }


def per_output(layer: str, weight: torch.Tensor) -> Tensors:
    """Return the tensors that FBGEMM stores."""
    scale = weight.float().abs().amax(1, keepdim=True) / LARGEST
    return {f"{layer}.weight": (weight.float() / scale).to(FP8), f"{layer}.weight_scale": scale}


GATE_AND_UP = ["gate_proj", "up_proj"]
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
# 688 outputs of gate and up are no multiple of 128, but one of 16.
BLOCKS_OF_16 = {**BLOCKS, "weight_block_size": [16, 16]}
BLOCKS_OF_128 = {**BLOCKS, "weight_block_size": [128, 128], "modules_to_not_convert": GATE_AND_UP}
ONLY_ATTENTION = {**BLOCKS_OF_128, "modules_to_not_convert": [*GATE_AND_UP, "down_proj"]}
KINDS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "blocks of 16 by transformers": (BLOCKS_OF_16, in_blocks_by_transformers(16, 16)),
    "blocks of 128 by transformers": (ONLY_ATTENTION, in_blocks_by_transformers(128, 128)),
    "blocks of 128": (BLOCKS_OF_128, partial(in_blocks_of_128, False)),
    "powers of two": (
        {**BLOCKS_OF_128, "scale_fmt": "ue8m0"},
        partial(in_blocks_of_128, True),
    ),
    "per tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, per_tensor_dynamic),
    "per tensor, static": ({"quant_method": "fp8", "activation_scheme": "static"}, per_tensor),
    "per tensor, static, saturating": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        per_tensor_of_transformers,
    ),
    "per output": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, per_output),
    "per output, saturating": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 3.0},
        per_output,
    ),
}


def write(path: Path, settings: Mapping[str, Any] | None, tensors: Tensors) -> Path:
    """Write the shipped model with other tensors."""
    path.mkdir(exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text())
    stated = {} if settings is None else {"quantization_config": settings}
    (path / "config.json").write_text(json.dumps({**config, **stated}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL / name, path)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS)
    return path


def quantized(kind: str) -> Tensors:
    settings, quantize = KINDS[kind]
    left_out = tuple(settings.get("modules_to_not_convert", ()))
    tensors: Tensors = {}
    for name, tensor in load_file(MODEL / WEIGHTS).items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj") and not layer.endswith(left_out):
            tensors.update(quantize(layer, tensor))
        else:
            tensors[name] = tensor
    return tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a kind to its model directory, which is written once."""
    written: dict[str, Path] = {}

    def of_kind(kind: str) -> Path:
        if kind not in written:
            path = tmp_path_factory.mktemp("fp8")
            written[kind] = write(path, KINDS[kind][0], quantized(kind))
        return written[kind]

    return of_kind


def linears(lm: LanguageModel) -> dict[str, Linear]:
    modules = lm.engine.model.modules()
    return {layer.prefix: layer for layer in modules if isinstance(layer, Linear)}


def dequantized(tensors: Tensors, layer: str) -> torch.Tensor:
    """Return the float64 weight of a layer of the checkpoint, from the published format."""
    weight = tensors[f"{layer}.weight"].double()
    scale = tensors.get(f"{layer}.weight_scale", tensors.get(f"{layer}.weight_scale_inv"))
    if scale is None or scale.numel() == 1 or scale.shape[1] == 1:
        return weight * (1.0 if scale is None else scale.double())
    size = 16 if scale.shape[1] * 16 == weight.shape[1] else 128
    spread = scale.double().repeat_interleave(size, 0)[: weight.shape[0]]
    return weight * spread.repeat_interleave(size, 1)[:, : weight.shape[1]]


def fused(tensors: Tensors, layer: Linear) -> torch.Tensor:
    parent = layer.prefix.rpartition(".")[0]
    return torch.cat([dequantized(tensors, f"{parent}.{part}") for part in layer.parts])


def rounded(kind: str, layer: str, x: torch.Tensor) -> torch.Tensor:
    """Return the float64 input that the format multiplies, ``x`` ``[..., I]`` being float32."""
    settings, _ = KINDS[kind]
    if settings["quant_method"] == "fp8" and settings["activation_scheme"] == "static":
        divisor = 4 if "saturating" in kind else 1
        scale = (torch.tensor(input_scale(layer)) / divisor).expand_as(x)
    elif "weight_block_size" in settings:
        size = settings["weight_block_size"][1]
        blocks = [block.abs().amax(-1, keepdim=True) / LARGEST for block in x.split(size, -1)]
        if settings.get("scale_fmt") == "ue8m0":
            blocks = [2.0 ** block.log2().ceil() for block in blocks]
        scale = torch.cat(blocks, -1).repeat_interleave(size, -1)[..., : x.shape[-1]]
    else:
        bound = settings.get("activation_scale_ub", torch.inf)
        scale = (x.abs().amax(-1, keepdim=True).clamp(max=bound) / LARGEST).expand_as(x)
    return (x / scale).clamp(-LARGEST, LARGEST).to(FP8).double() * scale.double()


@pytest.mark.landing(2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_multiplies_by_its_dequantized_weight(
    kind: str, checkpoint: Callable[[str], Path]
) -> None:
    path = checkpoint(kind)
    lm, tensors = load(path, dtype="float32"), load_file(path / WEIGHTS)
    observed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def see(layer: Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        observed[layer.prefix] = (inputs[0].clone(), output.clone())

    layers = linears(lm)
    for layer in layers.values():
        layer.register_forward_hook(see)
    lm.logits(lm.tokenizer.encode(TEXT))
    assert set(observed) == set(layers)
    assert len(observed) == NUM_LINEARS
    for prefix, (x, actual) in observed.items():
        weight = fused(tensors, layers[prefix])
        plain = isinstance(layers[prefix].method, PlainLinear)
        factors = x.double() if plain else rounded(kind, prefix, x)
        expected = factors @ weight.T
        magnitude = float((factors.abs() @ weight.abs().T).max())
        # The weight with its scale, the input with its scale and the result are rounded once each.
        case = Case("", {}, reduction=x.shape[-1] + 1, magnitude=magnitude)
        bound = Tolerance(roundings=3).bound(expected, torch.float32, case)
        assert ((actual.double() - expected).abs() <= bound).all(), prefix
        if not plain:
            # Without the rounding of inputs it would not be within the bound.
            assert ((x.double() @ weight.T - expected).abs() > bound).any(), prefix


@pytest.mark.landing(1)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "saturating" not in kind])
def test_logits_are_close_to_the_dequantized_model(
    kind: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = checkpoint(kind)
    tensors = load_file(path / WEIGHTS)
    layers = {n.removesuffix(".weight") for n in tensors if n.endswith("_proj.weight")}
    plain = {n: t for n, t in tensors.items() if n.rpartition(".")[0] not in layers}
    plain.update({f"{name}.weight": dequantized(tensors, name).float() for name in layers})
    lm, reference = load(path, dtype="float32"), load(write(tmp_path, None, plain), dtype="float32")
    tokens = lm.tokenizer.encode(TEXT)
    expected = reference.logits(tokens)
    error = lm.logits(tokens) - expected
    # Three bits of mantissa: a rounding errs by at most 2^-4 of the number, and where errors are
    # spread evenly by 2^-4 / sqrt(3) in the mean square. The errors of a product's terms are
    # independent, so that its result errs by as much relative to it, and those of the products
    # one after the other add up in the mean square.
    assert error.norm() <= 2**-4 / 3**0.5 * NUM_LINEARS**0.5 * expected.norm()
    assert error.norm() > 1e-3 * expected.norm(), "inputs were not quantized"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "by transformers" in kind])
def test_weights_match_the_dequantization_of_transformers(
    kind: str, checkpoint: Callable[[str], Path]
) -> None:
    tensors = load_file(checkpoint(kind) / WEIGHTS)
    dequantize = Fp8Dequantize(None).convert
    lm = load(checkpoint(kind), dtype="float32", config=AS_STORED)
    layers = [layer for layer in linears(lm).values() if not isinstance(layer.method, PlainLinear)]
    assert len(layers) == (NUM_LINEARS if "16" in kind else NUM_LINEARS // 2)
    for layer in layers:
        parent = layer.prefix.rpartition(".")[0]
        expected: list[Any] = []
        for part in layer.parts:
            names = ("weight", "weight_scale_inv")
            of_part: Any = {name: tensors[f"{parent}.{part}.{name}"] for name in names}
            expected.extend(dequantize(of_part).values())
        actual = layer.method.dequantized(layer)
        assert actual is not None
        # A number of 4 bits times one of 24 is exact in float64, so that this rounds once as well.
        assert torch.equal(actual.float(), torch.cat(expected))


@pytest.mark.landing(2)
@pytest.mark.parametrize("kind", KINDS)
def test_finalized_layer_keeps_one_8_bit_copy_of_the_weight(
    kind: str, checkpoint: Callable[[str], Path]
) -> None:
    layers = linears(load(checkpoint(kind), dtype="bfloat16", config=AS_STORED))
    for layer in layers.values():
        if not isinstance(layer.method, PlainLinear):
            tensors = [o for o in layer.operands if isinstance(o, torch.Tensor)]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
            storages |= {
                p.untyped_storage().data_ptr(): p.untyped_storage() for p in layer.parameters()
            }
            weights = sum(layer.parts.values()) * layer.in_features
            assert weights <= sum(map(len, storages.values())) < 1.1 * weights


def test_explanation_names_the_ops(checkpoint: Callable[[str], Path]) -> None:
    choices = explain(load(checkpoint("blocks of 128"), dtype="bfloat16")).to_dict()["choices"]
    (scheme,) = (choice for choice in choices if choice["kind"] == "scheme")
    assert (scheme["name"], scheme["provider"]) == ("fp8", "interposer-quantization")
    kernels = {choice["name"]: choice for choice in choices if choice["kind"] == "kernel"}
    for op in ("fp8_block_linear", "quantize_fp8_blocks"):
        assert kernels[op]["places"][0].startswith("model.layers.0.")
    assert kernels["quantize_fp8_blocks"]["dims"]["block_size"] == 128


def test_fused_layers_with_different_input_scales_are_refused(tmp_path: Path) -> None:
    tensors = quantized("per tensor, static")
    name = "model.layers.2.self_attn.k_proj.input_scale"
    tensors[name] = tensors[name] * 2
    with pytest.raises(CheckpointError) as caught:
        load(write(tmp_path, KINDS["per tensor, static"][0], tensors))
    message = str(caught.value)
    assert message.startswith("model.layers.2.self_attn.q_proj.input_scale: ")
    assert f"{name} = 0.0357142" in message
    assert "model.layers.2.self_attn.v_proj.input_scale = 0.0178571" in message
    assert "or quantize with activation_scheme 'dynamic'" in message


LAYER = "model.layers.1.self_attn.v_proj"
SCALES = {
    "blocks of 128": ["weight_scale_inv"],
    "per tensor": ["weight_scale"],
    "per tensor, static": ["weight_scale", "input_scale"],
    "per tensor, static, saturating": ["weight_scale_inv", "activation_scale"],
    "per output": ["weight_scale"],
}
PLACES = [(kind, name) for kind, names in SCALES.items() for name in names]


@pytest.mark.landing(4)
@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_scales_must_be_positive_numbers(
    kind: str, name: str, value: float, tmp_path: Path
) -> None:
    tensors = quantized(kind)
    scale = tensors[f"{LAYER}.{name}"].clone()
    scale.view(-1)[-1] = value
    path = write(tmp_path, KINDS[kind][0], {**tensors, f"{LAYER}.{name}": scale})
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.{name}: 1 of {scale.numel()} scales"):
        load(path)


@pytest.mark.landing(3)
@pytest.mark.parametrize(("kind", "name"), PLACES)
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda scale: None, "lacks the tensor '{name}'"),
        (lambda scale: torch.ones(3, 5), r"'{name}' has shape \[3, 5\]"),
        (lambda scale: scale.to(torch.int32), "'{name}' is stored as torch.int32"),
    ],
)
def test_scales_that_contradict_the_config_are_refused(
    kind: str,
    name: str,
    edit: Callable[[torch.Tensor], torch.Tensor | None],
    message: str,
    tmp_path: Path,
) -> None:
    tensors, full = quantized(kind), f"{LAYER}.{name}"
    changed = edit(tensors.pop(full))
    if changed is not None:
        tensors[full] = changed
    with pytest.raises(CheckpointError, match=message.format(name=full)):
        load(write(tmp_path, KINDS[kind][0], tensors))


@pytest.mark.landing(3)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
def test_weights_are_not_rounded_to_8_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, name = quantized(kind), f"{LAYER}.weight"
    path = write(tmp_path, KINDS[kind][0], {**tensors, name: tensors[name].float().to(dtype)})
    with pytest.raises(CheckpointError, match=f"'{name}' is stored as {dtype}, expected {FP8}"):
        load(path)


def test_e8m0_scales_are_read(tmp_path: Path) -> None:
    tensors = quantized("powers of two")
    for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
        tensors[name] = tensors[name].to(torch.float8_e8m0fnu)
    path = write(tmp_path, KINDS["powers of two"][0], tensors)
    layers = linears(load(path, dtype="float32", config=AS_STORED))
    scale = layers["model.layers.0.self_attn.o_proj"].get_parameter("weight_scale_inv")
    exponents = tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"].view(torch.uint8)
    assert torch.equal(scale, 2.0 ** (exponents.float() - 127))
