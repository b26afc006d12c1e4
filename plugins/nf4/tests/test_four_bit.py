"""Layers compute by the stored tensors as the format defines them.

The writer here follows the description of the format and shares nothing with what it checks.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples

from interposer import Capability, Config, Device, Resolver, Site, current_registry
from interposer.errors import CheckpointError, ConfigError
from interposer_nf4._bitsandbytes import BitsAndBytes
from interposer_nf4._codebooks import CODEBOOKS, QuantType
from interposer_ops.layers.linear import Linear, MergedLinear

DEVICE = Device("cpu", "cpu", "test", Capability("any"))
Tensors = dict[str, torch.Tensor]


class Quantized:
    """A weight ``[O, I]`` of four bits: its tensors, and its numbers in float32."""

    def __init__(
        self,
        weight: torch.Tensor,
        quant_type: QuantType = "nf4",
        blocksize: int = 64,
        double: bool = False,
        storage: torch.dtype = torch.uint8,
        codebook: torch.Tensor | None = None,
    ) -> None:
        self.codebook = torch.tensor(CODEBOOKS[quant_type]) if codebook is None else codebook
        count, num_blocks = weight.numel(), -(-weight.numel() // blocksize)
        padded = torch.zeros(num_blocks * blocksize)
        padded[:count] = weight.flatten()
        blocks = padded.view(num_blocks, blocksize)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {
            "quant_type": quant_type,
            "blocksize": blocksize,
            "dtype": "float32",
            "shape": list(weight.shape),
        }
        self.tensors: Tensors = {"absmax": absmax, "quant_map": self.codebook}
        if double:
            offset, scale_map = absmax.mean(), torch.linspace(-1, 1, 256)
            rest = torch.zeros(-(-num_blocks // 16) * 16)
            rest[:num_blocks] = absmax - offset
            outer = rest.view(-1, 16).abs().amax(1)
            ratios = rest.view(-1, 16) / outer.clamp(min=1e-30)[:, None]
            places = (ratios[..., None] - scale_map).abs().argmin(-1)
            absmax = ((scale_map[places] * outer[:, None]).flatten() + offset)[:num_blocks]
            stored = places.flatten()[:num_blocks].to(torch.uint8)
            self.tensors |= {"absmax": stored, "nested_absmax": outer}
            self.tensors["nested_quant_map"] = scale_map
            state |= {"nested_blocksize": 16, "nested_dtype": "float32"}
            state["nested_offset"] = float(offset)
        ratios = blocks / absmax.where(absmax != 0, 1)[:, None]
        codes = (ratios[..., None] - self.codebook).abs().argmin(-1)
        self.weight = (self.codebook[codes] * absmax[:, None]).flatten()[:count].view(weight.shape)
        pairs = codes.flatten()[:count].view(-1, 2).to(torch.uint8)
        packed = (pairs[:, 0] << 4) + pairs[:, 1]
        text = json.dumps(state).encode()
        self.tensors[f"quant_state.bitsandbytes__{quant_type}"] = torch.tensor(
            list(text), dtype=torch.uint8
        )
        self.packed = packed.view(storage).unsqueeze(1)

    def stored(self, layer: str) -> Tensors:
        below = {f"{layer}.weight.{name}": tensor for name, tensor in self.tensors.items()}
        return {f"{layer}.weight": self.packed, **below}


def built(
    parts: dict[str, int],
    inputs: int,
    quant_type: str = "nf4",
    double: bool = False,
    bias: bool = False,
) -> Linear:
    scheme = BitsAndBytes.parse(
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quant_type,
            "bnb_4bit_use_double_quant": double,
        }
    )
    site = Site(
        Resolver(current_registry(), DEVICE, Config(canary="off"), scheme), "block", torch.float32
    )
    if len(parts) == 1:
        ((name, size),) = parts.items()
        return Linear(site.at(name), inputs, size, bias)
    return MergedLinear(site.at("fused"), inputs, parts, bias)


def fill(layer: Linear, tensors: Tensors) -> None:
    for name, parameter in layer.named_parameters():
        if name != "bias":
            parameter.data = tensors.pop(parameter.stored_as)  # type: ignore[attr-defined]
    assert not tensors


def close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a float32 product in any order of its sums could have given ``found``."""
    terms = x.double().abs() @ weight.double().abs().T
    bound = (weight.shape[1] + 2) * torch.finfo(torch.float32).eps * terms + 1e-9
    return bool(((found.double() - x.double() @ weight.double().T).abs() <= bound).all())


@given(
    quant_type=st.sampled_from(["nf4", "fp4"]),
    blocksize=st.sampled_from([2, 16, 32, 64, 128, 4096]),
    double=st.booleans(),
    storage=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    outputs=st.sampled_from([4, 12, 37 * 4]),
    inputs=st.sampled_from([2, 24, 64, 90, 96]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=num_examples(100))
def test_layer_multiplies_by_the_stored_weight(
    quant_type: QuantType,
    blocksize: int,
    double: bool,
    storage: torch.dtype,
    outputs: int,
    inputs: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    weight *= 0.1 + 3 * torch.rand(outputs, 1, generator=generator)
    quantized = Quantized(weight, quant_type, blocksize, double, storage)
    layer = built({"o_proj": outputs}, inputs, quant_type, double)
    fill(layer, quantized.stored("block.o_proj"))
    expected = layer.method.dequantized(layer)
    assert expected is not None
    assert torch.equal(expected.float(), quantized.weight)
    layer.finalize()
    assert list(layer.parameters()) == []
    x = torch.randn(2, 3, inputs, generator=generator)
    assert close(layer(x), x, quantized.weight)


def test_the_first_weight_is_the_high_nibble() -> None:
    """The numbers are those of the format, stated without any packer."""
    layer = built({"o_proj": 2}, 4)
    codebook = torch.arange(16.0) / 16
    quantized = Quantized(torch.ones(2, 4), blocksize=4, codebook=codebook)
    quantized.packed = torch.tensor([[0x01], [0x23], [0xCD], [0xEF]], dtype=torch.uint8)
    quantized.tensors["absmax"] = torch.tensor([16.0, 32.0])
    fill(layer, quantized.stored("block.o_proj"))
    actual = layer.method.dequantized(layer)
    assert actual is not None
    assert actual.tolist() == [[0, 1, 2, 3], [24, 26, 28, 30]]


@pytest.mark.parametrize("double", [False, True])
def test_fused_layer_equals_separate_layers(double: bool) -> None:
    parts, sizes = {"q_proj": 24, "k_proj": 8, "v_proj": 8}, (16, 64, 32)
    generator = torch.Generator().manual_seed(2)
    whole, x = torch.randn(40, 96, generator=generator), torch.randn(3, 96, generator=generator)
    offset = torch.randn(40, generator=generator)
    fused, tensors, outputs = built(parts, 96, double=double, bias=True), Tensors(), []
    # Blocks of 64 straddle rows, and each part may have blocks of its own size.
    for (part, size), rows, added, blocksize in zip(
        parts.items(), whole.split([24, 8, 8]), offset.split([24, 8, 8]), sizes, strict=True
    ):
        stored = Quantized(rows, blocksize=blocksize, double=double).stored(f"block.{part}")
        alone = built({part: size}, 96, double=double, bias=True)
        fill(alone, dict(stored))
        alone.get_parameter("bias").data.copy_(added)
        alone.finalize()
        outputs.append(alone(x))
        tensors |= stored
    fill(fused, tensors)
    fused.get_parameter("bias").data.copy_(offset)
    fused.finalize()
    torch.testing.assert_close(fused(x), torch.cat(outputs, -1), rtol=1e-5, atol=1e-4)


def test_scales_of_blocks_within_rows_are_kept_unchanged() -> None:
    layer = built({"o_proj": 3}, 128)
    quantized = Quantized(torch.randn(3, 128), blocksize=64)
    fill(layer, quantized.stored("block.o_proj"))
    layer.finalize()
    assert torch.equal(layer.operands[1], quantized.tensors["absmax"].view(3, 2))


def test_stored_codebook_overrides_the_published_one() -> None:
    layer = built({"o_proj": 3}, 64)
    codebook = torch.linspace(-1, 1, 16)
    quantized = Quantized(torch.randn(3, 64), codebook=codebook)
    fill(layer, quantized.stored("block.o_proj"))
    expected = layer.method.dequantized(layer)
    assert expected is not None
    assert torch.equal(expected.float(), quantized.weight)


def test_fused_layers_with_different_codebooks_are_refused() -> None:
    layer, tensors = built({"gate_proj": 4, "up_proj": 4}, 64), Tensors()
    for part, codebook in (("gate_proj", None), ("up_proj", torch.linspace(-1, 1, 16))):
        tensors |= Quantized(torch.randn(4, 64), codebook=codebook).stored(f"block.{part}")
    fill(layer, tensors)
    with pytest.raises(CheckpointError) as caught:
        layer.finalize()
    assert caught.value.path == "block.up_proj.weight.quant_map"
    assert "differs from that of gate_proj, but fused layers must have the same" in str(
        caught.value
    )


def test_blocks_of_zeros_are_dequantized_to_zeros() -> None:
    layer = built({"o_proj": 2}, 64)
    weight = torch.cat((torch.zeros(1, 64), torch.ones(1, 64)))
    fill(layer, Quantized(weight).stored("block.o_proj"))
    layer.finalize()
    assert layer(torch.ones(1, 64)).tolist() == [[0, 64]]


def test_odd_inputs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"block.o_proj: codes of 4 bits .* its 63 inputs\. Try:"):
        built({"o_proj": 2}, 63)
