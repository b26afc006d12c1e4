"""Experts that are linear layers, in one call of the compiled library.

T tokens, H hidden size, E experts, I intermediate size, K chosen experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from interposer import Config, ExpertsSpec, PluggableLayer, Resolver, Site, current_registry, place
from interposer_cpu import native
from interposer_cpu._kernels import expert_layers
from interposer_ops.layers.moe.dispatcher import LocalDispatcher
from interposer_ops.layers.moe.experts import Experts

# Installed without a C++ compiler, the plugin works but has no native kernels to test.
pytestmark = pytest.mark.skipif(bool(native.why_absent()), reason=native.why_absent())

SPEC = ExpertsSpec(
    hidden_size=128, intermediate_size=192, num_experts=5, top_k=2, activation="silu"
)
# Of the largest result: projections are rounded to the dtype, or not.
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"quant_method": "online_int8"},
    "int8, inputs as they are": {"quant_method": "online_int8", "activations": "none"},
    "int4": {"quant_method": "online_int4", "group_size": 32},
    "w4a8": {"quant_method": "online_w4a8", "group_size": 32},
    "fp8": {"quant_method": "online_fp8"},
}


def built(
    name: str, settings: dict[str, Any], dtype: torch.dtype, spec: ExpertsSpec = SPEC, **more: Any
) -> Experts:
    """Build the layer of that name; all layers have the same weights."""
    config = Config(layers={"experts": name}, canary="off", tables=False, **more)
    resolver = Resolver(current_registry(), place().device, config)
    resolver.choose_scheme(settings)
    layer = Experts(Site(resolver, "model.layers.0.mlp.experts", dtype), spec)
    filled(layer, 1)
    return finalized(layer)


def filled(layer: Experts, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def finalized(layer: Experts) -> Experts:
    for each in layer.modules():
        if isinstance(each, PluggableLayer):
            each.finalize()
    return layer


def routing(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw inputs, weights and ids; some ids are -1, and one expert gets no token."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, SPEC.hidden_size, generator=generator).to(dtype)
    weights = torch.rand(tokens, SPEC.top_k, generator=generator)
    ids = torch.randint(-1, SPEC.num_experts - 1, (tokens, SPEC.top_k), generator=generator)
    return x, weights, ids.int()


class Counted:
    """A wrapper of the library that counts calls of the experts."""

    calls = 0

    def __getattr__(self, name: str) -> Any:
        Counted.calls += name == "expert_layers"
        return getattr(native.library(), name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(Counted, "calls", 0)
    monkeypatch.setattr(expert_layers, "library", Counted)
    return Counted


@pytest.mark.landing(6)
@pytest.mark.parametrize("dtype", [*CLOSE])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
def test_fused_experts_give_the_results_of_the_loop(
    form: str, dtype: torch.dtype, tokens: int, calls: type[Counted]
) -> None:
    x, weights, ids = routing(tokens, dtype)
    one, loop = (built(name, FORMATS[form], dtype) for name in ("native", "standard"))
    actual, expected = one(x, weights, ids), loop(x, weights, ids)
    assert calls.calls == 1
    assert actual.dtype == dtype
    if tokens:
        assert expected.abs().amax() > 0.1
        atol = CLOSE[dtype] * float(expected.abs().amax())
        # A number halfway between two codes may go either way, which moves few sums by one step.
        assert ((actual - expected).abs() <= atol).double().mean() > 0.98
        assert ((actual - expected).abs() <= 5e-2 * expected.abs().amax()).all()
    apart = x.repeat(1, 2)[:, ::2] if tokens else x
    wide = torch.stack((weights, weights), 2)[..., 0], ids.long()
    assert one(apart, *wide).shape == x.shape


@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
def test_interleaved_gates_use_the_loop(activation: str, calls: type[Counted]) -> None:
    spec = replace(SPEC, activation=activation)
    given = routing(9, torch.float32)
    one, loop = (
        built(name, FORMATS["int8"], torch.float32, spec) for name in ("native", "standard")
    )
    expected = loop(*given)
    largest = float(expected.abs().amax())
    torch.testing.assert_close(one(*given), expected, rtol=0, atol=1e-2 * largest)
    assert calls.calls == (activation != "swiglu_oai")


def test_other_kernels_hooks_and_dispatchers_call_the_parts(calls: type[Counted]) -> None:
    given = routing(4, torch.float32)
    expected = built("standard", FORMATS["int8"], torch.float32)(*given)
    reference = {"int8_linear": "reference"}
    other = built("native", FORMATS["int8"], torch.float32, kernels=reference)
    largest = float(expected.abs().amax())
    torch.testing.assert_close(other(*given), expected, rtol=0, atol=1e-2 * largest)
    hooked = built("native", FORMATS["int8"], torch.float32)
    seen: list[int] = []
    projection = hooked.operands[0][0][0]
    handle = projection.register_forward_hook(lambda *_: seen.append(1))
    hooked(*given)
    assert seen
    assert calls.calls == 0
    handle.remove()
    hooked(*given)
    assert calls.calls == 1

    config = Config(layers={"experts": "native"}, canary="off", tables=False)
    site = Site(Resolver(current_registry(), place().device, config), "experts", torch.float32)
    staged = Experts(site, SPEC, LocalDispatcher(site, SPEC))
    filled(staged, 1)
    assert finalized(staged)(*given).shape == given[0].shape
    assert calls.calls == 1


def test_fused_experts_use_exchanged_weights(calls: type[Counted]) -> None:
    given = routing(4, torch.float32)
    layer = built("native", FORMATS["int8"], torch.float32)
    before = layer(*given)
    first, second = layer.operands[0][0]
    for pair in layer.operands[0]:
        pair[0].operands, pair[1].operands = first.operands, second.operands
    after = layer(*given)
    assert calls.calls == 2
    assert not torch.equal(before, after)
    x, weights, ids = given
    alone = layer(x, weights, torch.where(ids >= 0, 0, ids))
    torch.testing.assert_close(after, alone)


def test_an_expert_id_out_of_range_is_refused(calls: type[Counted]) -> None:
    x, weights, ids = routing(2, torch.float32)
    layer = built("native", FORMATS["int8"], torch.float32)
    with pytest.raises(RuntimeError, match="the native experts failed"):
        layer(x, weights, torch.full_like(ids, SPEC.num_experts))
    assert calls.calls == 1
