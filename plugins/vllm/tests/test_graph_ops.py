"""A graph calls what is bound at a place, and knows its shape without asking it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interposer_vllm._graph_ops import PlacedKernel, look_up, multiply, new_place, place_call

WEIGHT = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def places() -> tuple[Tensor, Tensor]:
    head, table = new_place(), new_place()
    place_call(head, lambda x, weight: x @ weight.T, (WEIGHT,))
    place_call(table, lambda ids, weight: weight[ids], (WEIGHT,))
    return head, table


def test_both_ops_are_ops_by_torchs_own_checks(places: tuple[Tensor, Tensor]) -> None:
    head, table = places
    x, ids = torch.randn(3, 8), torch.tensor([3, 0])
    torch.library.opcheck(torch.ops.interposer_vllm.multiply.default, (x, head, 4))
    torch.library.opcheck(torch.ops.interposer_vllm.look_up.default, (ids, table, 8, torch.float32))


def test_one_graph_holds_a_lookup_and_a_product(places: tuple[Tensor, Tensor]) -> None:
    head, table = places

    def logits(ids: Tensor) -> Tensor:
        return multiply(look_up(ids, table, 8, torch.float32).relu(), head, 4)

    ids = torch.tensor([1, 2, 2])
    compiled = torch.compile(logits, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(ids), WEIGHT[ids].relu() @ WEIGHT.T)


def test_other_weights_at_a_place_are_called_next(
    places: tuple[Tensor, Tensor],
) -> None:
    head, _ = places
    x = torch.randn(2, 8)
    compiled = torch.compile(lambda x: multiply(x, head, 4), fullgraph=True, backend="eager")
    before = compiled(x)
    place_call(head, lambda x, weight: x @ weight.T, (2 * WEIGHT,))
    torch.testing.assert_close(compiled(x), 2 * before)


def test_layers_share_what_is_compiled_for_one() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append(graph)
        return graph.forward

    layer = torch.compile(lambda x, place: multiply(x, place, 4), backend=backend, fullgraph=True)
    x = torch.randn(2, 8)
    for factor in (1, 2, 3):
        place = new_place()
        place_call(place, lambda x, weight: x @ weight.T, (factor * WEIGHT,))
        torch.testing.assert_close(layer(x, place), factor * (x @ WEIGHT.T))
    assert len(compiled) == 1


@pytest.mark.parametrize("is_traceable", [False, True])
def test_a_graph_holds_what_a_traceable_kernel_calls(is_traceable: bool) -> None:
    held: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        held.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    placed, x = PlacedKernel(), torch.randn(3, 8)
    placed.bind(torch.nn.functional.linear, (WEIGHT,), is_traceable)
    layer = torch.compile(lambda x: placed.multiply(x, 4), backend=backend, fullgraph=True)
    torch.testing.assert_close(layer(x), x @ WEIGHT.T)
    assert any("interposer_vllm" in name for name in held) is not is_traceable
    # Weights that are exchanged are inputs of the graph, not constants.
    compiled = len(held)
    placed.bind(torch.nn.functional.linear, (2 * WEIGHT,), is_traceable)
    torch.testing.assert_close(layer(x), 2 * (x @ WEIGHT.T))
    assert len(held) == compiled
