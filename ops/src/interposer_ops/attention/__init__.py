"""Attention over paged and dense caches: ops, and backends built from torch operators.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.attention._alibi import alibi_slopes
    from interposer_ops.attention._flex_backend import FlexBackend
    from interposer_ops.attention._gathered_backend import (
        GatheredBackend,
        GatheredStep,
        window_ends,
    )
    from interposer_ops.attention._grouped_backend import GroupedBackend
    from interposer_ops.attention._page_size import common_page_size
    from interposer_ops.attention._paged_attention import paged_attention
    from interposer_ops.attention._ragged_attention import (
        merge_attention_states,
        ragged_attention,
        ragged_attention_with_lse,
    )
    from interposer_ops.attention._sdpa_backend import SdpaBackend
    from interposer_ops.attention._source_attention import lone_queries
    from interposer_ops.attention._sparse_attention import indexer_scores, indexer_topk

# fmt: off
__all__ = [
    "FlexBackend", "GatheredBackend", "GatheredStep", "GroupedBackend", "SdpaBackend",
    "alibi_slopes", "common_page_size",
    "indexer_scores", "indexer_topk", "lone_queries",
    "merge_attention_states", "paged_attention",
    "ragged_attention", "ragged_attention_with_lse", "window_ends",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.attention._alibi": "alibi_slopes",
        "interposer_ops.attention._flex_backend": "FlexBackend",
        "interposer_ops.attention._gathered_backend": "GatheredBackend GatheredStep window_ends",
        "interposer_ops.attention._grouped_backend": "GroupedBackend",
        "interposer_ops.attention._page_size": "common_page_size",
        "interposer_ops.attention._paged_attention": "paged_attention",
        "interposer_ops.attention._ragged_attention": (
            "merge_attention_states ragged_attention ragged_attention_with_lse"
        ),
        "interposer_ops.attention._sdpa_backend": "SdpaBackend",
        "interposer_ops.attention._source_attention": "lone_queries",
        "interposer_ops.attention._sparse_attention": "indexer_scores indexer_topk",
    },
)


def __dir__() -> list[str]:
    return __all__
