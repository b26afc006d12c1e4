"""Layers of vLLM in whose place an out-of-tree subclass is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from interposer import Verdict

__all__ = ["replace_layers"]


def replace_layers(module: str, layers: Mapping[str, Callable[[Any], None]]) -> Verdict:
    """Register subclasses of vLLM's layers that are handed to a function once they are built.

    A class that another plugin has replaced stays with that.

    Args:
        layers: the functions by the name of a class in ``module``.
    Returns: refused, where all were replaced by others; accepted with the names of those that are.
    """
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    others = [name for name in layers if name in op_registry_oot]
    for name, built in layers.items():
        if name not in others:
            layer = getattr(importlib.import_module(module), name)
            PluggableLayer.register_oot(_subclass(layer, built), name=name)
    if len(others) == len(layers):
        return Verdict.refuse(f"another plugin has replaced {', '.join(others)}")
    return Verdict.accept(f"except {', '.join(others)} of another plugin" if others else "")


def _subclass(layer: type, built: Callable[[Any], None]) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        layer.__init__(self, *args, **kwargs)  # type: ignore[misc]
        built(self)

    members = {"__init__": __init__, "__module__": __name__, "__doc__": layer.__doc__}
    # Under the same name, by which vLLM finds what stands in the place of a class.
    return type(layer.__name__, (layer,), members)
