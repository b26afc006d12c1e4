"""Norms and activations call what is chosen here where vLLM would call torch's ops one by one.

Classes stand for vLLM's here, with what is read of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interposer import BoundKernel, Config
from interposer_ops.activations import silu_and_mul
from interposer_ops.norms import fused_add_rms_norm, rms_norm
from interposer_vllm._elementwise import Activation, Norm
from interposer_vllm._session import Session

pytestmark = pytest.mark.process

WIDTH, EPS = 48, 1e-6
PLACE = f"RMSNorm of {WIDTH}"


class OwnNorm(nn.Module):
    """Has what is read of an ``RMSNorm``; its own methods return what nobody computes."""

    def __init__(self, enabled: bool = True, has_weight: bool = True) -> None:
        super().__init__()
        self.hidden_size, self.variance_epsilon, self.has_weight = WIDTH, EPS, has_weight
        self.variance_size_override = None
        self.weight = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self._forward_method: Any = self.forward_cpu if enabled else self.forward_native

    def forward(self, *args: Tensor) -> Any:
        return self._forward_method(*args)

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return self.forward_native(x, residual)

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return "vLLM's own"


class RMSNorm(Norm, OwnNorm):
    pass


class OwnActivation(nn.Module):
    def forward_cpu(self, x: Tensor) -> Any:
        return "vLLM's own"


class SiluAndMul(Activation, OwnActivation):
    pass


@pytest.fixture
def session(no_policy: None, monkeypatch: pytest.MonkeyPatch) -> Session:
    new_session = Session("cpu", Config())
    for module in ("_elementwise", "_methods"):
        monkeypatch.setattr(f"interposer_vllm.{module}.session", lambda: new_session)
    return new_session


@pytest.mark.slow
def test_a_norm_uses_the_weight_that_is_loaded_later(session: Session) -> None:
    norm: Any = RMSNorm()
    x, residual = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    for _ in range(2):
        weight = torch.rand(WIDTH)
        norm.weight.data.copy_(weight)
        torch.testing.assert_close(norm(x), rms_norm.reference(x, weight, EPS))
        added = fused_add_rms_norm.reference(x, residual, weight, EPS)
        torch.testing.assert_close(norm(x, residual), added)
    RMSNorm()
    assert session.taken == [PLACE]


def test_compiled_code_and_other_dtypes_stay_vllms(session: Session) -> None:
    x = torch.randn(3, WIDTH)
    assert RMSNorm(enabled=False)(x) == "vLLM's own"
    assert session.taken == []
    norm: Any = RMSNorm()
    assert norm(x.bfloat16()) == "vLLM's own"
    assert norm(x, x.double()) == "vLLM's own"
    gate: Any = SiluAndMul().forward_cpu
    for layer in (norm, gate):
        compiled: Any = torch.compile(layer, backend="eager", fullgraph=True)
        assert compiled(x) == "vLLM's own"


def test_a_norm_without_a_weight_stays_vllms_with_a_reason(session: Session) -> None:
    assert RMSNorm(has_weight=False)(torch.randn(3, WIDTH)) == "vLLM's own"
    assert "it has no weight" in session.kept[PLACE]


def test_a_kernel_that_prepares_weights_is_refused_for_norms(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(bound: Any, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": weight.clone()}

    monkeypatch.setattr(BoundKernel, "prepared", prepared)
    assert RMSNorm()(torch.randn(3, WIDTH)) == "vLLM's own"
    assert "prepares weights, but vLLM may replace them" in session.kept[PLACE]


def test_an_activation_agrees_with_the_op_at_every_width(session: Session) -> None:
    gate: Any = SiluAndMul()
    for width in (32, 32, 64):
        x = torch.randn(3, width)
        torch.testing.assert_close(gate.forward_cpu(x), silu_and_mul.reference(x))
    assert session.taken == ["SiluAndMul of 16", "SiluAndMul of 32"]
