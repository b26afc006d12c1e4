"""The share of a linear layer's parameters that each rank reads, found by comparing shapes.

A method is asked for parameters of other sizes, of which no memory is taken: the dimension in which
those of the whole layer and of a share differ is the one that is cut, and a share begins where the
parameter of all that comes before it would end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from interposer import PluggableLayer, Site
from interposer.errors import InterposerError
from interposer_ops.layers.cuts import Cut, Slice

__all__ = ["CannotCutError", "bare", "parameters_of", "sandboxed", "slices_between"]

Parameters = Mapping[str, nn.Parameter]
_SANDBOXES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class CannotCutError(Exception):
    """A parameter has no share that would do; the text says which one, and why."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """Builds the parameters of an axis of any size, or says that there are none."""

    build: Callable[[int], Parameters]
    known: dict[int, Parameters | None]

    def of(self, size: int) -> Parameters | None:
        if size not in self.known:
            try:
                with torch.device("meta"):
                    self.known[size] = self.build(size)
            except InterposerError:
                self.known[size] = None
        return self.known[size]


def sandboxed(site: Site) -> Site:
    """Return a site whose choices and notes nobody sees."""
    resolver: Any = site.resolver
    if resolver not in _SANDBOXES:
        shadow = copy.copy(resolver)
        shadow.choices, shadow.notes, shadow.failures, shadow.ranks = {}, [], [], None
        _SANDBOXES[resolver] = shadow
    _SANDBOXES[resolver].scheme = resolver.scheme
    return replace(site, resolver=_SANDBOXES[resolver])


def slices_between(
    place: str, build: Callable[[int], Parameters], cut: Cut, ranks: int
) -> dict[str, Slice]:
    """Return what a rank reads of the parameters of one axis, by their names.

    Args:
        build: returns the parameters of an axis of a size.
        ranks: their number.
    Raises: CannotCutError: a share of a parameter would be something else than a part of it.
    """
    probe = _Probe(build, {})
    whole, share = probe.of(cut.whole), probe.of(cut.size)
    if whole is None:
        raise CannotCutError(f"{place}: nothing can hold all of it")
    if share is None or share.keys() != whole.keys():
        known = _sizes_that_do(probe, cut, ranks)
        raise CannotCutError(f"{place}: {cut.size} of {cut.whole} cannot be held{known}")
    found = {}
    for name, parameter in whole.items():
        if getattr(parameter, "any_form", False):
            raise CannotCutError(f"{place}.{name} is held in whatever form it is stored")
        differs = _differing(parameter.shape, share[name].shape)
        if not differs:
            if hasattr(parameter, "states_sizes"):
                found[name] = _restated(parameter, share[name])
            continue
        if len(differs) > 1:
            raise CannotCutError(f"{place}.{name} changes in dimensions {differs}")
        dim = differs[0]
        ranges = []
        for start, stop in cut.ranges:
            begin, end = (_edge(probe, name, dim, at, cut) for at in (start, stop))
            if begin is None or end is None:
                wrong = start if begin is None else stop
                known = _sizes_that_do(probe, cut, ranks)
                raise CannotCutError(
                    f"{place}.{name}: what is stored for entry {wrong} of {cut.whole} is stored "
                    f"for its neighbours as well{known}"
                )
            ranges.append((begin, end))
        if sum(end - begin for begin, end in ranges) != share[name].shape[dim]:
            raise CannotCutError(f"{place}.{name}: the shares are no parts of the whole")
        found[name] = Slice(dim, parameter.shape[dim], tuple(ranges), _groups(probe, name, cut))
    return found


def _restated(whole: nn.Parameter, share: nn.Parameter) -> Slice:
    """Return the slice of a parameter that holds sizes of its layer, which no slice changes."""
    generator = torch.Generator(device="cpu")
    with torch.device("cpu"):
        sizes = [tuple(one.sample(generator).tolist()) for one in (whole, share)]  # type: ignore[attr-defined]
    return Slice(0, len(whole), ((0, len(whole)),), stated=(sizes[0], sizes[1]))


def _differing(whole: torch.Size, share: torch.Size) -> list[int]:
    if len(whole) != len(share):
        return [-1, -1]
    return [dim for dim, pair in enumerate(zip(whole, share, strict=True)) if pair[0] != pair[1]]


def _edge(probe: _Probe, name: str, dim: int, at: int, cut: Cut) -> int | None:
    """Return where entry ``at`` of the axis begins in a parameter, None within what it shares."""
    if at == 0:
        return 0
    before = probe.of(at)
    if before is None:
        return None
    length = before[name].shape[dim]
    if at == cut.whole:
        return length
    after = probe.of(at + 1)
    # Where no such size can be held, sizes are multiples of something that ``at`` is one of, too.
    is_edge = after is None or after[name].shape[dim] > length
    return length if is_edge else None


def _groups(probe: _Probe, name: str, cut: Cut) -> tuple[int, int] | None:
    """Return the numbers of groups of the axis that a parameter's entries may have."""
    whole = probe.of(cut.whole)
    assert whole is not None
    share = probe.of(cut.size)
    if not hasattr(whole[name], "num_groups") or share is None:
        return None
    if _num_groups(whole, name) == _num_groups(share, name):  # all inputs are of the same groups
        return 0, _num_groups(whole, name)
    if len(cut.ranges) > 1:
        raise CannotCutError(f"{name} numbers groups, which a rank has in several places")
    start, stop = cut.ranges[0]
    held = [probe.of(at) if at else None for at in (start, stop)]
    first, last = (0 if one is None else _num_groups(one, name) for one in held)
    return first, last


def _num_groups(parameters: Parameters, name: str) -> int:
    return int(parameters[name].num_groups)  # type: ignore[attr-defined]


def _sizes_that_do(probe: _Probe, cut: Cut, ranks: int) -> str:
    """Return which multiples of the number of ranks near the size can be shared out."""
    step = cut.whole // ranks
    found: list[int] = []
    for share in range(step, 4 * step + 4096):
        if len(found) == 1:
            break
        if share % 16 == 0 and share != step and probe.of(share) and probe.of(share * ranks):
            edge = probe.of(share + 1)
            here = probe.of(share)
            assert here is not None
            if edge is None or all(
                _differing(edge[name].shape, here[name].shape)
                for name in here
                if _differing(here[name].shape, _shapes(probe, share * ranks)[name])
            ):
                found.append(share * ranks)
    return f"; {ranks} ranks can share {found[0]}" if found else ""


def _shapes(probe: _Probe, size: int) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in (probe.of(size) or {}).items()}


def parameters_of(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a method has registered, of layers below as well."""
    return dict(_named(layer))


def _named(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from layer.named_parameters(remove_duplicate=False)


def bare(kind: type[PluggableLayer], site: Site, **attributes: Any) -> Any:
    """Return a layer of a class with nothing but these attributes, for a method to fill."""
    layer = object.__new__(kind)
    nn.Module.__init__(layer)
    vars(layer).update(prefix=site.prefix, **attributes)
    return layer
