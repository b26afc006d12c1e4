"""Attention, caches and generation of adapted models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapted_models import CACHE
from tests.landing import landing_sample, num_examples
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    StaticCache,
    pipeline,
)

from interposer_adapt import adapt

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def llama() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()


def windowed(window: int = 6) -> Any:
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=window, head_dim=8)
    return AutoModelForCausalLM.from_config(config).eval()


def mixed() -> Any:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    )
    return AutoModelForCausalLM.from_config(config).eval()


def capped() -> Any:
    torch.manual_seed(0)
    more: dict[str, Any] = {
        "attn_logit_softcapping": 2.0,
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
    }
    config = Gemma2Config(**SIZES, head_dim=8, **more)
    return AutoModelForCausalLM.from_config(config).eval()


def sunk() -> Any:
    torch.manual_seed(0)
    more: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    model = AutoModelForCausalLM.from_config(GptOssConfig(**SIZES, head_dim=8, **more)).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def reasons(adapted: Any) -> list[str]:
    return [place.reason for place in adapted.places if place.kind.endswith("Attention")]


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether float32 results of some twenty operations in a row agree."""
    return bool((actual - expected).abs().max() <= 2e-5 * expected.abs().max())


@pytest.mark.slow
@torch.no_grad()
@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from([llama, windowed, mixed, capped, sunk]),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    before=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    behind=st.integers(0, 2),
)
def test_padded_batches_in_chunks_compute_the_same(
    kind: Any, chunks: list[int], before: list[int], behind: int
) -> None:
    model = kind()
    length = sum(chunks)
    padding = torch.ones(len(before), length, dtype=torch.int64)
    for row, count in enumerate(before):
        padding[row, : min(count, length - 1)] = 0
    if len(chunks) == 1 and behind and max(before) + behind < length:
        padding[-1, length - behind :] = 0
    ids = torch.randint(1, 64, padding.shape, generator=torch.Generator().manual_seed(1))

    def logits(cache: Any) -> torch.Tensor:
        parts, first = [], 0
        for count in chunks:
            upto = first + count
            out = model(
                ids[:, first:upto],
                attention_mask=padding[:, :upto],
                **{CACHE: cache},
                use_cache=True,
            )
            parts.append(out.logits)
            first = upto
        return torch.cat(parts, 1)[padding.bool()]

    expected = logits(DynamicCache(config=model.config))
    adapted = adapt(model)
    assert close(logits(adapted.new_cache()), expected)
    assert close(logits(DynamicCache(config=model.config)), expected)
    assert not any("delegated" in reason for reason in reasons(adapted)), reasons(adapted)


@torch.no_grad()
def test_calls_with_unsupported_masks_are_delegated_and_reported() -> None:
    model = llama()
    ids = torch.arange(1, 11)[None]
    blocks = torch.ones(10, 10, dtype=torch.bool).tril()
    blocks[2:6, 2:6] = True  # as the parts of an image see each other
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])  # two sequences in one row
    expected = (
        model(ids, attention_mask=blocks[None, None]).logits,
        model(ids, position_ids=packed, use_cache=False).logits,
    )
    adapted = adapt(model)
    assert close(model(ids, attention_mask=blocks[None, None]).logits, expected[0])
    assert close(model(ids, position_ids=packed, use_cache=False).logits, expected[1])
    assert all(
        "calls are delegated to sdpa: its mask has no pattern" in r for r in reasons(adapted)
    )
    assert any("delegated" in note for note in adapted.resolver.notes)


@torch.no_grad()
def test_a_static_cache_computes_the_same() -> None:
    model = llama()
    ids = torch.arange(1, 11)[None]

    def run() -> list[torch.Tensor]:
        cache = StaticCache(model.config, max_cache_len=16)
        first = model(ids, **{CACHE: cache}, use_cache=True).logits
        second = model(ids[:, :1], **{CACHE: cache}, use_cache=True).logits
        return [first, second]

    expected = run()
    adapt(model)
    assert all(close(a, b) for a, b in zip(run(), expected, strict=True))


def test_a_model_with_another_attention_implementation_keeps_it() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES)
    config._attn_implementation = "eager"
    adapted = adapt(AutoModelForCausalLM.from_config(config).eval())
    assert any("its attention is 'eager'" in note for note in adapted.resolver.notes)
    assert adapted.model.config._attn_implementation == "eager"


@torch.no_grad()
@pytest.mark.parametrize("kind", [capped, sunk])
def test_softcaps_and_sinks_run_on_a_kernel(kind: Any) -> None:
    model = kind()
    ids = torch.arange(1, 10)[None]
    expected = model(ids, output_attentions=True)
    adapted = adapt(model)
    assert close(model(ids).logits, expected.logits)
    attentions = [place for place in adapted.places if place.kind.endswith("Attention")]
    assert len(attentions) == 2
    assert all(place.is_bound for place in attentions)
    # No reason may say that a call was delegated.
    reasons_before_by = {place.reason.partition(" by ")[0] for place in attentions}
    assert reasons_before_by <= {"", "rotary embedding"}
    # Weights of the softmax are nothing that a kernel returns.
    actual = model(ids, output_attentions=True)
    assert close(actual.logits, expected.logits)
    assert len(actual.attentions) == len(expected.attentions) == 2
    assert any("its attention weights are requested" in reason for reason in reasons(adapted))
    adapted.restore()
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, expected.logits)


def test_an_eager_attention_with_other_results_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama.LlamaPreTrainedModel, "_supports_sdpa", False)
    eager = modeling_llama.eager_attention_forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out, weights = eager(*args, **kwargs)
        return 2 * out, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)
    model = llama()
    ids = torch.arange(1, 10)[None]
    expected = model(ids).logits
    adapted = adapt(model)
    assert model.config._attn_implementation == "eager"
    assert any("in a trial its error was" in note for note in adapted.resolver.notes)
    assert close(model(ids).logits, expected)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager)
    adapt(adapted.restore())
    assert model.config._attn_implementation == "interposer"


def test_the_configuration_is_restored_and_not_saved(tmp_path: Any) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path / "before")
    adapted = adapt(model)
    assert model.config._attn_implementation == "interposer"
    model.config.save_pretrained(tmp_path / "after")
    saved = [(tmp_path / name / "config.json").read_text() for name in ("before", "after")]
    assert saved[0] == saved[1]
    adapted.restore()
    assert model.config._attn_implementation == "sdpa"


def test_models_that_share_a_configuration_are_adapted_independently() -> None:
    model = capped()
    second_model = AutoModelForCausalLM.from_config(model.config).eval()
    assert second_model.config is model.config
    ids = torch.arange(1, 10)[None]
    expected = model(ids).logits, second_model(ids).logits
    first = adapt(model)
    assert second_model.config._attn_implementation == "eager"
    assert torch.equal(second_model(ids).logits, expected[1])
    second = adapt(second_model)
    for adapted, logits in zip((first, second), expected, strict=True):
        assert close(adapted.model(ids).logits, logits)
        kernels = {p.kernel for p in adapted.places if p.kind.endswith("Attention")}
        assert all("ragged_attention" in kernel for kernel in kernels), kernels
    first.restore()
    assert second.model.config._attn_implementation == "interposer"
    second.restore()
    assert model.config is second_model.config


def test_values_assigned_to_a_configuration_survive_restore() -> None:
    model = llama()
    adapted = adapt(model)
    model.config.pad_token_id = 7
    adapted.restore()
    assert model.config.pad_token_id == 7


def states(cache: Any) -> list[torch.Tensor]:
    return [state for layer in cache.layers for state in (layer.keys, layer.values)]


class TwinCaches:
    """A cache of rows and one of transformers, which get the same and have to hold the same."""

    def __init__(self, window: int | None) -> None:
        self.config = windowed(window).config if window else llama().config
        torch.manual_seed(2)
        from interposer_adapt import adapt as adapt_model

        model = windowed(window) if window else llama()
        self.ours: Any = adapt_model(model).new_cache()
        self.theirs: Any = DynamicCache(config=self.config)
        self.caches: tuple[Any, Any] = (self.ours, self.theirs)
        self.batch = 2

    def update(self, length: int) -> None:
        states = [torch.randn(self.batch, 2, length, 8) for _ in range(4)]
        for layer in (0, 1):
            actual, expected = (
                cache.update(*states[2 * layer : 2 * layer + 2], layer) for cache in self.caches
            )
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))

    def check(self) -> None:
        assert self.ours.get_seq_length() == self.theirs.get_seq_length()
        assert self.ours.get_mask_sizes(3, 0) == self.theirs.get_mask_sizes(3, 0)
        if self.theirs.get_seq_length():
            pairs = zip(states(self.ours), states(self.theirs), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


STEPS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 7)),
    st.tuples(st.just("update"), st.sampled_from([200, 300])),
    st.tuples(st.just("crop"), st.integers(0, 3)),
    st.tuples(st.just("reorder"), st.integers(0, 5)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.integers(0, 5)),
    st.tuples(st.just("reset"), st.just(0)),
)


@settings(max_examples=num_examples(30), deadline=None)
@given(
    window=st.sampled_from([None, 4, 9]),
    recording=st.booleans(),
    steps=st.lists(STEPS, max_size=8),
)
def test_a_rows_cache_equals_a_transformers_cache(
    window: int | None, recording: bool, steps: list[tuple[str, int]]
) -> None:
    twins = TwinCaches(window)
    if recording:
        for cache in twins.caches:
            cache.activate_past_recording()
    for step, number in steps:
        length = twins.theirs.get_seq_length()
        if step == "update":
            twins.update(number)
        elif step == "crop" and length > number:
            if window is not None and length >= window and not recording:
                for cache in twins.caches:
                    with pytest.raises(RuntimeError):
                        cache.crop(-number)
                return
            for cache in twins.caches:
                cache.crop(-number)
        elif step == "reorder" and length:
            index = torch.tensor([number % twins.batch] * twins.batch)
            for cache in twins.caches:
                cache.reorder_cache(index)
        elif step == "repeat" and length and twins.batch < 5:
            for cache in twins.caches:
                cache.batch_repeat_interleave(number)
            twins.batch *= number
        elif step == "select" and length:
            for cache in twins.caches:
                cache.batch_select_indices(torch.tensor([number % twins.batch, 0]))
            twins.batch = 2
        elif step == "reset":
            for cache in twins.caches:
                cache.reset()
            twins.batch = 2
        twins.check()


def test_a_cache_returns_views_and_grows_in_place() -> None:
    twins = TwinCaches(None)
    twins.update(5)
    first = twins.ours.layers[0].keys.data_ptr()
    for _ in range(20):
        twins.update(1)
    assert twins.ours.layers[0].keys.data_ptr() == first
    # Tensors that other code assigned to the cache are used from then on.
    for cache in twins.caches:
        cache.layers[0].keys = cache.layers[0].keys[:, :, :4].clone()
        cache.layers[0].values = cache.layers[0].values[:, :, :4].clone()
    twins.update(2)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 2, "top_k": 20},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "without a cache": {"do_sample": False, "use_cache": False},
    "static": {"do_sample": False, "cache_implementation": "static"},
}


@pytest.mark.landing(2)
@torch.no_grad()
@pytest.mark.parametrize("kind", [llama, windowed, mixed, capped, sunk])
@pytest.mark.parametrize("mode", landing_sample(MODES, every=3))
def test_generate_gives_the_same_tokens(kind: Any, mode: str) -> None:
    if mode == "static":
        pytest.importorskip("torch._inductor")
    model = kind()
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(ids)
    if mode == "prompt lookup":
        ids, padding = ids[:1], padding[:1]
    else:
        padding[0, :3] = 0
    options = {"max_new_tokens": 14, "disable_compile": True, **MODES[mode]}

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        actual: torch.Tensor = model.generate(ids, attention_mask=padding, **options)
        return actual

    expected = run()
    adapt(model)
    assert torch.equal(run(), expected)


@pytest.mark.landing(1)
@torch.no_grad()
@pytest.mark.parametrize("kind", [llama, windowed])
def test_assisted_generation_gives_the_same_tokens(kind: Any) -> None:
    model, assistant = kind(), kind()
    for parameter in assistant.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    ids = torch.arange(1, 10)[None]
    options = {"max_new_tokens": 14, "do_sample": False, "assistant_model": assistant}
    expected = model.generate(ids, **options)
    adapt(model)
    adapt(assistant)
    assert torch.equal(model.generate(ids, **options), expected)


@torch.no_grad()
def test_generate_uses_the_cache_of_the_caller() -> None:
    model = llama()
    adapt(model)
    cache = DynamicCache(config=model.config)
    model.generate(torch.arange(1, 5)[None], **{CACHE: cache}, max_new_tokens=4)
    assert cache.get_seq_length() == 7
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(
            torch.arange(1, 5)[None],
            **{CACHE: cache},
            cache_implementation="static",
            max_new_tokens=4,
        )


def test_a_pipeline_runs_an_adapted_model(tmp_path: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0")
    model = llama()
    pipe = pipeline("text-generation", model=model, tokenizer=wrapped)
    expected = pipe("w1 w5 w9", max_new_tokens=6, do_sample=False)
    adapt(model)
    assert pipe("w1 w5 w9", max_new_tokens=6, do_sample=False) == expected
