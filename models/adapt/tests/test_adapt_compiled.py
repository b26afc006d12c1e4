"""Adapted models under torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.adapted_models import CACHE, NARROW, built, close, llama
from transformers import BertConfig, BertModel, Gemma3TextConfig, StaticCache

from interposer import Config
from interposer_adapt import adapt

IDS = torch.arange(1, 19).view(2, 9)
PADDING = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    torch.compiler.reset()


def windowed() -> Any:
    layers = ["sliding_attention", "full_attention"]
    settings: dict[str, Any] = {"head_dim": 8, "sliding_window": 5, "tie_word_embeddings": False}
    return built(Gemma3TextConfig(**NARROW, **settings, layer_types=layers))


class Graphs:
    """A backend that runs graphs as they are and notes their ops."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> Any:
        self.graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def attentions(self) -> list[int]:
        return [ops.count("interposer_adapted.attention") for ops in self.graphs]


def delegated(adapted: Any) -> list[str]:
    return [place.reason for place in adapted.places if "delegated" in place.reason]


@pytest.mark.landing(1)
@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "padded"),
    [
        (llama, True),
        (windowed, False),
        pytest.param(llama, False, marks=pytest.mark.slow),
        pytest.param(windowed, True, marks=pytest.mark.slow),
    ],
)
def test_attention_is_one_op_of_one_graph(kind: Any, padded: bool) -> None:
    model = kind()
    kwargs = {"attention_mask": PADDING} if padded else {}
    expected = model(IDS, use_cache=False, **kwargs).logits
    adapted = adapt(model)
    graphs = Graphs()
    compiled: Any = torch.compile(model, fullgraph=True, backend=graphs)
    actual = compiled(IDS, use_cache=False, **kwargs).logits
    where = PADDING.bool() if padded else slice(None)
    assert close(actual[where], expected[where])
    assert graphs.attentions() == [2]
    native = [op for op in graphs.graphs[0] if op.startswith("interposer_cpu.")]
    products = [op for op in native if op.startswith("interposer_cpu.linear")]
    # Q, K and V, o, gate and up, and down of both blocks, and the head; no kernel, no product.
    assert len(products) == (9 if native else 0)
    assert not delegated(adapted)
    attentions = [place for place in adapted.places if place.kind.endswith("Attention")]
    assert attentions
    assert all(place.is_bound for place in attentions)


@torch.no_grad()
@pytest.mark.slow
def test_an_encoder_is_one_graph() -> None:
    torch.manual_seed(0)
    sizes = {key: NARROW[key] for key in list(NARROW)[:4]}
    model = BertModel(BertConfig(**sizes, vocab_size=64)).eval()
    behind = PADDING.flip(1)
    expected = model(IDS, attention_mask=behind).last_hidden_state
    adapt(model)
    graphs = Graphs()
    compiled: Any = torch.compile(model, fullgraph=True, backend=graphs)
    actual = compiled(IDS, attention_mask=behind).last_hidden_state
    assert close(actual[behind.bool()], expected[behind.bool()])
    assert graphs.attentions() == [2]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", [llama, pytest.param(windowed, marks=pytest.mark.slow)])
def test_steps_over_a_static_cache_are_compiled(kind: Any) -> None:
    model = kind()

    def run(forward: Any) -> torch.Tensor:
        cache = StaticCache(model.config, max_cache_len=16)
        ids, padding, logits = IDS, PADDING, []
        for _ in range(5):
            out = forward(input_ids=ids, attention_mask=padding, **{CACHE: cache}, use_cache=True)
            ids = out.logits[:, -1:].argmax(-1)
            padding = torch.cat([padding, torch.ones_like(ids)], 1)
            logits.append(ids)
        return torch.cat(logits, 1)

    expected = run(model)
    adapted = adapt(model)
    assert torch.equal(run(model), expected)
    graphs = Graphs()
    assert torch.equal(run(torch.compile(model, fullgraph=True, backend=graphs)), expected)
    assert all(count == 2 for count in graphs.attentions())
    assert not delegated(adapted), delegated(adapted)


@pytest.mark.slow
@torch.no_grad()
def test_a_mask_of_another_pattern_is_delegated_within_the_graph() -> None:
    model = llama()
    blocks = torch.ones(9, 9, dtype=torch.bool).tril()
    blocks[2:6, 2:6] = True
    expected = model(IDS, attention_mask=blocks[None, None], use_cache=False).logits
    adapted = adapt(model)
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    actual = compiled(IDS, attention_mask=blocks[None, None], use_cache=False).logits
    assert close(actual, expected)
    assert len(delegated(adapted)) == 2


@pytest.mark.slow
@torch.no_grad()
def test_a_shared_table_that_is_packed_needs_the_reference_to_be_traced() -> None:
    """The embedding's own forward reads the table that the head holds packed."""
    settings: dict[str, Any] = {"head_dim": 8, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = built(Gemma3TextConfig(**NARROW, **settings))
    expected = model(IDS, use_cache=False).logits
    adapt(model, Config(kernels={"linear@lm_head": "reference"}))
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    assert close(compiled(IDS, use_cache=False).logits, expected)


@pytest.mark.slow
@torch.no_grad()
def test_a_restored_model_is_compiled_without_the_op() -> None:
    model = llama()
    expected = model(IDS, use_cache=False).logits
    adapted = adapt(model)
    graphs = Graphs()
    compiled: Any = torch.compile(model, fullgraph=True, backend=graphs)
    compiled(IDS, use_cache=False)
    adapted.restore()
    del adapted
    assert close(compiled(IDS, use_cache=False).logits, expected)
    assert graphs.attentions() == [2, 0]


@torch.no_grad()
@pytest.mark.slow
# inductor imports a part of torch that is deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", [llama, windowed])
def test_generate_with_a_static_cache_and_inductor_gives_the_same_tokens(kind: Any) -> None:
    model = kind()
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    options |= {"attention_mask": PADDING, "disable_compile": True}
    expected = model.generate(IDS, **options)
    adapt(model)
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert torch.equal(model.generate(IDS, **options), expected)
