"""Checkpoints of torchao: constants of layers, and results of the model.

``torchao_checkpoints`` holds what torchao 0.18 and transformers 5.23 wrote of a small model, and
weights that torchao dequantized itself; ``write.py`` there says how.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from interposer import Case, Config, Resolver, Site, Tolerance, current_registry, explain, place
from interposer.errors import CheckpointError, ConfigError, UnknownNameError
from interposer_engine import load, plan
from interposer_ops.layers.linear import Linear, PlainLinear
from interposer_quantization._torchao.examples import torchao_examples
from interposer_quantization._torchao.scheme import TorchAo
from interposer_testing import conformance

WRITTEN = Path(__file__).parent / "torchao_checkpoints"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
DYNAMIC = ("int8-dynamic", "intx-4-bits-dynamic", "intx-8-bits-dynamic")
KINDS = (
    *("float8", "float8-weights", "int8", "int8-groups", "intx-4-bits", "intx-8-bits"),
    *DYNAMIC,
)
ATTENTION = "model.layers.0.self_attn"

Tensors = dict[str, torch.Tensor]


def settings_of(kind: str) -> dict[str, Any]:
    actual: dict[str, Any] = json.loads((WRITTEN / kind / CONFIG).read_text())[
        "quantization_config"
    ]
    return actual


def copied(kind: str, path: Path) -> Path:
    """Return ``path`` with a checkpoint of torchao and a tokenizer of 16 letters."""
    for name in (CONFIG, WEIGHTS):
        shutil.copy(WRITTEN / kind / name, path)
    letters = {chr(ord("a") + index): index for index in range(16)}
    Tokenizer(models.BPE(vocab=letters, merges=[])).save(str(path / "tokenizer.json"))
    return path


def dequantized(tensors: Tensors, layer: str) -> torch.Tensor:
    """Return the float64 weight ``[O, I]`` of a layer: a loop over groups, as it is told."""
    codes, scales = (tensors[f"{layer}._weight_{name}"].double() for name in ("qdata", "scale"))
    if f"{layer}._weight_zero_point" not in tensors:
        return codes * scales
    zeros = tensors[f"{layer}._weight_zero_point"].double()
    groups = codes.chunk(scales.shape[1], 1)
    return torch.cat(
        [
            (group - zeros[:, index, None]) * scales[:, index, None]
            for index, group in enumerate(groups)
        ],
        1,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_weights_match_the_dequantization_of_torchao(kind: str) -> None:
    scheme = TorchAo.parse(settings_of(kind))
    resolver = Resolver(current_registry(), place().device, Config(canary="off"), scheme)
    tensors = load_file(WRITTEN / kind / WEIGHTS)
    recorded = load_file(WRITTEN / kind / "recorded.safetensors")
    names = [n.removesuffix("._weight_qdata") for n in tensors if n.endswith("_qdata")]
    assert len(names) == 7
    for name in names:
        expected = dequantized(tensors, name)
        out_features, in_features = expected.shape
        layer = Linear(Site(resolver, name, torch.float32), in_features, out_features)
        for parameter_name, parameter in layer.named_parameters():
            parameter.data.copy_(tensors[f"{name}.{parameter_name}"])
        actual = layer.method.dequantized(layer)
        assert actual is not None
        # A code of 9 bits times a scale of 24 is exact in float64; a weight that is held in the
        # model's dtype is rounded to it.
        assert torch.equal(
            actual, expected.float().double() if kind == "float8-weights" else expected
        )
        if name in recorded:
            # Which is in the dtype of the model, that of the record being float32.
            dtype = torch.bfloat16 if kind == "float8" else torch.float32
            assert torch.equal(actual.to(dtype).float(), recorded[name])
    assert set(recorded) & set(names)
    asymmetric = any(tensors[n].any() for n in tensors if n.endswith("_zero_point"))
    assert asymmetric == kind.startswith("intx-4-bits")


def rounded(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Return the float64 input that codes and scales stand for."""
    if kind == "float8":
        scale = x.abs().amax(1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).double() * scale.double()
    if kind == "int8-dynamic":
        scale = x.abs().amax(1, keepdim=True) / 127
        return (x / scale).round().double() * scale.double()
    if kind in DYNAMIC:
        low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
        scale = (high - low) / 255
        zero = -128 - (low / scale).round()
        return ((x / scale).round() + zero).clamp(-128, 127).double().sub(zero) * scale.double()
    return x.double()


@pytest.mark.parametrize("kind", DYNAMIC)
def test_input_rounding_matches_torchao(kind: str, tmp_path: Path) -> None:
    lm = load(copied(kind, tmp_path), dtype="float32")
    recorded = load_file(WRITTEN / kind / "recorded.safetensors")
    name = f"{ATTENTION}.q_proj"
    x, expected, weight = (recorded[f"{name}{part}"] for part in (".in", ".out", ""))
    (layer,) = (
        layer
        for layer in lm.engine.model.modules()
        if isinstance(layer, Linear) and "q_proj" in layer.parts
    )
    actual = layer(x)[:, : len(weight)].double()
    step = (x.amax(1, keepdim=True).clamp(min=0) - x.amin(1, keepdim=True).clamp(max=0)) / 255
    if kind == "int8-dynamic":
        # Its step is max / 127.5, here max / 127: either is at most half a step off.
        step = x.abs().amax(1, keepdim=True) / 127
        bound = (step.double() @ weight.double().abs().sum(1)[None, :]).double()
    else:
        # The same codes, and sums of 64 terms in float32.
        bound = 64 * 2.0**-24 * (x.double().abs() @ weight.double().abs().T)
    error = (actual - expected.double()).abs()
    assert (error <= bound).all()
    plain = x.double() @ weight.double().T
    assert ((plain - expected).abs() > 64 * 2.0**-24 * plain.abs()).any()


def test_symmetric_weights_of_one_scale_are_multiplied_as_integers(tmp_path: Path) -> None:
    used = {"int8-dynamic": "int8_linear", "intx-8-bits-dynamic": "int8_linear"}
    used |= {"intx-4-bits-dynamic": "w8a16_linear", "float8-weights": "linear"}
    for kind, op in used.items():
        (tmp_path / kind).mkdir()
        rows = explain(plan(copied(kind, tmp_path / kind))).to_dict()["choices"]
        places = [place for row in rows if row["name"] == op for place in row["places"]]
        assert f"{ATTENTION}.o_proj" in places


def test_inputs_of_int8_may_be_asymmetric(tmp_path: Path) -> None:
    path = copied("int8-dynamic", tmp_path)
    config = json.loads((path / CONFIG).read_text())
    fields = config["quantization_config"]["quant_type"]["default"]["_data"]
    fields["act_mapping_type"]["_data"] = "ASYMMETRIC"
    (path / CONFIG).write_text(json.dumps(config))
    tensors = load_file(path / WEIGHTS)
    layers = [
        m for m in load(path, dtype="float32").engine.model.modules() if isinstance(m, Linear)
    ]
    (layer,) = (layer for layer in layers if "down_proj" in layer.parts)
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1)) + 2
    expected = rounded("intx-8-bits-dynamic", x) @ dequantized(tensors, layer.prefix).T
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.landing(4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_multiplies_by_its_dequantized_weight(kind: str, tmp_path: Path) -> None:
    lm, tensors = load(copied(kind, tmp_path), dtype="float32"), load_file(WRITTEN / kind / WEIGHTS)
    layers = [layer for layer in lm.engine.model.modules() if isinstance(layer, Linear)]
    assert len(layers) == 4
    for layer in layers:
        parent = layer.prefix.rpartition(".")[0]
        weight = torch.cat([dequantized(tensors, f"{parent}.{part}") for part in layer.parts])
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
        factors = rounded(kind, x)
        expected = factors @ weight.T
        magnitude = float((factors.abs() @ weight.abs().T).max())
        case = Case("", {}, reduction=layer.in_features, magnitude=magnitude)
        # Weights, scaled inputs and results are rounded to float32 once each.
        bound = Tolerance(roundings=3).bound(expected, torch.float32, case)
        assert ((layer(x).double() - expected).abs() <= bound).all(), layer.prefix


def test_excluded_layers_stay_plain() -> None:
    settings = {**settings_of("int8"), "modules_to_not_convert": ["model.layers.1", "o_proj"]}
    scheme = TorchAo.parse(settings)
    assert scheme.linear_method("model.layers.1.self_attn.q_proj", ("q_proj",)) is None
    assert scheme.linear_method(f"{ATTENTION}.o_proj", ("o_proj",)) is None
    actual = scheme.linear_method(f"{ATTENTION}.q_proj", ("q_proj",))
    assert actual is not None
    assert not isinstance(actual, PlainLinear)


def changed(
    place: tuple[str, ...], value: object, label: str = "any bits per group, asymmetric"
) -> dict[str, Any]:
    """Return settings with another value at ``place``."""
    settings = copy.deepcopy(dict(torchao_examples()[label]))
    inner = settings["quant_type"]["default"]
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            changed(("_type",), "Int4WeightOnlyConfig"),
            "Input tag 'Int4WeightOnlyConfig' found using",
        ),
        (changed(("_version",), 1), "_version = 1: Input should be 2"),
        (
            changed(("_data", "granularity", "_type"), "PerTensor"),
            "granularity._type = 'PerTensor'",
        ),
        (
            changed(("_data", "granularity", "_type"), "PerAxis"),
            "group_size goes with PerGroup and no other, found PerAxis",
        ),
        (
            changed(("_data", "intx_packing_format", "_data"), "OPAQUE_ATEN_KLEIDIAI"),
            "intx_packing_format._data = 'OPAQUE_ATEN_KLEIDIAI'",
        ),
        (changed(("_data", "weight_dtype", "_data"), "uint4"), "weight_dtype._data = 'uint4'"),
        (
            changed(("_data", "reduce_range"), True, "8 bits, int8 inputs"),
            "reduce_range = True: Input should be False",
        ),
        (
            changed(("_data", "granularity", "_type"), "PerTensor", "8 bits, int8 inputs"),
            "_type = 'PerTensor': Input should be 'PerRow'",
        ),
        (
            changed(
                ("_data", "act_mapping_type", "_data"),
                "SYMMETRIC",
                "any bits per group, int8 inputs",
            ),
            "act_mapping_type._data = 'SYMMETRIC'",
        ),
        (
            {**torchao_examples()["8 bits per row"], "include_input_output_embeddings": True},
            "include_input_output_embeddings = True",
        ),
        (
            {"quant_method": "torchao", "quant_type": "int8_weight_only"},
            "quant_type = 'int8_weight_only'",
        ),
    ],
)
def test_unsupported_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TorchAo.parse(settings)
    assert message in str(caught.value)
    assert "Supported: quant_type Int8WeightOnlyConfig, IntxWeightOnlyConfig" in str(caught.value)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="quant_tipe"):
        TorchAo.parse({"quant_method": "torchao", "quant_tipe": {}})


def test_zero_points_must_be_0_where_weights_are_symmetric(tmp_path: Path) -> None:
    path, name = copied("int8", tmp_path), f"{ATTENTION}.k_proj._weight_zero_point"
    tensors = load_file(path / WEIGHTS)
    tensors[name][3] = 1
    save_file(tensors, path / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"{name}: 1 of 32 zero points are not 0"):
        load(path)


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_scales_must_be_positive_numbers(value: float, tmp_path: Path) -> None:
    path, name = copied("int8-groups", tmp_path), f"{ATTENTION}.k_proj._weight_scale"
    tensors = load_file(path / WEIGHTS)
    tensors[name][3, 1] = value
    save_file(tensors, path / WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"{name}: 1 of 64 scales .* at \[3, 1\]"):
        load(path)


def test_pickled_weights_are_refused_with_their_name(tmp_path: Path) -> None:
    path = copied("int8", tmp_path)
    (path / WEIGHTS).rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is pickled, which runs code"):
        plan(path)


def test_conformance_suite_runs_the_examples() -> None:
    # The trials themselves are run in ops/tests/test_conformance.py, among all that is installed.
    trials = [
        trial
        for trial in conformance(
            current_registry(), place().device, distribution="interposer-quantization"
        )
        if trial.aspect == "scheme" and trial.request.name == "torchao"
    ]
    assert {trial.label for trial in trials if trial.verdict} == set(torchao_examples())
