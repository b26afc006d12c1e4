"""The communicator of sums, as requests for layers that add results of ranks up state it."""

from __future__ import annotations

from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch

from interposer._contract.layer import PluggableLayer
from interposer._contract.op import Dims

_FEW_BYTES = 8192  # of a row of a decode step
_NAMES: WeakKeyDictionary[Any, dict[torch.dtype, str]] = WeakKeyDictionary()


def sum_dims(resolver: Any, standard: type[PluggableLayer], dtype: torch.dtype) -> Dims:
    """Return what a request for a layer states: of one that adds up, the ranks and by what.

    Args:
        resolver: the ``Resolver`` that is asked, which imports this module.
    """
    if resolver.ranks is None or not standard.reduces:
        return {}
    names = _NAMES.setdefault(resolver, {})
    if dtype not in names:
        aside = copy(resolver)  # layers ask again, for what they add up
        aside.choices = {}
        choice, _ = aside.communicator("all_reduce", dtype, _FEW_BYTES, "")
        names[dtype] = choice.chosen.name
    return {"ranks": resolver.ranks.size, "all_reduce": names[dtype]}
