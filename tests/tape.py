"""A platform that captures on the processor: a tape of what torch was asked for.

A replay asks for the same again, of the same tensors, so that memory that moved, a number that was
read of a tensor and code of Python between the calls are lost on it, as on a graph of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from interposer import Capability, Device, Memory, Platform, Verdict

DEVICE = Device("tape", "cpu", "a tape", Capability("any", memory_bytes=2**30))


class Tape(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch that code it compiled before runs under the tape, as under any capture."""
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            raise RuntimeError("the host waits for a number")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tensors(result)))
        return result

    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            for one, other in zip(results, tensors(func(*args, **kwargs)), strict=True):
                # A view shows what its own memory holds by now.
                if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
                    one.copy_(other)


def tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class TapePlatform(Platform):
    name = "tape"
    device_type = "cpu"
    captured = 0
    replayed = 0

    @classmethod
    def probe(cls) -> Verdict:
        return Verdict.accept()

    def devices(self) -> Sequence[Device]:
        return [DEVICE]

    def capability(self, device: str) -> Capability:
        return DEVICE.capability

    def dtypes(self, device: str) -> Sequence[torch.dtype]:
        return [torch.float32]

    def memory(self, device: str) -> Memory:
        return Memory(total_bytes=2**30, free_bytes=2**28)

    def capture_graph(self, step: Callable[[], object]) -> Callable[[], object]:
        step()
        tape = Tape()
        with tape:
            results = step()
        TapePlatform.captured += 1

        def replay() -> object:
            TapePlatform.replayed += 1
            tape.replay()
            return results

        return replay
