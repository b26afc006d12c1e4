"""Vocabulary-parallel embedding and head: each rank holds the table rows of some tokens.

Dimensions: T tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from interposer import PluggableLayer, Site
from interposer.errors import InterposerError
from interposer_ops.layers.embedding import Embedding, LMHead, PlainEmbedding
from interposer_ops.layers.linear import PlainLinear
from interposer_ops.layers.tensor_parallel.collectives import AllReduce, bind_all_gather
from interposer_ops.layers.tensor_parallel.sharding import (
    CannotShardError,
    Shard,
    Slices,
    empty_layer,
    even_edges,
    note_replicated,
    parameters_of,
    probe_site,
    shard_vocabulary,
    slices_between,
)

__all__ = ["shard_embedding", "shard_lm_head"]


class VocabParallelEmbedding(Embedding):
    """Look up this rank's tokens, and sum the results over the ranks.

    A rank contributes zeros for tokens of other ranks.
    """

    def __init__(
        self, site: Site, shard: Shard, hidden_size: int, head: Site | None, slices: Slices
    ) -> None:
        PluggableLayer.__init__(self, site)
        self.shard, self.slices = shard, slices
        self.start = shard.ranges[0][0]
        self._create(site, shard.size, hidden_size, head)
        self.vocab_size = shard.whole
        self.reduce = AllReduce(site, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up the embeddings ``[T, H]`` of ``token_ids`` ``[T]``."""
        # Look up row 0 for tokens of other ranks, then zero these rows: shapes stay static.
        local_ids = token_ids - self.start
        is_elsewhere = (local_ids < 0) | (local_ids >= self.shard.size)
        embeddings = super().forward(local_ids.masked_fill_(is_elsewhere, 0))
        return self.reduce(embeddings.masked_fill(is_elsewhere[..., None], 0))


class VocabParallelHead(LMHead):
    """Compute the logits of this rank's tokens, and gather the logits of all ranks."""

    def __init__(
        self, site: Site, shard: Shard, hidden_size: int, tied: Embedding | None, slices: Slices
    ) -> None:
        PluggableLayer.__init__(self, site)
        ranks = site.resolver.ranks
        assert ranks is not None
        self.shard, self.slices = shard, slices
        self._create(site, shard.size, hidden_size, tied)
        self.vocab_size = shard.whole
        edges = even_edges(ranks.size, shard.whole)
        sizes = [stop - start for start, stop in pairwise(edges)]
        self.gather = bind_all_gather(site, sizes)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project ``hidden`` ``[T, H]`` to logits ``[T, V]``."""
        return self.gather(super().forward(hidden))


def shard_embedding(
    site: Site, vocab_size: int, hidden_size: int, head: Site | None = None
) -> Embedding:
    """Build the embedding at ``site``, sharded by vocabulary if possible."""
    shard = shard_vocabulary(site, vocab_size)
    if shard is not None:

        def build_parameters(size: int) -> dict[str, Any]:
            probe = probe_site(site)
            scheme = probe.resolver.scheme
            method = scheme.embedding_method(probe.prefix, head and head.prefix) if scheme else None
            layer = empty_layer(Embedding, probe)
            probe_head = None if head is None else probe_site(head)
            (method or PlainEmbedding()).create_weights(layer, probe, size, hidden_size, probe_head)
            return parameters_of(layer)

        slices = _slices(site, build_parameters, shard)
        if slices is not None:
            return VocabParallelEmbedding(site, shard, hidden_size, head, slices)
    return Embedding(site, vocab_size, hidden_size, head)


def shard_lm_head(
    site: Site, vocab_size: int, hidden_size: int, tied: Embedding | None = None
) -> LMHead:
    """Build the language model head at ``site``, sharded by vocabulary if possible.

    A tied head has the same shard as the embedding that owns the table.
    """
    if tied is not None:
        # The embedding has decided already whether the shared table is sharded.
        if isinstance(tied, VocabParallelEmbedding):
            return VocabParallelHead(site, tied.shard, hidden_size, tied, tied.slices)
        return LMHead(site, vocab_size, hidden_size, tied)
    shard = shard_vocabulary(site, vocab_size)
    if shard is not None:

        def build_parameters(size: int) -> dict[str, Any]:
            probe = probe_site(site)
            scheme = probe.resolver.scheme
            method = scheme.head_method(probe.prefix) if scheme else None
            layer = empty_layer(LMHead, probe)
            (method or PlainLinear()).create_weights(layer, probe, hidden_size, size, bias=False)
            return parameters_of(layer)

        slices = _slices(site, build_parameters, shard)
        if slices is not None:
            return VocabParallelHead(site, shard, hidden_size, None, slices)
    return LMHead(site, vocab_size, hidden_size)


def _slices(site: Site, build_parameters: Any, shard: Shard) -> Slices | None:
    ranks = site.resolver.ranks
    assert ranks is not None
    try:
        slices = slices_between(site.prefix, build_parameters, shard, ranks.size)
    except (CannotShardError, InterposerError) as refusal:
        note_replicated(site, str(refusal))
        return None
    return {("", name): piece for name, piece in slices.items()}
