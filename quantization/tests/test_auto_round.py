"""Checkpoints of auto-round: constants of layers, and results of the model.

``auto_round_checkpoints`` holds what auto-round 0.16 wrote of a small model, and the weights that
it quantized; ``write.py`` there says how. Words are taken apart here once more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from interposer import Case, Config, Resolver, Site, Tolerance, current_registry, explain, place
from interposer.errors import CheckpointError, ConfigError
from interposer_engine import load, plan
from interposer_ops.layers.linear import Linear, PlainLinear
from interposer_quantization._auto_round.scheme import AutoRound

WRITTEN = Path(__file__).parent / "auto_round_checkpoints"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
KINDS = ("gptq", "gptq-8-bits", "gptq-asymmetric", "gptqmodel", "awq", "awq-asymmetric")
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
# The code of its word that AWQ puts at each place, the lowest bits first.
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]
Numbers = numpy.ndarray[Any, numpy.dtype[numpy.float64]]


def settings_of(kind: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((WRITTEN / kind / CONFIG).read_text())
    actual: dict[str, Any] = config["quantization_config"]
    return actual


def copied(kind: str, path: Path, **settings: Any) -> Path:
    """Return ``path`` with a checkpoint of auto-round and a tokenizer of 16 letters."""
    shutil.copy(WRITTEN / kind / WEIGHTS, path)
    config = json.loads((WRITTEN / kind / CONFIG).read_text())
    config["quantization_config"].update(settings)
    (path / CONFIG).write_text(json.dumps(config))
    letters = {chr(ord("a") + index): index for index in range(16)}
    Tokenizer(models.BPE(vocab=letters, merges=[])).save(str(path / "tokenizer.json"))
    return path


def codes(words: torch.Tensor, bits: int, places: tuple[int, ...] = ()) -> Numbers:
    """Return the codes ``[R, N]`` in the words ``[R, W]`` of each row."""
    unsigned = words.numpy().view(numpy.uint32)
    shifts = numpy.arange(0, 32, bits, dtype=numpy.uint32)
    parted = unsigned[..., None] >> shifts & (2**bits - 1)
    if places:
        parted = parted[..., numpy.argsort(places)]
    actual: Numbers = parted.reshape(len(words), -1).astype(float)
    return actual


def parted(
    tensors: Mapping[str, torch.Tensor], layer: str, form: str
) -> tuple[Numbers, Numbers, Numbers]:
    """Return codes less zero points, zero points, and scales of a layer, ``[I, O]`` all."""
    qweight, qzeros, scales = (tensors[f"{layer}.{n}"] for n in ("qweight", "qzeros", "scales"))
    bits = qzeros.shape[1] * 32 // scales.shape[1]
    if form.endswith("awq"):
        weight, zeros = codes(qweight, bits, AWQ_PLACES), codes(qzeros, bits, AWQ_PLACES)
    else:
        weight = codes(qweight.T.contiguous(), bits).T
        # Zero points are stored less one, but for the packer that GPTQModel reads.
        zeros = codes(qzeros, bits) + (form != "auto_round:gptqmodel")
    size = len(weight) // len(zeros)
    zeros = zeros.repeat(size, 0)
    return weight - zeros, zeros, scales.double().numpy().repeat(size, 0)


def dequantized(tensors: Mapping[str, torch.Tensor], layer: str, form: str) -> Numbers:
    """Return the weight ``[O, I]`` of a layer, from the layout that its packer writes."""
    if f"{layer}.weight" in tensors:
        return tensors[f"{layer}.weight"].double().numpy()
    numbers, _, scales = parted(tensors, layer, form)
    actual: Numbers = (numbers * scales).T
    return actual


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_dequantized_exactly(kind: str) -> None:
    settings = settings_of(kind)
    scheme = AutoRound.parse(settings)
    resolver = Resolver(current_registry(), place().device, Config(canary="off"), scheme)
    tensors, written = (
        load_file(WRITTEN / kind / WEIGHTS),
        load_file(WRITTEN / "weights.safetensors"),
    )
    quantized = {n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")}
    assert len(quantized) == {"gptq": 6, "awq-asymmetric": 4}.get(kind, 7)
    for name in (n.removesuffix(".weight") for n in written):
        original = written[f"{name}.weight"].double().numpy()
        layer = Linear(Site(resolver, name, torch.float32), *reversed(original.shape))
        assert isinstance(layer.method, PlainLinear) == (name not in quantized)
        if name not in quantized:
            continue
        for parameter_name, parameter in layer.named_parameters():
            parameter.data.copy_(tensors[f"{name}.{parameter_name}"])
        actual, form = layer.method.dequantized(layer), settings["packing_format"]
        assert actual is not None
        # A code of 8 bits times a scale of 11 is exact in float64.
        assert numpy.array_equal(actual.numpy(), dequantized(tensors, name, form))
        numbers, zeros, scales = parted(tensors, name, form)
        # Half a step, or one where the largest of one sign are a step from what codes reach; one
        # more for the zero point 0, which the packer of AutoGPTQ's words replaces by 1. Scales are
        # rounded to float16, and weights to bfloat16 before they are quantized.
        steps = 1.0 + (form == "auto_round:auto_gptq") * (zeros == 1) + abs(numbers) * 2.0**-11
        error = abs(actual.numpy() - original).T
        assert (error <= steps * abs(scales) + abs(original.T) * 2.0**-8).all(), name


@pytest.mark.landing(4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_multiplies_by_its_dequantized_weight(kind: str, tmp_path: Path) -> None:
    lm = load(copied(kind, tmp_path), dtype="float32")
    tensors, form = load_file(WRITTEN / kind / WEIGHTS), settings_of(kind)["packing_format"]
    layers = [layer for layer in lm.engine.model.modules() if isinstance(layer, Linear)]
    assert len(layers) == 4
    for layer in layers:
        parent = layer.prefix.rpartition(".")[0]
        rows = [dequantized(tensors, f"{parent}.{part}", form) for part in layer.parts]
        weight = torch.from_numpy(numpy.concatenate(rows))
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
        expected = x.double() @ weight.T
        magnitude = float((x.double().abs() @ weight.abs().T).max())
        case = Case("", {}, reduction=layer.in_features, magnitude=magnitude)
        # Weights and results are rounded to float32 once each.
        bound = Tolerance(roundings=2).bound(expected, torch.float32, case)
        assert ((layer(x).double() - expected).abs() <= bound).all(), layer.prefix


def test_4_and_8_bit_layers_use_different_kernels(tmp_path: Path) -> None:
    choices = explain(load(copied("gptq", tmp_path), dtype="bfloat16")).to_dict()["choices"]
    places: dict[str, set[str]] = {}
    for choice in choices:
        places.setdefault(choice["name"], set()).update(choice["places"])
    assert places["w8a16_linear"] == {f"{ATTENTION}.qkv_proj", f"{ATTENTION}.o_proj"}
    assert places["w4a16_linear"] == {f"{MLP}.gate_up_proj"}
    assert f"{MLP}.down_proj" in places["linear"]


def test_method_names_auto_round_and_inc_are_equivalent(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path, name in ((first, "auto-round"), (second, "inc")):
        path.mkdir()
        copied("awq", path, quant_method=name)
    logits = [load(path, dtype="float32").logits([3, 1, 4]) for path in (first, second)]
    assert torch.equal(*logits)


def test_fused_layers_with_different_storage_are_refused(tmp_path: Path) -> None:
    rules = {**settings_of("gptq")["extra_config"], f"{ATTENTION}.k_proj": {"bits": 4}}
    with pytest.raises(ConfigError, match="fuses layers that are quantized in different ways") as e:
        plan(copied("gptq", tmp_path, extra_config=rules))
    assert f"{ATTENTION}.q_proj: 8 bits per group of 32 inputs" in str(e.value)
    assert f"{ATTENTION}.k_proj: 4 bits per group of 32 inputs" in str(e.value)


def test_symmetric_weights_with_other_zero_points_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"qzeros: holds the zero point"):
        load(copied("gptq-asymmetric", tmp_path, sym=True))


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path, name = copied("gptq", tmp_path), f"{MLP}.up_proj.scales"
    tensors = load_file(path / WEIGHTS)
    tensors[name][1, 7] = torch.nan
    save_file(tensors, path / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{name}: holds 1 scales .* for group 1"):
        load(path)


@pytest.mark.parametrize(
    ("extra", "quantized"),
    [
        ({}, False),
        ({".*head": {"bits": 8}}, False),  # expressions are for layers of blocks
        ({"lm_head": {"bits": 16}}, False),
        ({"lm_head": {"bits": 8, "group_size": 32}}, True),
    ],
)
def test_lm_head_is_quantized_if_extra_config_names_it(
    extra: dict[str, Any], quantized: bool
) -> None:
    scheme = AutoRound.parse(settings_of("gptq") | {"extra_config": extra})
    assert (scheme.head_method("lm_head") is not None) == quantized
