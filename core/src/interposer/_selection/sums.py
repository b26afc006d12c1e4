"""The name of the all-reduce communicator, for requests of layers that sum over ranks."""

from __future__ import annotations

from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch

from interposer._contract.layer import PluggableLayer
from interposer._contract.op import Dims

_FEW_BYTES = 8192  # one row of a decode step: the size that decides the choice
_NAMES: WeakKeyDictionary[Any, dict[torch.dtype, str]] = WeakKeyDictionary()


def sum_dims(resolver: Any, standard: type[PluggableLayer], dtype: torch.dtype) -> Dims:
    """Return the dims of a summing layer's request: rank count and communicator.

    Args:
        resolver: the ``Resolver``, which imports this module.
    """
    if resolver.ranks is None or not standard.reduces:
        return {}
    names = _NAMES.setdefault(resolver, {})
    if dtype not in names:
        separate_resolver = copy(resolver)  # the layer requests its communicator itself later
        separate_resolver.choices = {}
        choice, _ = separate_resolver.communicator("all_reduce", dtype, _FEW_BYTES, "")
        names[dtype] = choice.chosen.name
    return {"ranks": resolver.ranks.size, "all_reduce": names[dtype]}
