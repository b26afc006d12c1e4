"""Assigns memories of a layer to experts, from the layer's packed state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from interposer_models._packed.layer_states import Data


def expert_memories(changes: Mapping[str, Data], num_experts: int) -> dict[int, int | None]:
    """Return the expert of each memory, by number; None for a memory that experts share.

    A sequence of ``num_experts`` members in the layer's state has one member for each expert.

    Args:
        changes: state of one layer; see ``layer_states``.
    """
    experts: dict[int, int | None] = {}
    for data in changes.values():
        experts.update(_walked(data, num_experts, None))
    return experts


def _walked(data: Data, num_experts: int, expert: int | None) -> Iterator[tuple[int, int | None]]:
    kind, content = data
    parts: list[Any] = []
    match kind:
        case "tensor" | "parameter":
            yield content[0], expert
        case "tuple" | "list":
            # The outermost such sequence counts; deeper ones belong to one expert.
            if expert is None and len(content) == num_experts:
                for number, part in enumerate(content):
                    yield from _walked(part, num_experts, number)
            else:
                parts = content
        case "dict":
            parts = [*content.values()]
        case "partial":
            parts = content
        case "product":
            parts = content[1]
        case "method":
            parts = content[:1]
        case "copy":
            parts = [*content[1].values()]
    for part in parts:
        yield from _walked(part, num_experts, expert)
