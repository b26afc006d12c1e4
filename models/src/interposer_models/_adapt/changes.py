"""An undo log of the changes to a model's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer_models._adapt.packed_weight import PackedWeight
from interposer_models._adapt.shards import local_part
from interposer_ops.devices import host_memory

_MISSING = object()
_TRIM_AFTER_BYTES = 64 << 20


class Changes:
    """Changes to instances, in order, each with an inverse. Classes are never changed."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._freed_bytes = 0

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an instance's attribute directly in its ``__dict__``, bypassing ``__setattr__``."""
        attributes = vars(owner)
        before = attributes.get(name, _MISSING)

        def undo() -> None:
            if before is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = before

        attributes[name] = value
        self._undo.append(undo)

    def pack(self, holders: list[tuple[nn.Module, str]], packed: PackedWeight) -> None:
        """Replace one parameter by ``packed`` in all modules, and free the parameter's memory.

        Args:
            holders: each module that holds the parameter, with the parameter's name there.
        """
        module, name = holders[0]
        plain = module._parameters[name]
        assert plain is not None
        part = local_part(plain)

        def undo() -> None:
            part.data = packed.part()
            for holder, parameter_name in holders:
                holder._parameters[parameter_name] = plain

        self._undo.append(undo)
        for holder, parameter_name in holders:
            holder._parameters[parameter_name] = packed
        num_bytes = part.nbytes if part.device.type == "cpu" else 0
        # Another reference to the parameter, such as an optimizer's, must not keep its memory.
        part.data = torch.empty(0, dtype=plain.dtype, device=plain.device)
        # The allocator keeps freed blocks below 32 MiB; trim returns their memory to the system.
        self._freed_bytes += num_bytes
        if self._freed_bytes >= _TRIM_AFTER_BYTES:
            self._freed_bytes = 0
            host_memory.trim()

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when the changes are undone."""
        self._undo.append(undo)

    def savepoint(self) -> int:
        """Return a savepoint for ``undo``."""
        return len(self._undo)

    def undo(self, savepoint: int = 0) -> None:
        """Undo the changes made since ``savepoint``, by default all, the last change first."""
        while len(self._undo) > savepoint:
            self._undo.pop()()
