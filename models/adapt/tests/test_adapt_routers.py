"""Routers of adapted MoE models: recognized by results, or skipped with a reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.adapted_models import WIDE, built
from tests.landing import num_examples
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig

from interposer_adapt import adapt

HIDDEN, EXPERTS = 24, 16


class Router(nn.Module):
    """A router of an unknown class; ``flip`` returns the results in another order."""

    def __init__(
        self, scoring: str, groups: int, top_groups: int, top_k: int, **parts: Any
    ) -> None:
        super().__init__()
        self.scoring, self.num_groups, self.kept, self.most = scoring, groups, top_groups, top_k
        self.width = EXPERTS
        self.share, self.gain = bool(parts["share"]), float(parts["gain"])
        self.flip, self.wide = bool(parts["flip"]), bool(parts["wide"])
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS)) if parts["biased"] else None
        self.balance: Tensor | None
        held = torch.randn(EXPERTS) / 4 if parts["corrected"] else None
        self.register_buffer("balance", held)

    def _logits(self, x: Tensor) -> Tensor:
        if not self.wide:
            return functional.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self.weight.float(), bias)

    def _scores(self, logits: Tensor) -> Tensor:
        wide = logits.float()
        return wide.softmax(-1) if self.scoring == "softmax" else wide.sigmoid()

    def forward(self, states: Tensor) -> tuple[Tensor, ...]:
        logits = self._logits(states.reshape(-1, HIDDEN))
        scores = self._scores(logits)
        compared = scores if self.balance is None else scores + self.balance.float()
        if self.num_groups > 1:
            parts = compared.unflatten(-1, (self.num_groups, -1))
            best = parts.amax(-1) if self.balance is None else parts.topk(2).values.sum(-1)
            kept = torch.zeros_like(best).scatter(-1, best.topk(self.kept).indices, 1).bool()
            compared = parts.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        ids = compared.topk(self.most, sorted=False).indices
        weights = scores.gather(-1, ids)
        if self.share:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = (weights * self.gain).to(states.dtype)
        return (ids, weights, logits) if self.flip else (logits, weights, ids)


class Cubed(Router):
    """One that weights as no op does."""

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid() ** 3


def dense(out: tuple[Tensor, ...]) -> Tensor:
    """Return the weight of every expert; zero for those that are not chosen."""
    (weights,) = (t for t in out if t.is_floating_point() and t.shape[-1] != EXPERTS)
    (ids,) = (t for t in out if not t.is_floating_point())
    return torch.zeros(len(ids), EXPERTS, dtype=torch.float64).scatter(-1, ids, weights.double())


@torch.no_grad()
@settings(max_examples=num_examples(25), deadline=None)
@example(
    scoring="softmax",
    groups=(8, 3),
    top_k=1,
    share=False,
    gain=1.0,
    biased=True,
    corrected=True,
    flip=False,
    dtypes=(torch.float32, False),
)
@given(
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    groups=st.sampled_from([(1, 1), (4, 2), (2, 1), (8, 3)]),
    top_k=st.integers(1, 4),
    share=st.booleans(),
    gain=st.sampled_from([1.0, 2.5]),
    biased=st.booleans(),
    corrected=st.booleans(),
    flip=st.booleans(),
    dtypes=st.sampled_from([(torch.float32, False), (torch.bfloat16, True)]),
)
def test_routers_are_recognized_by_results(
    scoring: str,
    groups: tuple[int, int],
    top_k: int,
    dtypes: tuple[torch.dtype, bool],
    **parts: Any,
) -> None:
    torch.manual_seed(0)
    dtype, wide = dtypes
    model = nn.Sequential(Router(scoring, *groups, top_k, wide=wide, **parts)).to(dtype).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(3, 5, HIDDEN).to(dtype)
    expected = model(x)
    adapted = adapt(model)
    (place,) = adapted.places
    assert place.is_bound, place.reason
    requested_ops = {choice.request.name for choice, _ in adapted.resolver.choices.values()}
    assert requested_ops & {"topk_softmax", "topk_sigmoid", "grouped_topk"}
    actual = model(x)
    assert [(t.shape, t.dtype) for t in actual] == [(t.shape, t.dtype) for t in expected]
    # Logits are float32 in either case, so that no token is at a tie; weights are rounded once.
    error = (dense(actual) - dense(expected)).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps * dense(expected).max()
    assert all(torch.equal(model.state_dict()[name], held) for name, held in before.items())
    adapted.restore()
    assert all(map(torch.equal, model(x), expected))


PARTS: dict[str, Any] = {
    "share": True, "gain": 1.0, "biased": False, "corrected": True, "flip": False, "wide": True,
}  # fmt: skip


@torch.no_grad()
def test_a_router_with_rounded_logits_chooses_the_best_of_these() -> None:
    torch.manual_seed(0)
    parts = {**PARTS, "corrected": False, "wide": False}
    model = nn.Sequential(Router("softmax", 1, 1, 4, **parts)).bfloat16().eval()
    x = torch.randn(200, HIDDEN).bfloat16()
    expected = model(x)[0]
    assert adapt(model).places[0].is_bound
    logits, _, ids = model(x)
    assert logits.dtype is torch.bfloat16
    assert (logits - expected).abs().max() <= torch.finfo(torch.bfloat16).eps * expected.abs().max()
    best = logits.topk(4).values.sort().values
    assert torch.equal(logits.gather(-1, ids).sort().values, best)


@torch.no_grad()
def test_routers_that_no_op_computes_are_skipped() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Cubed("sigmoid", 1, 1, 2, **PARTS)).eval()
    (place,) = adapt(model).places
    assert not place.is_bound
    assert "no known op" in place.reason


class Table(nn.Module):
    """Rows that are looked up, more than any router has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 16, 2))
        self.padding_idx = 1
        self.calls: list[Any] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.calls.append(ids)
        return self.weight[ids]


def test_an_embedding_table_is_not_probed_as_a_router() -> None:
    table = Table().eval()
    (place,) = adapt(nn.Sequential(table).eval()).places
    assert "no known op" in place.reason
    assert not table.calls


@torch.no_grad()
def test_a_replaced_correction_bias_takes_effect() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Router("sigmoid", 1, 1, 2, **PARTS)).eval()
    plain = copy.deepcopy(model)
    assert adapt(model).places[0].is_bound
    x = torch.randn(4, HIDDEN)
    for router in (model, plain):
        router[0].balance = torch.linspace(0, 40, EXPERTS)
    assert torch.allclose(dense(model(x)), dense(plain(x)))
    assert dense(model(x))[:, -2:].all()


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16},
    "deepseek_v3": {
        "n_routed_experts": 8, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1,
    },
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16, "layer_types": ["full_attention"]},
}  # fmt: skip


@pytest.mark.landing(3)
@torch.no_grad()
@pytest.mark.parametrize("name", MIXTURES)
def test_moe_models_of_transformers_compute_the_same(name: str) -> None:
    sizes = {
        **WIDE, "num_hidden_layers": 1, "num_key_value_heads": 4, "num_experts_per_tok": 2
    }  # fmt: skip
    config = AutoConfig.for_model(name, **{**sizes, **MIXTURES[name]})
    model = built(config)
    ids = torch.arange(24).view(2, 12)
    expected = model(ids).logits
    routed = [place for place in adapt(model).places if place.kind.lower().endswith("router")]
    assert [place.is_bound for place in routed] == [True]
    assert routed[0].kernel.count("/") == 2
    actual = model(ids).logits
    assert (actual - expected).norm() <= 1e-5 * expected.norm()
