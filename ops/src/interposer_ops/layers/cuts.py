"""Shards of layers: how the ranks that compute a model together divide an axis or a tensor.

A layer declares its shards as data (``Cut``, ``Slice``), so that the loader reads only the rank's
part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from interposer import AttentionSpec, Ranks, Site

__all__ = ["Cut", "Slice", "Slices", "heads_cut", "local_spec"]

Kind = Literal["column", "row", "heads", "vocabulary", "expert", "experts"]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The shard of a layer's axis on one rank. A layer without a ``Cut`` is replicated.

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

    def times(self, factor: int) -> Cut:
        """Return the shard of an axis that has ``factor`` entries for each entry of this axis."""
        return Cut(self.kind, self.whole * factor, _scaled(self.ranges, factor))


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
        return Cut("column", self.whole, self.ranges).of(tensor, dim)


Slices = Mapping[tuple[str, str], Slice]
"""Slices by (part of a merged layer or "", parameter name). Other parameters are replicated."""


def alone(site: Site) -> bool:
    """Check whether one process computes the whole model."""
    ranks = site.resolver.ranks
    return ranks is None or ranks.size == 1


def even_cut(site: Site, kind: Kind, size: int) -> Cut | None:
    """Divide an axis of ``size`` entries evenly among the ranks.

    Returns: this rank's shard. None if there is one process, or if ``size`` is not divisible by the
        number of ranks; a note then says that the layer is replicated.
    """
    if alone(site):
        return None
    ranks = _ranks(site)
    if size % ranks.size:
        note_replicated(site, f"{ranks.size} ranks do not divide {size}")
        return None
    size_per_rank = size // ranks.size
    return Cut(kind, size, ((ranks.rank * size_per_rank, (ranks.rank + 1) * size_per_rank),))


def vocabulary_cut(site: Site, size: int) -> Cut | None:
    """Divide the rows of a table among the ranks, as evenly as possible.

    Returns: this rank's shard; None if there is one process, or fewer rows than ranks.
    """
    if alone(site):
        return None
    ranks = _ranks(site)
    # A rank without rows would need a layer without outputs.
    if size < ranks.size:
        note_replicated(site, f"{size} rows are fewer than {ranks.size} ranks")
        return None
    edges = even_edges(ranks.size, size)
    return Cut("vocabulary", size, ((edges[ranks.rank], edges[ranks.rank + 1]),))


def even_edges(count: int, size: int) -> list[int]:
    """Return where the rows of each of ``count`` ranks begin, as even as possible, then the end."""
    return [size * rank // count for rank in range(count + 1)]


def heads_cut(site: Site, spec: AttentionSpec) -> tuple[AttentionSpec, Cut, Cut] | None:
    """Divide attention heads among the ranks.

    If there are fewer kv heads than ranks, several ranks hold the same kv head.

    Returns: this rank's spec, and the shards of query heads and of kv heads. None if there is one
        process, or if the heads cannot be divided; a note then says that the layer is replicated.
    """
    if alone(site):
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
        Cut("heads", heads, ((first, first + heads_per_rank),)),
        Cut("heads", kv_heads, ((first_kv, first_kv + kv_heads_per_rank),)),
    )


def local_spec(site: Site, spec: AttentionSpec) -> AttentionSpec:
    """Return this rank's attention spec, without adding a note if attention is replicated."""
    ranks = site.resolver.ranks
    if ranks is None:
        return spec
    # heads_cut notes on the resolver why it declines; the stand-in swallows the note.
    notes: list[str] = []
    local = heads_cut(replace(site, resolver=_Silent(ranks, notes)), spec)  # type: ignore[arg-type]
    return spec if local is None else local[0]


@dataclass(frozen=True, slots=True)
class _Silent:
    """Stand-in for a resolver: the ranks of a site, and notes that nothing reads."""

    ranks: Ranks
    notes: list[str]


def slices_of_heads(names: Iterable[str], cut: Cut) -> Slices:
    """Return the slices of parameters that have one entry per head."""
    return {("", name): Slice(0, cut.whole, cut.ranges) for name in names}


def note_replicated(site: Site, reason: str) -> None:
    """Note once for all layers of this kind that the layer at ``site`` is replicated."""
    note_once(site, f"every rank computes all of {prefix_without_numbers(site)}: {reason}")


def prefix_without_numbers(site: Site) -> str:
    """Return the prefix of a site without block numbers."""
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
