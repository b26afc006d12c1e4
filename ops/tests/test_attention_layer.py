"""The attention layer and the backend made of the standard ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from interposer import AttentionBatch, AttentionSpec, Capability, Site
from interposer.errors import CheckpointError, NoCandidateError
from interposer_ops.attention import paged_attention
from interposer_ops.layers.attention import Attention, PagedBackend

MakeSite = Callable[..., Site]
SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    dtype=torch.float32,
    cache_dtype=torch.float32,
    page_size=4,
    scale=0.25,
)
# Two sequences: six tokens of a prompt, and one that follows four others.
BATCH = AttentionBatch(
    query_starts=torch.tensor([0, 6, 7]),
    seq_lens=torch.tensor([6, 5]),
    page_table=torch.tensor([[5, 1], [0, 3]]),
    slots=torch.tensor([20, 21, 22, 23, 4, 5, 12]),
    max_query_tokens=6,
    max_seq_tokens=6,
)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "changes", [{}, {"window_tokens": 3}, {"softcap": 0.5}, {"num_kv_heads": 4}]
)
def test_a_step_writes_and_attends(make_site: MakeSite, changes: dict[str, Any]) -> None:
    spec = replace(SPEC, **changes)
    layer = Attention(make_site("attn", torch.float32), spec)
    layer.finalize()
    cache = layer.backend.kv_layout().allocate(1, 6, "cpu")[0]
    cache.copy_(numbers(*cache.shape, seed=3))
    query, key, value = (numbers(7, n, 16, seed=n) for n in (4, spec.num_kv_heads, 1))
    value = value.expand(-1, spec.num_kv_heads, -1).contiguous()
    before = cache.clone()
    actual = layer(query, key, value, cache, layer.backend.plan(BATCH))
    for token, slot in enumerate(BATCH.slots.tolist()):
        before[:, slot // 4, slot % 4] = torch.stack((key[token], value[token]))
    assert torch.equal(cache, before)
    expected = paged_attention(
        query,
        before[0],
        before[1],
        BATCH.page_table,
        BATCH.query_starts,
        BATCH.seq_lens,
        6,
        spec.scale,
        True,
        spec.window_tokens,
        spec.softcap,
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_join_the_softmax_of_every_head(make_site: MakeSite, window: int | None) -> None:
    spec = replace(SPEC, sinks=True, window_tokens=window)
    layer = Attention(make_site("self_attn.attn", torch.float32), spec)
    (sinks,) = layer.parameters()
    assert vars(sinks)["stored_as"] == "self_attn.sinks"
    sinks.data = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    layer.finalize()
    cache = layer.backend.kv_layout().allocate(1, 6, "cpu")[0]
    cache.copy_(numbers(*cache.shape, seed=3))
    query, key, value = (numbers(7, n, 16, seed=n) for n in (4, 2, 2))
    actual = layer(query, key, value, cache, layer.backend.plan(BATCH))
    expected = paged_attention(
        query,
        cache[0],
        cache[1],
        BATCH.page_table,
        BATCH.query_starts,
        BATCH.seq_lens,
        6,
        spec.scale,
        True,
        window,
        None,
        sinks.data,
    )
    torch.testing.assert_close(actual, expected)
    # The first token sees itself alone: its weight is what the sink leaves.
    scores = (query[0].unflatten(0, (2, 2)) * key[0, :, None]).sum(-1).flatten() * spec.scale
    share = torch.sigmoid(scores - sinks.data)[:, None]
    torch.testing.assert_close(actual[0], share * value[0].repeat_interleave(2, 0))


def test_a_sink_that_is_not_finite_is_refused(make_site: MakeSite) -> None:
    layer = Attention(make_site("self_attn.attn", torch.float32), replace(SPEC, sinks=True))
    layer.get_parameter("sinks").data = torch.tensor([0.0, torch.nan, 0.0, 0.0])
    with pytest.raises(CheckpointError, match=r"self_attn\.sinks: holds a score that is infinite"):
        layer.finalize()


@pytest.mark.parametrize("has_prefix", [True, False])
def test_prefix_tokens_attend_in_both_directions(make_site: MakeSite, has_prefix: bool) -> None:
    """Where the step has prefixes; layers without ``prefix_lm`` pass them over."""
    batch = replace(BATCH, prefix_lens=torch.tensor([4, 4])) if has_prefix else BATCH
    site = make_site("attn", torch.float32)
    layers = [Attention(site, replace(SPEC, prefix_lm=prefix)) for prefix in (True, False)]
    query, key, value = (numbers(7, n, 16, seed=n) for n in (4, 2, 2))
    outputs = []
    for layer in layers:
        cache = layer.backend.kv_layout().allocate(1, 6, "cpu")[0]
        cache.copy_(numbers(*cache.shape, seed=3))
        outputs.append(layer(query, key, value, cache, layer.backend.plan(batch)))
    both, causal = outputs
    assert torch.equal(both[3:], causal[3:])
    changed = (
        (both[:3] != causal[:3]).any(-1).all() if has_prefix else not torch.equal(both, causal)
    )
    assert bool(changed) == has_prefix
    if has_prefix:
        scores = torch.einsum("nd,ld->nl", query[0, :2], key[:4, 0]) * SPEC.scale
        torch.testing.assert_close(both[0, :2], scores.softmax(-1) @ value[:4, 0])


def test_layers_with_equal_specs_share_a_backend(make_site: MakeSite) -> None:
    site = make_site("model", torch.float32)
    layers = [Attention(site.at(name), spec) for name, spec in (("a", SPEC), ("b", replace(SPEC)))]
    other = Attention(site.at("c"), replace(SPEC, window_tokens=2))
    assert layers[0].backend is layers[1].backend
    assert other.backend is not layers[0].backend


def test_the_layout_is_pages_of_keys_and_values(make_site: MakeSite) -> None:
    layout = Attention(make_site("attn", torch.float32), SPEC).backend.kv_layout()
    assert layout.shape(6) == (2, 6, 4, 2, 16)
    assert layout.page_bytes() * 6 == layout.allocate(1, 6, "cpu")[0].nbytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"type": "encoder"}, "encoder"),
        ({"cache_dtype": torch.float16}, "float16"),
        ({"latent": True}, "latent"),
        ({"sparse": True}, "sparse"),
    ],
)
def test_refused_specs_have_a_reason(
    make_site: MakeSite, changes: dict[str, Any], reason: str
) -> None:
    spec = replace(SPEC, **changes)
    assert PagedBackend.accepts(SPEC, Capability("x86_64"))
    assert reason in PagedBackend.accepts(spec, Capability("x86_64")).reason
    with pytest.raises(NoCandidateError) as raised:
        Attention(make_site("attn", torch.float32), spec)
    assert [refusal.candidate for refusal in raised.value.refusals] == ["grouped", "paged"]
