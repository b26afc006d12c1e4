"""Shards of layers: the part of each axis and of each parameter that one rank holds.

A layer declares shards as data (``Shard``, ``Slice``). The loader then reads only this rank's part.

No quantization format has to describe its own slicing: ``slices_between`` compares shapes. The
quantization method creates the layer's parameters for several sizes on the meta device. The
dimension in which the whole layer and a shard differ is the sharded one, and a shard starts where
the parameter for all preceding entries would end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from interposer import AttentionSpec, PluggableLayer, Ranks, Site
from interposer.errors import InterposerError

__all__ = ["Shard", "Slice", "Slices", "local_spec", "shard_heads"]

Kind = Literal["column", "row", "heads", "vocabulary", "expert", "experts"]
Ranges = tuple[tuple[int, int], ...]
Parameters = Mapping[str, nn.Parameter]
_PROBE_RESOLVERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of a layer's axis on one rank. A layer without a ``Shard`` is replicated.

    Attributes:
        kind: ``column``: output features; ``row``: input features, so partial results are summed;
            ``heads``: output features by heads, and several ranks may hold the same head;
            ``vocabulary``: rows of a table; ``expert``: the inside of every expert; ``experts``:
            whole experts.
        whole: size of the whole axis.
        ranges: start and stop of each range that this rank holds, in order.
    """

    kind: Kind
    whole: int
    ranges: Ranges

    @property
    def size(self) -> int:
        """Number of entries of the axis that this rank holds."""
        return sum(stop - start for start, stop in self.ranges)

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard of ``tensor`` along ``dim``; a view if there is one range."""
        pieces = [tensor.narrow(dim, start, stop - start) for start, stop in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def times(self, factor: int) -> Shard:
        """Return the shard of an axis that has ``factor`` entries for each entry of this axis."""
        return Shard(self.kind, self.whole * factor, _scaled(self.ranges, factor))


@dataclass(frozen=True, slots=True)
class Slice:
    """The shard of a stored tensor on one rank: the concatenated ``ranges`` along ``dim``.

    Attributes:
        whole: size of ``dim`` as stored.
        groups: the entries are group numbers in this half-open range; after slicing, numbers are
            relative to its start. None: the entries are no group numbers.
        is_elsewhere: another rank holds the tensor; this rank holds zeros.
        stated: sizes of the whole layer that the tensor stores, and the sizes of the shard; else
            None.
    """

    dim: int
    whole: int
    ranges: Ranges
    groups: tuple[int, int] | None = None
    is_elsewhere: bool = False
    stated: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard of a stored tensor along ``dim``; a view if one range."""
        return Shard("column", self.whole, self.ranges).of(tensor, dim)


Slices = Mapping[tuple[str, str], Slice]
"""Slices by (part of a merged layer or "", parameter name). Other parameters are replicated."""


def is_single_process(site: Site) -> bool:
    """Check whether one process computes the whole model."""
    ranks = site.resolver.ranks
    return ranks is None or ranks.size == 1


def shard_evenly(site: Site, kind: Kind, size: int) -> Shard | None:
    """Divide an axis of ``size`` entries evenly among the ranks.

    Returns: this rank's shard. None if there is one process, or if ``size`` is not divisible by the
        number of ranks; a note then says that the layer is replicated.
    """
    if is_single_process(site):
        return None
    ranks = _ranks(site)
    if size % ranks.size:
        note_replicated(site, f"{ranks.size} ranks do not divide {size}")
        return None
    size_per_rank = size // ranks.size
    return Shard(kind, size, ((ranks.rank * size_per_rank, (ranks.rank + 1) * size_per_rank),))


def shard_vocabulary(site: Site, size: int) -> Shard | None:
    """Divide the rows of a table among the ranks, as evenly as possible.

    Returns: this rank's shard; None if there is one process, or fewer rows than ranks.
    """
    if is_single_process(site):
        return None
    ranks = _ranks(site)
    # A rank without rows would need a layer without outputs.
    if size < ranks.size:
        note_replicated(site, f"{size} rows are fewer than {ranks.size} ranks")
        return None
    edges = even_edges(ranks.size, size)
    return Shard("vocabulary", size, ((edges[ranks.rank], edges[ranks.rank + 1]),))


def even_edges(count: int, size: int) -> list[int]:
    """Return the first row of each of ``count`` ranks, as even as possible, and the end."""
    return [size * rank // count for rank in range(count + 1)]


def shard_heads(site: Site, spec: AttentionSpec) -> tuple[AttentionSpec, Shard, Shard] | None:
    """Divide attention heads among the ranks.

    If there are fewer kv heads than ranks, several ranks hold the same kv head.

    Returns: this rank's spec, and the shards of query heads and of kv heads. None if there is one
        process, or if the heads cannot be divided; a note then says that the layer is replicated.
    """
    if is_single_process(site):
        return None
    ranks = _ranks(site)
    heads, kv_heads, count = spec.num_heads, spec.num_kv_heads, ranks.size
    reason = ""
    if heads % count:
        reason = f"{count} ranks do not divide {heads} heads"
    elif kv_heads % count and count % kv_heads:
        # Divisible one way: several kv heads per rank. The other way: several ranks per kv head.
        reason = f"{kv_heads} kv heads and {count} ranks do not divide each other"
    elif spec.alibi:
        # Backends derive the slopes from the number of heads, so a shard would get wrong slopes.
        reason = "ALiBi slopes depend on the total number of heads"
    if reason:
        note_replicated(site, reason)
        return None
    heads_per_rank, kv_heads_per_rank = heads // count, max(1, kv_heads // count)
    first, first_kv = ranks.rank * heads_per_rank, ranks.rank * kv_heads // count
    return (
        replace(spec, num_heads=heads_per_rank, num_kv_heads=kv_heads_per_rank),
        Shard("heads", heads, ((first, first + heads_per_rank),)),
        Shard("heads", kv_heads, ((first_kv, first_kv + kv_heads_per_rank),)),
    )


def local_spec(site: Site, spec: AttentionSpec) -> AttentionSpec:
    """Return this rank's attention spec, without adding a note if attention is replicated."""
    ranks = site.resolver.ranks
    if ranks is None:
        return spec
    # shard_heads notes on the resolver why it declines; the stand-in swallows the note.
    notes: list[str] = []
    local = shard_heads(replace(site, resolver=_Silent(ranks, notes)), spec)  # type: ignore[arg-type]
    return spec if local is None else local[0]


@dataclass(frozen=True, slots=True)
class _Silent:
    """Stand-in for a resolver, for ``local_spec``: the ranks, and notes that are discarded."""

    ranks: Ranks
    notes: list[str]


def head_slices(names: Iterable[str], shard: Shard) -> Slices:
    """Return the slices of parameters that have one entry per head."""
    return {("", name): Slice(0, shard.whole, shard.ranges) for name in names}


def note_replicated(site: Site, reason: str) -> None:
    """Note once for all layers of this kind that the layer at ``site`` is replicated."""
    note_once(site, f"every rank computes all of {prefix_without_numbers(site)}: {reason}")


def prefix_without_numbers(site: Site) -> str:
    """Return the layer name of a site without the decoder block's number."""
    return ".".join(part for part in site.prefix.split(".") if not part.isdigit())


def note_once(site: Site, note: str) -> None:
    """Add a note about the model unless the same note exists."""
    if note not in site.resolver.notes:
        site.resolver.notes.append(note)


def _ranks(site: Site) -> Ranks:
    ranks: Any = site.resolver.ranks
    assert ranks is not None
    return ranks  # type: ignore[no-any-return]


def _scaled(ranges: Ranges, factor: int) -> Ranges:
    return tuple((start * factor, stop * factor) for start, stop in ranges)


class CannotShardError(Exception):
    """A parameter cannot be sharded; the text names the parameter and the reason."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """Builder and cache of a layer's parameters for any axis size; None if a size is invalid."""

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
    place: str, build: Callable[[int], Parameters], shard: Shard, ranks: int
) -> dict[str, Slice]:
    """Return this rank's slices of the parameters along one axis, by parameter name.

    Args:
        build: creates the parameters for an axis of the given size.
        ranks: number of ranks.
    Raises: CannotShardError: a shard of a parameter would not be a part of the whole parameter.
    """
    probe = _Probe(build, {})
    complete, sharded = probe.of(shard.whole), probe.of(shard.size)
    if complete is None:
        raise CannotShardError(f"{place}: this format cannot store the whole layer")
    if sharded is None or sharded.keys() != complete.keys():
        suggestion = _suggest_size(probe, shard, ranks)
        raise CannotShardError(
            f"{place}: this format cannot store a shard of {shard.size} of {shard.whole} "
            f"entries{suggestion}"
        )
    slices = {}
    for name, parameter in complete.items():
        # The stored shape is unknown before loading, so no slice can be computed.
        if getattr(parameter, "any_form", False):
            raise CannotShardError(f"the stored form of {place}.{name} is known only after loading")
        differing_dims = _differing_dims(parameter.shape, sharded[name].shape)
        if not differing_dims:
            if hasattr(parameter, "states_sizes"):
                slices[name] = _restated(parameter, sharded[name])
            continue
        # Slicing along one dimension cannot produce a shard that differs in two.
        if len(differing_dims) > 1:
            raise CannotShardError(f"{place}.{name} changes in dimensions {differing_dims}")
        dim = differing_dims[0]
        ranges = []
        for start, stop in shard.ranges:
            begin, end = (_edge(probe, name, dim, at, shard) for at in (start, stop))
            if begin is None or end is None:
                entry = start if begin is None else stop
                suggestion = _suggest_size(probe, shard, ranks)
                raise CannotShardError(
                    f"{place}.{name}: entry {entry} of {shard.whole} shares a stored element with "
                    f"its neighbours{suggestion}"
                )
            ranges.append((begin, end))
        if sum(end - begin for begin, end in ranges) != sharded[name].shape[dim]:
            raise CannotShardError(
                f"{place}.{name}: the shard is not a part of the whole parameter"
            )
        slices[name] = Slice(dim, parameter.shape[dim], tuple(ranges), _groups(probe, name, shard))
    return slices


def _restated(complete: nn.Parameter, sharded: nn.Parameter) -> Slice:
    """Return the slice of a parameter that stores the layer's sizes; loading replaces the sizes."""
    generator = torch.Generator(device="cpu")
    with torch.device("cpu"):
        sizes = [tuple(p.sample(generator).tolist()) for p in (complete, sharded)]  # type: ignore[attr-defined]
    return Slice(0, len(complete), ((0, len(complete)),), stated=(sizes[0], sizes[1]))


def _differing_dims(complete: torch.Size, sharded: torch.Size) -> list[int]:
    if len(complete) != len(sharded):
        return [-1, -1]  # more than one dimension, so that callers refuse the parameter
    pairs = enumerate(zip(complete, sharded, strict=True))
    return [dim for dim, (size, shard_size) in pairs if size != shard_size]


def _edge(probe: _Probe, name: str, dim: int, at: int, shard: Shard) -> int | None:
    """Return the index in a parameter at which entry ``at`` of the sharded axis begins.

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
    if at == shard.whole:
        return length
    after = probe.of(at + 1)
    # ``at + 1`` cannot be built if sizes must be multiples of a block size; ``at`` then is one.
    is_edge = after is None or after[name].shape[dim] > length
    return length if is_edge else None


def _groups(probe: _Probe, name: str, shard: Shard) -> tuple[int, int] | None:
    """Return this rank's range of quantization groups, if the parameter stores group numbers."""
    complete = probe.of(shard.whole)
    assert complete is not None
    sharded = probe.of(shard.size)
    if not hasattr(complete[name], "num_groups") or sharded is None:
        return None
    if _num_groups(complete, name) == _num_groups(sharded, name):  # groups lie along another axis
        return 0, _num_groups(complete, name)
    if len(shard.ranges) > 1:
        raise CannotShardError(f"{name} holds group numbers, and this rank's ranges have gaps")
    start, stop = shard.ranges[0]
    edges = [probe.of(at) if at else None for at in (start, stop)]
    first, last = (0 if edge is None else _num_groups(edge, name) for edge in edges)
    return first, last


def _num_groups(parameters: Parameters, name: str) -> int:
    return int(parameters[name].num_groups)  # type: ignore[attr-defined]


def _suggest_size(probe: _Probe, shard: Shard, ranks: int) -> str:
    """Suggest a nearby size that the ranks can divide, as text for an error; empty if none."""
    step = shard.whole // ranks
    # The search is bounded: a suggestion far from the model's size helps nobody.
    for size in range(step, 4 * step + 4096):
        if size % 16 == 0 and size != step and probe.of(size) and probe.of(size * ranks):
            larger = probe.of(size + 1)
            sharded = probe.of(size)
            assert sharded is not None
            # As in ``_edge``: every sharded parameter must have an edge after ``size`` entries.
            if larger is None or all(
                _differing_dims(larger[name].shape, sharded[name].shape)
                for name in sharded
                if _differing_dims(sharded[name].shape, _shapes(probe, size * ranks)[name])
            ):
                return f"; {ranks} ranks can divide {size * ranks} entries"
    return ""


def _shapes(probe: _Probe, size: int) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in (probe.of(size) or {}).items()}


def parameters_of(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Return the registered parameters of a layer and its children, by name."""
    return dict(layer.named_parameters(remove_duplicate=False))


def empty_layer(kind: type[PluggableLayer], site: Site, **attributes: Any) -> Any:
    """Create a layer without calling its constructor, to which a method adds parameters."""
    layer = object.__new__(kind)
    nn.Module.__init__(layer)
    vars(layer).update(prefix=site.prefix, **attributes)
    return layer
