"""Checkpoints of transformers and bitsandbytes mean here what they mean there.

``write_fixtures.py`` wrote them and says what stands beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from interposer import (
    Capability,
    Config,
    Device,
    LinearMethod,
    Resolver,
    Site,
    current_registry,
    explain,
)
from interposer_engine import load
from interposer_nf4._bitsandbytes import BitsAndBytes
from interposer_nf4._codebooks import CODEBOOKS, QuantType
from interposer_ops.layers.linear import Linear, PlainLinear

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
FOUR_BIT = [name for name in NAMES if name != "int8"]
DEVICE = Device("cpu", "cpu", "test", Capability("any"))
# They came from float32 sums in another order, of up to 128 terms, and were rounded to 1e-5.
LOGIT_ERROR = 5e-5


def read(name: str, file: str) -> Any:
    return json.loads((FIXTURES / name / file).read_text(encoding="utf-8"))


def test_every_checkpoint_variant_exists() -> None:
    assert NAMES == [
        "fp4",
        "fp4-double-but-some",
        "int8",
        "nf4",
        "nf4-double",
        "nf4-double-in-bfloat16",
        "nf4-straddling",
    ]


def loaded(name: str, layer: str, tensors: dict[str, torch.Tensor]) -> tuple[LinearMethod, Linear]:
    """Return the linear layer of that name, not finalized, and its method."""
    weights = [tensors[f"{layer}.weight"]]
    shape = weights[0].shape
    for key, tensor in tensors.items():
        if key.startswith(f"{layer}.weight.quant_state"):
            shape = torch.Size(json.loads(bytes(tensor.tolist()))["shape"])
    scheme = BitsAndBytes.parse(read(name, "config.json")["quantization_config"])
    resolver = Resolver(current_registry(), DEVICE, Config(canary="off"), scheme)
    built = Linear(Site(resolver, layer, torch.float32), shape[1], shape[0])
    for key, parameter in built.named_parameters():
        parameter.data = tensors[getattr(parameter, "stored_as", f"{layer}.{key}")]
    return built.method, built


@pytest.mark.parametrize("name", FOUR_BIT)
def test_4_bit_weights_match_bitsandbytes_bit_for_bit(name: str) -> None:
    tensors = load_file(FIXTURES / name / "model.safetensors")
    digests = read(name, "expected.json")["weights"]
    assert len(digests) == (6 if name.endswith("some") else 7)
    for layer, digest in digests.items():
        method, built = loaded(name, layer, tensors)
        weight = method.dequantized(built)
        assert weight is not None
        # The product of two float32 is exact in float64, so this rounds once, as theirs does.
        assert hashlib.sha256(weight.float().numpy().tobytes()).hexdigest() == digest, layer


def test_int8_weights_match_bitsandbytes() -> None:
    """There the scale is multiplied by a rounded 1/127, here divided by 127."""
    tensors = load_file(FIXTURES / "int8" / "model.safetensors")
    layers = read("int8", "expected.json")["weights"]
    assert len(layers) == 7
    for layer, digest in layers.items():
        integers, scale = tensors[f"{layer}.weight"], tensors[f"{layer}.SCB"]
        theirs = integers * scale[:, None] * torch.tensor(1 / 127)
        assert hashlib.sha256(theirs.numpy().tobytes()).hexdigest() == digest, layer
        method, built = loaded("int8", layer, {**tensors, f"{layer}.weight_format": torch.zeros(1)})
        ours = method.dequantized(built)
        assert ours is not None
        torch.testing.assert_close(ours, theirs.double(), rtol=4 * 2**-24, atol=0.0)


@pytest.mark.landing(3)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_dequantized_model(name: str, copied: Callable[[str], Path]) -> None:
    facts = read(name, "expected.json")
    actual = load(copied(name), dtype="float32").logits(facts["tokens"])
    expected = torch.tensor(facts["logits of the dequantized model"])
    assert expected.abs().max() > 5
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=LOGIT_ERROR)


# Weights that were bfloat16 are dequantized to bfloat16 there, and inputs of int8 rounded to int8.
# A rounding is off by 2^-9 or 1/254 at most, 7 products follow each other; the deviation of their
# sum is that of one times sqrt(7), and three of them are allowed.
QUANTIZED_ERROR = {
    "nf4": 0.0,
    "fp4": 0.0,
    "fp4-double-but-some": 0.0,
    "nf4-double": 3 * 7**0.5 * 2**-9,
    "nf4-double-in-bfloat16": 3 * 7**0.5 * 2**-9,
    "int8": 3 * 7**0.5 / 254,
}


@pytest.mark.landing(4)
@pytest.mark.parametrize("name", QUANTIZED_ERROR)
def test_logits_match_transformers(name: str, copied: Callable[[str], Path]) -> None:
    facts = read(name, "expected.json")
    actual = load(copied(name), dtype="float32").logits(facts["tokens"])
    expected = torch.tensor(facts["logits of the quantized model"])
    error = torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)
    assert error <= QUANTIZED_ERROR[name] + LOGIT_ERROR


@pytest.mark.landing(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["reference", "nf4_linear_byte_table"])
def test_model_runs_with_every_kernel(
    kernel: str, dtype: str, copied: Callable[[str], Path]
) -> None:
    facts = read("nf4-straddling", "expected.json")
    config = Config(kernels={"nf4_linear": kernel})
    lm = load(copied("nf4-straddling"), dtype=dtype, config=config)
    expected = torch.tensor(facts["logits of the dequantized model"])
    bound = LOGIT_ERROR if dtype == "float32" else 3 * 7**0.5 * 2**-8 * float(expected.abs().max())
    assert (lm.logits(facts["tokens"]).float() - expected).abs().max() <= bound
    choices = explain(lm).to_dict()["choices"]
    chosen = {c["chosen"] for c in choices if c["name"] == "nf4_linear"}
    assert chosen == {kernel}


def test_finalized_layers_keep_only_quantized_weights_and_scales(
    copied: Callable[[str], Path],
) -> None:
    config = Config(kernels={"nf4_linear": "reference"})
    lm = load(copied("nf4-double-in-bfloat16"), dtype="bfloat16", config=config)
    layers = [module for module in lm.engine.model.modules() if isinstance(module, Linear)]
    assert len(layers) == 4
    for layer in layers:
        assert list(layer.parameters()) == []
        codes, scales, codebook, bias = layer.operands
        outputs = sum(layer.parts.values())
        assert (codes.shape, codes.dtype) == ((outputs, layer.in_features // 2), torch.uint8)
        assert (scales.shape, scales.dtype) == ((outputs, layer.in_features // 64), torch.float32)
        assert torch.equal(codebook, torch.tensor(CODEBOOKS["nf4"]))
        assert bias is None


def test_weights_can_be_updated(copied: Callable[[str], Path]) -> None:
    path, tokens = copied("nf4-double"), list(range(20))
    lm = load(path, dtype="float32")
    before = lm.logits(tokens)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.dtype == torch.uint8:
            tensors[name] = tensor.flip(0)
    assert lm.update_weights(tensors) == ()
    save_file(tensors, path / "model.safetensors")
    assert torch.equal(lm.logits(tokens), load(path, dtype="float32").logits(tokens))
    assert not torch.equal(lm.logits(tokens), before)


def test_weights_can_be_updated_with_another_block_size(copied: Callable[[str], Path]) -> None:
    """The tensors then have another shape than those that were loaded."""
    path, tokens = copied("nf4"), list(range(20))
    lm = load(path, dtype="float32")
    before, layer = lm.logits(tokens), "model.layers.0.self_attn.o_proj"
    tensors = load_file(path / "model.safetensors")
    given = {name: tensor for name, tensor in tensors.items() if layer in name}
    # Halves of a block share its scale, so this says the same.
    halved = f"{layer}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(given[halved].tolist())) | {"blocksize": 32}
    given[halved] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    given[f"{layer}.weight.absmax"] = given[f"{layer}.weight.absmax"].repeat_interleave(2)
    assert lm.update_weights(given) == (layer,)
    torch.testing.assert_close(lm.logits(tokens), before)


def test_skipped_layers_stay_plain(copied: Callable[[str], Path]) -> None:
    lm = load(copied("fp4-double-but-some"), dtype="float32")
    plain = {
        layer.prefix.rpartition(".")[2]: isinstance(layer.method, PlainLinear)
        for layer in lm.engine.model.modules()
        if isinstance(layer, Linear)
    }
    assert plain == {"qkv_proj": False, "o_proj": False, "gate_up_proj": False, "down_proj": True}


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_codebook_constants_match_the_checkpoints(name: QuantType) -> None:
    tensors = load_file(FIXTURES / name / "model.safetensors")
    stored = [tensor for key, tensor in tensors.items() if key.endswith(".quant_map")]
    assert len(stored) == 7
    for codebook in stored:
        assert torch.equal(codebook, torch.tensor(CODEBOOKS[name]))


def test_nf4_holds_quantiles_of_a_normal_distribution() -> None:
    """Eight above zero and seven below it, of equal shares up to the last, scaled to end at 1."""
    tail = 0.5 * (1 / 32 + 1 / 30)
    shares = [torch.linspace(1 - tail, 0.5, count, dtype=torch.float64)[:-1] for count in (8, 9)]
    below, above = (torch.special.ndtri(share) for share in shares)
    quantiles = torch.cat((-below, torch.zeros(1, dtype=torch.float64), above)).sort().values
    expected = (quantiles / quantiles.max()).float()
    torch.testing.assert_close(torch.tensor(CODEBOOKS["nf4"]), expected, rtol=1e-6, atol=5e-7)
