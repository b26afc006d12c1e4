"""Layers of 8-bit floats: the suite's checks, and fused layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from interposer import Config, Resolver, Site, current_registry, place
from interposer.errors import ConfigError
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_quantization._examples import fbgemm_fp8_examples, fp8_examples
from interposer_quantization._fp8.scheme import FbgemmFp8, Fp8
from interposer_testing import check_scheme, conformance

EXAMPLES: list[tuple[type[Fp8 | FbgemmFp8], Mapping[str, Any]]] = [
    *((Fp8, settings) for settings in fp8_examples().values()),
    *((FbgemmFp8, settings) for settings in fbgemm_fp8_examples().values()),
]


def site(scheme: Fp8 | FbgemmFp8) -> Site:
    resolver = Resolver(current_registry(), place().device, Config(canary="off"), scheme)
    return Site(resolver, "block", torch.float32)


@pytest.mark.landing(6)
@pytest.mark.parametrize(("scheme", "settings"), EXAMPLES)
def test_fused_layer_equals_separate_layers(
    scheme: type[Fp8 | FbgemmFp8], settings: Mapping[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    at, sizes = site(scheme.parse(settings)), {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    fused = MergedLinear(at.at("qkv_proj"), 192, sizes, bias=True)
    parts = {name: Linear(at.at(name), 192, size, bias=True) for name, size in sizes.items()}
    for name, parameter in fused.named_parameters():
        pieces = [part.get_parameter(name) for part in parts.values()]
        for piece in pieces:
            piece.copy_(torch.rand(piece.shape, generator=generator) + 0.5)
            if name in ("input_scale", "activation_scale"):
                piece.fill_(0.02)
        assert parameter.dtype == pieces[0].dtype
        parameter.copy_(torch.cat([piece.data for piece in pieces]))
    weight = fused.method.dequantized(fused)
    assert weight is not None
    for layer in (fused, *parts.values()):
        layer.finalize()
    x = 4 * torch.randn(3, 192, generator=generator)
    outputs = torch.cat([part(x) for part in parts.values()], -1)
    # Both round the input alike, to at most twice its size, and may add up in different orders.
    magnitude = float((2 * x.double().abs() @ weight.abs().T).max())
    bound = 2 * 193 * torch.finfo(torch.float32).eps * magnitude
    assert ((fused(x) - outputs).abs() <= bound).all()
    assert not torch.equal(outputs[:, :128], outputs[:, 256:384])


def test_blocks_across_fused_layers_are_refused() -> None:
    at = site(Fp8.parse({"weight_block_size": [128, 128]}))
    with pytest.raises(ConfigError, match=r"block\.gate_up_proj: blocks of 128 rows") as caught:
        MergedLinear(at.at("gate_up_proj"), 256, {"gate_proj": 688, "up_proj": 688})
    assert "gate_proj 688, up_proj 688" in str(caught.value)
    assert "'modules_to_not_convert'" in str(caught.value)
    alone = Linear(at.at("gate_proj"), 200, 688)
    assert alone.get_parameter("weight_scale_inv").shape == (6, 2)


def test_conformance_suite_runs_the_examples() -> None:
    # The trials themselves are run in ops/tests/test_conformance.py, among all that is installed.
    trials = [
        trial
        for trial in conformance(
            current_registry(), place().device, distribution="interposer-quantization"
        )
        if trial.aspect == "scheme" and trial.request.name in ("fp8", "fbgemm_fp8")
    ]
    assert {trial.label for trial in trials if trial.verdict} == {
        *fp8_examples(),
        *fbgemm_fp8_examples(),
    }


@pytest.mark.landing(11)
@pytest.mark.parametrize(("scheme", "settings"), EXAMPLES)
@pytest.mark.parametrize(
    ("claim", "where", "reason"),
    [
        (lambda layer, x: x.double(), "input [1, 512]", "is above the bound"),
        (lambda layer, x: x[..., 1:].double(), "dequantized_input", "[[1, 512], "),
    ],
)
def test_conformance_suite_compares_the_dequantized_input(
    scheme: type[Fp8 | FbgemmFp8],
    settings: Mapping[str, Any],
    claim: Callable[..., torch.Tensor],
    where: str,
    reason: str,
) -> None:
    class Claiming(scheme):  # type: ignore[misc,valid-type]
        """Says of inputs what is not so."""

        def linear_method(self, prefix: str, parts: tuple[str, ...]) -> Any:
            method = super().linear_method(prefix, parts)
            method.dequantized_input = claim
            return method

    arguments = (settings, current_registry(), place().device, torch.float32, 0)
    assert check_scheme(scheme, *arguments) == []
    (fault, *_) = check_scheme(Claiming, *arguments)
    assert fault.where == where
    assert reason in fault.reason
