"""Loading: each layer is finished as its tensors come, and a failed load leaves nothing behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from torch import nn
from torch.utils import _pytree

from interposer import (
    Config,
    LinearMethod,
    PluggableLayer,
    QuantizationScheme,
    Resolver,
    Site,
    current_registry,
    place,
)
from interposer.errors import CheckpointError
from interposer_engine import load
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._checkpoint.updates import Offer
from interposer_engine._checkpoint.weights import Weights
from interposer_engine._plan import Plan
from interposer_engine._planning import plan
from interposer_ops.layers.linear import Linear, MergedLinear

Tensors = dict[str, torch.Tensor]


def layers_of(model: nn.Module) -> list[PluggableLayer]:
    return [module for module in model.modules() if isinstance(module, PluggableLayer)]


def held(model: nn.Module) -> list[torch.Tensor]:
    """Return every tensor of the layers, in the order of their attributes."""
    leaves = _pytree.tree_leaves([vars(layer) for layer in layers_of(model)])
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [tensor.to_dense() if tensor.is_mkldnn else tensor for tensor in tensors]


def read(path: Path) -> tuple[Plan, Tensors]:
    planned = plan(path, dtype="float32")
    assert isinstance(planned.checkpoint, Checkpoint)
    return planned, dict(planned.checkpoint.stream())


@pytest.fixture(scope="module")
def loaded(llama: Path) -> tuple[Tensors, list[torch.Tensor]]:
    """The tensors of the tiny Llama, and what its layers hold after loading."""
    planned, tensors = read(llama)
    Weights(planned.model, "cpu").load(tensors.items(), "test")
    return tensors, held(planned.model)


def same(model: nn.Module, expected: list[torch.Tensor]) -> bool:
    current = held(model)
    return len(current) == len(expected) and all(map(torch.equal, current, expected))


def test_checkpoint_names_equal_the_streamed_names(sharded: Path, llama: Path) -> None:
    for path in (sharded, llama):
        checkpoint = Checkpoint.open(path)
        assert checkpoint.names() == {name for name, _ in checkpoint.stream()}


def test_stream_yields_tables_before_blocks_of_all_shards(sharded: Path) -> None:
    order = [name for name, _ in Checkpoint.open(sharded).stream()]
    numbered = [".layers." in name for name in order]
    assert numbered == sorted(numbered)
    assert 1 < numbered.count(False) < len(order) == len(set(order))
    blocks = [name.split(".")[2] for name in order if ".layers." in name]
    assert len(list(itertools.groupby(blocks))) < len(blocks) / 4


def test_a_layer_is_finalized_before_the_next_tensor_comes(llama: Path) -> None:
    planned, tensors = read(llama)
    linears = [layer for layer in layers_of(planned.model) if isinstance(layer, Linear)]
    names = {
        layer.prefix: {f"{layer.prefix.rpartition('.')[0]}.{part}.weight" for part in layer.parts}
        for layer in linears
    }
    come: set[str] = set()

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for item in tensors.items():
            for layer in linears:
                complete = names[layer.prefix] <= come
                assert (layer.kernel is not None) == complete
                stored = layer._parameters["weight"]
                assert complete or (stored is not None and stored.is_meta)
            yield item
            come.add(item[0])

    Weights(planned.model, "cpu").load(watched(), "test")
    assert all(layer.kernel is not None for layer in linears)


@settings(max_examples=num_examples(15))
@given(seed=st.integers(0, 2**32))
def test_tensors_come_in_any_order(
    llama: Path, loaded: tuple[Tensors, list[torch.Tensor]], seed: int
) -> None:
    planned = plan(llama, dtype="float32")
    tensors, expected = list(loaded[0].items()), loaded[1]
    order = torch.randperm(len(tensors), generator=torch.Generator().manual_seed(seed))
    Weights(planned.model, "cpu").load([tensors[i] for i in order.tolist()], "test")
    assert same(planned.model, expected)


@pytest.mark.landing(5)
@pytest.mark.parametrize("after", [0, 1, 7, 20, 29])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, GeneratorExit])
def test_an_interrupted_load_leaves_the_model_as_it_was_built(
    llama: Path,
    loaded: tuple[Tensors, list[torch.Tensor]],
    after: int,
    error: type[BaseException],
) -> None:
    planned, tensors = plan(llama, dtype="float32"), loaded[0]
    assert len(tensors) == 30
    before = [dict(vars(layer)) for layer in layers_of(planned.model)]
    weights = Weights(planned.model, "cpu")
    done = 0

    def interrupt(_: int) -> None:
        nonlocal done
        if done == after:
            raise error
        done += 1

    with pytest.raises(error):
        weights.load(tensors.items(), "test", interrupt)
    assert all(tensor.is_meta for tensor in held(planned.model))
    for layer, built_state in zip(layers_of(planned.model), before, strict=True):
        assert vars(layer).keys() == built_state.keys()
        assert vars(layer)["_parameters"] == built_state["_parameters"]
    weights.load(tensors.items(), "test")
    assert same(planned.model, loaded[1])


def test_a_load_that_was_interrupted_can_be_repeated(llama: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if 2 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(llama, progress=interrupt)
    token_ids = [3, 1, 4, 1, 5]
    assert torch.equal(load(llama).logits(token_ids), load(llama).logits(token_ids))


def test_a_failed_finalize_restores_the_layers_before(
    llama: Path, loaded: tuple[Tensors, list[torch.Tensor]]
) -> None:
    planned = plan(llama, dtype="float32", quantization="fp8")
    name = "model.layers.2.mlp.up_proj.weight"
    spoiled = {
        **loaded[0],
        name: loaded[0][name].clone().index_fill_(0, torch.tensor(5), torch.inf),
    }
    weights = Weights(planned.model, "cpu")
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight: holds inf"):
        weights.load(spoiled.items(), "test")
    assert all(tensor.is_meta for tensor in held(planned.model))
    weights.load(loaded[0].items(), "test")


def test_duplicates_are_refused_before_and_after_a_layer_is_complete(
    llama: Path, loaded: tuple[Tensors, list[torch.Tensor]]
) -> None:
    weights = Weights(plan(llama, dtype="float32").model, "cpu")
    tensors = list(loaded[0].items())
    part = "model.layers.0.self_attn.q_proj.weight"
    for again in ([(part, loaded[0][part])] * 2, [*tensors, tensors[0]]):
        with pytest.raises(CheckpointError, match="twice"):
            weights.load(again, "test")


class Method(LinearMethod):
    """Hands out its parameters, all but the first with a default."""

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        rows = torch.empty(out_features)
        self.add(layer, "scale", rows)
        self.add(layer, "offset", rows, default=0.5)
        self.add(layer, "order", rows, default=lambda: torch.arange(out_features))
        self.add(layer, "shared", torch.empty(2), per_part=True, default=lambda: torch.arange(2))

    def add(self, layer: nn.Module, name: str, tensor: torch.Tensor, **attributes: object) -> None:
        parameter = nn.Parameter(torch.empty_like(tensor), requires_grad=False)
        parameter.__dict__.update(attributes)
        layer.register_parameter(name, parameter)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        names = ("scale", "offset", "order", "shared")
        return torch.add, tuple(layer.get_parameter(name) for name in names)


class Scheme(QuantizationScheme):
    """Everything by ``Method``."""

    method = "test"

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Scheme:
        return cls()

    def linear_method(self, prefix: str, parts: tuple[str, ...]) -> LinearMethod:
        return Method()


def merged() -> nn.ModuleList:
    """Return a list of two merged layers on the meta device."""
    resolver = Resolver(current_registry(), place().device, Config(canary="off"), Scheme())
    site = Site(resolver, "block", torch.float32)
    with torch.device("meta"):
        return nn.ModuleList(
            MergedLinear(site.at(name), 4, {f"{name}_a": 3, f"{name}_b": 2}) for name in "xy"
        )


STORED = {
    "block.x_a.scale": torch.full((3,), 2.0),
    "block.x_b.scale": torch.full((2,), 3.0),
    "block.x_b.order": torch.full((2,), 9.0),
    "block.y_a.scale": torch.full((3,), 4.0),
    "block.y_a.offset": torch.full((3,), 7.0),
    "block.y_b.scale": torch.full((2,), 5.0),
    "block.y_b.shared": torch.full((1,), 8.0),
}
EXPECTED = [
    [[2.0, 2.0, 2.0, 3.0, 3.0], [0.5] * 5, [0.0, 1.0, 2.0, 9.0, 9.0], [0.0, 1.0]],
    [[4.0, 4.0, 4.0, 5.0, 5.0], [7.0, 7.0, 7.0, 0.5, 0.5], [0, 1, 2, 3, 4], [0.0, 8.0]],
]


def operands(model: nn.ModuleList) -> list[list[list[float]]]:
    return [[tensor.tolist() for tensor in layer.operands] for layer in model]  # type: ignore[union-attr]


@settings(max_examples=num_examples(20))
@given(order=st.permutations(sorted(STORED)), known=st.booleans())
def test_missing_optional_tensors_get_defaults(order: list[str], known: bool) -> None:
    model = merged()
    tensors = [(name, STORED[name]) for name in order]
    Weights(model, "cpu").load(tensors, "test", names=STORED.keys() if known else None)
    assert operands(model) == EXPECTED


def test_a_layer_waits_for_optional_tensors_only_if_they_may_come() -> None:
    for names, waits in ((STORED.keys(), False), (None, True)):
        model = merged()
        first, second = model

        def watched(first: nn.Module = first, waits: bool = waits) -> Iterator[Any]:
            for name, tensor in STORED.items():
                if name.startswith("block.y"):
                    assert (first.kernel is None) == waits
                yield name, tensor

        Weights(model, "cpu").load(watched(), "test", names=names)
        assert operands(model) == EXPECTED
        assert second.kernel is torch.add


def test_a_missing_tensor_without_default_is_refused() -> None:
    model = merged()
    stored = {name: t for name, t in STORED.items() if name != "block.y_b.scale"}
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'block\.y_b\.scale'\n"):
        Weights(model, "cpu").load(stored.items(), "test")
    assert all(tensor.is_meta for tensor in held(model))


def test_an_update_fills_omitted_tensors_with_defaults() -> None:
    model = merged()
    weights = Weights(model, "cpu")
    weights.load(STORED.items(), "test")
    scales = {name: 10 * t for name, t in STORED.items() if name.startswith("block.y")}
    del scales["block.y_a.offset"]
    assert weights.update(Offer(scales.items()), "test") == ()
    changed = [[40.0, 40.0, 40.0, 50.0, 50.0], [0.5] * 5, [0, 1, 2, 3, 4], [0.0, 80.0]]
    assert operands(model) == [EXPECTED[0], changed]
