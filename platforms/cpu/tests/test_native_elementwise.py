"""Kernels of independent rows, called from Python; the C++ tests check every level."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from interposer import Case, Config, current_registry
from interposer_cpu import native
from interposer_cpu._kernels import activations, heads, norms, quantizers
from interposer_cpu._platform import CPUPlatform
from interposer_ops.activations import gelu, gelu_and_mul, quick_gelu, silu_and_mul
from interposer_ops.norms import fused_add_rms_norm, layer_norm, rms_norm
from interposer_testing import Trial, check_kernel, conformance

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

OPS = {
    "fused_add_gemma_rms_norm",
    "fused_add_rms_norm",
    "gelu",
    "gelu_and_mul",
    "gemma_rms_norm",
    "layer_norm",
    "qk_norm",
    "quantize_fp8_blocks",
    "quantize_fp8_per_token",
    "quantize_fp8_static",
    "quantize_int8_per_token",
    "quantize_int8_static",
    "quantize_mxfp8",
    "quick_gelu",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])

WIDE = torch.randn(300, 4096, generator=torch.Generator().manual_seed(0))
HEADS = WIDE.view(300, 32, 128)
WEIGHT = WIDE[0]
TABLES = WIDE[:, :64].contiguous(), WIDE[:, 64:128].contiguous()
CALLS: dict[str, Callable[[], Any]] = {
    "rms_norm": lambda: norms.rms_norm(WIDE, WEIGHT, 1e-6),
    "rms_norm of heads": lambda: norms.rms_norm(HEADS[:, 3:7], WEIGHT[:128], 1e-6),
    "fused_add_rms_norm": lambda: norms.fused_add_rms_norm(WIDE, WIDE, WEIGHT, 1e-6),
    "layer_norm": lambda: norms.layer_norm(WIDE, WEIGHT, WEIGHT, 1e-6),
    "silu_and_mul": lambda: activations.silu_and_mul(WIDE),
    "gelu_and_mul": lambda: activations.gelu_and_mul(WIDE, "none"),
    "gelu": lambda: activations.gelu(WIDE, "none"),
    "quick_gelu": lambda: activations.quick_gelu(WIDE),
    "rotary_embedding": lambda: heads.rotary_embedding(HEADS, HEADS[:, :5], *TABLES),
    "qk_norm": lambda: heads.qk_norm(HEADS, HEADS, WEIGHT[:128], WEIGHT[:128], 1e-6),
    "quantize_int8_per_token": lambda: quantizers.quantize_int8_per_token(WIDE),
}


@pytest.fixture
def forced() -> Iterator[None]:
    yield
    native.force_level(None)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def trials() -> Iterator[Trial]:
    device = CPUPlatform().devices()[0]
    # Whether the records' conditions may be asked is no matter here.
    registry = current_registry(Config(isolation="off"))
    for op in sorted(OPS):  # the cases of other ops are not even built
        for trial in conformance(
            registry, device, distribution="interposer-cpu", op=op, quick=True
        ):
            if trial.candidate.name == f"{op}_native" and trial.aspect == "numerics":
                yield trial


@pytest.mark.parametrize(
    "level",
    # The lowest differs most from the best; those between are tried when there is time.
    [
        pytest.param(name, marks=[pytest.mark.slow] if index else [])
        for index, name in enumerate(native.levels()[:-1])
    ],
)
def test_kernels_conform_on_every_level_below_the_best(level: str, forced: None) -> None:
    native.force_level(level)
    ran = set()
    for trial in trials():
        assert trial.run() == [], str(trial)
        ran.add(trial.candidate.name.removesuffix("_native"))
    assert ran == OPS


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_the_number_of_threads(
    name: str, threads: Callable[[int], None]
) -> None:
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(torch.utils._pytree.tree_leaves(CALLS[name]()))
    for actual in results[1:]:
        assert all(map(torch.equal, results[0], actual))


@DTYPES
def test_results_keep_the_strides_of_reordered_rows(dtype: torch.dtype) -> None:
    x = WIDE[:24, :96].reshape(4, 6, 96).to(dtype).transpose(0, 1)
    weight = WEIGHT[:96].to(dtype)
    normed = {"x": x, "weight": weight, "eps": 1e-5}
    for op, function, arguments in (
        (rms_norm, norms.rms_norm, normed),
        (layer_norm, norms.layer_norm, {**normed, "bias": weight}),
        (fused_add_rms_norm, norms.fused_add_rms_norm, {**normed, "residual": x}),
        (silu_and_mul, activations.silu_and_mul, {"x": x}),
        (gelu_and_mul, activations.gelu_and_mul, {"x": x, "approximate": "tanh"}),
        (gelu, activations.gelu, {"x": x, "approximate": "none"}),
        (quick_gelu, activations.quick_gelu, {"x": x}),
    ):
        ordered = {name: arguments[name] for name in op.signature.parameters}
        case = Case("transposed", ordered, reduction=96, magnitude=40.0, rounded=8.0)
        assert check_kernel(op, function, case) == []


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (-200.0, 0.0),
        (-100.0, 0.0),
        (-20.0, -20 / (1 + torch.tensor(20.0).double().exp().item())),
        (0.0, 0.0),
        (1e-30, 5e-31),
        (100.0, 100.0),
        (float("inf"), float("inf")),
    ],
)
def test_silu_is_accurate_far_from_zero(x: float, expected: float) -> None:
    actual = activations.silu_and_mul(torch.tensor([[x, 1.0]]))
    assert actual.item() == pytest.approx(expected, rel=5e-7, abs=1e-37)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_accurate_for_many_numbers(approximate: str) -> None:
    gates = torch.linspace(-12, 12, 40_000)
    x = torch.stack((gates, torch.ones_like(gates)), 1).flatten(1)
    exact = torch.nn.functional.gelu(gates.double(), approximate=approximate)
    for actual in (
        activations.gelu_and_mul(x, approximate).squeeze(1),
        activations.gelu(gates, approximate),
    ):
        # Three units of what float32 rounds at the gate's size.
        assert bool(((actual.double() - exact).abs() <= 2e-7 + 1.8e-7 * gates.abs()).all())


def test_quantized_values_round_ties_to_even_and_saturate() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0], [0.0, -0.0, 0.0, 0.0, 0.0]])
    codes, scales = quantizers.quantize_int8_per_token(x)
    assert codes.tolist() == [[127, 0, 2, -2, -127], [0, 0, 0, 0, 0]]
    assert scales.tolist() == [[1.0], [1.0]]


def test_calls_with_too_few_arguments_are_refused() -> None:
    library = native.library()
    for name in ("rms_norm", "add_rms_norm", "normalise", "gate", "turn_heads", "code", "mlp"):
        with pytest.raises(TypeError, match="arguments, got 1"):
            getattr(library, name)(1)
