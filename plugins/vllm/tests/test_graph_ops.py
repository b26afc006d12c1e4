"""A compiled graph calls the kernel of a slot, and knows the output's shape without a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interposer_vllm._graph_ops import SlotKernel, look_up, multiply, new_slot, register_call

WEIGHT = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def slots() -> tuple[Tensor, Tensor]:
    head, table = new_slot(), new_slot()
    register_call(head, lambda x, weight: x @ weight.T, (WEIGHT,))
    register_call(table, lambda ids, weight: weight[ids], (WEIGHT,))
    return head, table


def test_both_ops_pass_torchs_opcheck(slots: tuple[Tensor, Tensor]) -> None:
    head, table = slots
    x, ids = torch.randn(3, 8), torch.tensor([3, 0])
    torch.library.opcheck(torch.ops.interposer_vllm.multiply.default, (x, head, 4))
    torch.library.opcheck(torch.ops.interposer_vllm.look_up.default, (ids, table, 8, torch.float32))


def test_one_graph_calls_a_lookup_and_a_matmul(slots: tuple[Tensor, Tensor]) -> None:
    head, table = slots

    def logits(ids: Tensor) -> Tensor:
        return multiply(look_up(ids, table, 8, torch.float32).relu(), head, 4)

    ids = torch.tensor([1, 2, 2])
    compiled = torch.compile(logits, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(ids), WEIGHT[ids].relu() @ WEIGHT.T)


def test_a_graph_calls_the_kernel_registered_last_for_its_slot(
    slots: tuple[Tensor, Tensor],
) -> None:
    head, _ = slots
    x = torch.randn(2, 8)
    compiled = torch.compile(lambda x: multiply(x, head, 4), fullgraph=True, backend="eager")
    before = compiled(x)
    register_call(head, lambda x, weight: x @ weight.T, (2 * WEIGHT,))
    torch.testing.assert_close(compiled(x), 2 * before)


def test_layers_share_one_compiled_graph() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append(graph)
        return graph.forward

    layer = torch.compile(lambda x, slot: multiply(x, slot, 4), backend=backend, fullgraph=True)
    x = torch.randn(2, 8)
    for factor in (1, 2, 3):
        slot = new_slot()
        register_call(slot, lambda x, weight: x @ weight.T, (factor * WEIGHT,))
        torch.testing.assert_close(layer(x, slot), factor * (x @ WEIGHT.T))
    assert len(compiled) == 1


@pytest.mark.parametrize("is_traceable", [False, True])
def test_a_graph_contains_the_ops_of_a_traceable_kernel(is_traceable: bool) -> None:
    held: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        held.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    kernel, x = SlotKernel(), torch.randn(3, 8)
    kernel.bind(torch.nn.functional.linear, (WEIGHT,), is_traceable)
    layer = torch.compile(lambda x: kernel.multiply(x, 4), backend=backend, fullgraph=True)
    torch.testing.assert_close(layer(x), x @ WEIGHT.T)
    assert any("interposer_vllm" in name for name in held) is not is_traceable
    # Weights that are exchanged are inputs of the graph, not constants.
    compiled = len(held)
    kernel.bind(torch.nn.functional.linear, (2 * WEIGHT,), is_traceable)
    torch.testing.assert_close(layer(x), 2 * (x @ WEIGHT.T))
    assert len(held) == compiled
