"""Adapted models whose modules compare the attention's name or pass it further keywords."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from models.adapt.tests.test_adapt_attention import SIZES, close, llama, reasons, sunk

from interposer_adapt import adapt
from interposer_adapt._attention_registry import NAME, AliasedName, attention_name_for

TOP_K = 8
LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "index_topk": TOP_K,
    "index_head_dim": 16,
    "index_n_heads": 2,
}


def indexed(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**LATENT)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["DeepseekV32", "GlmMoeDsa"])
def test_a_sparse_indexer_takes_effect_beyond_its_top_k(kind: str) -> None:
    model = indexed(kind)
    ids = torch.randint(1, 64, (2, 3 * TOP_K), generator=torch.Generator().manual_seed(1))
    expected = model(ids).logits
    adapted = adapt(model)
    assert close(model(ids).logits, expected)
    assert any("no pattern that kernels support" in each for each in reasons(adapted))
    assert close(adapted.restore()(ids).logits, expected)


@torch.no_grad()
def test_an_unsupported_keyword_is_never_ignored() -> None:
    model, ids = llama(), torch.arange(1, 13)[None]
    bias = torch.randn(1, 4, 12, 12)
    expected = model(ids, position_bias=bias).logits
    assert not close(model(ids).logits, expected)
    adapted = adapt(model)
    assert close(model(ids, position_bias=bias).logits, expected)
    model(ids, indices=ids)
    for name in ("position_bias", "indices"):
        assert any(f"is passed {name!r}, which no kernel takes" in r for r in reasons(adapted))
    capped = sunk()
    adapt(capped)
    with pytest.raises(NotImplementedError, match="passed 'indices', which no kernel takes"):
        capped(ids, indices=ids)


def test_the_attention_name_equals_the_replaced_name() -> None:
    name = attention_name_for(indexed("DeepseekV32"), "sdpa")
    assert name in ("eager", "sdpa")
    assert name == NAME
    assert (name != "sdpa") is False
    assert name != "eager"
    assert {"sdpa": 1, NAME: 2}[name] == 2
    for same in (copy.deepcopy(name), pickle.loads(pickle.dumps(name))):
        assert isinstance(same, AliasedName)
        assert same == "sdpa"
    # Llama compares no names.
    assert not isinstance(attention_name_for(llama(), "sdpa"), AliasedName)


@pytest.mark.slow
@torch.no_grad()
def test_a_model_that_compares_names_compiles_to_the_same() -> None:
    model = indexed("DeepseekV32")
    ids = torch.randint(1, 64, (1, 2 * TOP_K))
    adapt(model)
    expected = model(ids).logits
    compiled: Any = torch.compile(model, backend="eager")
    assert close(compiled(ids).logits, expected)
