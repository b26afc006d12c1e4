"""The watch over the modules of a block, which runs at once while they are what they were."""

from __future__ import annotations

import copy
from itertools import chain, repeat
from operator import contains, is_, itemgetter
from typing import Any

from torch import nn
from torch.nn.modules import module as every_module

from interposer_models._adapt.module_forward import ModuleForward

_FORWARD = "forward"
_forward_of = itemgetter(_FORWARD)


class Watch:
    """All modules of a layer, with their forwards and hooks.

    It is asked at every call of every layer, so that it compares lists without a loop of Python.

    Args:
        layer: whose own hooks are those of whoever calls it.
        attention: whose forward may be a ``ModuleForward``.
    """

    def __init__(self, layer: nn.Module, attention: nn.Module) -> None:
        modules = list(layer.modules())
        inner = modules[1:]
        self._children: list[Any] = [m._modules for m in modules if m._modules]
        self._known = [*chain.from_iterable(map(dict.values, self._children))]
        self._bound = [m for m in inner if _FORWARD in vars(m)]
        self._forwards = [vars(m)[_FORWARD] for m in self._bound]
        self._plain = [m for m in inner if _FORWARD not in vars(m)]
        self._hooks: list[Any] = [
            hooks for m in inner for hooks in (m._forward_hooks, m._forward_pre_hooks)
        ]
        self._layer, self._attention = layer, attention
        self._classes = (type(layer).forward, type(attention).forward)
        forward = vars(attention).get(_FORWARD)
        self._renamed = forward.renamed if isinstance(forward, ModuleForward) else None
        self._attributes: tuple[list[Any], list[Any]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        # Modules and their containers are copied with the layer, the classes stay.
        twin = copy.copy(self)
        for name in ("_children", "_known", "_bound", "_forwards", "_plain", "_hooks"):
            setattr(twin, name, copy.deepcopy(vars(self)[name], memo))
        twin._layer = copy.deepcopy(self._layer, memo)
        twin._attention = copy.deepcopy(self._attention, memo)
        # Attributes of copies are there when these are complete.
        twin._attributes = None
        return twin

    def change(self) -> str:
        """Return what is not as it was, an empty text if nothing is."""
        if (
            any(self._hooks)
            or every_module._global_forward_hooks
            or every_module._global_forward_pre_hooks
        ):
            return "a module within it has hooks"
        now = [*chain.from_iterable(map(dict.values, self._children))]
        if len(now) != len(self._known) or not all(map(is_, now, self._known)):
            return "a module within it was exchanged"
        if self._attributes is None:
            self._attributes = ([vars(m) for m in self._bound], [vars(m) for m in self._plain])
        bound, plain = self._attributes
        try:
            is_same = all(map(is_, map(_forward_of, bound), self._forwards))
        except KeyError:
            is_same = False
        if not is_same or any(map(contains, plain, repeat(_FORWARD))):
            return "the forward of a module within it was replaced"
        layer, attention = type(self._layer).forward, type(self._attention).forward
        if layer is not self._classes[0] or attention is not self._classes[1]:
            return "the forward of its class was replaced"
        if self._renamed is not None and self._renamed.of(attention) is attention:
            return "its class calls another rotary embedding"
        return ""
