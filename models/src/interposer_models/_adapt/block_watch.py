"""Detection of changes to a layer's modules, which disable the decoder block."""

from __future__ import annotations

import copy
from itertools import chain, repeat
from operator import contains, is_, itemgetter
from typing import Any

from torch import nn
from torch.nn.modules import module as module_hooks

from interposer_models._adapt.module_forward import ModuleForward

_FORWARD = "forward"
_forward_of = itemgetter(_FORWARD)


class Watch:
    """A snapshot of a layer's modules, forwards and hooks.

    Every call of every layer compares the snapshot, so the comparison runs in C, without Python
    loops.

    Args:
        layer: hooks of the layer itself are not watched, as the caller runs them.
        attention: the child that may have a ``ModuleForward``.
    """

    def __init__(self, layer: nn.Module, attention: nn.Module) -> None:
        modules = list(layer.modules())
        inner = modules[1:]
        self._children: list[Any] = [m._modules for m in modules if m._modules]
        self._modules = [*chain.from_iterable(map(dict.values, self._children))]
        self._replaced = [m for m in inner if _FORWARD in vars(m)]
        self._forwards = [vars(m)[_FORWARD] for m in self._replaced]
        self._unreplaced = [m for m in inner if _FORWARD not in vars(m)]
        self._hooks: list[Any] = [
            hooks for m in inner for hooks in (m._forward_hooks, m._forward_pre_hooks)
        ]
        self._layer, self._attention = layer, attention
        self._classes = (type(layer).forward, type(attention).forward)
        forward = vars(attention).get(_FORWARD)
        self._override = forward.override if isinstance(forward, ModuleForward) else None
        self._attributes: tuple[list[Any], list[Any]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        # deepcopy maps modules and their containers to the copied layer's by way of the memo.
        twin = copy.copy(self)
        for name in ("_children", "_modules", "_replaced", "_forwards", "_unreplaced", "_hooks"):
            setattr(twin, name, copy.deepcopy(vars(self)[name], memo))
        twin._layer = copy.deepcopy(self._layer, memo)
        twin._attention = copy.deepcopy(self._attention, memo)
        # The copies have no attributes yet; describe_change collects these at the first call.
        twin._attributes = None
        return twin

    def describe_change(self) -> str:
        """Return a description of the changes to the layer's modules, or "" if there are none."""
        if (
            any(self._hooks)
            or module_hooks._global_forward_hooks
            or module_hooks._global_forward_pre_hooks
        ):
            return "a module within it has hooks"
        current = [*chain.from_iterable(map(dict.values, self._children))]
        if len(current) != len(self._modules) or not all(map(is_, current, self._modules)):
            return "a module within it was exchanged"
        if self._attributes is None:
            self._attributes = (
                [vars(m) for m in self._replaced],
                [vars(m) for m in self._unreplaced],
            )
        replaced, unreplaced = self._attributes
        try:
            is_same = all(map(is_, map(_forward_of, replaced), self._forwards))
        except KeyError:
            is_same = False
        if not is_same or any(map(contains, unreplaced, repeat(_FORWARD))):
            return "the forward of a module within it was replaced"
        layer, attention = type(self._layer).forward, type(self._attention).forward
        if layer is not self._classes[0] or attention is not self._classes[1]:
            return "the forward of its class was replaced"
        if self._override is not None and self._override.apply(attention) is attention:
            return "its class calls another rotary embedding"
        return ""
