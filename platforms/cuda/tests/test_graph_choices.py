"""Verdicts on capturing the selected kernels in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from interposer import AttentionSpec, Capability, Config, Device, Resolver, Site, current_registry
from interposer_ops.attention import paged_attention
from interposer_ops.devices.graphs import judge_choices
from interposer_ops.experts import fused_experts


def resolver(config: Config | None = None) -> Resolver:
    device = Device("cuda", "cuda:0", "a GPU", Capability("sm_90", frozenset({"triton"})))
    registry = current_registry(Config(plugins={"interposer-ops", "interposer-cuda"}))
    return Resolver(registry, device, config or Config(), described=True)


def test_a_kernel_that_synchronizes_is_named() -> None:
    made = resolver()
    site = Site(made, "mlp", torch.float32)
    site.bind_kernel(paged_attention, **facts())
    safe = [choice for choice, _ in made.choices.values()]
    assert judge_choices(safe)
    config = Config(kernels={"fused_experts": "fused_experts_in_turn"})
    registry = current_registry(Config(plugins={"interposer-ops", "interposer-cuda"}))
    waits = Resolver(registry, made.device, config, described=True)
    Site(waits, "mlp", torch.float32).bind_kernel(
        fused_experts, hidden_size=8, intermediate_size=8, num_experts=2, top_k=1, biased=False
    )
    choices = [choice for choice, _ in waits.choices.values()]
    verdict = judge_choices([*safe, *choices])
    assert verdict.reason == (
        "cannot be captured: fused_experts_in_turn of interposer-ops for 'fused_experts' does not "
        "promise to be graph_safe. Try: Config(require={'graph_safe'})"
    )


def facts() -> dict[str, int | float | str | bool]:
    flags = dict.fromkeys(("windowed", "softcapped", "sinks", "alibi", "prefix_lm"), False)
    numbers = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "page_size": 16}
    return {**flags, **numbers, "cache_dtype": "float32"}


@pytest.mark.process  # the backends are asked in another process first
@pytest.mark.parametrize("name", ["flex_gathered", "sdpa_gathered"])
def test_attention_that_waits_or_is_compiled_is_not_captured(name: str) -> None:
    made = resolver(Config(attention={"decoder": name}))
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16,
        page_size=16,
        scale=0.125,
    )
    made.attention(spec, Site(made, "attn", spec.dtype))
    verdict = judge_choices([choice for choice, _ in made.choices.values()])
    assert verdict.reason.startswith(
        f"cannot be captured: {name} of interposer-cuda for 'decoder' does not promise to be graph_"
    )
