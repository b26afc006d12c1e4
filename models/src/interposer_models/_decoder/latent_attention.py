"""Multi-head latent attention (MLA), whose cache holds one vector per token.

Dimensions: T tokens, H hidden size, N heads, D plain size of a query and key head, R rotary size,
C latent size, V size of a value head.

Source: arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from interposer import AttentionBatch, AttentionSpec, LinearMethod, PluggableLayer, Site
from interposer_models._decoder.attention import InterleavedRotary
from interposer_models._decoder.expanded_attention import ExpandedAttention
from interposer_models._decoder.indexer import Indexer
from interposer_ops.layers.attention import Attention, LatentBackend
from interposer_ops.layers.cuts import Cut, Slices, heads_cut
from interposer_ops.layers.divided_linear import ColumnLinear, Projection, RowLinear, divides
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.linear import batched_linear, linear

# Of the norms of latent vectors, whatever the config says of the others.
_EPS = 1e-6


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of latent attention.

    Attributes:
        query_latent: size of the latent vector of queries; None where they have none.
        plain: elements of a query and key head that are not rotated, D.
        value: elements of a value head, V.
    """

    hidden: int
    query_latent: int | None
    plain: int
    value: int


class LatentProjection(PluggableLayer):
    """The projection ``kv_b_proj`` from latent vectors to keys and values, taken apart.

    Its weight ``[N (D + V), C]`` is held in the model's dtype, however a checkpoint stores it: what
    it multiplies are queries and outputs of the attention, head by head.

    Args:
        expands: keys and values are asked for as well.
    Attributes:
        parts: the outputs by the name that checkpoints use, as those of ``Linear``.
        slices: what this rank reads of its tensors; empty where that is all.
        of_queries, of_values: ``[N, D, C]`` and ``[N, C, V]``, as the kernels want them.
        to_heads: ``[N D, C]`` and ``[N V, C]``, the same for ``linear``, if it ``expands``.
    """

    def __init__(
        self,
        site: Site,
        num_heads: int,
        sizes: LatentSizes,
        latent_size: int,
        expands: bool = True,
    ) -> None:
        super().__init__(site)
        self.heads, self.sizes = num_heads, (sizes.plain, sizes.value)
        self.latent_size, self.dtype = latent_size, site.dtype
        rows = num_heads * sum(self.sizes)
        self.parts = {site.prefix.rpartition(".")[2]: rows}
        scheme = site.resolver.scheme
        self.method: LinearMethod | None = None
        if scheme is not None:
            self.method = scheme.linear_method(site.prefix, tuple(self.parts))
        if self.method is None:
            weight = torch.empty(rows, latent_size, dtype=site.dtype)
            self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        else:
            self.method.create_weights(self, site, latent_size, rows, bias=False)
        inner, sides = {"num_heads": num_heads}, (sizes.plain, latent_size, sizes.value)
        self._bound = tuple(
            site.bind_kernel(batched_linear, **inner, in_features=taken, out_features=given)
            for taken, given in pairwise(sides)
        )
        rows_of = (num_heads * size for size in self.sizes)
        self._linear = tuple(
            site.bind_kernel(linear, in_features=latent_size, out_features=out, biased=False)
            for out in rows_of
            if expands
        )
        self.slices: Slices = {}
        self.of_queries = self.of_values = torch.empty(0)
        self.to_heads: tuple[Tensor, ...] = ()

    def finalize(self) -> None:
        """Split the weight, dequantized if it has to be, and free it."""
        weight = self._weight()
        for name in list(self._parameters):
            self.register_parameter(name, None)
        keys, values = weight.view(self.heads, -1, self.latent_size).split(self.sizes, dim=1)
        self.to_heads = tuple(
            bound.prepared(weight=part.flatten(0, 1), bias=None)["weight"]
            for bound, part in zip(self._linear, (keys, values), strict=False)
        )
        to_latent, to_values = self._bound
        self.of_queries = to_latent.prepared(weight=keys.contiguous())["weight"]
        values = values.transpose(1, 2).contiguous()
        self.of_values = to_values.prepared(weight=values)["weight"]

    def absorbed(self, query: Tensor) -> Tensor:
        """Return ``[T, N, C]``, what latent vectors answer, of plain queries ``[T, N, D]``."""
        return self._bound[0].function(query.transpose(0, 1), self.of_queries).transpose(0, 1)

    def values(self, mixed: Tensor) -> Tensor:
        """Return ``[T, N, V]`` of means of latent vectors ``[T, N, C]``."""
        return self._bound[1].function(mixed.transpose(0, 1), self.of_values).transpose(0, 1)

    def expanded(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``[U, N, D]`` and values ``[U, N, V]`` of latent vectors ``[U, C]``."""
        keys, values = (
            bound.function(latent, weight, None).unflatten(-1, (self.heads, -1))
            for bound, weight in zip(self._linear, self.to_heads, strict=True)
        )
        return keys, values

    def _weight(self) -> Tensor:
        if self.method is None:
            return self.get_parameter("weight").data
        weight = self.method.dequantized(self)
        kernel, operands = self.method.finalize(self)  # checks what it was given
        if weight is None:
            device = next((x.device for x in operands if isinstance(x, Tensor)), None)
            unit = torch.eye(self.latent_size, dtype=self.dtype, device=device)
            weight = kernel(unit, *operands).T
        return weight.to(self.dtype)


@dataclass(frozen=True)
class LatentShares:
    """The projections of a latent attention that have outputs or inputs of each head.

    Attributes:
        spec: of the heads that this rank has.
        projections: of queries, of keys and values, and the last one.
        slices: what this rank reads of each of them; None where it has all heads.
    """

    spec: AttentionSpec
    projections: tuple[Projection, Projection, Projection]
    slices: tuple[Slices, ...] | None

    @classmethod
    def of(cls, site: Site, spec: AttentionSpec, sizes: LatentSizes, bias: bool) -> LatentShares:
        """Return those of the attention at ``site``, cut by heads if they can be."""
        local = heads_cut(site, spec)
        if local is not None:
            projections = _projections(spec, sizes, bias, local[1])
            if (slices := divides(site, *projections)) is not None:
                return cls(local[0], projections, slices)
        return cls(spec, _projections(spec, sizes, bias, None), None)

    @property
    def slices_of_values(self) -> Slices:
        """Return what this rank reads of the projection to keys and values."""
        return {} if self.slices is None else self.slices[1]

    def query(self, site: Site) -> Linear:
        """Return the projection of queries."""
        if self.slices is None:
            return self.projections[0].whole(site)
        return ColumnLinear(site, self.projections[0], self.slices[0])

    def last(self, site: Site) -> Linear:
        """Return the last projection."""
        if self.slices is None:
            return self.projections[2].whole(site)
        return RowLinear(site, self.projections[2], self.slices[2])


def _projections(
    spec: AttentionSpec, sizes: LatentSizes, bias: bool, cut: Cut | None
) -> tuple[Projection, Projection, Projection]:
    """Return the projections of all heads, with their cut if there is one."""
    heads, latent = spec.num_heads, spec.latent_size
    name, inputs = "q_proj", sizes.hidden
    if sizes.query_latent is not None:
        name, inputs = "q_b_proj", sizes.query_latent
    wide, both = sizes.plain + spec.head_size - latent, sizes.plain + sizes.value
    columns = [
        None if cut is None else {part: cut.times(size)}
        for part, size in ((name, wide), ("kv_b_proj", both))
    ]
    row = None if cut is None else replace(cut.times(sizes.value), kind="row")
    return (
        Projection(name, inputs, {name: heads * wide}, False, columns=columns[0]),
        Projection("kv_b_proj", latent, {"kv_b_proj": heads * both}, False, columns=columns[1]),
        Projection("o_proj", heads * sizes.value, {"o_proj": sizes.hidden}, bias, row=row),
    )


class LatentAttention(SelfAttention):
    """Attention of all heads to one latent vector per token, and its projections.

    The projection from latent vectors to keys is applied to queries instead, and that to values to
    what the attention returns, so that neither keys nor values are made of what is cached. Where
    long prompts meet the backend of the standard ops, they are made: see ``ExpandedAttention``.

    Args:
        spec: of heads of C + R elements, with one kv head and ``latent_size`` C.
        interleaved: neighbours are rotated, not the halves of the rotary part.
        bias: of the projections of ``x`` to latent vectors, and of the last one.
    """

    def __init__(
        self,
        site: Site,
        spec: AttentionSpec,
        sizes: LatentSizes,
        interleaved: bool = True,
        bias: bool = False,
    ) -> None:
        PluggableLayer.__init__(self, site)
        hidden, latent = sizes.hidden, spec.latent_size
        shares = LatentShares.of(site, spec, sizes, bias)
        self.spec = spec = shares.spec
        self.plain_size, heads = sizes.plain, spec.num_heads
        rotary = self.rotary_size = spec.head_size - latent
        self.query_latent = sizes.query_latent is not None
        if sizes.query_latent is None:
            self.q_proj = shares.query(site.at("q_proj"))
        else:
            self.q_a_proj = Linear(site.at("q_a_proj"), hidden, sizes.query_latent, bias)
            self.q_a_layernorm = RMSNorm(site.at("q_a_layernorm"), sizes.query_latent, _EPS)
            self.q_b_proj = shares.query(site.at("q_b_proj"))
        at = site.at("kv_a_proj_with_mqa")
        self.kv_a_proj_with_mqa = Linear(at, hidden, spec.head_size, bias)
        self.kv_a_layernorm = RMSNorm(site.at("kv_a_layernorm"), latent, _EPS)
        at = site.at("kv_b_proj")
        self.kv_b_proj = LatentProjection(at, heads, sizes, latent, expands=not spec.sparse)
        self.kv_b_proj.slices = shares.slices_of_values
        kind = InterleavedRotary if interleaved else RotaryEmbedding
        self.rotary = kind(site.at("rotary"), rotary, rotary)
        self.attn = Attention(site.at("attn"), spec)
        self.o_proj = shares.last(site.at("o_proj"))
        self.expanded = ExpandedAttention(site.at("attn"), spec, sizes.plain, sizes.value)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, plan: Any, rows: Tensor | None
    ) -> Tensor:
        """Return the output projection, as ``SelfAttention`` does.

        Args:
            x: ``[T, H]``.
            cos, sin: ``[T, R / 2]``, float32 or wider.
            cache, plan: of the attention backend.
            rows: int64, indices into T.
        """
        plain, rotated, vectors = self.parts(x, self.query_source(x), cos, sin)
        backend, is_batch = self.attn.backend, isinstance(plan, AttentionBatch)
        if is_batch and isinstance(backend, LatentBackend) and self.expanded.pays(plan):
            backend.write(vectors, cache, plan.slots)
            query = torch.cat((plain, rotated), dim=-1)
            mixed = self.expanded(query, vectors, self.kv_b_proj.expanded, cache, plan)
            return self.o_proj((mixed if rows is None else mixed[rows]).flatten(1))  # type: ignore[no-any-return]
        query = self.absorbed(plain, rotated)
        value = vectors[..., : self.spec.latent_size]
        return self.projected(self.attn(query, vectors, value, cache, plan), rows)

    def projected(self, mixed: Tensor, rows: Tensor | None) -> Tensor:
        """Return ``[T, H]`` of means of latent vectors ``[T, N, C]``, or ``[rows, H]``."""
        if rows is not None:
            mixed = mixed[rows]
        return self.o_proj(self.kv_b_proj.values(mixed).flatten(1))  # type: ignore[no-any-return]

    def query_source(self, x: Tensor) -> Tensor:
        """Return what queries are projected from: their latent vectors, or ``x`` itself."""
        return self.q_a_layernorm(self.q_a_proj(x)) if self.query_latent else x

    def parts(
        self, x: Tensor, source: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[T, N, D]`` and ``[T, N, R]``, and vectors to be cached.

        The latter are ``[T, 1, C + R]``.

        Args:
            source: of ``query_source``.
        """
        latent_size, rotary_size = self.spec.latent_size, self.rotary_size
        projected = self.q_b_proj(source) if self.query_latent else self.q_proj(source)
        query = projected.unflatten(-1, (self.spec.num_heads, -1))  # [T, N, D + R]
        plain, rotated = query.split((self.plain_size, rotary_size), dim=-1)
        latent, key = self.kv_a_proj_with_mqa(x).split((latent_size, rotary_size), dim=-1)
        rotated, key = self.rotary(rotated.contiguous(), key.unsqueeze(1), cos, sin)
        latent = self.kv_a_layernorm(latent.contiguous())
        return plain, rotated, torch.cat((latent.unsqueeze(1), key), dim=-1)

    def absorbed(self, plain: Tensor, rotated: Tensor) -> Tensor:
        """Return the queries ``[T, N, C + R]`` of both parts of them."""
        return torch.cat((self.kv_b_proj.absorbed(plain), rotated), dim=-1)


class SparseLatentAttention(LatentAttention):
    """Attention to those latent vectors that an indexer names.

    Args:
        indexer: the spec of one, of type ``indexer``.
    """

    def __init__(
        self,
        site: Site,
        spec: AttentionSpec,
        sizes: LatentSizes,
        indexer: AttentionSpec,
        bias: bool = False,
    ) -> None:
        super().__init__(site, spec, sizes, bias=bias)
        assert sizes.query_latent is not None
        self.indexer = Indexer(
            site.at("indexer"), indexer, sizes.hidden, sizes.query_latent, self.rotary_size
        )

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Sequence[Tensor],
        plan: Sequence[object],
        rows: Tensor | None,
    ) -> Tensor:
        """Return the output projection, as ``LatentAttention`` does.

        Args:
            cache, plan: of the attention backend, and of the indexer's.
        """
        source = self.query_source(x)
        named = self.indexer(x, source, cos, sin, cache[1], plan[1])  # [T, X]
        plain, rotated, vectors = self.parts(x, source, cos, sin)
        query = self.absorbed(plain, rotated)
        return self.projected(self.attn(query, vectors, named, cache[0], plan[0]), rows)
