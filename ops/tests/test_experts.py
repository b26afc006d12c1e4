"""Experts against a loop over tokens, against transformers, and the formats against each other."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from interposer.errors import RequestError
from interposer_ops.experts import (
    fused_experts,
    fused_experts_fp8,
    fused_experts_mxfp4,
    fused_experts_w4a16,
)
from interposer_ops.quantizers import dequantize_mxfp4, quantize_mxfp4

E, H, I = 4, 16, 8  # noqa: E741


class Mixture:
    """Random tokens, weights and routing; the last token has an expert of another rank."""

    def __init__(self, num_tokens: int = 6, top_k: int = 2) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.x = normal(num_tokens, H)
        self.gate_up, self.down = normal(E, 2 * I, H), normal(E, H, I)
        self.gate_up_bias, self.down_bias = normal(E, 2 * I), normal(E, H)
        self.weights = torch.rand(num_tokens, top_k, generator=generator)
        self.ids = torch.randint(E, (num_tokens, top_k), generator=generator)
        self.ids[-1, 0] = -1

    def expected(self, activation: str, *, biased: bool) -> torch.Tensor:
        """Return the mixture token by token, expert by expert, in float64."""
        result = torch.zeros(self.x.shape, dtype=torch.float64)
        for token, (ids, weights) in enumerate(zip(self.ids.tolist(), self.weights, strict=True)):
            for expert, weight in zip(ids, weights.double(), strict=True):
                if expert < 0:
                    continue
                first = self.gate_up[expert].double() @ self.x[token].double()
                first = first + self.gate_up_bias[expert] if biased else first
                gate, up = first[:I], first[I:]
                if activation == "silu":
                    hidden = functional.silu(gate) * up
                elif activation == "gelu":
                    hidden = 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up
                else:
                    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                    hidden = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
                second = self.down[expert].double() @ hidden
                second = second + self.down_bias[expert] if biased else second
                result[token] += weight * second
        return result


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swiglu_oai"])
def test_experts_are_a_loop_over_tokens(activation: str, biased: bool) -> None:
    m = Mixture()
    first, second = (m.gate_up_bias, m.down_bias) if biased else (None, None)
    y = fused_experts(m.x, m.gate_up, first, m.down, second, m.weights, m.ids, activation)
    expected = m.expected(activation, biased=biased)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


def test_experts_match_mixtral_of_transformers() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=E)
    config._experts_implementation = "eager"
    peer, m = MixtralExperts(config), Mixture()
    peer.gate_up_proj.data, peer.down_proj.data = m.gate_up, m.down
    ids = m.ids.clamp(min=0)
    y = fused_experts(m.x, m.gate_up, None, m.down, None, m.weights, ids, "silu")
    torch.testing.assert_close(y, peer(m.x, ids, m.weights).detach(), rtol=1e-5, atol=1e-4)


def test_an_expert_of_another_rank_is_not_read() -> None:
    m = Mixture()
    m.gate_up[0] = torch.inf
    m.ids = torch.where(m.ids == 0, -1, m.ids)
    y = fused_experts(m.x, m.gate_up, None, m.down, None, m.weights, m.ids, "silu")
    assert y.isfinite().all()


@pytest.mark.parametrize("shares", [(1, 1), (2 * I, 1), (2, 4)], ids=["matrix", "channel", "block"])
def test_8_bit_experts_match_plain_experts_of_scaled_weights(shares: tuple[int, int]) -> None:
    m = Mixture()
    rows, columns = shares
    stored, down = m.gate_up.to(torch.float8_e4m3fn), m.down.to(torch.float8_e4m3fn)
    scale = torch.rand(E, rows, columns) + 0.5
    wide = scale.repeat_interleave(2 * I // rows, 1).repeat_interleave(H // columns, 2)
    ones = torch.ones(E, 1, 1)
    y = fused_experts_fp8(m.x, stored, scale, down, ones, m.weights, m.ids, "silu")
    plain = fused_experts(
        m.x, stored.float() * wide, None, down.float(), None, m.weights, m.ids, "silu"
    )
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-4)


def test_4_bit_experts_match_plain_experts_of_unpacked_weights() -> None:
    m = Mixture()
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(16, (E, 2 * I, H), generator=generator, dtype=torch.uint8)
    second = torch.randint(16, (E, H, I), generator=generator, dtype=torch.uint8)
    first_scale, second_scale = torch.rand(E, 2 * I, H // 8), torch.rand(E, H, 1)
    y = fused_experts_w4a16(
        m.x,
        first[..., ::2] | first[..., 1::2] << 4,
        first_scale,
        second[..., ::2] | second[..., 1::2] << 4,
        second_scale,
        m.weights,
        m.ids,
        "gelu",
    )
    gate_up = (first.float() - 8) * first_scale.repeat_interleave(8, 2)
    down = (second.float() - 8) * second_scale
    plain = fused_experts(m.x, gate_up, None, down, None, m.weights, m.ids, "gelu")
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-3)


def test_mxfp4_experts_match_plain_experts_of_dequantized_weights() -> None:
    m = Mixture()
    generator = torch.Generator().manual_seed(1)
    hidden, inner = 64, 32
    x = torch.randn(len(m.x), hidden, generator=generator)
    first, second = (
        quantize_mxfp4(torch.randn(E, *shape, generator=generator))
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    biases = torch.randn(E, 2 * inner), torch.randn(E, hidden)
    routing = m.weights, m.ids, "swiglu_oai"

    def microscaled() -> torch.Tensor:
        return fused_experts_mxfp4(
            x, first[0], first[1], biases[0], second[0], second[1], biases[1], *routing
        )

    y = microscaled()
    gate_up, down = (dequantize_mxfp4(*stored, torch.float32) for stored in (first, second))
    plain = fused_experts(x, gate_up, biases[0], down, biases[1], *routing)
    assert torch.equal(y, plain)
    first[1][1], second[1][1] = 255, 255
    spoiled = microscaled()
    assert torch.equal(spoiled.isnan().all(1), (m.ids == 1).any(1))
    assert torch.equal(spoiled.isnan().any(1), (m.ids == 1).any(1))


def test_an_unknown_activation_lists_the_known_ones() -> None:
    m = Mixture()
    with pytest.raises(RequestError, match="No activation 'relu' of experts; try 'silu', 'gelu'"):
        fused_experts(m.x, m.gate_up, None, m.down, None, m.weights, m.ids, "relu")
