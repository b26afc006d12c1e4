"""The pools of pages that the attention layers of a model need, and the bytes of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interposer import AttentionBackend
from interposer_models._engine.pages import window_pages
from interposer_models._engine.sources import sees_source


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The attention layers that see equally far, whose pages are of one pool.

    Attributes:
        seen_tokens: that a token sees at most, itself included; None sees all.
        page_bytes: of one page in all of these layers.
        most_pages: that sequences hold at once, however long they are; None where the length
            decides.
        is_source: they see a source, whose tokens are not those of the sequence.
    """

    seen_tokens: int | None
    num_layers: int
    page_bytes: int
    most_pages: int | None
    is_source: bool = False

    @property
    def num_zero_pages(self) -> int:
        """The pages of zeros, which stand in a table for those that were given back."""
        return 0 if self.seen_tokens is None else 1

    def num_pages(self, tokens_pages: int) -> int:
        """Return the pages of the pool where the cache is for so many pages of tokens."""
        return tokens_pages if self.most_pages is None else min(tokens_pages, self.most_pages)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The groups of a model, those that see farthest first, and what they have besides.

    Attributes:
        spare_pages: of each group, which no sequence is given.
    """

    groups: Sequence[CacheGroup]
    page_size: int
    spare_pages: int = 0

    @classmethod
    def of(
        cls,
        backends: Iterable[AttentionBackend],
        page_size: int,
        max_sequences: int,
        max_step_tokens: int,
        spare_pages: int = 0,
    ) -> CacheShape:
        """Return the shape for the layers of these backends; without a layer it has one group.

        A sequence holds its window and what it adds in a step, so that so many sequences and
        tokens of a step never need more than ``most_pages``.
        """
        layers: dict[tuple[int | None, bool], list[int]] = {}
        for backend in backends:
            kind = backend.seen_tokens, sees_source(backend.spec)
            layers.setdefault(kind, []).append(backend.kv_layout().page_bytes())
        groups = []
        for seen, is_source in sorted(layers or {(None, False): []}, key=_order):
            most = None
            if seen is not None:
                each = window_pages(seen, page_size) + 1
                most = max_sequences * each + max_step_tokens // page_size
            own = layers.get((seen, is_source), [])
            groups.append(CacheGroup(seen, len(own), sum(own), most, is_source))
        return cls(groups, page_size, spare_pages)

    def place(self, backend: AttentionBackend) -> int:
        """Return the number of a backend's group among ``by_pool``."""
        kind = backend.seen_tokens, sees_source(backend.spec)
        return [(group.seen_tokens, group.is_source) for group in self.by_pool].index(kind)

    @property
    def by_pool(self) -> list[CacheGroup]:
        """The groups, that of sources as the last one."""
        return sorted(self.groups, key=lambda group: group.is_source)

    def num_bytes(self, tokens_pages: int) -> int:
        """Return the bytes of a cache for so many pages of tokens."""
        return self._fixed_bytes + sum(
            group.num_pages(tokens_pages) * group.page_bytes for group in self.groups
        )

    def fitting(self, room_bytes: int) -> int | None:
        """Return for how many pages of tokens the room is enough, None where for any number.

        The bytes are the least of lines, each of which takes some groups as full: the number is
        the largest that one of them allows for.
        """
        left = room_bytes - self._fixed_bytes
        rising = sum(group.page_bytes for group in self.groups)
        fitting = left // rising if rising else None
        # The group that sees least is full first.
        for group in reversed(self.groups):
            if fitting is None or group.most_pages is None:
                break
            left -= group.most_pages * group.page_bytes
            rising -= group.page_bytes
            if rising:
                fitting = max(fitting, left // rising)
            elif left >= 0:
                fitting = None
        return fitting

    def parts(self, tokens_pages: int) -> str:
        """Return the tokens and layers of each group, for people; empty where all see all."""
        if all(group.seen_tokens is None and not group.is_source for group in self.groups):
            return ""
        parts = []
        for group in self.groups:
            tokens = group.num_pages(tokens_pages) * self.page_size
            see = "layer that sees" if group.num_layers == 1 else "layers that see"
            what = "the source" if group.is_source else group.seen_tokens or "all"
            parts.append(f"{tokens} in {group.num_layers} {see} {what}")
        return ", ".join(parts)

    @property
    def _fixed_bytes(self) -> int:
        return sum((self.spare_pages + g.num_zero_pages) * g.page_bytes for g in self.groups)


def _order(kind: tuple[int | None, bool]) -> tuple[float, bool]:
    """Return what sorts those that see farthest first."""
    return -(kind[0] or float("inf")), kind[1]
