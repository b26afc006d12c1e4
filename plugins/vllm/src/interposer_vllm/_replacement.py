"""Registration of subclasses that vLLM builds instead of vLLM's own layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from interposer import Verdict

__all__ = ["replace_layers"]


def replace_layers(module: str, layers: Mapping[str, Callable[[Any], None]]) -> Verdict:
    """Register subclasses of vLLM's layers that call a function at the end of ``__init__``.

    A class that another plugin has replaced already is left to that plugin.

    Args:
        layers: the function to call with the built layer, by the name of the class in ``module``.
    Returns: a refusal if other plugins replaced all classes; otherwise acceptance, with the names
        of the classes that belong to other plugins.
    """
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    replaced_elsewhere = [name for name in layers if name in op_registry_oot]
    for name, on_built in layers.items():
        if name not in replaced_elsewhere:
            layer = getattr(importlib.import_module(module), name)
            PluggableLayer.register_oot(_subclass(layer, on_built), name=name)
    if len(replaced_elsewhere) == len(layers):
        return Verdict.refuse(f"another plugin has replaced {', '.join(replaced_elsewhere)}")
    return Verdict.accept(
        f"except {', '.join(replaced_elsewhere)} of another plugin" if replaced_elsewhere else ""
    )


def _subclass(layer: type, on_built: Callable[[Any], None]) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        layer.__init__(self, *args, **kwargs)  # type: ignore[misc]
        on_built(self)

    members = {"__init__": __init__, "__module__": __name__, "__doc__": layer.__doc__}
    # vLLM looks the replacement of a class up by this name.
    return type(layer.__name__, (layer,), members)
