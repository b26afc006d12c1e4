"""Adapted decoders in the engine: the tokens of transformers, alone and in batches that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.landing import landing_sample
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    Qwen3Config,
    T5Config,
)

import interposer
from interposer import Config
from interposer.errors import ConfigError, RequestError, UnsupportedModelError
from interposer_adapt import adapt, language_model
from interposer_engine import LanguageModel, SamplingParams

DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ONE_HEADED = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**DECODER),
    "qwen3": lambda: Qwen3Config(**DECODER, head_dim=16, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3TextConfig(
        **{**DECODER, "num_hidden_layers": 3},
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi": lambda: PhiConfig(**{**DECODER, "partial_rotary_factor": 0.5}),
    "deepseek-v3": lambda: DeepseekV3Config(
        **{**DECODER, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "olmo2": lambda: Olmo2Config(**DECODER),
    "gpt-neox": lambda: GPTNeoXConfig(**ONE_HEADED),
    "cohere": lambda: CohereConfig(**DECODER),
    "gpt2": lambda: GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=128,
        n_positions=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    ),
    # These two use eager attention, because sdpa knows neither caps nor sinks.
    "gemma2": lambda: Gemma2Config(
        **DECODER, head_dim=16, sliding_window=8, attn_logit_softcapping=1.0
    ),
    "gpt-oss": lambda: GptOssConfig(
        **DECODER,
        head_dim=16,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
STATEFUL: dict[str, Any] = {
    "lfm2": lambda: Lfm2Config(
        **{**DECODER, "num_hidden_layers": 3},
        layer_types=["conv", "full_attention", "conv"],
        block_multiple_of=16,
    ),
    "mamba": lambda: MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=128, state_size=8),
    "bert": lambda: BertConfig(**ONE_HEADED),
}
PROMPTS = [[5, 9, 3, 7, 2, 11, 40], [6, 2, 3], [77, 12] * 12, [99]]
COUNT = 14


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = {**FAMILIES, **STATEFUL}[name]()
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for module in model.modules():
        for held, parameter in module.named_parameters(recurse=False):
            if "norm" in type(module).__name__.lower() or held == "sinks":
                nn.init.normal_(parameter, 0.5, 0.3)
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@torch.no_grad()
def logits_of(model: Any, prompt: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([prompt])).logits
    return logits[0]


def engine_of(model: Any, **settings: Any) -> LanguageModel:
    return language_model(adapt(model), **{"cache_tokens": 1024, **settings})


@pytest.mark.landing(1)
@pytest.mark.parametrize("name", landing_sample(FAMILIES, every=3))
def test_tokens_equal_transformers(name: str) -> None:
    model = made(name)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    # The longest prompt comes in chunks, and not all prompts fit into a step.
    lm = engine_of(model, max_step_tokens=9, max_sequences=3)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        (alone,) = lm.generate([prompt], max_new_tokens=COUNT)
        assert list(alone.token_ids) == tokens
    together = lm.generate(PROMPTS, max_new_tokens=COUNT)
    assert [list(one.token_ids) for one in together] == expected
    assert lm.engine.pool.num_free == lm.engine.pool.num_pages
    dense = logits_of(model, PROMPTS[2])
    torch.testing.assert_close(lm.logits(PROMPTS[2]), dense, rtol=2e-4, atol=2e-4)


@pytest.mark.landing(1)
@pytest.mark.parametrize("name", ["gemma3", "olmo2"])
def test_requests_join_and_leave(name: str) -> None:
    model = made(name)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    engine = engine_of(model, max_step_tokens=7).engine
    sequences, counts = [], (COUNT, 3, COUNT, 9)
    for prompt, count in zip(PROMPTS, counts, strict=True):
        sequences.append(engine.add(prompt, SamplingParams(max_new_tokens=count)))
        engine.step()
        engine.step()
    while engine.busy:
        engine.step()
    for sequence, tokens, count in zip(sequences, expected, counts, strict=True):
        assert sequence.output == tokens[:count]


def test_preempted_requests_are_computed_again() -> None:
    model = made("llama")
    expected = [greedy(model, prompt) for prompt in PROMPTS[:3]]
    lm = engine_of(model, cache_tokens=48)
    actual = lm.generate(PROMPTS[:3], max_new_tokens=COUNT)
    assert [list(one.token_ids) for one in actual] == expected


def test_the_trial_allows_for_rounding_of_the_dtype() -> None:
    model = made("qwen3", torch.bfloat16)
    lm = engine_of(model)
    dense = logits_of(model, PROMPTS[2]).float()
    actual = lm.logits(PROMPTS[2])
    assert float((actual - dense).norm() / dense.norm()) < 0.05


def test_a_quantized_model_runs_in_the_engine() -> None:
    model = made("llama")
    handle = adapt(model, quantization="int8")
    lm = language_model(handle, cache_tokens=512)
    dense = logits_of(model, PROMPTS[2])
    actual = lm.logits(PROMPTS[2])
    assert float((actual - dense).norm() / dense.norm()) < 0.05
    assert len(lm.generate(PROMPTS, max_new_tokens=COUNT)[3].token_ids) == COUNT


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("lfm2", "model.layers.0.conv (Lfm2ShortConv)"),
        ("mamba", "backbone.layers.0.mixer (MambaMixer)"),
    ],
)
def test_a_model_with_other_state_gets_transformers_caches(name: str, layer: str) -> None:
    model = made(name)
    for config in (model.config, model.generation_config):
        config.eos_token_id = None
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    lm = engine_of(model, max_step_tokens=9, max_sequences=3)
    together = lm.generate(PROMPTS, max_new_tokens=COUNT)
    assert [list(one.token_ids) for one in together] == expected
    dense = logits_of(model, PROMPTS[2])
    torch.testing.assert_close(lm.logits(PROMPTS[2]), dense, rtol=2e-4, atol=2e-4)
    (note,) = [note for note in lm.resolver.notes if "a cache of transformers" in note]
    assert note.startswith(layer)
    assert lm.engine.pool.num_free == lm.engine.pool.num_pages


def test_bidirectional_attention_is_refused_by_name() -> None:
    model = made("bert")
    handle = adapt(model)
    layer = r"bert\.encoder\.layer\.0.* attends to tokens that come later"
    with pytest.raises(UnsupportedModelError, match=layer):
        language_model(handle, cache_tokens=512)
    assert handle.restore() is model


def test_an_encoder_is_refused_by_name() -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"encoder \(T5Stack\) has outputs"):
        language_model(adapt(model), cache_tokens=512)


class Shifted(nn.Module):
    """An MLP that mixes in the state of the previous token."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of ``inner`` for both."""
        before = torch.nn.functional.pad(x, (0, 0, 1, -1))
        out: torch.Tensor = self.inner(x + 0.01 * before)
        return out


def test_state_in_a_custom_layer_is_refused_by_name() -> None:
    model = made("llama")
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp \(Shifted\) computes"):
        engine_of(model)


def test_angles_by_the_longest_sequence_limit_the_context() -> None:
    torch.manual_seed(0)
    half = DECODER["hidden_size"] // DECODER["num_attention_heads"] // 2
    scaling = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "original_max_position_embeddings": 64,
    }
    config = Phi3Config(**DECODER, rope_parameters=scaling, original_max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    lm = engine_of(model)
    actual = lm.generate(PROMPTS, max_new_tokens=COUNT)
    assert [list(one.token_ids) for one in actual] == expected
    (note,) = [note for note in lm.resolver.notes if "the context is 64 of 128 tokens" in note]
    assert "model.rotary_emb (Phi3RotaryEmbedding)" in note
    with pytest.raises(RequestError, match="context is 64"):
        lm.generate([[3] * 64])


def test_restore_returns_the_model_and_stops_the_engine() -> None:
    model = made("gpt-oss")
    before = logits_of(model, PROMPTS[0])
    handle = adapt(model)
    chosen = model.config._attn_implementation
    lm = language_model(handle, cache_tokens=512)
    lm.generate(PROMPTS, max_new_tokens=2)
    assert model.config._attn_implementation == chosen
    handle.restore()
    assert model.config._attn_implementation == "eager"
    assert torch.equal(logits_of(model, PROMPTS[0]), before)
    with pytest.raises(ConfigError, match=r"The model was restored"):
        lm.generate(PROMPTS, max_new_tokens=2)
    with pytest.raises(ConfigError, match=r"The model was restored"):
        language_model(handle)


def test_a_second_engine_and_generate_work_at_the_same_time() -> None:
    model = made("llama")
    expected = greedy(model, PROMPTS[0])
    handle = adapt(model)
    first, second = (language_model(handle, cache_tokens=256) for _ in range(2))
    deltas = first.stream(PROMPTS[0], max_new_tokens=COUNT)
    tokens = [next(deltas).token_id, next(deltas).token_id]
    (completion,) = second.generate([PROMPTS[0]], max_new_tokens=COUNT)
    assert list(completion.token_ids) == greedy(model, PROMPTS[0]) == expected
    assert tokens + [delta.token_id for delta in deltas] == expected


def test_explain_has_notes_of_adapt_and_of_the_engine() -> None:
    lm = engine_of(made("gemma3"))
    explanation = interposer.explain(lm)
    kinds = {row.choice.request.kind for row in explanation.rows}
    assert {"attention", "kernel"} <= kinds
    assert any("model.embed_tokens: left as it was" in note for note in explanation.notes)
    assert any("KV cache of 1024 tokens" in note for note in explanation.notes)
    assert "model.layers.0.self_attn" in str(explanation.why("attention"))


def test_end_tokens_and_tokenizer_come_from_the_model() -> None:
    model = made("llama")
    expected = greedy(model, PROMPTS[0])
    model.generation_config.eos_token_id = [expected[4], 127]
    lm = engine_of(model)
    (actual,) = lm.generate([PROMPTS[0]], max_new_tokens=COUNT)
    assert actual.finish_reason == "stop"
    assert list(actual.token_ids) == expected[: expected.index(expected[4]) + 1]
    with pytest.raises(RequestError, match=r"holds no tokenizer.*language_model\(adapted"):
        lm.generate("text")


def test_update_weights_is_refused() -> None:
    lm = engine_of(made("llama"))
    with pytest.raises(ConfigError, match=r"weights of an adapted model are changed in the model"):
        lm.update_weights({})


def test_the_context_defaults_to_the_cache_size() -> None:
    model = made("llama")
    # Some configs have no such field; this one validates assignments, so vars() bypasses it.
    vars(model.config)["max_position_embeddings"] = None
    handle = adapt(model)
    lm = language_model(handle, cache_tokens=64)
    with pytest.raises(RequestError, match="context is 64"):
        lm.generate([[3] * 64])
    lm = language_model(handle)
    assert lm.engine.model.config.max_position_embeddings == 4096
    assert any("the context is 4096 tokens, as the config" in note for note in lm.resolver.notes)


@pytest.mark.landing(3)
@pytest.mark.parametrize(
    ("settings", "config", "reason"),
    [
        ({"max_sequences": 0}, Config(), "max_sequences is 0, must be an integer"),
        ({"cache_tokens": 10**15}, Config(), r"Try: language_model\(\.\.\., cache_tokens="),
        ({"tokenizer": 3}, Config(), "tokenizer is of the type int"),
        ({}, Config(graphs="on"), "graphs='on' was requested, but the forward"),
        ({}, Config(compile="eager"), "compile='eager' was requested, but the forward"),
    ],
)
def test_unsupported_settings_are_refused(
    settings: dict[str, Any], config: Config, reason: str
) -> None:
    handle = adapt(made("llama"), config)
    with pytest.raises(ConfigError, match=reason):
        language_model(handle, **settings)


def test_only_an_adapted_model_is_accepted() -> None:
    model: Any = made("llama")
    with pytest.raises(ConfigError, match=r"Try: language_model\(adapt\(model\)\)"):
        language_model(model)


def test_the_default_cache_takes_a_fraction_of_the_free_memory() -> None:
    lm = language_model(adapt(made("llama")), max_sequences=2)
    assert (
        lm.engine.pool.num_pages * lm.engine.pool.page_size
        == 2 * DECODER["max_position_embeddings"]
    )
