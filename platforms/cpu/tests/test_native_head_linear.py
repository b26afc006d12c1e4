"""Linear layers of heads whose plain weights are quantized, compared with dequantized weights.

Dimensions: N heads, T tokens, I input features, O output features of a head.
"""

from typing import Any

import pytest
import torch

from interposer import Config, Resolver, Site, current_registry, place
from interposer.records import SchemeEntry, load_target
from interposer_cpu import native
from interposer_cpu._kernels.head_linear import NativeHeadLinear
from interposer_ops.layers.head_linear import HeadLinear, HeadWeight

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

HEADS, INPUTS, OUTPUTS = 3, 96, 128
SETTINGS: dict[str, dict[str, Any]] = {
    "w4a8": {"quant_method": "w4a8", "group_size": 32},
    "w4a16": {"quant_method": "int4", "group_size": 32},
    "int8": {"quant_method": "int8"},
    "w8a16": {"quant_method": "int8", "activations": "none"},
}


def built(
    settings: dict[str, Any] | None, dtype: torch.dtype, outputs: int = OUTPUTS
) -> HeadLinear:
    """Build the layer in a model with these quantization settings."""
    scheme = None
    if settings is not None:
        method = f"online_{settings['quant_method']}"
        (entry,) = (
            record for _, record in current_registry().records(SchemeEntry) if record.name == method
        )
        scheme = load_target(entry.target).parse({**settings, "quant_method": method})
    resolver = Resolver(current_registry(), place().device, Config(), scheme)
    return HeadLinear(Site(resolver, "attn.kv_b_proj", dtype), HEADS, INPUTS, outputs)


def drawn(layer: HeadLinear, dtype: torch.dtype, rows: int) -> tuple[HeadWeight, torch.Tensor]:
    """Draw a weight and inputs, which lie in memory as projections write them."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(HEADS, layer.out_features, INPUTS, generator=generator).to(dtype)
    x = torch.randn(rows, HEADS, INPUTS + 8, generator=generator).to(dtype)
    return layer.prepared(weight), x[..., :INPUTS].transpose(0, 1)


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    """Round each row to multiples of its largest magnitude divided by 127."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", SETTINGS)
def test_heads_multiply_by_their_quantized_weights(
    form: str, dtype: torch.dtype, rows: int
) -> None:
    layer = built(SETTINGS[form], dtype)
    assert type(layer) is NativeHeadLinear
    assert layer.quantizes()
    weight, x = drawn(layer, dtype, rows)
    actual = layer.project(x, weight.operand)
    inputs = x.double()
    if form in ("w4a8", "int8"):
        inputs = rounded_to_int8(inputs)
    expected = inputs @ weight.values.double().transpose(1, 2)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    # The reference's weights and the results are rounded to the dtype; sums have float32.
    terms = inputs.abs() @ weight.values.double().abs().transpose(1, 2)
    bound = (torch.finfo(dtype).eps + INPUTS * 2.0**-24) * terms
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("settings", [None, SETTINGS["w4a8"]])
def test_heads_of_other_sizes_keep_plain_weights(settings: dict[str, Any] | None) -> None:
    outputs = OUTPUTS if settings is None else OUTPUTS - 8
    layer = built(settings, torch.float32, outputs)
    assert not layer.quantizes()
    weight, x = drawn(layer, torch.float32, 5)
    actual = layer.project(x, weight.operand)
    torch.testing.assert_close(actual, x @ weight.values.transpose(1, 2), rtol=0, atol=1e-4)


def test_four_bit_heads_take_a_quarter_of_the_memory() -> None:
    weights = [
        drawn(built(settings, torch.bfloat16), torch.bfloat16, 1)[0]
        for settings in (None, {"quant_method": "w4a8", "group_size": 96})
    ]
    plain, quantized = weights[0].operand[0], weights[1].operand[0]
    assert quantized.nbytes < 0.3 * plain.nbytes


def test_compiled_heads_give_the_same_results() -> None:
    layer = built(SETTINGS["w4a8"], torch.bfloat16)
    weight, x = drawn(layer, torch.bfloat16, 5)
    compiled = torch.compile(lambda x: layer.project(x, weight.operand), backend="eager")
    assert torch.equal(compiled(x), layer.project(x, weight.operand))


def test_a_file_of_packed_weights_can_store_quantized_heads() -> None:
    weight, _ = drawn(built(SETTINGS["w4a8"], torch.bfloat16), torch.bfloat16, 1)
    packed, outputs, fields = weight.operand
    assert isinstance(packed, torch.Tensor)
    assert {type(part) for part in (outputs, *fields)} == {int}
    assert type(weight.operand) is type(fields) is tuple
