"""The states of groups of layers as data: kept as each is finalized, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interposer_models._checkpoint.layer_group import LayerGroup, State
from interposer_models._packed.layer_states import (
    Keep,
    StateWriter,
    UnpackableError,
    restored_state,
)

GroupData = dict[str, list[dict[str, Any]]]
"""Differences from the state that each layer was built in, by the number of its group."""


def keep_states(
    states: GroupData, number: int, group: LayerGroup, hold: Keep, device: str = "cpu"
) -> None:
    """Add the states of a finalized group.

    Args:
        hold: takes each memory of the group once, uint8 on ``device``, and returns its number.
    Raises: UnpackableError: a layer holds what is no data.
    """
    numbers: dict[int, int] = {}  # of memories, which tensors of a group may share

    def number_of(memory: torch.Tensor) -> int:
        address = memory.data_ptr()
        if address not in numbers or not address:
            numbers[address] = hold(memory)
        return numbers[address]

    def changes(built: State, state: State) -> dict[str, Any]:
        try:
            return StateWriter(built, number_of, device).changes(state)
        except UnpackableError as error:
            raise UnpackableError(f"{state.get('prefix')}: {error}") from None

    states[str(number)] = group.compare_states(changes)


def group_states(
    states: GroupData, number: int, group: LayerGroup, memory_of: Callable[[int], torch.Tensor]
) -> list[State]:
    """Return the states of a group over the memories of these numbers, uint8.

    Raises: KeyError, ValueError, TypeError: they are of another model.
    """
    pairs = zip(group.states({}), states[str(number)], strict=True)
    return [restored_state(*pair, memory_of) for pair in pairs]
