"""The record of what was changed on instances, so that all of it can be taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer_models._adapt.packed_weight import PackedWeight
from interposer_models._adapt.shards import local
from interposer_ops.devices import host_memory

_MISSING = object()
_MOST_FREED_BYTES = 64 << 20


class Changes:
    """Changes to instances; classes and modules of other packages stay as they are."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._freed_bytes = 0

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of the instance alone, past what its class does on assignment."""
        held = vars(owner)
        before = held.get(name, _MISSING)

        def undo() -> None:
            if before is _MISSING:
                held.pop(name, None)
            else:
                held[name] = before

        held[name] = value
        self._undo.append(undo)

    def pack(self, holders: list[tuple[nn.Module, str]], packed: PackedWeight) -> None:
        """Hold ``packed`` in place of one parameter, whose memory is given up.

        Args:
            holders: every module that has the parameter, with its name there.
        """
        module, name = holders[0]
        plain = module._parameters[name]
        assert plain is not None
        part = local(plain)

        def undo() -> None:
            part.data = packed.part()
            for holder, held_as in holders:
                holder._parameters[held_as] = plain

        self._undo.append(undo)
        for holder, held_as in holders:
            holder._parameters[held_as] = packed
        num_bytes = part.nbytes if part.device.type == "cpu" else 0
        # Whoever else refers to it, such as an optimizer, must not keep the memory.
        part.data = torch.empty(0, dtype=plain.dtype, device=plain.device)
        # Weights of less than 32 MiB lie in the heap, which keeps what it is given back.
        self._freed_bytes += num_bytes
        if self._freed_bytes >= _MOST_FREED_BYTES:
            self._freed_bytes = 0
            host_memory.trim()

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when all is taken back."""
        self._undo.append(undo)

    def mark(self) -> int:
        """Return a mark up to which ``undo`` takes back."""
        return len(self._undo)

    def undo(self, mark: int = 0) -> None:
        """Take back what was changed since ``mark``, the last change first."""
        while len(self._undo) > mark:
            self._undo.pop()()
