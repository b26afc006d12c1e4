"""Find each rank's slices of a layer's parameters by comparing shapes.

A quantization method creates the layer's parameters for several sizes on the meta device. The
dimension in which the whole layer and a shard differ is the sharded one, and a shard starts where
the parameter for all preceding entries would end. So no format has to describe its own slicing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from interposer import PluggableLayer, Site
from interposer.errors import InterposerError
from interposer_ops.layers.cuts import Cut, Slice

__all__ = ["CannotShardError", "empty_layer", "parameters_of", "probe_site", "slices_between"]

Parameters = Mapping[str, nn.Parameter]
_PROBE_RESOLVERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class CannotShardError(Exception):
    """A parameter cannot be sharded; the text names the parameter and the reason."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """Builds and caches the parameters for any axis size; None if a size cannot be built."""

    build: Callable[[int], Parameters]
    built: dict[int, Parameters | None]

    def of(self, size: int) -> Parameters | None:
        if size not in self.built:
            try:
                with torch.device("meta"):
                    self.built[size] = self.build(size)
            except InterposerError:
                self.built[size] = None
        return self.built[size]


def probe_site(site: Site) -> Site:
    """Return a site for throw-away layers, whose kernel choices and notes are discarded."""
    resolver: Any = site.resolver
    # One shadow per resolver, reused by all probes of a model.
    if resolver not in _PROBE_RESOLVERS:
        shadow = copy.copy(resolver)
        shadow.choices, shadow.notes, shadow.failures, shadow.ranks = {}, [], [], None
        _PROBE_RESOLVERS[resolver] = shadow
    _PROBE_RESOLVERS[resolver].scheme = resolver.scheme
    return replace(site, resolver=_PROBE_RESOLVERS[resolver])


def slices_between(
    place: str, build: Callable[[int], Parameters], cut: Cut, ranks: int
) -> dict[str, Slice]:
    """Return a rank's slices of the parameters along one axis, by parameter name.

    Args:
        build: creates the parameters for an axis of the given size.
        ranks: number of ranks.
    Raises: CannotShardError: a shard of a parameter would not be a part of the whole parameter.
    """
    probe = _Probe(build, {})
    complete, shard = probe.of(cut.whole), probe.of(cut.size)
    if complete is None:
        raise CannotShardError(f"{place}: this format cannot store the whole layer")
    if shard is None or shard.keys() != complete.keys():
        suggestion = _suggest_size(probe, cut, ranks)
        raise CannotShardError(
            f"{place}: this format cannot store a shard of {cut.size} of {cut.whole} "
            f"entries{suggestion}"
        )
    slices = {}
    for name, parameter in complete.items():
        # The stored shape is unknown before loading, so no slice can be computed.
        if getattr(parameter, "any_form", False):
            raise CannotShardError(f"{place}.{name} is held in whatever form it is stored")
        differing_dims = _differing_dims(parameter.shape, shard[name].shape)
        if not differing_dims:
            if hasattr(parameter, "states_sizes"):
                slices[name] = _restated(parameter, shard[name])
            continue
        # Slicing along one dimension cannot produce a shard that differs in two.
        if len(differing_dims) > 1:
            raise CannotShardError(f"{place}.{name} changes in dimensions {differing_dims}")
        dim = differing_dims[0]
        ranges = []
        for start, stop in cut.ranges:
            begin, end = (_edge(probe, name, dim, at, cut) for at in (start, stop))
            if begin is None or end is None:
                entry = start if begin is None else stop
                suggestion = _suggest_size(probe, cut, ranks)
                raise CannotShardError(
                    f"{place}.{name}: entry {entry} of {cut.whole} shares a stored element with "
                    f"its neighbours{suggestion}"
                )
            ranges.append((begin, end))
        if sum(end - begin for begin, end in ranges) != shard[name].shape[dim]:
            raise CannotShardError(
                f"{place}.{name}: the shard is not a part of the whole parameter"
            )
        slices[name] = Slice(dim, parameter.shape[dim], tuple(ranges), _groups(probe, name, cut))
    return slices


def _restated(complete: nn.Parameter, shard: nn.Parameter) -> Slice:
    """Return the slice of a parameter that stores its layer's sizes and is replaced, not sliced."""
    generator = torch.Generator(device="cpu")
    with torch.device("cpu"):
        sizes = [tuple(p.sample(generator).tolist()) for p in (complete, shard)]  # type: ignore[attr-defined]
    return Slice(0, len(complete), ((0, len(complete)),), stated=(sizes[0], sizes[1]))


def _differing_dims(complete: torch.Size, shard: torch.Size) -> list[int]:
    if len(complete) != len(shard):
        return [-1, -1]  # more than one dimension, so that callers refuse the parameter
    pairs = enumerate(zip(complete, shard, strict=True))
    return [dim for dim, (size, shard_size) in pairs if size != shard_size]


def _edge(probe: _Probe, name: str, dim: int, at: int, cut: Cut) -> int | None:
    """Return where entry ``at`` of the axis begins in a parameter.

    Returns: None if ``at`` lies inside a packed element, such as a word or group of several
        entries.
    """
    if at == 0:
        return 0
    # The parameter for the first ``at`` entries ends where entry ``at`` begins.
    before = probe.of(at)
    if before is None:
        return None
    length = before[name].shape[dim]
    if at == cut.whole:
        return length
    after = probe.of(at + 1)
    # ``at + 1`` cannot be built if sizes must be multiples of a block size; ``at`` then is one.
    is_edge = after is None or after[name].shape[dim] > length
    return length if is_edge else None


def _groups(probe: _Probe, name: str, cut: Cut) -> tuple[int, int] | None:
    """Return the range of group numbers of this rank, if the parameter holds group numbers."""
    complete = probe.of(cut.whole)
    assert complete is not None
    shard = probe.of(cut.size)
    if not hasattr(complete[name], "num_groups") or shard is None:
        return None
    if _num_groups(complete, name) == _num_groups(shard, name):  # groups lie along another axis
        return 0, _num_groups(complete, name)
    if len(cut.ranges) > 1:
        raise CannotShardError(f"{name} holds group numbers, and this rank's ranges have gaps")
    start, stop = cut.ranges[0]
    edges = [probe.of(at) if at else None for at in (start, stop)]
    first, last = (0 if edge is None else _num_groups(edge, name) for edge in edges)
    return first, last


def _num_groups(parameters: Parameters, name: str) -> int:
    return int(parameters[name].num_groups)  # type: ignore[attr-defined]


def _suggest_size(probe: _Probe, cut: Cut, ranks: int) -> str:
    """Suggest a nearby size that the ranks can divide, as text for an error; empty if none."""
    step = cut.whole // ranks
    # The search is bounded: a suggestion far from the model's size helps nobody.
    for size in range(step, 4 * step + 4096):
        if size % 16 == 0 and size != step and probe.of(size) and probe.of(size * ranks):
            larger = probe.of(size + 1)
            shard = probe.of(size)
            assert shard is not None
            # As in ``_edge``: every sharded parameter must have an edge after ``size`` entries.
            if larger is None or all(
                _differing_dims(larger[name].shape, shard[name].shape)
                for name in shard
                if _differing_dims(shard[name].shape, _shapes(probe, size * ranks)[name])
            ):
                return f"; {ranks} ranks can divide {size * ranks} entries"
    return ""


def _shapes(probe: _Probe, size: int) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in (probe.of(size) or {}).items()}


def parameters_of(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the registered parameters of a layer and its children, by name."""
    return dict(layer.named_parameters(remove_duplicate=False))


def empty_layer(kind: type[PluggableLayer], site: Site, **attributes: Any) -> Any:
    """Create a layer without calling its constructor, for a method to add parameters."""
    layer = object.__new__(kind)
    nn.Module.__init__(layer)
    vars(layer).update(prefix=site.prefix, **attributes)
    return layer
