"""Checkpoints of AWQ compute what the codes, zero points and scales in them say.

The writer here packs code by code as AutoAWQ 0.2 does in ``WQLinear_GEMM.from_linear`` of
``awq/modules/linear/gemm.py``. It is written for these tests, in numpy, and shares nothing with
what it checks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.landing import num_examples
from transformers import AwqConfig

from interposer import Capability, Config, Device, Resolver, Site, current_registry, explain
from interposer.errors import CheckpointError, ConfigError, UnknownNameError
from interposer_engine import load
from interposer_ops.layers.linear import Linear, MergedLinear, PlainLinear
from interposer_quantization._awq.config import Settings
from interposer_quantization._awq.scheme import AWQ
from interposer_testing import conformance

SOURCE = Path(__file__).parents[2] / "examples" / "models" / "stdlib-lm"
DEVICE = Device("cpu", "cpu", "test", Capability("any"))
TOKENS = [token * 37 % 4096 for token in range(40)]
# The output of each word that stands at bits 0 to 3, at 4 to 7 and so on.
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


def packed(codes: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return int32 words, each of which takes eight codes of a row."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place, output in enumerate(INTERLEAVED):
            words[:, word] |= codes[:, 8 * word + output].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


class Quantized:
    """A weight ``[O, I]`` rounded to nearest: its stored tensors, and their numbers."""

    def __init__(self, weight: torch.Tensor, group_size: int, zero_point: bool = True) -> None:
        size = weight.shape[1] if group_size == -1 else group_size
        grouped = weight.unflatten(1, (-1, size))
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        if not zero_point:
            high = torch.maximum(-low, high)
            low = -high
        self.scales = ((high - low).clamp(min=1e-4) / 15).half()
        self.zeros = (-low / self.scales.float()).round().clamp(0, 15)
        if not zero_point:
            self.zeros.fill_(8)
        scale, zero = self.scales.float()[..., None], self.zeros[..., None]
        codes = (grouped / scale + zero).round().clamp(0, 15)
        self.codes = codes.flatten(1)
        # At most 5 bits times 11: float32 holds the product exactly.
        self.weight = ((codes - zero) * scale).flatten(1)

    @property
    def stored(self) -> Tensors:
        return {
            "qweight": packed(self.codes.numpy().T),
            "qzeros": packed(self.zeros.numpy().T),
            "scales": self.scales.T.contiguous(),
        }


def awq(group_size: int = 16, **settings_: Any) -> dict[str, Any]:
    plain = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
    return {**plain, "group_size": group_size, **settings_}


def write(path: Path, config: dict[str, Any], plain: Path) -> Path:
    """Write the shipped model quantized, and what its weights then stand for to ``plain``."""
    stored: Tensors = {}
    expected: Tensors = {}
    tensors = load_file(SOURCE / "model.safetensors")
    if config.get("lm_head"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        skipped = any(part in layer for part in config.get("modules_to_not_convert", []))
        if not layer.endswith(("_proj", "lm_head")) or skipped:
            stored[name] = expected[name] = tensor
            continue
        quantized = Quantized(tensor.float(), config["group_size"], config["zero_point"])
        stored |= {f"{layer}.{key}": value for key, value in quantized.stored.items()}
        expected[name] = quantized.weight
    facts = json.loads((SOURCE / "config.json").read_text(encoding="utf-8"))
    facts["tie_word_embeddings"] = "lm_head.weight" not in tensors
    both = (path, stored, {"quantization_config": config}), (plain, expected, dict[str, Any]())
    for folder, tensors, extra in both:
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**facts, **extra}), encoding="utf-8")
        shutil.copy(SOURCE / "tokenizer.json", folder)
    return path


def built(config: dict[str, Any], parts: dict[str, int], inputs: int, bias: bool = False) -> Linear:
    resolver = Resolver(current_registry(), DEVICE, Config(canary="off"), AWQ.parse(config))
    site = Site(resolver, "block", torch.float32)
    if len(parts) == 1:
        ((name, size),) = parts.items()
        return Linear(site.at(name), inputs, size, bias)
    return MergedLinear(site.at("fused"), inputs, parts, bias)


def fill(layer: Linear, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        parameter = layer.get_parameter(name)
        assert parameter.shape == tensor.shape
        parameter.copy_(tensor)


@given(
    group_size=st.sampled_from([-1, 8, 10, 20, 40]),
    zero_point=st.booleans(),
    outputs=st.sampled_from([8, 24, 40]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=num_examples(60))
def test_layer_multiplies_by_the_stored_weight(
    group_size: int, zero_point: bool, outputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, 40, generator=generator) + torch.randn(1, generator=generator)
    quantized = Quantized(weight, group_size, zero_point)
    layer = built(awq(group_size, zero_point=zero_point), {"o_proj": outputs}, 40)
    fill(layer, quantized.stored)
    expected = layer.method.dequantized(layer)
    assert expected is not None
    assert torch.equal(expected, quantized.weight.double())
    layer.finalize()
    x = torch.randn(2, 3, 40, generator=generator)
    # Each of n additions and the products before them err by at most u of a partial sum, and the
    # kernel may multiply by the scale after adding, so twice.
    terms = x.double().abs() @ expected.abs().T
    bound = 2 * (40 + 2) * torch.finfo(torch.float32).eps * terms + 1e-9
    assert ((layer(x).double() - x.double() @ expected.T).abs() <= bound).all()


def test_packed_int32_interleaves_the_values() -> None:
    """The numbers are those of the format, stated without any packer."""
    layer = built(awq(1), {"o_proj": 8}, 1)
    weight = torch.tensor([[0x75316420]], dtype=torch.int32)  # outputs 0 to 7 hold 0 to 7
    zeros = torch.tensor([[0x00000010]], dtype=torch.int32)  # output 2 holds 1
    layer.get_parameter("qweight").copy_(weight)
    fill(layer, {"qzeros": zeros, "scales": torch.full((1, 8), 0.5)})
    actual = layer.method.dequantized(layer)
    assert actual is not None
    assert actual.flatten().tolist() == [0, 0.5, 0.5, 1.5, 2, 2.5, 3, 3.5]


VARIANTS = {
    "groups of 16": awq(),
    "per output": awq(-1, version="GEMM"),
    "symmetric": awq(zero_point=False),
    "head": awq(lm_head=True),
    "some left plain": awq(modules_to_not_convert=["mlp.down_proj", "layers.2.", "lm_head"]),
}


@pytest.mark.landing(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_dequantized_model(variant: str, tmp_path: Path) -> None:
    path = write(tmp_path / "stored", VARIANTS[variant], tmp_path / "meant")
    expected = load(tmp_path / "meant", dtype="float32").logits(TOKENS)
    # Both models multiply by the same float32 weights. The rounding errors of a sum of n terms, a
    # product and an addition each, are independent: their deviation is sqrt(2 n) u of the
    # magnitude. 256 (qkv) + 256 (o) + 256 (gate, up) + 688 (down) terms lie on the way through each
    # of 6 blocks and 256 in the head, in two models; eight deviations are allowed.
    terms = 6 * (3 * 256 + 688) + 256
    bound = float(8 * (2 * 2 * terms) ** 0.5 * 2**-24 * expected.abs().max())
    assert (load(path, dtype="float32").logits(TOKENS) - expected).abs().max() <= bound
    original = load(SOURCE, dtype="float32").logits(TOKENS)
    assert (original - expected).abs().max() > 10 * bound, "nothing is compared"


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model in groups of 16."""
    path = tmp_path_factory.mktemp("awq")
    return write(path / "stored", awq(), path / "meant")


def test_finalized_layer_keeps_one_copy_of_the_weight(grouped: Path) -> None:
    # Another kernel may hold its own form of them.
    config = Config(kernels={"w4a16_linear": "reference"})
    for layer in load(grouped, dtype="bfloat16", config=config).engine.model.modules():
        if isinstance(layer, Linear):
            assert list(layer.parameters()) == []
            weight, scale, bias, zeros = layer.operands
            assert weight.shape == (sum(layer.parts.values()), layer.in_features // 2)
            assert (weight.dtype, zeros.dtype, scale.dtype) == (torch.uint8,) * 2 + (torch.float32,)
            assert bias is None


def test_fused_layer_equals_separate_layers() -> None:
    parts = {"q_proj": 24, "k_proj": 8, "v_proj": 8}
    generator = torch.Generator().manual_seed(2)
    whole, x = torch.randn(40, 48, generator=generator), torch.randn(3, 48, generator=generator)
    offset = torch.randn(40, generator=generator)
    fused, outputs, tensors = built(awq(), parts, 48, bias=True), [], []
    for size, rows, added in zip(
        parts.values(), whole.split([24, 8, 8]), offset.split([24, 8, 8]), strict=True
    ):
        stored = Quantized(rows, 16).stored
        part = built(awq(), {"o_proj": size}, 48, bias=True)
        fill(part, stored | {"bias": added})
        part.finalize()
        outputs.append(part(x))
        tensors.append(stored)
    fill(fused, {name: torch.cat([each[name] for each in tensors], 1) for name in tensors[0]})
    fused.get_parameter("bias").copy_(offset)
    fused.finalize()
    torch.testing.assert_close(fused(x), torch.cat(outputs, -1))


def test_modules_to_not_convert_stay_plain(tmp_path: Path) -> None:
    path = write(tmp_path / "stored", VARIANTS["some left plain"], tmp_path / "meant")
    lm = load(path, dtype="float32")
    for layer in lm.engine.model.modules():
        if isinstance(layer, Linear):
            plain = layer.prefix.endswith("down_proj") or ".layers.2." in layer.prefix
            assert isinstance(layer.method, PlainLinear) == plain
    choices = explain(lm).to_dict()["choices"]
    (scheme,) = (choice for choice in choices if choice["kind"] == "scheme")
    assert (scheme["name"], scheme["provider"]) == ("awq", "interposer-quantization")


V_PROJ = "model.layers.3.self_attn.v_proj"


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("scales", lambda s: s * 0, r"v_proj\.scales: holds 2048 scales .* 0\.0 for group 0"),
        ("scales", lambda s: s / 0, r"v_proj\.scales: .* inf for group 0"),
        ("scales", lambda s: -s / 0, r"v_proj\.scales: .* -inf for group 0"),
        ("scales", lambda s: s * torch.nan, r"v_proj\.scales: .* nan for group 0"),
        ("scales", lambda s: s[:, 1:], r"v_proj\.scales' has shape \[16, 127\].* \[16, 128\]"),
        ("qweight", lambda w: w.T, r"v_proj\.qweight' has shape \[16, 256\].* \[256, 16\]"),
        ("qweight", lambda w: w.long(), r"v_proj\.qweight' is stored as torch.int64"),
        ("qzeros", lambda z: z[:8], r"v_proj\.qzeros' has shape \[8, 16\].* \[16, 16\]"),
        ("qzeros", None, r"lacks the tensor '.*v_proj\.qzeros'"),
        ("g_idx", torch.zeros, r"v_proj\.g_idx', which the model has no place for"),
    ],
)
def test_invalid_tensors_are_refused_with_their_name(
    grouped: Path, tmp_path: Path, name: str, change: Callable[[Any], Any] | None, message: str
) -> None:
    shutil.copytree(grouped, tmp_path, dirs_exist_ok=True)
    tensors = load_file(grouped / "model.safetensors")
    stored = tensors.pop(f"{V_PROJ}.{name}", 256)
    if change is not None:
        tensors[f"{V_PROJ}.{name}"] = change(stored).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_zero_points_in_a_symmetric_checkpoint_are_refused() -> None:
    layer = built(awq(zero_point=False), {"q_proj": 8, "k_proj": 8}, 48)
    quantized = Quantized(torch.randn(16, 48), 16, zero_point=False)
    quantized.zeros[12, 1] = 3
    fill(layer, quantized.stored)
    with pytest.raises(CheckpointError, match=r"block\.k_proj\.qzeros: .* point 3 for group 1.* 8"):
        layer.finalize()


@pytest.mark.parametrize(
    ("group_size", "parts", "inputs", "message"),
    [
        (48, {"o_proj": 8}, 64, r"block\.o_proj: groups of 48 do not divide its 64 inputs"),
        (128, {"o_proj": 8}, 64, r"groups of 128 do not divide its 64 inputs"),
        (-1, {"o_proj": 12}, 64, r"64 inputs and 12 outputs, which do not fill words of 8 values"),
        (-1, {"q_proj": 12, "k_proj": 4}, 64, r"block\.fused: q_proj has 64 inputs and 12 outputs"),
    ],
)
def test_sizes_that_the_packing_cannot_store_are_refused(
    group_size: int, parts: dict[str, int], inputs: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built(awq(group_size), parts, inputs)


def test_fused_layers_with_different_quantization_are_refused() -> None:
    scheme = AWQ.parse(awq(modules_to_not_convert=["k_proj"]))
    with pytest.raises(ConfigError, match=r"a\.q_proj: 4 bits per group of 16(.|\n)*k_proj: not q"):
        scheme.linear_method("a.qkv_proj", ("q_proj", "k_proj", "v_proj"))
    assert scheme.linear_method("a.k_proj", ("k_proj",)) is None
    assert scheme.linear_method("lm_head", ("lm_head",)) is None


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"version": "gemv"}, r"version = 'gemv': Input should be 'gemm'"),
        ({"version": "GEMV_fast"}, r"version = '(gemv_fast|GEMV_fast)'"),
        ({"version": "marlin"}, r"version = 'marlin'"),
        ({"version": "ipex"}, r"version = 'ipex'"),
        ({"format": "exllama"}, r"format = 'exllama'"),
        ({"checkpoint_format": "gemv_fast"}, r"checkpoint_format = 'gemv_fast'"),
        ({"dynamic": {"-:.*": {}}}, r"dynamic = "),
        ({"lm_head": "yes"}, r"lm_head = 'yes'"),
        ({"backend": "llm-awq"}, r"backend = 'llm-awq': another writer"),
        ({"bits": 8}, r"bits = 8"),
        ({"group_size": 0}, r"group_size = 0: must be positive, or -1"),
        ({"zero_point": 1}, r"zero_point = 1"),
        ({"desc_act": True}, r"desc_act = True"),
        ({"modules_to_not_convert": "lm_head"}, r"modules_to_not_convert = 'lm_head'"),
        ({"quant_method": "gptq"}, r"quant_method = 'gptq'"),
    ],
)
def test_unsupported_settings_are_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Settings.parse(awq() | settings_)
    assert "version 'gemm'" in str(caught.value)


def test_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="in quantization_config") as caught:
        Settings.parse(awq() | {"zero_points": True})
    assert caught.value.known[0] == "zero_point"


# As AutoAWQ, transformers and auto-round write it.
WRITTEN: list[dict[str, Any]] = [
    {"quant_method": "awq", "zero_point": True, "group_size": 16, "bits": 4, "version": "gemm"},
    awq(modules_to_not_convert=None),
    awq(
        backend="autoawq",
        do_fuse=False,
        exllama_config=None,
        fuse_max_seq_len=None,
        modules_to_fuse=None,
        modules_to_not_convert=None,
    ),
    awq(provider="auto-round", autoround_version="0.16.1", sym=False),
    awq(
        checkpoint_format="gemm",
        desc_act=False,
        format="gemm",
        lm_head=False,
        meta={"quantizer": ["gptqmodel:5.6.12"]},
        method="awq",
        pack_dtype="int32",
    ),
    awq(format="gemm", desc_act=False, sym=True, act_group_aware=True, backend="auto", meta=None),
]


def test_settings_of_transformers_are_read() -> None:
    written = json.loads(json.dumps(AwqConfig(group_size=-1).to_dict()))
    assert str(Settings.parse(written).stored("a.b")) == "4 bits per output, asymmetric"


@pytest.mark.parametrize("config", WRITTEN)
def test_settings_of_other_exporters_are_read(config: dict[str, Any]) -> None:
    weights = Settings.parse(config).stored("model.layers.0.mlp.down_proj")
    assert weights is not None
    assert (weights.inputs_per_scale, weights.symmetric) == (16, False)


def test_conformance_suite_runs_the_examples() -> None:
    actual = conformance(current_registry(), DEVICE, distribution="interposer-quantization")
    # The trials themselves are run in ops/tests/test_conformance.py, among all that is installed.
    trials = [t for t in actual if t.aspect == "scheme" and t.request.name == "awq"]
    assert {"groups of 32", "symmetric"} <= {trial.label for trial in trials if trial.verdict}
