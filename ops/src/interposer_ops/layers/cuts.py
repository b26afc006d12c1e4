"""The cuts of layers over the ranks that compute a model together, as data that they declare."""

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
    """The share of one rank of an axis of a layer. A layer without a cut is replicated.

    Attributes:
        kind: ``column``: of outputs; ``row``: of inputs, so that results are added up; ``heads``:
            of outputs by heads, of which ranks may hold the same; ``vocabulary``: of a table's
            rows; ``expert``: of what lies inside each expert; ``experts``: whole ones.
        whole: the size of the axis.
        ranges: starts and stops of what this rank holds, in order.
    """

    kind: Kind
    whole: int
    ranges: Ranges

    @property
    def size(self) -> int:
        """Return how much of the axis this rank holds."""
        return sum(stop - start for start, stop in self.ranges)

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's share of a tensor with that axis, a view if it is one range."""
        pieces = [tensor.narrow(dim, start, stop - start) for start, stop in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def times(self, factor: int) -> Cut:
        """Return the cut of an axis with ``factor`` entries for each of this one."""
        return Cut(self.kind, self.whole * factor, _scaled(self.ranges, factor))


@dataclass(frozen=True, slots=True)
class Slice:
    """The share of one rank of a stored tensor: ``ranges`` along ``dim``, one behind the other.

    Attributes:
        whole: the size of that dimension as it is stored.
        groups: entries are numbers of groups from here to before the second one, and are counted
            from the first one after the cut; None where they are anything else.
        is_elsewhere: another rank holds what is stored here; this one has zeros.
        stated: sizes of the whole layer that are stored, and those of the share; else None.
    """

    dim: int
    whole: int
    ranges: Ranges
    groups: tuple[int, int] | None = None
    is_elsewhere: bool = False
    stated: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's share of a stored tensor along ``dim``, a view if it is one range."""
        return Cut("column", self.whole, self.ranges).of(tensor, dim)


Slices = Mapping[tuple[str, str], Slice]
"""By the name of a layer that is fused, or empty, and of a parameter; others are replicated."""


def alone(site: Site) -> bool:
    """Say whether one process computes the whole model."""
    ranks = site.resolver.ranks
    return ranks is None or ranks.size == 1


def even_cut(site: Site, kind: Kind, size: int) -> Cut | None:
    """Return an equal share of an axis for each rank.

    None: there is one process, or the ranks do not divide the size, which is noted.
    """
    if alone(site):
        return None
    ranks = _ranks(site)
    if size % ranks.size:
        tell_replicated(site, f"{ranks.size} ranks do not divide {size}")
        return None
    share = size // ranks.size
    return Cut(kind, size, ((ranks.rank * share, (ranks.rank + 1) * share),))


def vocabulary_cut(site: Site, size: int) -> Cut | None:
    """Return the share of a table's rows, as equal as can be; None where there is one process."""
    if alone(site):
        return None
    ranks = _ranks(site)
    if size < ranks.size:
        tell_replicated(site, f"{size} rows are fewer than {ranks.size} ranks")
        return None
    edges = even_edges(ranks.size, size)
    return Cut("vocabulary", size, ((edges[ranks.rank], edges[ranks.rank + 1]),))


def even_edges(count: int, size: int) -> list[int]:
    """Return where the rows of each of ``count`` ranks begin, as equal as can be, and the end."""
    return [size * rank // count for rank in range(count + 1)]


def heads_cut(site: Site, spec: AttentionSpec) -> tuple[AttentionSpec, Cut, Cut] | None:
    """Return what the attention of this rank has to do, and the cuts of query and kv heads.

    Where there are fewer kv heads than ranks, several ranks hold the same one.

    None: there is one process, or the heads cannot be shared out, which is noted.
    """
    if alone(site):
        return None
    ranks = _ranks(site)
    heads, kv_heads, count = spec.num_heads, spec.num_kv_heads, ranks.size
    reason = ""
    if heads % count:
        reason = f"{count} ranks do not divide {heads} heads"
    elif kv_heads % count and count % kv_heads:
        reason = f"{kv_heads} kv heads and {count} ranks do not divide each other"
    elif spec.alibi:
        reason = "slopes of heads are of their number among all"
    if reason:
        tell_replicated(site, reason)
        return None
    share, kv_share = heads // count, max(1, kv_heads // count)
    first, first_kv = ranks.rank * share, ranks.rank * kv_heads // count
    return (
        replace(spec, num_heads=share, num_kv_heads=kv_share),
        Cut("heads", heads, ((first, first + share),)),
        Cut("heads", kv_heads, ((first_kv, first_kv + kv_share),)),
    )


def local_spec(site: Site, spec: AttentionSpec) -> AttentionSpec:
    """Return what the attention of this rank has to do, without a note where it is all."""
    ranks = site.resolver.ranks
    if ranks is None:
        return spec
    notes: list[str] = []
    found = heads_cut(replace(site, resolver=_Silent(ranks, notes)), spec)  # type: ignore[arg-type]
    return spec if found is None else found[0]


@dataclass(frozen=True, slots=True)
class _Silent:
    """The ranks of a site, and notes that nobody sees."""

    ranks: Ranks
    notes: list[str]


def slices_of_heads(names: Iterable[str], cut: Cut) -> Slices:
    """Return the slices of parameters with one entry for each head."""
    return {("", name): Slice(0, cut.whole, cut.ranges) for name in names}


def tell_replicated(site: Site, reason: str) -> None:
    """Note that every rank computes all of the layer at ``site``, once for all such layers."""
    tell_once(site, f"every rank computes all of {kind_of(site)}: {reason}")


def kind_of(site: Site) -> str:
    """Return the prefix of a site without the numbers of blocks."""
    return ".".join(part for part in site.prefix.split(".") if not part.isdigit())


def tell_once(site: Site, note: str) -> None:
    """Note something of the model, once for all layers of which it is true."""
    if note not in site.resolver.notes:
        site.resolver.notes.append(note)


def _ranks(site: Site) -> Ranks:
    ranks: Any = site.resolver.ranks
    assert ranks is not None
    return ranks  # type: ignore[no-any-return]


def _scaled(ranges: Ranges, factor: int) -> Ranges:
    return tuple((start * factor, stop * factor) for start, stop in ranges)
