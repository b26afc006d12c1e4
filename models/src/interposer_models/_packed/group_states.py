"""States of layer groups as plain data: recorded after finalizing, and restored later."""

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
"""Each layer's changes to the state in which it was built, by the number of its group."""


def keep_states(
    states: GroupData, number: int, group: LayerGroup, hold: Keep, device: str = "cpu"
) -> None:
    """Record the states of a finalized group in ``states``.

    Args:
        hold: stores a memory, uint8 on ``device``, and returns a number. Called once for each
            memory of the group.
    Raises: UnpackableError: a layer holds a value that no file can store.
    """
    numbers: dict[int, int] = {}  # by address, as tensors of a group may share memory

    def number_of(memory: torch.Tensor) -> int:
        address = memory.data_ptr()
        # Empty tensors all have the address 0, but are different memories.
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
    """Return the recorded states of a group, with tensors in the memories of ``memory_of``.

    Raises: KeyError, ValueError, TypeError: the states belong to another model.
    """
    pairs = zip(group.states({}), states[str(number)], strict=True)
    return [restored_state(*pair, memory_of) for pair in pairs]
