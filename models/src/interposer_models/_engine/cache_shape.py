"""Page pools that a model's attention layers need, and the sizes in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interposer import AttentionBackend
from interposer_models._engine.pages import window_pages
from interposer_models._engine.sources import sees_source


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Attention layers with the same window, which share one page pool.

    Attributes:
        seen_tokens: Window: the number of tokens that a token attends to, including the token; None
            for full attention.
        num_layers: Number of layers in the group.
        page_bytes: Size of one page over all layers of the group.
        most_pages: Upper bound on the pages that all running sequences hold; None if the bound
            depends on sequence lengths.
        is_source: Whether the layers attend to the encoder input instead of the sequence.
    """

    seen_tokens: int | None
    num_layers: int
    page_bytes: int
    most_pages: int | None
    is_source: bool = False

    @property
    def num_zero_pages(self) -> int:
        """Number of zero-filled pages, which stand in a page table for pages that were freed."""
        return 0 if self.seen_tokens is None else 1

    def num_pages(self, num_token_pages: int) -> int:
        """Return the pool size if the cache has ``num_token_pages`` pages of full attention."""
        return num_token_pages if self.most_pages is None else min(num_token_pages, self.most_pages)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Groups of a model's attention layers, the widest window first.

    Attributes:
        groups: The groups of layers.
        page_size: Tokens per page.
        spare_pages: Additional pages in each pool that no sequence gets, for the padding of graphs.
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
        """Group the layers of the backends by window; without layers, there is one empty group.

        A sequence holds the pages of one window and of the tokens that a step adds. So all
        sequences together never need more than ``most_pages`` of a group with a window.
        """
        page_bytes_by_kind: dict[tuple[int | None, bool], list[int]] = {}
        for backend in backends:
            kind = backend.seen_tokens, sees_source(backend.spec)
            page_bytes_by_kind.setdefault(kind, []).append(backend.kv_layout().page_bytes())
        groups = []
        for window, is_source in sorted(page_bytes_by_kind or {(None, False): []}, key=_order):
            most_pages = None
            if window is not None:
                # One page more than the window touches, because new tokens may start a page.
                pages_per_sequence = window_pages(window, page_size) + 1
                most_pages = max_sequences * pages_per_sequence + max_step_tokens // page_size
            layer_bytes = page_bytes_by_kind.get((window, is_source), [])
            groups.append(
                CacheGroup(window, len(layer_bytes), sum(layer_bytes), most_pages, is_source)
            )
        return cls(groups, page_size, spare_pages)

    def pool_index(self, backend: AttentionBackend) -> int:
        """Return the index of the pool of a backend's layers, within ``by_pool``."""
        kind = backend.seen_tokens, sees_source(backend.spec)
        return [(group.seen_tokens, group.is_source) for group in self.by_pool].index(kind)

    @property
    def by_pool(self) -> list[CacheGroup]:
        """The groups in the order of the pools: the encoder-input group comes last."""
        return sorted(self.groups, key=lambda group: group.is_source)

    def num_bytes(self, num_token_pages: int) -> int:
        """Return the size in bytes of a cache of ``num_token_pages`` pages."""
        return self._fixed_bytes + sum(
            group.num_pages(num_token_pages) * group.page_bytes for group in self.groups
        )

    def pages_within(self, capacity_bytes: int) -> int | None:
        """Return how many pages of tokens fit into ``capacity_bytes``; None for any number.

        The size as a function of the page count is piecewise linear and concave: a group with a
        window stops growing at ``most_pages``. So the result is the maximum over the linear pieces.
        """
        free_bytes = capacity_bytes - self._fixed_bytes
        growing_page_bytes = sum(group.page_bytes for group in self.groups)
        num_pages = free_bytes // growing_page_bytes if growing_page_bytes else None
        # The group with the smallest window stops growing first.
        for group in reversed(self.groups):
            if num_pages is None or group.most_pages is None:
                break
            free_bytes -= group.most_pages * group.page_bytes
            growing_page_bytes -= group.page_bytes
            if growing_page_bytes:
                num_pages = max(num_pages, free_bytes // growing_page_bytes)
            elif free_bytes >= 0:
                num_pages = None
        return num_pages

    def parts(self, num_token_pages: int) -> str:
        """Describe the tokens and layers of each group; "" if all have full attention."""
        if all(group.seen_tokens is None and not group.is_source for group in self.groups):
            return ""
        parts = []
        for group in self.groups:
            tokens = group.num_pages(num_token_pages) * self.page_size
            see = "layer that sees" if group.num_layers == 1 else "layers that see"
            window_text = "the source" if group.is_source else group.seen_tokens or "all"
            parts.append(f"{tokens} in {group.num_layers} {see} {window_text}")
        return ", ".join(parts)

    @property
    def _fixed_bytes(self) -> int:
        return sum((self.spare_pages + g.num_zero_pages) * g.page_bytes for g in self.groups)


def _order(kind: tuple[int | None, bool]) -> tuple[float, bool]:
    """Sort key: the widest window first."""
    return -(kind[0] or float("inf")), kind[1]
