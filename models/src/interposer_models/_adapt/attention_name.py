"""The name of interposer's attention in configurations, also where a module compares names."""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache

from torch import nn

NAME = "interposer"
_COMPARISON = re.compile(r"attn_impl\w*\s*(?:==|!=|(?:not\s+)?in\b)|[=!]=\s*[\w.]*attn_impl")


class AliasedName(str):
    """The name of interposer's attention, which also equals the replaced name.

    transformers looks up the attention by hash. Some modules, such as those with a sparse indexer,
    build a mask only if the name equals "sdpa". With an ``AliasedName`` such a module builds the
    mask, and interposer's attention receives the same mask as sdpa. A kernel that does not support
    the mask's pattern delegates the call to sdpa.
    """

    _names: tuple[str, ...]

    def __new__(cls, replaced_name: str) -> AliasedName:
        name = super().__new__(cls, NAME)
        name._names = (NAME, replaced_name)
        return name

    def __eq__(self, value: object) -> bool:
        return value in self._names

    def __ne__(self, value: object) -> bool:
        return value not in self._names

    def __hash__(self) -> int:  # in Python, so that torch.compile can follow it
        return hash(NAME)

    def __reduce__(self) -> tuple[type[AliasedName], tuple[str]]:
        return AliasedName, (self._names[1],)


def attention_name_for(model: nn.Module, replaced_name: str) -> str:
    """Return the name of interposer's attention for the configurations of ``model``.

    Args:
        replaced_name: the previous name in the configurations.
    """
    modules = {parent.__module__ for module in model.modules() for parent in type(module).__mro__}
    return AliasedName(replaced_name) if any(map(_compares_names, modules)) else NAME


@cache
def _compares_names(module: str) -> bool:
    """Search the source of a Python module for comparisons of attention names."""
    package = module.partition(".")[0]
    if package in ("torch", "builtins", "interposer_models") or module not in sys.modules:
        return False
    if package == "transformers" and not module.startswith("transformers.models."):
        return False  # code shared by all models
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return True  # without source, assume a comparison
    return bool(_COMPARISON.search(source))
