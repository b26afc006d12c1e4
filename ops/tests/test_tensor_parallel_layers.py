"""Shards of attention, MLPs and tables: the part that each rank holds, and replicated layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interposer import AttentionSpec, Communicator, Ranks, Site
from interposer.records import CommunicatorEntry, LayerEntry
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.mlp import GatedMLP
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.tensor_parallel.embedding import shard_embedding, shard_lm_head
from interposer_ops.layers.tensor_parallel.fused_all_reduce import FUSED_ALL_REDUCE, fuse_all_reduce
from interposer_ops.layers.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from interposer_ops.layers.tensor_parallel.sharding import even_edges, local_spec, shard_heads
from interposer_ops.norms import fused_add_rms_norm

MakeSite = Callable[..., Site]


def spec_of(heads: int, kv_heads: int, **changes: Any) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=8,
        dtype=torch.float32,
        cache_dtype=torch.float32,
        page_size=4,
        scale=1.0,
        **changes,
    )


def described(site: Site, rank: int, count: int) -> Site:
    resolver: Any = site.resolver
    resolver.ranks = Ranks(rank, count, (0,) * count, ("cpu",) * count)
    return site


@given(count=st.integers(2, 8), heads=st.integers(1, 48), kv_heads=st.integers(1, 12))
def test_every_query_head_keeps_its_kv_head_on_its_rank(
    count: int, heads: int, kv_heads: int
) -> None:
    heads *= kv_heads
    group = heads // kv_heads
    heads_of_ranks: list[int] = []
    for rank in range(count):
        ranks = Ranks(rank, count, (0,) * count, ("cpu",) * count)
        resolver: Any = type("Resolver", (), {"ranks": ranks, "notes": []})()
        site, spec = Site(resolver, "model.layers.3.attn", torch.float32), spec_of(heads, kv_heads)
        shards = shard_heads(site, spec)
        if shards is None:
            assert heads % count or (kv_heads % count and count % kv_heads)
            (note,) = resolver.notes
            assert note.startswith("every rank computes all of model.layers.attn: ")
            assert local_spec(site, spec) == spec
            return
        local, query, kv = shards
        ((first, last),), ((first_kv, last_kv),) = query.ranges, kv.ranges
        assert (local.num_heads, local.num_kv_heads) == (last - first, last_kv - first_kv)
        own_group = local.num_heads // local.num_kv_heads
        for head in range(first, last):
            # What the attention of this rank takes for the keys of a head are those of that head.
            assert first_kv + (head - first) // own_group == head // group
        heads_of_ranks += range(first, last)
    assert heads_of_ranks == list(range(heads))


def test_one_process_has_the_standard_layers(make_site: MakeSite) -> None:
    site = make_site("model", torch.float32)
    attention = SelfAttention(site.at("self_attn"), spec_of(4, 2), 32, 8)
    mlp = GatedMLP(site.at("mlp"), 32, 64, "silu")
    embedding = shard_embedding(site.at("embed"), 50, 32)
    head = shard_lm_head(site.at("head"), 50, 32)
    kinds = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    assert [type(layer) for layer in kinds] == [MergedLinear, Linear, MergedLinear, Linear]
    assert (type(embedding), type(head)) == (Embedding, LMHead)


def test_ranks_hold_shards(make_site: MakeSite) -> None:
    site = described(make_site("model", torch.float32), 1, 2)
    with torch.device("meta"):
        attention = SelfAttention(site.at("self_attn"), spec_of(4, 2), 32, 8, None, True, True)
        mlp = GatedMLP(site.at("mlp"), 32, 64, "silu")
        embedding = shard_embedding(site.at("embed"), 51, 32)
    first, last = attention.qkv_proj, attention.o_proj
    assert isinstance(first, ColumnParallelLinear)
    assert isinstance(last, RowParallelLinear)
    assert first.parts == {"q_proj": 16, "k_proj": 8, "v_proj": 8}
    assert attention.attn.spec.num_heads == 2
    assert last.get_parameter("weight").shape == (32, 16)
    # The first rank adds the bias.
    assert (last._parameters["bias"], last.elsewhere) == (None, ("bias",))
    assert mlp.activation.prefix == "model.mlp.activation"
    assert mlp.down_proj.in_features == 32
    assert embedding.get_parameter("weight").shape == (26, 32)
    assert even_edges(2, 51) == [0, 25, 51]
    assert not site.resolver.notes


@pytest.mark.parametrize("says", [False, True])
def test_a_replacement_layer_must_declare_its_reduction(make_site: MakeSite, says: bool) -> None:
    name = "AddingMLP" if says else "ForgetfulMLP"
    entry = LayerEntry("gated_mlp", "other", f"{__name__}:{name}")
    alone = make_site("model", torch.float32, entry)
    assert type(GatedMLP(alone.at("mlp"), 32, 64, "silu")).__name__ == name
    site = described(make_site("model", torch.float32, entry), 0, 2)
    mlp = GatedMLP(site.at("mlp"), 32, 64, "silu")
    assert type(mlp).__name__ == (name if says else "GatedMLP")
    if not says:
        refused_choices = [
            choice for choice, _ in site.resolver.choices.values() if choice.refusals
        ]
        (refusal,) = refused_choices[0].refusals
        assert "does not set `reduces`" in refusal.reason


class ForgetfulMLP(GatedMLP):
    """Computes its parts by itself, and adds nothing up."""


class AddingMLP(GatedMLP):
    """Calls its parts."""

    reduces = True


class Twice(Communicator):
    """Two ranks that have the same."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        NORMED.append(x)
        return fused_add_rms_norm(2 * x, residual, weight, eps)

    def close(self) -> None:
        pass


NORMED: list[torch.Tensor] = []


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_all_reduce_is_fused_with_the_next_norm(make_site: MakeSite, is_fused: bool) -> None:
    collectives = ("all_reduce", *((FUSED_ALL_REDUCE,) if is_fused else ()))
    twice = CommunicatorEntry("twice", f"{__name__}:Twice", collectives, score=99.0)
    site = make_site("model", torch.float32, twice)
    resolver: Any = site.resolver
    resolver.ranks = Ranks(0, 2, (0, 0), ("cpu", "cpu"), group=object())
    generator = torch.Generator().manual_seed(0)
    mlp, norm = GatedMLP(site.at("mlp"), 32, 64, "silu"), RMSNorm(site.at("norm"), 32, 1e-5)
    for parameter in (*mlp.parameters(), *norm.parameters()):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    finalized: Any = [m for m in (*mlp.modules(), norm) if hasattr(m, "finalize")]
    for module in finalized:
        module.finalize()
    x, residual = torch.randn(2, 3, 32, generator=generator)
    total = mlp(x)
    expected = fused_add_rms_norm(total, residual, norm.weight, 1e-5)
    assert fuse_all_reduce(site.at("norm"), mlp.down_proj, norm, (mlp,)) == is_fused
    notes = {note for choice, _ in resolver.choices.values() for note in choice.notes}
    note = f"the next norm is not fused with the all-reduce: twice has no {FUSED_ALL_REDUCE}"
    assert notes == (set() if is_fused else {note})
    NORMED.clear()
    torch.testing.assert_close(norm.forward_add(mlp(x), residual), expected)
    assert len(NORMED) == is_fused
    # A forward hook receives the sum, and the all-reduce still runs once.
    mlp.register_forward_hook(lambda _module, _given, out: torch.testing.assert_close(out, total))
    torch.testing.assert_close(norm.forward_add(mlp(x), residual), expected)
    assert len(NORMED) == is_fused
