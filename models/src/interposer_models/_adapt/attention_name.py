"""The name of this attention in configurations, and modules that compare it with others."""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache

from torch import nn

NAME = "interposer"
_COMPARISON = re.compile(r"attn_impl\w*\s*(?:==|!=|(?:not\s+)?in\b)|[=!]=\s*[\w.]*attn_impl")


class StandIn(str):
    """The name of this attention, which also equals the name that it stands for.

    transformers looks the attention up by its hash. Modules that build a mask for sdpa alone, as
    those with a sparse indexer do, compare the name with "sdpa". The mask then comes here, as it
    would to sdpa. A kernel that does not know its pattern leaves the call to sdpa.
    """

    _names: tuple[str, ...]

    def __new__(cls, stands_for: str) -> StandIn:
        name = super().__new__(cls, NAME)
        name._names = (NAME, stands_for)
        return name

    def __eq__(self, other: object) -> bool:
        return other in self._names

    def __ne__(self, other: object) -> bool:
        return other not in self._names

    def __hash__(self) -> int:  # in Python, so that torch.compile can follow it
        return hash(NAME)

    def __reduce__(self) -> tuple[type[StandIn], tuple[str]]:
        return StandIn, (self._names[1],)


def name_for(model: nn.Module, stands_for: str) -> str:
    """Return the name of this attention for the configurations of ``model``.

    Args:
        stands_for: the name that the configurations had.
    """
    modules = {parent.__module__ for module in model.modules() for parent in type(module).__mro__}
    return StandIn(stands_for) if any(map(_compares, modules)) else NAME


@cache
def _compares(module: str) -> bool:
    """Say whether the source of a Python module compares names of attentions."""
    package = module.partition(".")[0]
    if package in ("torch", "builtins", "interposer_models") or module not in sys.modules:
        return False
    if package == "transformers" and not module.startswith("transformers.models."):
        return False  # what all its models share
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return True  # without its source, it may compare them
    return bool(_COMPARISON.search(source))
