"""Layers of which the compiled library computes several parts in one call."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from interposer import (
    AttentionSpec,
    Config,
    PluggableLayer,
    Resolver,
    Site,
    current_registry,
    place,
)
from interposer_cpu import fused, native
from interposer_cpu._kernels import activations, blocks, decoder_block, linear
from interposer_cpu._kernels.blocks import NativeGatedMLP, NativeSelfAttention
from interposer_cpu._kernels.fusion import activation_number
from interposer_cpu._kernels.interface import SILU, TYPES
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.self_attention import SelfAttention
from interposer_testing import layer_trials

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

L = TypeVar("L", bound=PluggableLayer)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Other distributions may replace norms too.
NATIVE = {"rms_norm": "rms_norm_native"}
PARTS = {"rms_norm": "standard"}
BOTH = (("gated_mlp", GatedMLP), ("self_attention", SelfAttention))
# Of the largest result: what lies between products is rounded to the dtype, or not.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def built(
    layer_class: type[L],
    dtype: torch.dtype,
    *arguments: Any,
    name: str = "native",
    kernels: dict[str, str] | None = None,
    **options: Any,
) -> L:
    """Build the layer of that name; all layers have the same weights."""
    layers = {**PARTS, **{layer_id: name for layer_id, standard in BOTH if standard is layer_class}}
    config = Config(layers=layers, kernels={**NATIVE, **(kernels or {})})
    site = Site(Resolver(current_registry(), place().device, config), "block", dtype)
    layer = layer_class(site, *arguments, **options)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    for part in layer.modules():
        if isinstance(part, PluggableLayer):
            part.finalize()
    return layer


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    largest = float(expected.abs().amax()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=CLOSE[actual.dtype] * largest)


def counted(part: Any) -> list[int]:
    """Return a list that gets an entry whenever ``part`` computes."""
    calls = []
    forward = part.forward

    def counting(*inputs: torch.Tensor) -> Any:
        calls.append(1)
        return forward(*inputs)

    part.forward = counting
    return calls


def attention(dtype: torch.dtype) -> AttentionSpec:
    return AttentionSpec(
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        dtype=dtype,
        cache_dtype=dtype,
        page_size=16,
        scale=0.2,
    )


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    "layer_id",
    ["gated_mlp", pytest.param("self_attention", marks=pytest.mark.slow), "decoder_block"],
)
def test_layers_conform_in_one_call(layer_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = {"gated_mlp": "mlp", "self_attention": "project_heads"}.get(layer_id, layer_id)
    calls: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(native.library(), name)

    for module in (blocks, decoder_block):
        monkeypatch.setattr(module, "library", Counted)
    ran = 0
    for trial in layer_trials(current_registry(), place().device, "interposer-cpu", 0, layer_id):
        assert not trial.not_run
        calls.clear()
        assert trial.run() == [], str(trial)
        # Blocks and their halves take float32 and bfloat16 alone.
        assert calls == ([] if trial.request.dtype == "float16" else [called]), str(trial)
        ran += 1
    assert ran > 10


@pytest.mark.landing(7)
@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 7, 600])
def test_an_mlp_in_one_call_equals_its_parts(
    dtype: torch.dtype, activation: str, bias: bool, tokens: int
) -> None:
    fused, parts = (
        built(GatedMLP, dtype, 40, 72, activation, bias, name=name)
        for name in ("native", "standard")
    )
    assert type(fused) is NativeGatedMLP
    assert fused.is_fusable
    assert type(parts) is GatedMLP
    x = torch.randn(tokens, 40).to(dtype)
    assert_close(fused(x), parts(x))


@pytest.mark.landing(5)
@DTYPES
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("rotary_size", [32, 16])
@pytest.mark.parametrize(("norm_eps", "bias"), [(None, False), (None, True), (1e-6, False)])
def test_heads_in_one_call_equal_their_parts(
    dtype: torch.dtype, tokens: int, rotary_size: int, norm_eps: float | None, bias: bool
) -> None:
    fused, parts = (
        built(SelfAttention, dtype, attention(dtype), 40, rotary_size, norm_eps, bias, name=name)
        for name in ("native", "standard")
    )
    assert type(fused) is NativeSelfAttention
    assert fused.is_fusable
    x, angles = torch.randn(tokens, 40).to(dtype), torch.rand(tokens, rotary_size // 2)
    tables = angles.cos(), angles.sin()
    for actual, expected in zip(fused.heads(x, *tables), parts.heads(x, *tables), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("op", ["silu_and_mul", "linear"])
def test_an_mlp_with_another_kernel_calls_its_parts(op: str) -> None:
    layer = built(GatedMLP, torch.float32, 40, 72, "silu", kernels={op: "reference"})
    plain = built(GatedMLP, torch.float32, 40, 72, "silu", name="standard")
    assert type(layer) is NativeGatedMLP
    calls = counted(layer.activation)
    x = torch.randn(3, 40)
    assert_close(layer(x), plain(x))
    assert calls == [1]


@pytest.mark.parametrize("declared", [False, True])
def test_a_declared_foreign_activation_is_fused(declared: bool) -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        return activations.silu_and_mul(x)

    if declared:
        fused("activation", read=lambda: SILU)(silu_and_mul)
    assert activation_number(silu_and_mul, ()) == (SILU if declared else None)
    assert activation_number(activations.silu_and_mul, ()) == SILU


@pytest.mark.parametrize("op", ["rms_norm", "rotary_embedding", "linear"])
def test_attention_with_another_kernel_calls_its_parts(op: str) -> None:
    spec = attention(torch.float32)
    layer = built(SelfAttention, torch.float32, spec, 40, 32, 1e-6, kernels={op: "reference"})
    assert type(layer) is NativeSelfAttention
    calls = counted(layer.rotary)
    layer.heads(torch.randn(3, 40), torch.rand(3, 16), torch.rand(3, 16))
    assert calls == [1]


@pytest.mark.parametrize("part", ["gate_up_proj", "activation", "down_proj"])
def test_hooks_of_parts_are_called(part: str) -> None:
    layer = built(GatedMLP, torch.float32, 40, 72, "silu")
    calls = []
    hook = layer.get_submodule(part).register_forward_pre_hook(lambda *_: calls.append(part))
    x = torch.randn(3, 40)
    watched = layer(x)
    hook.remove()
    assert_close(layer(x), watched)
    assert calls == [part]


def test_new_weights_of_a_part_are_used() -> None:
    layer = built(GatedMLP, torch.float32, 40, 72, "silu")
    layer.down_proj.operands = (linear.pack(torch.zeros(40, 72), None)["weight"], None)
    assert not layer(torch.randn(3, 40)).any()


# Arguments after the address of a weight: unquantized inputs.
AS_THEY_ARE = (0, -1, 0, 0, 0)


def packings(weight: torch.Tensor) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the packing function of each op; the quantized weights are random."""
    outputs, inputs = weight.shape
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scales = 0.02 * torch.rand(outputs, inputs // 32)
    integers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    exponents = torch.randint(118, 122, (outputs, inputs // 32), dtype=torch.uint8)
    return {
        "linear": lambda: linear.pack(weight, None),
        "w4a16_linear": lambda: linear.pack_w4a16(codes, scales, None),
        "w8a16_linear": lambda: linear.pack_w8a16(integers, scales / 16, None),
        "mxfp4_linear": lambda: linear.pack_mxfp4(codes, exponents, None),
    }


@DTYPES
@pytest.mark.parametrize("op", ["linear", "w4a16_linear", "w8a16_linear", "mxfp4_linear"])
@pytest.mark.parametrize("level", native.levels())
def test_a_fused_mlp_is_correct_in_every_format(dtype: torch.dtype, op: str, level: str) -> None:
    hidden, inner = 64, 96
    torch.manual_seed(3)
    up = packings(0.1 * torch.randn(2 * inner, hidden, dtype=dtype))[op]()["weight"]
    down = packings(0.1 * torch.randn(hidden, inner, dtype=dtype))[op]()["weight"]
    x = torch.randn(5, hidden).to(dtype)
    out = torch.full((5, hidden), float("nan")).to(dtype)
    factors = [fact for weight in (up, down) for fact in (weight[0].data_ptr(), *AS_THEY_ARE)]
    addresses = x.data_ptr(), out.data_ptr()
    project = getattr(linear, op)
    rest = (None,) * (1 if op == "linear" else 2)
    native.force_level(level)
    try:
        native.library().mlp(*factors, *addresses, TYPES[dtype], 0, 5, hidden, 0, 0, 0)
        gate, other = project(x, up, *rest).float().chunk(2, dim=-1)
        between = (torch.nn.functional.silu(gate) * other).to(dtype)
        expected = project(between, down, *rest)
    finally:
        native.force_level(None)
    assert_close(out, expected)


def test_weights_that_do_not_follow_each_other_are_refused() -> None:
    up, _ = linear.pack(torch.randn(66, 32), None)["weight"]
    x, factor = torch.randn(1, 32), (up.data_ptr(), *AS_THEY_ARE)
    with pytest.raises(RuntimeError, match="block failed with code 4"):
        native.library().mlp(*factor, *factor, *[x.data_ptr()] * 2, 0, 0, 1, 32, 0, 0, 0)
