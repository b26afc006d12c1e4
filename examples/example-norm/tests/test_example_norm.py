"""Installing the example changes the selection, and disabling the example restores the defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.tape import TapePlatform

from interposer import Capability, Case, Config, Device, Resolver, Site, current_registry, explain
from interposer_example_norm import _kernels as kernels
from interposer_example_norm._layers import ExampleNorm
from interposer_ops.devices.graphs import judge_choices
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.norms import fused_add_rms_norm, rms_norm
from interposer_testing import check_kernel, conformance

DISTRIBUTION = "interposer-example-norm"
# No plugin provides the platform "bare", so no kernel written for a platform is a candidate.
DEVICE = Device("bare", "cpu", "a device without kernels of its own", Capability("any"))


def site(dtype: torch.dtype = torch.bfloat16, config: Config | None = None) -> Site:
    config = config or Config()
    return Site(Resolver(current_registry(config), DEVICE, config), "model.norm", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 1024), (3, 64, 512)])
def test_kernels_conform_for_inputs_above_the_small_size(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1], generator=generator).to(dtype)
    norm_arguments = {"x": x, "weight": weight, "eps": 1e-5}
    add_arguments = {"x": x, "residual": residual.float(), "weight": weight, "eps": 1e-5}
    # An element is at most about five root mean squares.
    norm, add = (
        Case("many", arguments, {}, shape[-1], 5.0) for arguments in (norm_arguments, add_arguments)
    )
    assert check_kernel(rms_norm, kernels.rms_norm, norm) == []
    assert check_kernel(fused_add_rms_norm, kernels.fused_add_rms_norm, add) == []


def test_every_declared_dtype_is_tried() -> None:
    trials = conformance(current_registry(), DEVICE, distribution=DISTRIBUTION, quick=True)
    numerics_trials = [trial for trial in trials if trial.aspect == "numerics" and trial.verdict]
    accepted = {(trial.request.name, trial.request.dtype) for trial in numerics_trials}
    ops = ("rms_norm", "fused_add_rms_norm")
    assert accepted == {(op, dtype) for op in ops for dtype in ("float32", "bfloat16")}


def test_replacement_has_the_constructor_of_the_standard_layer() -> None:
    assert inspect.signature(ExampleNorm.__init__) == inspect.signature(RMSNorm.__init__)


def test_model_code_gets_the_replacement_and_the_kernels() -> None:
    layer = RMSNorm(site(), 64, 1e-5)
    assert type(layer) is ExampleNorm
    assert layer.norm.__module__ == layer.add_norm.__module__ == "interposer_example_norm._kernels"


def test_layer_agrees_with_the_reference() -> None:
    layer = RMSNorm(site(torch.float32), 96, 1e-5)
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 5, 96, generator=generator)
    layer.weight.copy_(torch.randn(96, generator=generator))
    torch.testing.assert_close(layer(x), rms_norm(x, layer.weight, 1e-5))
    expected = fused_add_rms_norm(x, residual, layer.weight, 1e-5)
    torch.testing.assert_close(layer.forward_add(x, residual), expected)


def test_printed_layer_names_its_kernels() -> None:
    printed = str(RMSNorm(site(), 64, 1e-5))
    module = "interposer_example_norm._kernels"
    assert printed == (
        f"ExampleNorm(64, eps=1e-05, kernels: {module}.rms_norm, {module}.fused_add_rms_norm)"
    )


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.relu, "torch.relu"),
        (torch.ops.aten.relu.default, "torch._ops.aten.relu.default"),
        (partial(len), "functools.partial(<built-in function len>)"),
    ],
)
def test_printed_layer_names_any_callable(function: Callable[..., Any], name: str) -> None:
    layer = RMSNorm(site(), 64, 1e-5)
    layer.norm = function
    assert f"kernels: {name}, interposer" in str(layer)


def test_replacement_keeps_graph_capture_possible() -> None:
    place = site()
    layer = RMSNorm(place, 64, 1e-5)
    assert judge_choices([row.choice for row in explain(place).rows])
    generator = torch.Generator().manual_seed(0)
    layer.weight.copy_(torch.rand(64, generator=generator))
    x, residual = torch.randn(2, 5, 64, generator=generator).bfloat16()
    replay = TapePlatform().capture_graph(lambda: layer.forward_add(x, residual))
    for _ in range(2):
        x.normal_(generator=generator)
        expected = fused_add_rms_norm(x, residual, layer.weight, 1e-5)
        torch.testing.assert_close(replay(), expected)


def test_explanation_shows_the_plugin() -> None:
    place = site()
    RMSNorm(place, 64, 1e-5)
    text = str(explain(place))
    for name in ("example_norm", "rms_norm_example", "fused_add_rms_norm_example"):
        assert f": {name} ({DISTRIBUTION} 0.1.0), highest score" in text


@pytest.mark.parametrize("name", ["example-norm", DISTRIBUTION])
def test_disabled_plugin_is_no_candidate(name: str) -> None:
    place = site(config=Config(disable=frozenset({name})))
    layer = RMSNorm(place, 64, 1e-5)
    assert type(layer) is RMSNorm
    assert layer.norm.__module__.startswith("interposer_ops.")
    rows = explain(place).rows
    providers = {row.choice.chosen.provider for row in rows}
    providers |= {refusal.provider for row in rows for refusal in row.choice.refusals}
    assert not any(DISTRIBUTION in provider for provider in providers)


def test_another_dtype_is_refused_with_a_reason() -> None:
    place = site(torch.float16)
    assert type(RMSNorm(place, 64, 1e-5)) is RMSNorm
    assert "needs dtype float32 or bfloat16, got float16" in str(explain(place).all())


def test_pinned_reference_outranks_the_example() -> None:
    place = site(config=Config(kernels={"rms_norm": "reference"}))
    assert RMSNorm(place, 64, 1e-5).norm is rms_norm.reference
    text = str(explain(place).all())
    assert "rms_norm_example (interposer-example-norm 0.1.0): accepted, but" in text
