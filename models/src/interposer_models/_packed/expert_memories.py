"""The experts whose numbers lie in each memory of a layer, as its state in a packed file tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from interposer_models._packed.layer_states import Data


def expert_memories(changes: Mapping[str, Data], num_experts: int) -> dict[int, int | None]:
    """Return the expert of each memory, by its number; None where it has equal shares of all.

    What a layer holds as a sequence of that length has a member for each expert.

    Args:
        changes: of one layer; see ``layer_states``.
    """
    found: dict[int, int | None] = {}
    for data in changes.values():
        found.update(_walked(data, num_experts, None))
    return found


def _walked(data: Data, count: int, expert: int | None) -> Iterator[tuple[int, int | None]]:
    kind, held = data
    parts: list[Any] = []
    match kind:
        case "tensor" | "parameter":
            yield held[0], expert
        case "tuple" | "list":
            if expert is None and len(held) == count:
                for number, part in enumerate(held):
                    yield from _walked(part, count, number)
            else:
                parts = held
        case "dict":
            parts = [*held.values()]
        case "partial":
            parts = held
        case "product":
            parts = held[1]
        case "method":
            parts = held[:1]
        case "copy":
            parts = [*held[1].values()]
    for part in parts:
        yield from _walked(part, count, expert)
