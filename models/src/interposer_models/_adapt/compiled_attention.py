"""The attention of adapted models as one op of a graph that torch's compiler makes.

The graph holds the label of the module. When it runs, the op finds the attention by that label,
and does what a call without a compiler does.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

_NAMESPACE = "interposer_adapted"
_OP = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, str label, float? scaling, "
    "bool? is_causal, float? softcap, Tensor? sinks) -> Tensor"
)


class Attends(Protocol):
    """Computes a call at the time when the graph runs."""

    def compute(self, name: str, *args: Any) -> Tensor:
        """Return ``[B, T, N, E]``."""
        ...


_owners: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_libraries: list[torch.library.Library] = []  # what they define is gone with them


def labels(owner: Attends, names: dict[int, str]) -> dict[int, str]:
    """Return what stands for each module of an attention in graphs, by the module's id."""
    _define()
    number = str(next(_numbers))
    _owners[number] = owner
    return {key: f"{number}:{name}" for key, name in names.items()}


def traced_attention(
    label: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the op's result, ``[B, T, N, E]``, where the compiler sees the call."""
    found: Tensor = torch.ops.interposer_adapted.attention(
        query, key, value, mask, label, scaling, is_causal, softcap, sinks
    )
    return found


def is_traceable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether a call can be one op.

    It reads a mask's numbers, so that on another device it would wait within captured graphs. A
    program that is exported runs where nobody knows the label.
    """
    if torch.compiler.is_exporting() or query.device.type != "cpu":
        return False
    return not (query.requires_grad or key.requires_grad or value.requires_grad)


def _define() -> None:
    if _libraries:
        return
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    library.define(_OP)

    def attention(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, label: str, *rest: Any
    ) -> Tensor:
        number, _, name = label.partition(":")
        owner: Attends = _owners[number]
        return owner.compute(name, query, key, value, mask, *rest)

    def fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        batch, num_heads, num_queries, _size = query.shape
        return query.new_empty(batch, num_queries, num_heads, value.shape[3])

    torch.library.impl(f"{_NAMESPACE}::attention", "cpu", attention, lib=library)
    torch.library.register_fake(f"{_NAMESPACE}::attention", fake, lib=library)
