"""Checkpoints of GPTQ compute what the codes, zero points, scales and groups in them say.

The writer here packs word by word as AutoGPTQ 0.7 does in ``QuantLinear.pack`` of
``nn_modules/qlinear/qlinear_cuda.py``. The second format, of GPTQModel, stores zero points as they
are, and its first one is the second less a one in each code of a word, taken from the whole word.
It is written for these tests, in numpy, and shares nothing with what it checks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.landing import num_examples
from transformers import GPTQConfig

from interposer import Capability, Config, Device, Resolver, Site, current_registry, explain
from interposer.errors import CheckpointError, ConfigError, NoCandidateError, UnknownNameError
from interposer_engine import load
from interposer_ops.layers.linear import Linear, MergedLinear, PlainLinear
from interposer_quantization._gptq.config import Settings
from interposer_quantization._gptq.scheme import GPTQ
from interposer_testing import conformance

SOURCE = Path(__file__).parents[2] / "examples" / "models" / "stdlib-lm"
DEVICE = Device("cpu", "cpu", "test", Capability("any"))
TOKENS = [token * 37 % 4096 for token in range(40)]
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], None]


def packed(rows: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """Return int32 words, each of which takes its codes from consecutive rows."""
    words = np.zeros((len(rows) * bits // 32, rows.shape[1]), dtype=np.uint32)
    for row, codes in enumerate(rows.astype(np.uint32)):
        word, place = divmod(row, 32 // bits)
        words[word] |= codes << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32))


class Quantized:
    """A weight ``[O, I]`` rounded to nearest: its stored tensors, and their numbers."""

    def __init__(self, weight: torch.Tensor, config: dict[str, Any], seed: int = 0) -> None:
        bits, inputs = config["bits"], weight.shape[1]
        size = inputs if config["group_size"] == -1 else config["group_size"]
        order = torch.arange(inputs)
        if config.get("desc_act"):
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
        self.groups = order // size
        grouped = [weight[:, self.groups == group] for group in range(inputs // size)]
        low = torch.stack([part.amin(1) for part in grouped], 1).clamp(max=0)
        high = torch.stack([part.amax(1) for part in grouped], 1).clamp(min=0)
        last, middle = 2**bits - 1, 2 ** (bits - 1)
        if config.get("sym", True):
            reach = torch.maximum(-low, high).clamp(min=1e-4)
            low, high = -reach, reach
        self.scales = ((high - low).clamp(min=1e-4) / last).half()
        self.zeros = (-low / self.scales.float()).round().clamp(0, last)
        if config.get("sym", True):
            self.zeros.fill_(middle)
        scale, zero = self.scales.float()[:, self.groups], self.zeros[:, self.groups]
        self.codes = (weight / scale + zero).round().clamp(0, last)
        # At most 9 bits times 11: float32 holds the product exactly.
        self.weight = (self.codes - zero) * scale

    def stored(self, config: dict[str, Any]) -> Tensors:
        bits = config["bits"]
        zeros = packed(self.zeros.numpy(), bits).T.contiguous()
        if config.get("checkpoint_format", "gptq") == "gptq":
            zeros -= 0x11111111 if bits == 4 else 0x01010101
        return {
            "qweight": packed(self.codes.numpy().T, bits),
            "qzeros": zeros,
            "scales": self.scales.T.contiguous(),
            "g_idx": self.groups.to(torch.int32),
        }


def gptq(bits: int = 4, group_size: int = 16, **settings_: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **settings_}


def write(path: Path, config: dict[str, Any], plain: Path | None = None) -> Path:
    """Write the shipped model quantized, and what its weights then stand for to ``plain``."""
    scheme, stored, expected = Settings.parse(config), {}, {}
    tensors = load_file(SOURCE / "model.safetensors")
    if config.get("lm_head"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        how = scheme.stored(layer) if layer.endswith(("_proj", "lm_head")) else None
        if how is None:
            stored[name] = expected[name] = tensor
            continue
        own = config | {"bits": how.bits, "sym": how.symmetric}
        own["group_size"] = how.inputs_per_scale or -1
        quantized = Quantized(tensor.float(), own)
        stored |= {f"{layer}.{key}": value for key, value in quantized.stored(own).items()}
        expected[name] = quantized.weight
    facts = json.loads((SOURCE / "config.json").read_text(encoding="utf-8"))
    facts["tie_word_embeddings"] = "lm_head.weight" not in tensors
    for folder, tensors, extra in (
        (path, stored, {"quantization_config": config}),
        (plain, expected, {}),
    ):
        if folder is not None:
            folder.mkdir(exist_ok=True)
            save_file(tensors, folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps({**facts, **extra}), encoding="utf-8")
            shutil.copy(SOURCE / "tokenizer.json", folder)
    return path


def built(config: dict[str, Any], parts: dict[str, int], inputs: int, bias: bool = False) -> Linear:
    resolver = Resolver(current_registry(), DEVICE, Config(canary="off"), GPTQ.parse(config))
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


CONFIGS = st.fixed_dictionaries(
    {
        "bits": st.sampled_from([4, 8]),
        "group_size": st.sampled_from([-1, 8, 12, 24, 48]),
        "sym": st.booleans(),
        "desc_act": st.booleans(),
        "checkpoint_format": st.sampled_from(["gptq", "gptq_v2"]),
    }
)


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a float32 product in any order of its sums could have given ``found``.

    Each of n additions and the products before them err by at most u of a partial sum, and the
    kernel may multiply by the scale after adding, so twice.
    """
    terms = x.double().abs() @ weight.double().abs().T
    bound = 2 * (weight.shape[1] + 2) * torch.finfo(torch.float32).eps * terms + 1e-9
    return bool(((found.double() - x.double() @ weight.double().T).abs() <= bound).all())


@given(config=CONFIGS, seed=st.integers(0, 2**31), outputs=st.sampled_from([8, 24, 40]))
@settings(max_examples=num_examples(80))
def test_layer_multiplies_by_the_stored_weight(
    config: dict[str, Any], seed: int, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, 48, generator=generator) + torch.randn(1, generator=generator)
    quantized = Quantized(weight, config, seed)
    layer = built(config, {"o_proj": outputs}, 48)
    fill(layer, quantized.stored(config))
    expected = layer.method.dequantized(layer)
    assert expected is not None
    assert torch.equal(expected, quantized.weight.double())
    layer.finalize()
    x = torch.randn(2, 3, 48, generator=generator)
    assert close(layer(x), x, quantized.weight)


def test_first_value_is_in_the_lowest_bits() -> None:
    """The numbers are those of the format, stated without any packer."""
    layer = built(gptq(4, 8, sym=False), {"o_proj": 8}, 8)
    words = torch.full((1, 8), 0x76543210, dtype=torch.int32)
    zeros = torch.tensor([[0x06543210]], dtype=torch.int32)  # 1 to 7 and, less one, 0
    groups = torch.zeros(8, dtype=torch.int32)
    fill(layer, {"qweight": words, "qzeros": zeros, "scales": torch.ones(1, 8), "g_idx": groups})
    actual = layer.method.dequantized(layer)
    zero_points = torch.tensor([1, 2, 3, 4, 5, 6, 7, 1]).double()
    assert actual is not None
    assert torch.equal(actual, torch.arange(8).double() - zero_points[:, None])


@pytest.mark.parametrize(("bits", "one"), [(4, 0x11111111), (8, 0x01010101)])
def test_zero_point_of_zero_that_borrows_from_its_neighbour_is_read(bits: int, one: int) -> None:
    layer = built(gptq(bits, -1, sym=False), {"o_proj": 8}, 8)
    count = 8 * bits // 32
    minus_ones = torch.full((1, count), -one, dtype=torch.int32)
    ones = torch.full((count, 8), one, dtype=torch.int32)
    groups = torch.zeros(8, dtype=torch.int32)
    fill(
        layer, {"qweight": ones, "qzeros": minus_ones, "scales": torch.ones(1, 8), "g_idx": groups}
    )
    actual = layer.method.dequantized(layer)
    assert actual is not None
    assert (actual == 1).all()


def bound_of(expected: torch.Tensor) -> float:
    """Return the tolerance of logits that were summed in float32 in two orders.

    Both models multiply by the same float32 weights. The rounding errors of a sum of n terms, a
    product and an addition each, are independent: their deviation is sqrt(2 n) u of the magnitude.
    256 (qkv) + 256 (o) + 256 (gate, up) + 688 (down) terms lie on the way through each of 6 blocks
    and 256 in the head, in two models; eight deviations are allowed.
    """
    terms = 6 * (3 * 256 + 688) + 256
    return float(8 * (2 * 2 * terms) ** 0.5 * 2**-24 * expected.abs().max())


VARIANTS = {
    "4 bits": gptq(sym=True, desc_act=False),
    "4 bits, asymmetric": gptq(sym=False, desc_act=False),
    "4 bits, act order": gptq(sym=False, desc_act=True),
    "8 bits, second format": gptq(8, sym=True, checkpoint_format="gptq_v2", desc_act=False),
    "8 bits, act order": gptq(8, sym=False, checkpoint_format="gptq_v2", desc_act=True),
    "per output": gptq(4, -1, desc_act=True),
    "some modules": gptq(
        8, modules_in_block_to_quantize=[["self_attn.o_proj"], ["mlp.up_proj", "mlp.gate_proj"]]
    ),
    # As GPTQModel writes it of a head about which nothing else was said.
    "head": gptq(
        lm_head=True,
        dynamic={
            "lm_head": {"bits": 8, "group_size": 32, "sym": True, "desc_act": False, "mse": 2.4}
        },
    ),
    "overrides": gptq(
        dynamic={
            r"-:model\.layers\.[01]\.": {},
            r"+:.*down_proj": {"bits": 8, "sym": False},
            r".*\.self_attn\.": {"group_size": 64},
        }
    ),
}


@pytest.mark.landing(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_dequantized_model(variant: str, tmp_path: Path) -> None:
    path = write(tmp_path / "stored", VARIANTS[variant], tmp_path / "meant")
    expected = load(tmp_path / "meant", dtype="float32").logits(TOKENS)
    error = (load(path, dtype="float32").logits(TOKENS) - expected).abs().max()
    assert error <= bound_of(expected)
    original = load(SOURCE, dtype="float32").logits(TOKENS)
    assert (original - expected).abs().max() > 10 * bound_of(expected), "nothing is compared"


@pytest.fixture(scope="module")
def act_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model in 4 bits with act order."""
    config = gptq(sym=False, desc_act=True)
    return write(tmp_path_factory.mktemp("gptq") / "stored", config)


def test_finalized_layer_keeps_one_copy_of_the_weight(act_order: Path) -> None:
    # Another kernel may hold its own form of them.
    config = Config(kernels={"w4a16_linear": "reference"})
    for layer in load(act_order, dtype="bfloat16", config=config).engine.model.modules():
        if isinstance(layer, Linear):
            assert list(layer.parameters()) == []
            order, weight, scale, bias, zeros = layer.operands
            assert weight.shape == (sum(layer.parts.values()), layer.in_features // 2)
            assert (weight.dtype, zeros.dtype, scale.dtype) == (torch.uint8,) * 2 + (torch.float32,)
            assert order.shape == (layer.in_features,)
            assert bias is None


def test_inputs_are_sorted_only_if_groups_are_not_consecutive() -> None:
    for desc_act in (False, True):
        config = gptq(desc_act=desc_act)
        layer = built(config, {"o_proj": 8}, 48)
        fill(layer, Quantized(torch.randn(8, 48), config, 1).stored(config))
        layer.finalize()
        assert len(layer.operands) == (5 if desc_act else 4)


def test_act_order_may_be_trivial() -> None:
    config = gptq(desc_act=True)
    layer = built(config, {"o_proj": 8}, 48)
    fill(layer, Quantized(torch.randn(8, 48), gptq()).stored(config))
    layer.finalize()
    assert len(layer.operands) == 4


@pytest.mark.parametrize("desc_act", [False, True])
def test_fused_layer_equals_separate_layers(desc_act: bool) -> None:
    parts, config = {"q_proj": 24, "k_proj": 8, "v_proj": 8}, gptq(desc_act=desc_act, sym=False)
    generator = torch.Generator().manual_seed(2)
    whole, x = torch.randn(40, 48, generator=generator), torch.randn(3, 48, generator=generator)
    fused, outputs, tensors = built(config, parts, 48, bias=True), [], []
    offset = torch.randn(40, generator=generator)
    for size, rows, added in zip(
        parts.values(), whole.split([24, 8, 8]), offset.split([24, 8, 8]), strict=True
    ):
        stored = Quantized(rows, config, 5).stored(config)
        part = built(config, {"o_proj": size}, 48, bias=True)
        fill(part, stored | {"bias": added})
        part.finalize()
        outputs.append(part(x))
        tensors.append(stored)
    for name in ("qweight", "qzeros", "scales"):
        fused.get_parameter(name).copy_(torch.cat([each[name] for each in tensors], 1))
    fused.get_parameter("g_idx").copy_(torch.cat([each["g_idx"] for each in tensors]))
    fused.get_parameter("bias").copy_(offset)
    fused.finalize()
    torch.testing.assert_close(fused(x), torch.cat(outputs, -1))


def test_explanation_states_the_sizes(act_order: Path) -> None:
    choices = explain(load(act_order, dtype="float32")).to_dict()["choices"]
    (scheme,) = (choice for choice in choices if choice["kind"] == "scheme")
    assert (scheme["name"], scheme["provider"]) == ("gptq", "interposer-quantization")
    (down,) = (
        c for c in choices if c["name"] == "w4a16_linear" and c["dims"]["in_features"] == 688
    )
    assert down["dims"] == {
        "in_features": 688,
        "out_features": 256,
        "group_size": 16,
        "num_groups": 43,
        "asymmetric": True,
        "scale_dtype": "float32",
        "biased": False,
    }


def test_emulation_is_explained_and_can_be_refused(act_order: Path) -> None:
    only = {"w4a16_linear": {"forbid": ["interposer-cpu/*", "*_triton"]}}
    lm = load(act_order, dtype="float32", config=Config(kernels=only))
    assert "note: an emulation: it dequantizes, then multiplies floats" in str(explain(lm))
    with pytest.raises(NoCandidateError) as caught:
        load(act_order, dtype="float32", config=Config(kernels=only, emulation=False))
    reasons = {r.candidate: r.reason for r in caught.value.refusals}
    assert reasons["reference"].startswith("an emulation, which the configuration refuses")


def test_overrides_leave_layers_plain(tmp_path: Path) -> None:
    path = write(tmp_path / "stored", VARIANTS["overrides"])
    for layer in load(path, dtype="float32").engine.model.modules():
        if isinstance(layer, Linear):
            plain = layer.prefix.startswith(("model.layers.0.", "model.layers.1."))
            assert isinstance(layer.method, PlainLinear) == plain


K_PROJ = "model.layers.3.self_attn.k_proj"


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(tensors: Tensors) -> None:
        key = f"{K_PROJ}.{name}"
        tensors[key] = change(tensors[key].clone()).contiguous()

    return edit


def without(name: str) -> Edit:
    def edit(tensors: Tensors) -> None:
        del tensors[f"{K_PROJ}.{name}"]

    return edit


def at(place: Any, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (changed("g_idx", at(5, 16)), r"k_proj\.g_idx: holds the group 16 for input 5.* 0 to 15"),
        (changed("g_idx", at(0, -1)), r"k_proj\.g_idx: holds the group -1 for input 0"),
        (changed("g_idx", lambda g: g * 0), r"k_proj\.g_idx: assigns 256 inputs to group 0.* 16"),
        (changed("g_idx", lambda g: g.roll(1)), r"k_proj\.g_idx: differs from .*q_proj\.g_idx"),
        (changed("g_idx", lambda g: g[:-1]), r"k_proj\.g_idx' has shape \[255\].* \[256\]"),
        (changed("g_idx", lambda g: g.long()), r"k_proj\.g_idx' is stored as torch.int64"),
        (changed("scales", at((3, 7), 0)), r"k_proj\.scales: holds 1 scales.* 0\.0 for group 3"),
        (changed("scales", at((0, 0), float("nan"))), r"k_proj\.scales: .*nan for group 0"),
        (changed("scales", at((1, 127), float("-inf"))), r"k_proj\.scales: .*-inf for group 1"),
        (changed("scales", lambda s: s[:1]), r"k_proj\.scales' has shape \[1, 128\]"),
        (changed("scales", lambda s: s.int()), r"k_proj\.scales' is stored as torch.int32"),
        (changed("qweight", lambda w: w[:-1]), r"k_proj\.qweight' has shape \[31, 128\]"),
        (changed("qzeros", lambda z: z[:, :-1]), r"k_proj\.qzeros' has shape \[16, 15\]"),
        (without("g_idx"), r"lacks the tensor '.*k_proj\.g_idx'"),
        (without("qzeros"), r"lacks the tensor '.*k_proj\.qzeros'"),
    ],
)
def test_invalid_tensors_are_refused_with_their_name(
    act_order: Path, tmp_path: Path, edit: Edit, message: str
) -> None:
    shutil.copytree(act_order, tmp_path, dirs_exist_ok=True)
    tensors = load_file(act_order / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def biased(name: str, value: float) -> Edit:
    """Add what AutoGPTQ stores for every layer: a bias, of zeros but for one number."""

    def edit(tensors: Tensors) -> None:
        for scales in [key for key in tensors if key.endswith("_proj.scales")]:
            layer = scales.removesuffix(".scales")
            offsets = torch.zeros(tensors[scales].shape[1], dtype=torch.float16)
            offsets[5] = value if layer == name else -0.0
            tensors[f"{layer}.bias"] = offsets

    return edit


def test_biases_of_zeros_are_left_out(act_order: Path, tmp_path: Path) -> None:
    shutil.copytree(act_order, tmp_path, dirs_exist_ok=True)
    tensors = load_file(act_order / "model.safetensors")
    expected = load(act_order, dtype="float32").logits(TOKENS)
    biased(K_PROJ, 0.0)(tensors)
    assert sum(name.endswith(".bias") for name in tensors) == 6 * 7
    save_file(tensors, tmp_path / "model.safetensors")
    lm = load(tmp_path, dtype="float32")
    assert torch.equal(lm.logits(TOKENS), expected)
    assert all(
        layer._parameters["bias"] is None
        for layer in (m for m in lm.engine.model.modules() if isinstance(m, Linear))
    )
    assert lm.update_weights(tensors) == ()
    assert torch.equal(lm.logits(TOKENS), expected)


@pytest.mark.landing(1)
@pytest.mark.parametrize("layer", [K_PROJ, "model.layers.3.mlp.down_proj"])
@pytest.mark.parametrize("value", [2.0**-24, float("nan")])
def test_nonzero_biases_are_refused_if_the_model_has_none(
    act_order: Path, tmp_path: Path, layer: str, value: float
) -> None:
    shutil.copytree(act_order, tmp_path, dirs_exist_ok=True)
    tensors = load_file(act_order / "model.safetensors")
    biased(layer, value)(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    outputs = len(tensors[f"{layer}.bias"])
    message = rf"'{layer}\.bias', 1 of whose {outputs} numbers are not 0, but the model has no bias"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
    lm = load(act_order, dtype="float32")
    expected = lm.logits(TOKENS)
    with pytest.raises(CheckpointError, match=message):
        lm.update_weights(tensors)
    assert torch.equal(lm.logits(TOKENS), expected)


def test_biases_of_unknown_layers_are_refused(act_order: Path, tmp_path: Path) -> None:
    shutil.copytree(act_order, tmp_path, dirs_exist_ok=True)
    tensors = load_file(act_order / "model.safetensors")
    tensors["model.layers.0.mlp.bias"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.bias', which the model has no"):
        load(tmp_path)


def test_negative_scales_are_read() -> None:
    config = gptq()
    layer = built(config, {"o_proj": 8}, 48)
    stored = Quantized(torch.randn(8, 48), config).stored(config)
    fill(layer, stored | {"scales": -stored["scales"]})
    layer.finalize()


def test_groups_out_of_order_contradict_desc_act_false() -> None:
    ordered = gptq(desc_act=False)
    layer = built(ordered, {"o_proj": 8}, 48)
    fill(layer, Quantized(torch.randn(8, 48), gptq(desc_act=True), 1).stored(ordered))
    with pytest.raises(CheckpointError, match=r"block\.o_proj\.g_idx: .* though desc_act is false"):
        layer.finalize()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_symmetric_weights_of_the_other_format_are_read(form: str, bits: int) -> None:
    """Checkpoints are published that name the first format and store the second."""
    named = gptq(bits, checkpoint_format=form)
    other = gptq(bits, checkpoint_format="gptq_v2" if form == "gptq" else "gptq")
    quantized = Quantized(torch.randn(8, 48), other)
    layer = built(named, {"o_proj": 8}, 48)
    fill(layer, quantized.stored(other))
    expected = layer.method.dequantized(layer)
    assert expected is not None
    assert torch.equal(expected, quantized.weight.double())
    layer.finalize()
    x = torch.randn(3, 48)
    assert close(layer(x), x, quantized.weight)


@pytest.mark.parametrize(("form", "points"), [("gptq", (8, 9)), ("gptq_v2", (7, 8))])
def test_other_zero_points_are_refused_if_sym_is_true(form: str, points: tuple[int, int]) -> None:
    config = gptq(checkpoint_format=form)
    quantized = Quantized(torch.randn(16, 48), config)
    for place, point in (((12, 1), 3), ((slice(8), slice(None)), points[0] + points[1] - 8)):
        quantized.zeros[place] = point  # one of a kind, and all of one layer only
        layer = built(config, {"q_proj": 8, "k_proj": 8}, 48)
        stored = quantized.stored(config)
        fill(layer, stored | {"g_idx": stored["g_idx"].repeat(2)})
        name = "k_proj" if point == 3 else "q_proj"
        with pytest.raises(CheckpointError, match=rf"\.{name}\.qzeros: .* point {point}.* are 8"):
            layer.finalize()
        quantized.zeros.fill_(8)


@pytest.mark.parametrize(
    ("config", "parts", "inputs", "message"),
    [
        (gptq(4, 48), {"o_proj": 8}, 64, r"block\.o_proj: groups of 48 do not divide its 64"),
        (gptq(4, 128), {"o_proj": 8}, 64, r"groups of 128 do not divide its 64 inputs"),
        (gptq(4, -1), {"o_proj": 8}, 60, r"60 inputs and 8 outputs, which do not fill words of 8"),
        (gptq(4, -1), {"o_proj": 12}, 64, r"64 inputs and 12 outputs, which do not fill words"),
        (
            gptq(4, -1),
            {"q_proj": 12, "k_proj": 4},
            64,
            r"block\.fused: q_proj has 64 .* 12 outputs",
        ),
        (gptq(8, -1), {"o_proj": 4}, 66, r"66 inputs and 4 outputs, which do not fill words of 4"),
    ],
)
def test_sizes_that_the_packing_cannot_store_are_refused(
    config: dict[str, Any], parts: dict[str, int], inputs: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built(config, parts, inputs)


def test_fused_layers_with_different_quantization_are_refused() -> None:
    scheme = GPTQ.parse(gptq(dynamic={"-:.*k_proj": {}, ".*up_proj": {"bits": 8}}))
    with pytest.raises(ConfigError, match=r"a\.q_proj: 4 bits per group of 16(.|\n)*k_proj: not q"):
        scheme.linear_method("a.qkv_proj", ("q_proj", "k_proj", "v_proj"))
    with pytest.raises(ConfigError, match=r"mlp\.up_proj: 8 bits per group of 16 inputs"):
        scheme.linear_method("mlp.gate_up_proj", ("gate_proj", "up_proj"))
    assert scheme.linear_method("lm_head", ("lm_head",)) is None


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"bits": 3}, r"bits = 3: .* 4 or 8"),
        ({"bits": "4"}, r"bits = '4'"),
        ({"group_size": 0}, r"group_size = 0: must be positive, or -1"),
        ({"group_size": -2}, r"group_size = -2"),
        ({"sym": "yes"}, r"sym = 'yes'"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format = 'marlin': .*'gptq' or 'gptq_v2'"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, r"format 'gptq_v2' contradicts"),
        ({"is_marlin_format": True}, r"is_marlin_format = True"),
        ({"pack_dtype": "int16"}, r"pack_dtype = 'int16'"),
        ({"lm_head": "yes"}, r"lm_head = 'yes'"),
        ({"dynamic": {".*": {"adapter": {}}}}, r"dynamic\.\.\*\.adapter"),
        ({"dynamic": {".*": {"bits": 2}}}, r"dynamic\.\.\*\.bits = 2"),
        ({"dynamic": {"-:(": {}}}, r"not a regular expression"),
        ({"data_type": "mx_fp"}, r"data_type = 'mx_fp'"),
        ({"act_bits": 8}, r"Unknown setting 'act_bits'"),
        ({"quant_method": "awq"}, r"quant_method = 'awq'"),
    ],
)
def test_unsupported_settings_are_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Settings.parse(gptq() | settings_)
    assert "Supported: bits 4 or 8" in str(caught.value)


def test_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="in quantization_config") as caught:
        Settings.parse(gptq() | {"desc_acts": True})
    assert caught.value.known[0] == "desc_act"
    with pytest.raises(ConfigError, match=r"quantization_config\.bits = missing"):
        Settings.parse({"quant_method": "gptq"})


# As AutoGPTQ, optimum, GPTQModel, transformers and auto-round write it.
WRITTEN: list[dict[str, Any]] = [
    gptq(damp_percent=0.1, desc_act=True, sym=True, true_sequential=True, model_file_base_name="m"),
    gptq(
        batch_size=1,
        block_name_to_quantize=None,
        cache_block_outputs=True,
        exllama_config={"version": 1},
        max_input_length=None,
        model_seqlen=None,
        module_name_preceding_first_block=None,
        modules_in_block_to_quantize=[["self_attn.k_proj"], ["mlp.down_proj"]],
        pad_token_id=None,
        tokenizer=None,
        use_cuda_fp16=False,
        use_exllama=True,
    ),
    gptq(
        checkpoint_format="gptq",
        dynamic=None,
        lm_head=False,
        meta={"quantizer": ["gptqmodel:2.2.0"]},
        pack_dtype="int32",
        static_groups=False,
    ),
    gptq(format="gptq", checkpoint_format="gptq", backend="auto", act_group_aware=True, meta=None),
    gptq(format="gptq", checkpoint_format="gptq", method="gptq", pack_dtype="int32", lm_head=False),
    gptq(
        autoround_version="0.16.1",
        damp_percent=0.01,
        data_type="int",
        desc_act=False,
        enable_quanted_input=False,
        iters=50,
        lm_head=False,
        low_gpu_mem_usage=True,
        provider="auto-round",
        true_sequential=False,
    ),
]


def test_settings_of_transformers_are_read() -> None:
    written = json.loads(json.dumps(GPTQConfig(bits=8, group_size=-1).to_dict()))
    assert (
        str(Settings.parse(written).stored("a.b")) == "8 bits per output, symmetric, desc_act false"
    )


@pytest.mark.parametrize("config", WRITTEN)
def test_settings_of_other_exporters_are_read(config: dict[str, Any]) -> None:
    weights = Settings.parse(config).stored("model.layers.0.mlp.down_proj")
    assert weights is not None
    assert (weights.bits, weights.inputs_per_scale, weights.zeros_minus_one) == (4, 16, True)


def scheme_trials() -> Iterator[Any]:
    actual = conformance(current_registry(), DEVICE, distribution="interposer-quantization")
    return (t for t in actual if t.aspect == "scheme" and t.request.name == "gptq")


def test_conformance_suite_runs_the_examples() -> None:
    # The trials themselves are run in ops/tests/test_conformance.py, among all that is installed.
    tried = {trial.label for trial in scheme_trials() if trial.verdict}
    assert {"4 bits, act order", "8 bits, asymmetric, act order"} <= tried
