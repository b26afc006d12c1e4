"""Projections of one input, merged into one matmul, and rotary embeddings by a kernel."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapted_models import WIDE, built
from torch import nn
from transformers import LlamaConfig, PhiConfig, Qwen3Config

from interposer import Config, explain
from interposer_adapt import Adapted, adapt

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**WIDE),
    "biased": lambda: LlamaConfig(**WIDE, attention_bias=True),
    "qwen3": lambda: Qwen3Config(**WIDE, head_dim=16),
    "phi": lambda: PhiConfig(**{**WIDE, "partial_rotary_factor": 0.5}),
}
IDS = torch.randint(1, 128, (2, 9), generator=torch.Generator().manual_seed(1))


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = built(CONFIGS[name](), dtype)
    for label, parameter in model.named_parameters():
        if label.endswith("bias"):
            nn.init.normal_(parameter)
    return model


def merged_with(adapted: Adapted[Any]) -> dict[str, str]:
    """Return which projections are merged, by the reasons of the places."""
    prefix = "one product with "
    return {
        place.name: place.reason.removeprefix(prefix)
        for place in adapted.places
        if place.is_bound and place.reason.startswith(prefix)
    }


class Siblings(nn.Module):
    """Projections of one input."""

    a: nn.Linear
    b: nn.Linear
    c: nn.Linear

    def __init__(self, sizes: tuple[int, ...], biased: tuple[bool, ...]) -> None:
        super().__init__()
        for label, size, bias in zip("abc", sizes, biased, strict=True):
            self.add_module(label, nn.Linear(24, size, bias=bias))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(child(x) for child in self.children())


class Crossed(Siblings):
    """Two of them read other states where these are given."""

    def forward(
        self, x: torch.Tensor, other: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        states = x if other is None else other
        return self.a(x), self.b(states), self.c(states)


class Written(Siblings):
    """The input is changed in place before the last one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.clone()
        first = self.a(x), self.b(x)
        return *first, self.c(x.add_(1))


@pytest.mark.landing(2)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_merged_attention_computes_the_same_and_is_restored(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = build(name, dtype)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    expected = model(IDS).logits
    exact = build(name).double()(IDS).logits
    adapted = adapt(model)
    merged = merged_with(adapted)
    assert len(merged) == 6
    assert merged["model.layers.1.self_attn.k_proj"] == "q_proj, v_proj"
    actual = model(IDS).logits
    max_error = 32 * torch.finfo(dtype).eps
    error, theirs = ((result - exact).norm() / exact.norm() for result in (actual, expected))
    assert error <= max(max_error, 2 * theirs)
    state = model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in before.items())
    model.save_pretrained(tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes(), path.name
    adapted.restore()
    assert torch.equal(model(IDS).logits, expected)
    assert "forward" not in vars(model.model.layers[0].self_attn)
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())


@torch.no_grad()
@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 40)] * 3),
    biased=st.tuples(*[st.booleans()] * 3),
    rows=st.lists(st.integers(0, 3), min_size=0, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    inference=st.booleans(),
)
def test_siblings_of_any_size_compute_the_same(
    sizes: tuple[int, ...],
    biased: tuple[bool, ...],
    rows: list[int],
    dtype: torch.dtype,
    inference: bool,
) -> None:
    model = nn.Sequential(Siblings(sizes, biased)).to(dtype).eval()
    exact = copy.deepcopy(model).double()
    assert set(merged_with(adapt(model))) == {"0.a", "0.b", "0.c"}
    with torch.inference_mode(inference):
        x = torch.randn(*rows, 24).to(dtype)
        for _ in range(2):
            for ours, right in zip(model(x), exact(x.double()), strict=True):
                assert ours.is_contiguous()
                # Sums of 24 products of numbers of which hardly any is above 5 and 0.21.
                allowed = torch.finfo(dtype).eps * (right.abs() + 1) + 26 * 2**-23 * 30
                assert ((ours - right).abs() <= allowed).all()
            # Writing to the input changes the results, in inference mode as well.
            x.mul_(0.5)


@torch.no_grad()
def test_the_merged_matmul_runs_once_per_forward() -> None:
    model = build("qwen3")
    adapted = adapt(model, Config(kernels={"linear": "reference"}))
    assert len(merged_with(adapted)) == 6
    attention = model.model.layers[0].self_attn

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model.model(IDS)
    counts = [event.count for event in profile.key_averages() if event.key == "aten::linear"]
    # Both MLPs have two products in place of three, both attentions two in place of four.
    assert counts == [8]
    alone = attention.k_proj(torch.ones(1, 64))
    assert torch.equal(attention.k_proj(torch.ones(1, 64)), alone)


@torch.no_grad()
@pytest.mark.parametrize("kind", [Crossed, Written])
def test_projections_of_possibly_different_inputs_are_not_merged(kind: type[Siblings]) -> None:
    torch.manual_seed(0)
    model = kind((8, 9, 10), (True, True, True)).eval()
    plain = copy.deepcopy(model)
    merged = {"a": "b", "b": "a"} if kind is Written else {"b": "c", "c": "b"}
    assert merged_with(adapt(model)) == merged
    x = torch.randn(3, 24)
    arguments = (x, torch.randn(5, 24)) if kind is Crossed else (x,)
    for ours, right in zip(model(*arguments), plain(*arguments), strict=True):
        assert torch.allclose(ours, right, atol=1e-5)


@torch.no_grad()
def test_hooks_and_replaced_children_disable_the_merged_matmul() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Siblings((8, 9, 10), (False, True, False))).eval()
    plain = copy.deepcopy(model)
    adapt(model)
    x = torch.randn(3, 24)

    def doubled(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (args[0].mul_(2),)

    handles = [sequential[0].b.register_forward_pre_hook(doubled) for sequential in (model, plain)]
    with torch.inference_mode():
        for ours, right in zip(model(x.clone()), plain(x.clone()), strict=True):
            assert torch.allclose(ours, right, atol=1e-5)
    for handle in handles:
        handle.remove()
    model[0].b = plain[0].b = nn.Linear(24, 4)
    for ours, right in zip(model(x), plain(x), strict=True):
        assert torch.allclose(ours, right, atol=1e-5)


@torch.no_grad()
def test_hooks_of_a_copied_model_are_separate() -> None:
    model = build("llama")
    adapt(model)
    twin = copy.deepcopy(model)
    events: list[str] = []
    layer = twin.model.layers[0].self_attn.v_proj
    layer.register_forward_hook(lambda *_: events.append("twin"))
    model(IDS)
    assert events == []
    expected = model(IDS).logits
    assert torch.equal(twin(IDS).logits, expected)
    assert events == ["twin"]


def test_threads_do_not_mix_their_inputs() -> None:
    torch.manual_seed(0)
    model = Siblings((8, 9, 10), (True, True, True)).eval()
    plain = copy.deepcopy(model)
    adapt(model)
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for _ in range(100):
                x = torch.randn(2, 24, generator=generator)
                for ours, right in zip(model(x), plain(x), strict=True):
                    if not torch.allclose(ours, right, atol=1e-5):
                        wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@torch.no_grad()
def test_a_rule_for_one_projection_prevents_merging() -> None:
    model = build("llama")
    adapted = adapt(model, Config(kernels={"linear@*layers.0*v_proj": "reference"}))
    kernels = {place.name: place.kernel for place in adapted.places}
    assert kernels["model.layers.0.self_attn.v_proj"] == "interposer-ops/reference"
    assert set(merged_with(adapted)) == {
        f"model.layers.1.self_attn.{label}_proj" for label in "qkv"
    }


@torch.no_grad()
@pytest.mark.slow
def test_torch_compile_sees_one_matmul() -> None:
    model = build("llama")
    expected = model(IDS, use_cache=False).logits
    adapt(model, Config(kernels={"linear": "reference"}))
    products: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        products.append(
            sum(node.target is torch.nn.functional.linear for node in graph.graph.nodes)
        )
        return graph

    compiled: Any = torch.compile(model.model.layers[0].self_attn, fullgraph=True, backend=backend)
    x = torch.randn(2, 9, 64)
    angles = model.model.rotary_emb(x, torch.arange(9)[None])
    out, _ = compiled(x, position_embeddings=angles, attention_mask=None)
    right, _ = model.model.layers[0].self_attn(x, position_embeddings=angles, attention_mask=None)
    assert torch.allclose(out, right, atol=1e-5)
    assert products == [2]
    torch.compiler.reset()
    assert torch.allclose(model(IDS, use_cache=False).logits, expected, atol=1e-4)


def rotary_places(adapted: Adapted[Any]) -> list[str]:
    return [place.name for place in adapted.places if "rotary embedding by" in place.reason]


@pytest.mark.landing(2)
@torch.no_grad()
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_rotary_embedding_runs_on_the_kernel(name: str, inference: bool) -> None:
    model = build(name)
    expected = model(IDS).logits
    options = {"max_new_tokens": 12, "do_sample": False}
    tokens = model.generate(input_ids=IDS, **options)
    adapted = adapt(model)
    with torch.inference_mode(inference):
        assert torch.allclose(model(IDS).logits, expected, atol=1e-4)
        assert torch.equal(model.generate(input_ids=IDS, **options), tokens)
    assert rotary_places(adapted) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert "kernel 'rotary_embedding' [float32" in str(explain(adapted))


@torch.no_grad()
def test_rotary_tables_of_the_current_call_are_used() -> None:
    model = build("llama")
    attention, plain = model.model.layers[0].self_attn, build("llama").model.layers[0].self_attn
    adapt(model)
    for inference in (False, True):
        with torch.inference_mode(inference):
            x = torch.randn(2, 9, 64)
            cos, sin = torch.rand(1, 9, 16), torch.rand(1, 9, 16)
            cos[..., 8:], sin[..., 8:] = cos[..., :8], sin[..., :8]
            tables = {"position_embeddings": (cos, sin), "attention_mask": None}
            for start, factor in ((0, 1), (0, 2), (12, 3)):
                cos[..., start:] *= factor  # at last the halves have other angles
                assert torch.allclose(attention(x, **tables)[0], plain(x, **tables)[0], atol=1e-4)


@torch.no_grad()
def test_a_patched_rotary_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    adapt(model)
    before = model(IDS).logits
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert not torch.allclose(model(IDS).logits, before, atol=1e-2)
    monkeypatch.undo()
    assert torch.equal(model(IDS).logits, before)


@torch.no_grad()
def test_decorators_of_a_forward_with_a_rotary_kernel_are_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, calls = build("llama"), []
    attention = type(model.model.layers[0].self_attn)
    original = attention.forward

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", counted)
    adapted = adapt(model)
    calls.clear()
    model(IDS)
    assert len(calls) == 2
    assert rotary_places(adapted) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_a_trace_leaves_the_model_unchanged() -> None:
    class Counts(nn.Module):
        """A module that keeps what its last call had, and counts calls."""

        table: torch.Tensor
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 16)
            self.register_buffer("table", torch.arange(32.0))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.calls += 1
            self.table = self.table.to(x.device)
            return self.q(x + self.table), self.k(x)

    module = Counts().eval()
    table = module.table
    adapt(module)
    assert module.table is table
    assert module.calls.item() == 0
