"""The request of a layer of vLLM has its facts, and layers with other readers have none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interposer import AttentionSpec
from interposer.errors import ConfigError
from interposer_ops.attention import alibi_slopes
from interposer_vllm._attention_request import spec_of

NAME = "model.layers.0.self_attn.attn"
IMPL = {
    "attn_type": "decoder",
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_size": 64,
    "scale": 0.125,
    "sliding_window": -1,
    "logits_soft_cap": 0,
    "sinks": None,
    "alibi_slopes": None,
}
LAYER = {
    "head_size": 64,
    "head_size_v": 64,
    "use_mm_prefix": False,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "kv_cache_torch_dtype": torch.bfloat16,
    "kv_sharing_target_layer_name": None,
}


def request(
    impl: dict[str, Any] | None = None,
    layer: dict[str, Any] | None = None,
    others: dict[str, Any] | None = None,
    **config: Any,
) -> AttentionSpec:
    described_layer = SimpleNamespace(
        **LAYER | (layer or {}), impl=SimpleNamespace(**IMPL | (impl or {}))
    )
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    parallel |= config.pop("parallel", {})
    facts = SimpleNamespace(
        kv_transfer_config=config.get("transfer"),
        parallel_config=SimpleNamespace(**parallel),
        compilation_config=SimpleNamespace(
            static_forward_context={NAME: described_layer, **(others or {})}
        ),
    )
    return spec_of(NAME, described_layer, 128, facts)


def test_the_request_has_the_facts_of_vllms_layer() -> None:
    assert request() == AttentionSpec(
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        dtype=torch.bfloat16,
        cache_dtype=torch.bfloat16,
        page_size=128,
        scale=0.125,
    )


def test_the_request_has_windows_caps_sinks_slopes_and_8_bit_caches() -> None:
    spec = request(
        {
            "sliding_window": 77,
            "logits_soft_cap": 30.0,
            "sinks": torch.zeros(8),
            "alibi_slopes": alibi_slopes(8, "cpu"),
        },
        {"kv_cache_dtype": "fp8_e5m2", "kv_cache_torch_dtype": torch.uint8},
    )
    assert (spec.window_tokens, spec.softcap, spec.sinks, spec.alibi) == (77, 30.0, True, True)
    assert spec.cache_dtype == torch.float8_e5m2


SHARING = SimpleNamespace(kv_sharing_target_layer_name=NAME)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"impl": {"attn_type": "encoder_only"}}, "attends as encoder_only"),
        ({"layer": {"head_size_v": 32}}, "has values of 32 and keys of 64"),
        ({"layer": {"use_mm_prefix": True}}, "without a causal mask"),
        ({"layer": {"is_draft_layer": True}}, "without a causal mask"),
        ({"transfer": "a connector"}, "hands its cache to another engine"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "on several workers"),
        ({"others": {"model.layers.9.attn": SHARING}}, "'model.layers.9.attn' reads that of"),
        ({"layer": {"kv_sharing_target_layer_name": "model.layers.3"}}, "shares a cache"),
        ({"impl": {"alibi_slopes": torch.ones(8)}}, "ALiBi slopes that do not follow"),
    ],
    ids=str,
)
def test_a_layer_that_no_request_describes_is_refused(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        request(**facts)
