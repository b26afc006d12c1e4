"""Checkpoints of ModelOpt: constants of layers, and results of the model.

``modelopt_checkpoints`` holds what ModelOpt 0.47 wrote of a small model, and what its layers
computed before it was written; ``write.py`` there says how. Weights are dequantized here once more,
from the bits and the published formats.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from interposer import Case, Config, Resolver, Site, Tolerance, current_registry, explain, place
from interposer.errors import CheckpointError, ConfigError
from interposer_engine import LanguageModel, load, plan
from interposer_ops.layers.linear import Linear
from interposer_quantization._examples import modelopt_examples
from interposer_quantization._modelopt.scheme import ModelOpt
from interposer_testing import conformance

WRITTEN = Path(__file__).parent / "modelopt_checkpoints"
WEIGHTS, CONFIG, BESIDE = "model.safetensors", "config.json", "hf_quant_config.json"
ROUNDED = ("fp8", "fp8-per-channel", "nvfp4", "mxfp8", "mixed", "fp8-cache", "nvfp4-awq")
PLAIN = ("fp8-blocks", "w4a16-awq", "w4a16-nvfp4", "w8a16")
KINDS = (*ROUNDED, *PLAIN)
E2M1 = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCK = {"nvfp4": 16, "mxfp8": 32}
NUM_LAYERS = 4  # four products in the one block
TOKENS = [3, 1, 4, 1, 5, 9]
ATTENTION = "model.layers.0.self_attn"
QKV = ("q_proj", "k_proj", "v_proj")
RECORDED = {kind: WRITTEN / kind / "recorded.safetensors" for kind in ("fp8", "fp8-cache")}

Tensors = dict[str, torch.Tensor]
Numbers = numpy.ndarray[Any, numpy.dtype[numpy.float64]]


def copied(kind: str, path: Path) -> Path:
    """Return ``path`` with a checkpoint of ModelOpt, and a tokenizer of 16 letters."""
    for name in (CONFIG, BESIDE, WEIGHTS):
        shutil.copy(WRITTEN / kind / name, path)
    letters = {chr(ord("a") + index): index for index in range(16)}
    Tokenizer(models.BPE(vocab=letters, merges=[])).save(str(path / "tokenizer.json"))
    return path


def edited(path: Path, file: str, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Change a JSON file of the checkpoint at ``path``."""
    content = json.loads((path / file).read_text())
    edit(content)
    (path / file).write_text(json.dumps(content))
    return path


def replaced(path: Path, **tensors: torch.Tensor) -> Path:
    """Change tensors of the checkpoint at ``path``, by name with ``__`` for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    stored = load_file(path / WEIGHTS)
    assert set(named) <= set(stored)
    save_file({**stored, **named}, path / WEIGHTS)
    return path


def linears(lm: LanguageModel) -> list[Linear]:
    return [layer for layer in lm.engine.model.modules() if isinstance(layer, Linear)]


def bits(tensor: torch.Tensor) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    return tensor.contiguous().view(torch.uint8).numpy()


def decoded_e4m3(codes: numpy.ndarray[Any, numpy.dtype[numpy.uint8]]) -> Numbers:
    """Return the numbers of bytes with 1 bit of sign, 4 of exponent (bias 7) and 3 of mantissa."""
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(float)
    magnitude = numpy.where(
        exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )
    actual: Numbers = numpy.where(codes >= 128, -magnitude, magnitude)
    return actual


def dequantized(tensors: Tensors, layer: str) -> Numbers:
    """Return the weight ``[O, I]`` of a layer of the checkpoint, from the published formats.

    Of weights that plain inputs are multiplied by, a number is float32, or the product of one that
    has few bits and a scale that is float32.
    """
    weight, scale = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"]
    is_plain = f"{layer}.input_scale" not in tensors
    if weight.dtype == torch.uint8 and scale.dtype == torch.float32:
        pairs = numpy.stack((bits(weight) & 15, bits(weight) >> 4), 1)
        signed = pairs.reshape(-1, weight.shape[1]).astype(float)
        signed[signed > 7] -= 16
        actual: Numbers = signed * scale.double().numpy().repeat(16, 1)
        return actual
    if weight.dtype == torch.uint8:
        codes = numpy.stack((bits(weight) & 15, bits(weight) >> 4), -1).reshape(len(weight), -1)
        overall = float(tensors[f"{layer}.weight_scale_2"])
        both = decoded_e4m3(bits(scale)) * overall
        if is_plain:
            both = both.astype(numpy.float32).astype(float)
        packed: Numbers = E2M1[codes] * both.repeat(16, 1)
        return packed
    if weight.dtype == torch.int8:
        integers: Numbers = weight.numpy().astype(float) * scale.double().numpy()[:, None]
        return integers
    numbers = decoded_e4m3(bits(weight))
    if is_plain and scale.ndim in (0, 4):
        square = (
            scale.double().numpy().reshape(scale.shape[0], -1) if scale.ndim else scale.view(1, 1)
        )
        by_number = numpy.asarray(square).repeat(128, 0).repeat(128, 1)
        products = numbers * by_number[: numbers.shape[0], : numbers.shape[1]]
        block_scaled: Numbers = products.astype(numpy.float32).astype(float)
        return block_scaled
    if scale.dtype == torch.uint8:
        factors: Numbers = (2.0 ** (scale.numpy().astype(float) - 127)).repeat(32, 1)
    else:
        factors = scale.double().numpy().reshape(-1, 1)
    return numbers * factors


@pytest.mark.landing(7)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_dequantized_exactly(kind: str) -> None:
    settings = json.loads((WRITTEN / kind / BESIDE).read_text())["quantization"]
    scheme = ModelOpt.parse({"quant_method": "modelopt", "quantization": settings})
    resolver = Resolver(current_registry(), place().device, Config(canary="off"), scheme)
    tensors = load_file(WRITTEN / kind / WEIGHTS)
    names = [n.removesuffix(".weight") for n in tensors if n.endswith("_proj.weight")]
    assert len(names) == 7
    for name in names:
        expected = dequantized(tensors, name)
        layer = Linear(Site(resolver, name, torch.float32), *reversed(expected.shape))
        for parameter_name, parameter in layer.named_parameters():
            parameter.data.copy_(tensors.get(f"{name}.{parameter_name}", torch.ones(())))
        actual = layer.method.dequantized(layer)
        assert actual is not None
        # No product has more bits than float64 holds, so that the order of factors is all one.
        assert numpy.array_equal(actual.numpy(), expected)
        assert len(numpy.unique(expected)) > 100


# How often either side rounds in float32 where they don't do the same: of integers the library
# divides by 1 / scale, which is rounded as the scale is and the quotient and the product are; both
# scales of NVFP4 make one number there, and not here.
ROUNDINGS = {"fp8-blocks": 0, "w4a16-nvfp4": 0, "w4a16-awq": 4, "w8a16": 4, "nvfp4-awq": 3}


@pytest.mark.parametrize("kind", ROUNDINGS)
def test_weights_match_modelopt(kind: str) -> None:
    tensors = load_file(WRITTEN / kind / WEIGHTS)
    recorded = load_file(WRITTEN / kind / "recorded.safetensors")
    names = [name for name in recorded if name.endswith(".weight")]
    assert len(names) == 2
    for name in names:
        expected = recorded[name]
        actual = torch.from_numpy(dequantized(tensors, name.removesuffix(".weight"))).float()
        bound = ROUNDINGS[kind] * 2.0**-24 * expected.abs()
        assert ((actual - expected).abs() <= bound).all()
        assert expected.abs().min() < expected.abs().max() / 10


@pytest.mark.landing(3)
@pytest.mark.parametrize("kind", KINDS)
def test_layer_outputs_match_modelopt(kind: str, tmp_path: Path) -> None:
    lm = load(copied(kind, tmp_path), dtype="float32")
    recorded = load_file(WRITTEN / kind / "recorded.safetensors")
    tensors = load_file(WRITTEN / kind / WEIGHTS)
    for layer in linears(lm):
        parent = layer.prefix.rpartition(".")[0]
        names = [f"{parent}.{part}" for part in layer.parts]
        inputs = [recorded[f"{name}.in"] for name in names]
        assert all(torch.equal(x, inputs[0]) for x in inputs)
        expected = torch.cat([recorded[f"{name}.out"] for name in names], -1)
        weight = torch.from_numpy(numpy.concatenate([dequantized(tensors, n) for n in names]))
        scale = tensors.get(f"{names[0]}.pre_quant_scale", torch.ones(()))
        magnitude = float(((inputs[0] * scale).double().abs() @ weight.abs().T).max())
        # Weight, input and result are rounded once each with their scales, and so by the library.
        case = Case("", {}, reduction=weight.shape[1], magnitude=magnitude)
        bound = Tolerance(roundings=6).bound(expected.double(), torch.float32, case)
        assert ((layer(inputs[0]).double() - expected).abs() <= bound).all(), layer.prefix
        # What was not multiplied and rounded would be far from it.
        plain = inputs[0].double() @ weight.T
        differs = kind in ROUNDED or scale.ndim > 0
        assert ((plain - expected).abs() > bound).any() == differs, layer.prefix


def test_inputs_are_scaled_before_quantization(tmp_path: Path) -> None:
    """The library does not always fold the numbers into the layer before: of GQA in ``o_proj``."""
    for kind in ("w4a16-awq", "nvfp4-awq"):
        (tmp_path / kind).mkdir()
        (output,) = (
            layer
            for layer in linears(load(copied(kind, tmp_path / kind), dtype="bfloat16"))
            if "o_proj" in layer.parts
        )
        scale = load_file(WRITTEN / kind / WEIGHTS)[f"{ATTENTION}.o_proj.pre_quant_scale"]
        kernel: Any = output.kernel
        assert torch.equal(output.operands[0], scale)
        x = torch.randn(3, output.in_features, generator=torch.Generator().manual_seed(0))
        x = x.to(torch.bfloat16)
        once = (x.float() * scale).to(torch.bfloat16)
        (multiplied,) = kernel.args
        assert torch.equal(output(x), multiplied(once, *output.operands[1:]))


def test_layer_without_pre_quant_scale_does_not_scale_its_input(tmp_path: Path) -> None:
    layers = linears(load(copied("w4a16-awq", tmp_path), dtype="float32"))
    assert [len(layer.operands) for layer in layers] == [4, 5, 4, 5]


def test_fused_layers_with_different_pre_quant_scales_are_refused(tmp_path: Path) -> None:
    path = copied("w4a16-awq", tmp_path)
    tensors = load_file(path / WEIGHTS)
    own = {f"{ATTENTION}.{n}.pre_quant_scale": torch.full((64,), 0.5) for n in QKV}
    expected = load(path, dtype="float32").logits(TOKENS)
    halved = tensors["model.layers.0.input_layernorm.weight"] * 2
    save_file({**tensors, **own, "model.layers.0.input_layernorm.weight": halved}, path / WEIGHTS)
    assert torch.equal(load(path, dtype="float32").logits(TOKENS), expected)
    other = own[f"{ATTENTION}.v_proj.pre_quant_scale"].clone()
    other[7] = 0.25
    for numbers in ({}, {f"{ATTENTION}.v_proj.pre_quant_scale": other}):
        rest = {name: t for name, t in own.items() if "v_proj" not in name}
        save_file({**tensors, **rest, **numbers}, path / WEIGHTS)
        with pytest.raises(
            CheckpointError, match=r"v_proj\.pre_quant_scale: differs from .*q_proj"
        ):
            load(path)


@pytest.mark.landing(2)
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_both_settings_files_is_enough(kind: str, tmp_path: Path) -> None:
    both, first, second = (tmp_path / name for name in ("both", "first", "second"))
    for path in (both, first, second):
        path.mkdir()
        copied(kind, path)
    (first / BESIDE).unlink()
    if kind == "w4a16-awq":
        with pytest.raises(ConfigError, match="W4A16_AWQ needs group_size, which"):
            plan(first)
        edited(first, CONFIG, lambda config: config["quantization_config"].update(group_size=16))
    edited(second, CONFIG, lambda config: config.pop("quantization_config"))
    logits = [load(path, dtype="float32").logits(TOKENS) for path in (both, first, second)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_explanation_names_the_ops_of_every_layer(tmp_path: Path) -> None:
    choices = explain(load(copied("mixed", tmp_path), dtype="bfloat16")).to_dict()["choices"]
    places: dict[str, set[str]] = {}
    for choice in choices:
        places.setdefault(choice["name"], set()).update(choice["places"])
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    assert places["fp8_linear"] == {f"{attention}qkv_proj", f"{attention}o_proj"}
    assert places["quantize_fp8_static"] == places["fp8_linear"]
    assert places["nvfp4_linear"] == {f"{mlp}gate_up_proj", f"{mlp}down_proj"}
    assert places["quantize_nvfp4"] == places["nvfp4_linear"]


class Recorded(torch.nn.Module):
    """Returns ``output``, whatever comes, and keeps that."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return self.output[: len(x)]


def attended(kind: str, path: Path) -> torch.Tensor:
    """Return attention over projections that the library recorded, ``[T, N D]``."""
    # One call for all of a block would not come by the projections that are put in their place.
    parts = Config(layers={"decoder_block": "standard", "self_attention": "standard"})
    lm = load(copied(kind, path), dtype="float32", config=parts)
    recorded = load_file(RECORDED[kind])
    block: Any = lm.engine.model.model.layers[0].self_attn
    projected = [recorded[f"{ATTENTION}.{name}.out"] for name in ("q_proj", "k_proj", "v_proj")]
    block.qkv_proj = Recorded(torch.cat(projected, -1))
    block.o_proj = Recorded(recorded[f"{ATTENTION}.o_proj.out"])
    lm.logits(TOKENS[: len(projected[0])])
    (actual,) = block.o_proj.seen
    return torch.as_tensor(actual)


def test_kv_cache_rounding_matches_modelopt(tmp_path: Path) -> None:
    for kind in RECORDED:
        (tmp_path / kind).mkdir()
    expected = {kind: load_file(path)[f"{ATTENTION}.o_proj.in"] for kind, path in RECORDED.items()}
    actual = attended("fp8-cache", tmp_path / "fp8-cache")
    torch.testing.assert_close(actual, expected["fp8-cache"], rtol=1e-5, atol=1e-9)
    # The same model with a plain cache attends to other numbers.
    assert not torch.allclose(expected["fp8"], expected["fp8-cache"], rtol=1e-3)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_scales_of_the_cache_must_be_positive_numbers(scale: float, tmp_path: Path) -> None:
    changed = {f"{PLACE}__k_scale": torch.tensor(scale)}
    path = replaced(copied("fp8-cache", tmp_path), **changed)
    with pytest.raises(CheckpointError, match=r"k_proj\.k_scale: holds the scale"):
        load(path)


def test_missing_scale_of_the_cache_is_refused(tmp_path: Path) -> None:
    path = copied("fp8-cache", tmp_path)
    stored = load_file(path / WEIGHTS)
    del stored[f"{ATTENTION}.v_proj.v_scale"]
    save_file(stored, path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"lacks the tensor '.*v_proj\.v_scale'"):
        load(path)


ALGORITHM = {"quant_algo": "NVFP4", "group_size": 16}
OTHER_LAYER = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}
CONTRADICTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "algorithm": (
        "fp8",
        lambda beside: beside["quantization"].update(ALGORITHM),
        "quant_algo 'FP8' of config.json contradicts quant_algo 'NVFP4' of hf_quant_config.json",
    ),
    "layers left out": (
        "nvfp4",
        lambda beside: beside["quantization"].update(exclude_modules=["lm_head"]),
        "of config.json contradicts exclude_modules {'lm_head'} of hf_quant_config.json",
    ),
    "layers": (
        "mixed",
        lambda beside: beside["quantization"]["quantized_layers"].update(OTHER_LAYER),
        "of config.json contradicts quantized_layers",
    ),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradicting_settings_files_are_refused(what: str, tmp_path: Path) -> None:
    kind, edit, message = CONTRADICTIONS[what]
    path = edited(copied(kind, tmp_path), BESIDE, edit)
    with pytest.raises(ConfigError) as caught:
        plan(path)
    assert message in str(caught.value)
    assert BESIDE in str(caught.value)


def test_settings_files_of_different_methods_are_refused(tmp_path: Path) -> None:
    path = edited(copied("fp8", tmp_path), BESIDE, lambda b: b["producer"].update(name="acme"))
    with pytest.raises(CheckpointError, match=f"{BESIDE}: contradicts config.json") as caught:
        plan(path)
    assert "quant_method 'modelopt', not 'acme'" in str(caught.value)


def test_invalid_config_raises_the_same_error_with_and_without_the_file(tmp_path: Path) -> None:
    path = edited(copied("fp8", tmp_path), CONFIG, lambda c: c.update(quantization_config="fp8"))
    with pytest.raises(CheckpointError, match=f"{CONFIG}: .*quantization_config"):
        plan(path)


@pytest.mark.parametrize("content", [{}, {"producer": {"name": "modelopt"}}, {"quantization": {}}])
def test_incomplete_settings_file_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    (copied("fp8", tmp_path) / BESIDE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{BESIDE}: lacks 'quantization' or the name"):
        plan(tmp_path)


LAYER = "model.layers.0.self_attn.k_proj"
PLACE = LAYER.replace(".", "__")


@pytest.mark.parametrize("name", ["weight_scale_2", "input_scale"])
def test_fused_layers_with_different_global_scales_are_refused(name: str, tmp_path: Path) -> None:
    changed = {f"{PLACE}__{name}": torch.tensor(0.125)}
    path = replaced(copied("nvfp4", tmp_path), **changed)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    place = f"model.layers.0.self_attn.q_proj.{name}"
    assert message.startswith(f"{place}: fused layers must have the same {name}, but differ")
    assert f"{LAYER}.{name} = 0.125" in message


def test_advice_for_input_scales_names_a_modelopt_algorithm(tmp_path: Path) -> None:
    changed = {f"{PLACE}__input_scale": torch.tensor(0.125)}
    path = replaced(copied("fp8", tmp_path), **changed)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert f"{LAYER}.input_scale = 0.125" in message
    assert "Try: export the model with a release of ModelOpt that gives fused layers one" in message
    # It names another algorithm that is read, and no setting of other schemes.
    ModelOpt.parse({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"})
    assert "quantize the model as FP8_PER_CHANNEL_PER_TOKEN" in message
    assert "activation_scheme" not in message


@pytest.mark.landing(4)
@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("nvfp4", "weight_scale_2"),
        ("nvfp4", "input_scale"),
        ("fp8", "weight_scale"),
        ("fp8", "input_scale"),
        ("fp8-per-channel", "weight_scale"),
        ("w4a16-awq", "weight_scale"),
        ("w4a16-nvfp4", "weight_scale_2"),
        ("w8a16", "weight_scale"),
        ("fp8-blocks", "weight_scale"),
    ],
)
def test_scales_must_be_positive_numbers(
    kind: str, name: str, value: float, tmp_path: Path
) -> None:
    scale = load_file(WRITTEN / kind / WEIGHTS)[f"{LAYER}.{name}"].clone()
    scale.view(-1)[-1] = value
    path = replaced(copied(kind, tmp_path), **{f"{PLACE}__{name}": scale})
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.{name}: 1 of {scale.numel()} scales"):
        load(path)


@pytest.mark.parametrize(
    ("kind", "byte"), [("nvfp4", 127), ("w4a16-nvfp4", 127), ("nvfp4", 129), ("mxfp8", 255)]
)
def test_block_scales_that_are_not_finite_are_refused(kind: str, byte: int, tmp_path: Path) -> None:
    scale = load_file(WRITTEN / kind / WEIGHTS)[f"{LAYER}.weight_scale"].clone()
    scale.view(torch.uint8)[5, 1] = byte
    path = replaced(copied(kind, tmp_path), **{f"{PLACE}__weight_scale": scale})
    with pytest.raises(CheckpointError, match=rf"{LAYER}\.weight_scale: 1 of .* at \[5, 1\]"):
        load(path)


def test_group_of_zeros_may_have_a_scale_of_zero(tmp_path: Path) -> None:
    stored = load_file(WRITTEN / "nvfp4" / WEIGHTS)
    scale = torch.zeros_like(stored[f"{LAYER}.weight_scale"].float()).to(torch.float8_e4m3fn)
    path = replaced(copied("nvfp4", tmp_path), **{f"{PLACE}__weight_scale": scale})
    (layer,) = (
        actual for actual in linears(load(path, dtype="float32")) if "k_proj" in actual.parts
    )
    start, size = layer.parts["q_proj"], layer.parts["k_proj"]
    actual = layer(torch.randn(3, layer.in_features))
    assert (actual[:, start : start + size] == 0).all()
    assert actual[:, :start].abs().sum() > 0


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
def test_finalized_layer_keeps_one_copy_of_the_weight(kind: str, tmp_path: Path) -> None:
    # What kernels hold of their own is their affair.
    config = Config(kernels={f"{kind}_linear": "reference"})
    for layer in linears(load(copied(kind, tmp_path), dtype="bfloat16", config=config)):
        tensors = [o for o in layer.operands if isinstance(o, torch.Tensor)]
        tensors += [p.data for p in layer.parameters()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        weights = sum(layer.parts.values()) * layer.in_features
        stored = weights // 2 if kind == "nvfp4" else weights
        # The scales of blocks come on top, and a few numbers.
        assert stored <= sum(map(len, storages.values())) < stored + weights // BLOCK[kind] + 64


def test_conformance_suite_runs_the_examples() -> None:
    # The trials themselves are run in ops/tests/test_conformance.py, among all that is installed.
    trials = [
        trial
        for trial in conformance(
            current_registry(), place().device, distribution="interposer-quantization"
        )
        if trial.aspect == "scheme" and trial.request.name == "modelopt"
    ]
    assert {trial.label for trial in trials if trial.verdict} == set(modelopt_examples())
