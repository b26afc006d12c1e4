"""The attention of adapted models as one op in graphs of ``torch.compile``.

The graph stores the label of the module. At run time the op finds the attention by this label, and
computes the call as without a compiler.
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


class AttentionOwner(Protocol):
    """Computes attention calls when a compiled graph runs."""

    def compute(self, name: str, *args: Any) -> Tensor:
        """Return ``[B, T, N, E]``."""
        ...


# Weak, so that a compiled graph does not keep a model alive.
_owners: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_libraries: list[torch.library.Library] = []  # an op is unregistered with its library


def register_labels(owner: AttentionOwner, names: dict[int, str]) -> dict[int, str]:
    """Register an attention and return a label for each module, by the module's id."""
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
    """Call the op from code that is being compiled, ``[B, T, N, E]``."""
    out: Tensor = torch.ops.interposer_adapted.attention(
        query, key, value, mask, label, scaling, is_causal, softcap, sinks
    )
    return out


def is_traceable(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if a call can be one op of the graph.

    The op reads the mask's values, which would synchronize within captured graphs on another
    device. An exported program may run in a process where the label is not registered.
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
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, label: str, *options: Any
    ) -> Tensor:
        number, _, name = label.partition(":")
        owner: AttentionOwner = _owners[number]
        return owner.compute(name, query, key, value, mask, *options)

    def fake(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
        batch, num_heads, num_queries, _size = query.shape
        return query.new_empty(batch, num_queries, num_heads, value.shape[3])

    torch.library.impl(f"{_NAMESPACE}::attention", "cpu", attention, lib=library)
    torch.library.register_fake(f"{_NAMESPACE}::attention", fake, lib=library)
