"""Decoder layers bound as blocks: equal results, and part by part for unsupported calls.

The result of a layer states the bound block, and the reason of calls that ran part by part.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapted_models import CACHE
from tests.landing import num_examples
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DynamicCache,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from interposer import Config, explain
from interposer.errors import ConfigError
from interposer_adapt import Adapted, adapt, language_model
from interposer_engine import SamplingParams

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
BLOCKS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=16, sliding_window=None),
    "gelu": lambda: LlamaConfig(**SIZES, hidden_act="gelu_pytorch_tanh"),
}
# Each with a part of the reason.
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "granite": (
        lambda: GraniteConfig(**SIZES, residual_multiplier=0.5),
        "the sum of input and attention is not read",
    ),
    "olmo2": (lambda: Olmo2Config(**SIZES), "its input is not read"),
    "gemma2": (lambda: Gemma2Config(**SIZES, head_dim=16), "its attention is passed softcap"),
    "cohere": (lambda: CohereConfig(**SIZES), "not projections, rotated as kernels"),
}
# The development plugin replaces norm layers, which takes the norms out of a block's call.
CONFIG = Config(disable=["example-norm"])
IDS = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(1))


def build(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
        elif parameter.ndim == 1:
            nn.init.normal_(parameter, 1, 0.3)
    return model


def layers_of(adapted: Adapted[Any]) -> dict[str, str]:
    """Return the reasons of the bound layers by name."""
    return {
        place.name: place.reason
        for place in adapted.places
        if place.is_bound and place.kind.endswith("DecoderLayer")
    }


def skip_notes(adapted: Adapted[Any]) -> str:
    """Return the lines that say why something is computed part by part."""
    lines = str(explain(adapted)).splitlines()
    return "\n".join(line for line in lines if "part by part" in line)


def greedy(model: Any, ids: torch.Tensor = IDS, count: int = 6, **options: Any) -> torch.Tensor:
    options = {"do_sample": False, **options}
    tokens: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options
    )
    return tokens


@torch.no_grad()
def steps(model: Any, cache: Any, lengths: tuple[int, ...] = (5, 1, 2, 1)) -> torch.Tensor:
    """Return the logits of tokens that are computed over a cache in steps."""
    actual, first = [], 0
    for length in lengths:
        ids = IDS[:, first : first + length]
        actual.append(model(ids, **{CACHE: cache}, use_cache=True).logits)
        first += length
    return torch.cat(actual, dim=1)


class PastKeyValuesDecoderLayer(LlamaDecoderLayer):
    """A layer that names its cache as transformers did before 5.24."""

    def forward(  # type: ignore[override]  # its names depend on the version of transformers
        self, hidden_states: Any, past_key_values: Any = None, **options: Any
    ) -> Any:
        return super().forward(hidden_states, **{CACHE: past_key_values}, **options)


class CacheDecoderLayer(LlamaDecoderLayer):
    """A layer that names its cache as transformers does since 5.24."""

    def forward(  # type: ignore[override]  # its names depend on the version of transformers
        self, hidden_states: Any, cache: Any = None, **options: Any
    ) -> Any:
        return super().forward(hidden_states, **{CACHE: cache}, **options)


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "name"), [(PastKeyValuesDecoderLayer, "past_key_values"), (CacheDecoderLayer, "cache")]
)
def test_a_layer_is_a_block_by_either_name_of_its_cache(kind: Any, name: str) -> None:
    model = build(BLOCKS["llama"]())
    for layer in model.model.layers:
        layer.__class__ = kind
    x = torch.randn(2, 5, 64)
    tables = model.model.rotary_emb(x, torch.arange(5)[None])
    options = {"attention_mask": None, "position_embeddings": tables, "use_cache": True}
    layer = model.model.layers[0]
    expected = layer(x, **{name: DynamicCache(config=model.config)}, **options)
    adapted = adapt(model, CONFIG)
    cache = adapted.new_cache()
    actual = layer(x, **{name: cache}, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert layers_of(adapted) == {"model.layers.0": "", "model.layers.1": ""}
    assert cache.get_seq_length() == 5


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_generates_the_same_tokens_and_is_restored(name: str) -> None:
    model = build(BLOCKS[name]())
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    expected, beams = greedy(model), greedy(model, num_beams=3)
    before = steps(model, DynamicCache(config=model.config))
    adapted = adapt(model, CONFIG)
    assert torch.equal(greedy(model), expected)
    assert torch.equal(greedy(model, num_beams=3), beams)
    assert layers_of(adapted) == {"model.layers.0": "", "model.layers.1": ""}
    assert not skip_notes(adapted)
    adapted.restore()
    assert torch.equal(steps(model, DynamicCache(config=model.config)), before)
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


@pytest.mark.landing(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [CONFIG, Config()], ids=["native", "with plugins"])
def test_a_block_is_as_close_to_the_exact_result_as_the_layer(
    config: Config, dtype: torch.dtype
) -> None:
    model = build(BLOCKS["qwen3"](), dtype)
    expected = steps(model, DynamicCache(config=model.config))
    exact = steps(copy.deepcopy(model).double(), DynamicCache())
    adapted = adapt(model, config)
    actual = steps(model, adapted.new_cache())
    assert layers_of(adapted) == {"model.layers.0": "", "model.layers.1": ""}
    error, theirs = ((result - exact).norm() / exact.norm() for result in (actual, expected))
    # Both round to the model's dtype as often, or less.
    assert error <= 2 * theirs


@pytest.mark.landing(2)
@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_is_no_block_is_skipped_with_a_reason(name: str) -> None:
    make, reason = OTHERS[name]
    model = build(make())
    expected = greedy(model)
    adapted = adapt(model, CONFIG)
    assert torch.equal(greedy(model), expected)
    assert not layers_of(adapted)
    assert reason in skip_notes(adapted)


def test_layers_without_a_gated_mlp_get_no_note() -> None:
    adapted = adapt(build(PhiConfig(**SIZES)), CONFIG)
    assert not layers_of(adapted)
    assert not skip_notes(adapted)


class Doubled(nn.Module):
    """A wrapper of a projection, as adapters are."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = 2 * self.base(x)
        return doubled


def hooked(layer: Any) -> Callable[[], None]:
    handle = layer.self_attn.v_proj.register_forward_hook(lambda _, __, out: 2 * out)
    return lambda: handle.remove()


def hooked_before(layer: Any) -> Callable[[], None]:
    handle = layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    return lambda: handle.remove()


def wrapped(layer: Any) -> Callable[[], None]:
    base = layer.self_attn.o_proj
    layer.self_attn.o_proj = Doubled(base)

    def undo() -> None:
        layer.self_attn.o_proj = base

    return undo


def replaced(layer: Any) -> Callable[[], None]:
    module = layer.mlp.up_proj
    inner = module.forward
    module.forward = lambda x: 2 * inner(x)

    def undo() -> None:
        module.forward = inner

    return undo


def turned_off(layer: Any) -> Callable[[], None]:
    layer.self_attn.config._attn_implementation = "eager"

    def undo() -> None:
        layer.self_attn.config._attn_implementation = "interposer"

    return undo


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "has hooks"),
        (hooked_before, "has hooks"),
        (wrapped, "was exchanged"),
        (replaced, "was replaced"),
        (turned_off, "attention implementation was changed"),
    ],
)
def test_later_changes_to_a_layer_take_effect(
    change: Callable[[Any], Callable[[], None]], reason: str
) -> None:
    config = BLOCKS["qwen3"]()
    expected, before = [], build(config)
    for model in (before, build(config)):
        if model is not before:
            adapted = adapt(model, CONFIG)
        plain = steps(
            model, DynamicCache(config=config) if model is before else adapted.new_cache()
        )
        undo = change(model.model.layers[1])
        expected_steps = steps(
            model, DynamicCache(config=config) if model is before else adapted.new_cache()
        )
        undo()
        again = steps(
            model, DynamicCache(config=config) if model is before else adapted.new_cache()
        )
        expected.append((plain, expected_steps, again))
    for actual, right in zip(expected[1], expected[0], strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-4)
    assert torch.equal(expected[1][0], expected[1][2])
    layers = layers_of(adapted)
    assert reason in layers["model.layers.1"]
    assert ("attention implementation" in reason) == (reason in layers["model.layers.0"])


def test_existing_hooks_are_called_and_prevent_a_block() -> None:
    model, events = build(BLOCKS["llama"]()), []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: events.append(1))
    adapted = adapt(model, CONFIG)
    assert not events
    steps(model, adapted.new_cache())
    assert len(events) == 4
    assert list(layers_of(adapted)) == ["model.layers.1"]
    assert "model.layers.0: computed part by part: a module within it has hooks" in skip_notes(
        adapted
    )


def test_a_wrapped_forward_of_a_part_prevents_a_block() -> None:
    model, events = build(BLOCKS["llama"]()), []
    projection = model.model.layers[0].self_attn.o_proj
    inner = projection.forward

    def around(x: torch.Tensor) -> Any:
        events.append(x.shape)
        return inner(x)

    projection.forward = around
    adapted = adapt(model, CONFIG)
    events.clear()
    steps(model, adapted.new_cache())
    assert len(events) == 4
    assert list(layers_of(adapted)) == ["model.layers.1"]
    assert "model.layers.0: computed part by part: another library wrapped" in skip_notes(adapted)


@torch.no_grad()
def test_hidden_states_and_layer_hooks_get_the_results_of_blocks() -> None:
    model, events = build(BLOCKS["llama"]()), []
    expected = model(IDS, output_hidden_states=True).hidden_states
    model = build(BLOCKS["llama"]())
    adapted = adapt(model, CONFIG)
    model.model.layers[0].register_forward_hook(lambda _, __, out: events.append(out))
    model(IDS, **{CACHE: adapted.new_cache()}, use_cache=True)
    assert layers_of(adapted) == {"model.layers.0": "", "model.layers.1": ""}
    torch.testing.assert_close(events[0], expected[1], rtol=1e-4, atol=1e-4)
    cache = adapted.new_cache()
    actual = model(IDS, **{CACHE: cache}, use_cache=True, output_hidden_states=True)
    for each, right in zip(actual.hidden_states, expected, strict=True):
        torch.testing.assert_close(each, right, rtol=1e-4, atol=1e-4)
    # transformers hooks the parts as well from then on.
    assert "has hooks" in layers_of(adapted)["model.layers.0"]


def test_hooks_of_a_copied_model_are_separate() -> None:
    model, events = build(BLOCKS["llama"]()), []
    adapted = adapt(model, CONFIG)
    expected = steps(model, adapted.new_cache())
    twin = copy.deepcopy(model)
    twin.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: events.append(1))
    assert torch.equal(steps(model, adapted.new_cache()), expected)
    assert not events
    torch.testing.assert_close(steps(twin, adapted.new_cache()), expected, rtol=1e-4, atol=1e-4)
    assert len(events) == 4


def test_a_model_with_blocks_refuses_training_and_conversion() -> None:
    model = build(BLOCKS["llama"]())
    adapt(model, CONFIG)
    with pytest.raises(ConfigError, match="cannot be trained"):
        model.model.layers[0].train()
    with pytest.raises(ConfigError, match="cannot become"):
        model.model.layers[0].double()


@torch.no_grad()
def test_padded_batches_and_transformers_caches_run_part_by_part() -> None:
    config = BLOCKS["qwen3"]()
    model, mask = build(config), torch.ones_like(IDS)
    mask[1, :4] = 0
    expected = model.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False)
    adapted = adapt(model, CONFIG)
    actual = model.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(actual, expected)
    assert "such as padding" in layers_of(adapted)["model.layers.0"]
    model(IDS, **{CACHE: DynamicCache(config=config)}, use_cache=True)
    assert "no cache of interposer" in layers_of(adapted)["model.layers.0"]


@pytest.mark.slow
def test_torch_compile_sees_the_parts_of_a_block() -> None:
    model = build(BLOCKS["llama"]())
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        adapt(model, CONFIG)
        graphs: list[Any] = []

        def kept(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        compiled: Any = torch.compile(model, backend=kept, fullgraph=True)
        actual = compiled(IDS, use_cache=False).logits
    assert graphs
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, 6])
def test_the_engine_computes_blocks_over_its_pages(window: int | None) -> None:
    model = build(MistralConfig(**SIZES, head_dim=16, sliding_window=window))
    prompts = [[5, 9, 3, 7, 2, 11, 40], [6, 2, 3], [77, 12] * 12]
    expected = [greedy(model, torch.tensor([prompt])) for prompt in prompts]
    adapted = adapt(model, CONFIG)
    lm = language_model(adapted, cache_tokens=256)
    actual = lm.generate(prompts, SamplingParams(max_new_tokens=6))
    for prompt, right, out in zip(prompts, expected, actual, strict=True):
        assert list(out.token_ids) == right[0, len(prompt) :].tolist()
    # The trial has no cache.
    assert set(layers_of(adapted).values()) == {
        "some calls are computed part by part: they have no cache of interposer"
    }


STEPS = st.one_of(
    st.tuples(st.just("update"), st.sampled_from([1, 1, 2, 7, 17, 130, 300])),
    st.tuples(st.just("crop"), st.integers(0, 3)),
    st.tuples(st.just("reorder"), st.integers(0, 5)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.integers(0, 5)),
    st.tuples(st.just("look"), st.integers(0, 1)),
    st.tuples(st.just("write"), st.integers(0, 1)),
    st.tuples(st.just("copy"), st.integers(0, 1)),
    st.tuples(st.just("reset"), st.just(0)),
)


class Pair:
    """A model and the same one adapted, over a cache each."""

    def __init__(self) -> None:
        config = LlamaConfig(**{**SIZES, "max_position_embeddings": 4096})
        self.plain, self.model = build(config), build(config)
        self.adapted = adapt(self.model, CONFIG)
        self.config = config
        self.generator = torch.Generator().manual_seed(3)

    def caches(self) -> list[Any]:
        return [DynamicCache(config=self.config), self.adapted.new_cache()]

    @torch.no_grad()
    def update(self, caches: list[Any], batch: int, length: int) -> None:
        ids = torch.randint(1, 128, (batch, length), generator=self.generator)
        expected, actual = (
            model(ids, **{CACHE: cache}, use_cache=True).logits
            for model, cache in zip((self.plain, self.model), caches, strict=True)
        )
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


PAIR: list[Pair] = []


@settings(max_examples=num_examples(15), deadline=None)
@given(step_list=st.lists(STEPS, max_size=7))
def test_a_paged_cache_equals_a_transformers_cache(
    step_list: list[tuple[str, int]],
) -> None:
    if not PAIR:
        PAIR.append(Pair())
    pair = PAIR[0]
    caches, batch = pair.caches(), 2
    pair.update(caches, batch, 3)
    for step, number in step_list:
        length = caches[0].get_seq_length()
        assert caches[1].get_seq_length() == length
        assert caches[1].get_mask_sizes(3, 0) == caches[0].get_mask_sizes(3, 0)
        if step == "update":
            pair.update(caches, batch, number)
        elif step == "crop" and length > number:
            for cache in caches:
                cache.crop(-number)
        elif step == "reorder" and length:
            for cache in caches:
                cache.reorder_cache(torch.tensor([number % batch] * (batch - 1) + [0]))
        elif step == "repeat" and length and batch < 5:
            for cache in caches:
                cache.batch_repeat_interleave(number)
            batch *= number
        elif step == "select" and length:
            for cache in caches:
                cache.batch_select_indices(torch.tensor([number % batch, 0]))
            batch = 2
        elif step == "look" and length:
            for expected, actual in zip(caches[0].layers, caches[1].layers, strict=True):
                torch.testing.assert_close(actual.keys, expected.keys, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(actual.values, expected.values, rtol=1e-4, atol=1e-4)
        elif step == "write" and length:
            for cache in caches:
                cache.layers[number].values.mul_(0.5)
        elif step == "copy":
            pages_cache = caches[1]
            caches[1] = (
                pickle.loads(pickle.dumps(pages_cache)) if number else copy.deepcopy(pages_cache)
            )
        elif step == "reset":
            for cache in caches:
                cache.reset()
            batch = 2
    pair.update(caches, batch, 1)


@torch.no_grad()
def test_reading_a_paged_cache_converts_it_to_rows() -> None:
    pair = Pair()
    caches = pair.caches()
    pair.update(caches, 2, 5)
    assert layers_of(pair.adapted) == {"model.layers.0": "", "model.layers.1": ""}
    cache_layer = caches[1].layers[0]
    first = cache_layer.keys.data_ptr()
    pair.update(caches, 2, 1)
    assert cache_layer.keys.data_ptr() == first
    layers = layers_of(pair.adapted)
    assert "its tensors were read" in layers["model.layers.0"]
    assert layers["model.layers.1"] == ""


@pytest.mark.parametrize("method", ["int8", "w4a8"])
def test_quantized_layers_run_as_blocks(method: str) -> None:
    model = build(BLOCKS["qwen3"]())
    adapted = adapt(model, CONFIG, quantization=method)
    cache, looked_at = adapted.new_cache(), adapted.new_cache()
    actual = steps(model, cache)
    assert layers_of(adapted) == {"model.layers.0": "", "model.layers.1": ""}
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    expected = steps(model, looked_at)
    handle.remove()
    hook.remove()
    assert all("has hooks" in reason for reason in layers_of(adapted).values())
    # An input that lies at a boundary of its codes may go either way.
    assert (actual - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize(
    "rule",
    ["ragged_attention", "rms_norm@*post_attention_layernorm", "*@model.layers.1*"],
)
def test_a_rule_for_a_part_prevents_a_block(rule: str) -> None:
    config = Config(kernels={rule: "reference"}, disable=["example-norm"])
    model = build(BLOCKS["qwen3"]())
    expected = greedy(model)
    adapted = adapt(model, config)
    assert torch.equal(greedy(model), expected)
    assert not layers_of(adapted)
    assert f"the rule '{rule}' names the kernel of a part" in skip_notes(adapted)


def test_a_policy_without_block_layers_prevents_blocks() -> None:
    config = Config(layers={"decoder_block": "standard"}, disable=["example-norm"])
    adapted = adapt(build(BLOCKS["qwen3"]()), config)
    assert not layers_of(adapted)
    assert "no installed layer computes a block at once" in skip_notes(adapted)


def test_merged_projections_of_the_checkpoint_prevent_a_block() -> None:
    adapted = adapt(build(Phi3Config(**SIZES)), CONFIG)
    assert not layers_of(adapted)
