"""Multi-head latent attention (MLA), which caches one latent vector per token for all heads.

Dimensions: T tokens, U cached tokens, H hidden size, N heads, D size of a query and key head
without its rotary part, R rotary size, C latent size, V size of a value head, X selected tokens.

Source: arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from interposer import AttentionBatch, AttentionSpec, LinearMethod, PluggableLayer, Site
from interposer_models._decoder.attention import ExpandedAttention, InterleavedRotary
from interposer_models._decoder.moe import GroupedFamily
from interposer_models._decoder.settings import Positive
from interposer_models._decoder.sparse_attention import Indexer
from interposer_ops.layers.attention import Attention, LatentBackend
from interposer_ops.layers.head_linear import HeadLinear
from interposer_ops.layers.latent_attention import LatentParts
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.layers.tensor_parallel.linear import (
    ColumnParallelLinear,
    Projection,
    RowParallelLinear,
    shard_projections,
)
from interposer_ops.layers.tensor_parallel.sharding import Shard, Slices, shard_heads
from interposer_ops.linear import linear

# Epsilon of the norms of latent vectors; the reference fixes it, independent of the config.
_EPS = 1e-6


@dataclass(frozen=True)
class LatentSizes:
    """Head, latent and rotary sizes of latent attention.

    Attributes:
        query_latent: size of the latent vector of queries; None if queries are projected directly.
        plain: elements of a query and key head that are not rotated, D.
        value: elements of a value head, V.
    """

    hidden: int
    query_latent: int | None
    plain: int
    value: int


class LatentProjection(PluggableLayer):
    """The projection ``kv_b_proj`` from latent vectors to keys and values, split in two matrices.

    Queries and attention outputs are multiplied head by head, by ``HeadLinear`` layers. The weight
    ``[N (D + V), C]`` of a checkpoint with quantized values is dequantized to the model's dtype. A
    plain weight that the model's scheme quantizes while loading may be quantized by these layers,
    the keys with one scale per elements of D instead of C: these are the inputs of the matmul.

    Args:
        expands: also prepare the weights that ``expanded`` needs.
    Attributes:
        parts: the outputs by the name that checkpoints use, as those of ``Linear``.
        slices: the part of each tensor that this rank reads; empty for whole tensors.
        head_layers: the projections of queries and of values; a tuple, because torch would
            otherwise register modules whose weights no checkpoint has.
        head_operands: the prepared weights of these layers.
        expansion_weights: ``[N D, C]`` and ``[N V, C]``, prepared for ``linear``; empty without
            ``expands``.
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
        sides = sizes.plain, latent_size, sizes.value
        # D -> C for queries, C -> V for values.
        self.head_layers = tuple(HeadLinear(site, num_heads, *pair) for pair in pairwise(sides))
        self.head_operands: tuple[Any, ...] = (None, None)
        rows_of = (num_heads * size for size in self.sizes)
        self._expansion_kernels = tuple(
            site.bind_kernel(linear, in_features=latent_size, out_features=out, biased=False)
            for out in rows_of
            if expands
        )
        self.slices: Slices = {}
        self.expansion_weights: tuple[Tensor, ...] = ()

    def finalize(self) -> None:
        """Split the weight into key and value matrices, dequantized if needed, and prepare both."""
        weight = self._weight()
        for name in list(self._parameters):
            self.register_parameter(name, None)
        keys, values = weight.view(self.heads, -1, self.latent_size).split(self.sizes, dim=1)
        # [N, D, C] to [N, C, D]: C is the output of queries' projection.
        matrices = keys.transpose(1, 2), values
        prepared = [
            layer.prepared(matrix) for layer, matrix in zip(self.head_layers, matrices, strict=True)
        ]
        # Kept here, not in the layers, because this layer may be a copy with updated weights.
        self.head_operands = tuple(weight.operand for weight in prepared)
        keys, values = prepared[0].values.transpose(1, 2), prepared[1].values
        self.expansion_weights = tuple(
            kernel.prepared(weight=part.flatten(0, 1), bias=None)["weight"]
            for kernel, part in zip(self._expansion_kernels, (keys, values), strict=False)
        )

    def absorbed(self, query: Tensor) -> Tensor:
        """Project queries ``[T, N, D]`` into the latent space, ``[T, N, C]``."""
        return self._project(0, query)

    def values(self, mixed: Tensor) -> Tensor:
        """Project attention outputs in the latent space ``[T, N, C]`` to values ``[T, N, V]``."""
        return self._project(1, mixed)

    def _project(self, index: int, x: Tensor) -> Tensor:
        layer, operand = self.head_layers[index], self.head_operands[index]
        return layer.project(x.transpose(0, 1), operand).transpose(0, 1)

    def expanded(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latent vectors ``[U, C]`` to keys ``[U, N, D]`` and values ``[U, N, V]``."""
        keys, values = (
            kernel.function(latent, weight, None).unflatten(-1, (self.heads, -1))
            for kernel, weight in zip(self._expansion_kernels, self.expansion_weights, strict=True)
        )
        return keys, values

    def _weight(self) -> Tensor:
        if self.method is None:
            return self.get_parameter("weight").data
        if self.method.quantizes_plain_weights and all(x.quantizes() for x in self.head_layers):
            return self.get_parameter("weight").data
        # Per-head matmuls have no quantized kernels.
        weight = self.method.dequantized(self)
        kernel, operands = self.method.finalize(self)  # checks the weights
        if weight is None:
            device = next((x.device for x in operands if isinstance(x, Tensor)), None)
            # A scheme without a dequantizer: the product with the identity matrix is the weight.
            identity = torch.eye(self.latent_size, dtype=self.dtype, device=device)
            weight = kernel(identity, *operands).T
        return weight.to(self.dtype)


@dataclass(frozen=True)
class LatentShards:
    """The per-head projections of latent attention on this rank: all heads, or a shard of them.

    Attributes:
        spec: the attention spec of the heads that this rank computes.
        projections: the projections of queries, of keys and values, and of the output.
        slices: the parts of the tensors that this rank reads; None if this rank has all heads.
    """

    spec: AttentionSpec
    projections: tuple[Projection, Projection, Projection]
    slices: tuple[Slices, ...] | None

    @classmethod
    def of(cls, site: Site, spec: AttentionSpec, sizes: LatentSizes, bias: bool) -> LatentShards:
        """Shard the per-head projections of an attention by heads, or replicate them."""
        # None on a single rank, or if the heads do not divide among the ranks.
        local = shard_heads(site, spec)
        if local is not None:
            projections = _projections(spec, sizes, bias, local[1])
            slices = shard_projections(site, *projections)
            if slices is not None:
                return cls(local[0], projections, slices)
        return cls(spec, _projections(spec, sizes, bias, None), None)

    @property
    def value_slices(self) -> Slices:
        """Return the part of ``kv_b_proj`` that this rank reads; empty for the whole weight."""
        return {} if self.slices is None else self.slices[1]

    def query(self, site: Site) -> Linear:
        """Build this rank's projection of queries."""
        if self.slices is None:
            return self.projections[0].whole(site)
        return ColumnParallelLinear(site, self.projections[0], self.slices[0])

    def output(self, site: Site) -> Linear:
        """Build this rank's output projection."""
        if self.slices is None:
            return self.projections[2].whole(site)
        return RowParallelLinear(site, self.projections[2], self.slices[2])


def _projections(
    spec: AttentionSpec, sizes: LatentSizes, bias: bool, shard: Shard | None
) -> tuple[Projection, Projection, Projection]:
    """Describe the per-head projections, for the shard of heads if ``shard`` is given."""
    heads, latent = spec.num_heads, spec.latent_size
    name, inputs = "q_proj", sizes.hidden
    if sizes.query_latent is not None:
        name, inputs = "q_b_proj", sizes.query_latent
    query_width, key_value_width = sizes.plain + spec.head_size - latent, sizes.plain + sizes.value
    columns = [
        None if shard is None else {part: shard.times(size)}
        for part, size in ((name, query_width), ("kv_b_proj", key_value_width))
    ]
    row = None if shard is None else replace(shard.times(sizes.value), kind="row")
    return (
        Projection(name, inputs, {name: heads * query_width}, False, columns=columns[0]),
        Projection(
            "kv_b_proj", latent, {"kv_b_proj": heads * key_value_width}, False, columns=columns[1]
        ),
        Projection("o_proj", heads * sizes.value, {"o_proj": sizes.hidden}, bias, row=row),
    )


class LatentAttention(SelfAttention):
    """Latent attention: all heads attend to one cached vector per token, with all projections.

    The projections are absorbed: the one from latent vectors to keys is applied to queries instead,
    and the one to values is applied to the attention's output, so that cached tokens are never
    expanded.
    For long prompts on the standard backend expansion is cheaper: see ``ExpandedAttention``.

    Args:
        spec: an attention spec with heads of C + R elements, one kv head and ``latent_size`` C.
        interleaved: rotate adjacent elements, not the halves of the rotary part.
        bias: the projections of ``x`` to latent vectors and the output projection have a bias.
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
        shards = LatentShards.of(site, spec, sizes, bias)
        self.spec = spec = shards.spec
        self.plain_size, heads = sizes.plain, spec.num_heads
        rotary = self.rotary_size = spec.head_size - latent
        self.has_latent_queries = sizes.query_latent is not None
        if sizes.query_latent is None:
            self.q_proj = shards.query(site.at("q_proj"))
        else:
            self.q_a_proj = Linear(site.at("q_a_proj"), hidden, sizes.query_latent, bias)
            self.q_a_layernorm = RMSNorm(site.at("q_a_layernorm"), sizes.query_latent, _EPS)
            self.q_b_proj = shards.query(site.at("q_b_proj"))
        at = site.at("kv_a_proj_with_mqa")
        self.kv_a_proj_with_mqa = Linear(at, hidden, spec.head_size, bias)
        self.kv_a_layernorm = RMSNorm(site.at("kv_a_layernorm"), latent, _EPS)
        at = site.at("kv_b_proj")
        self.kv_b_proj = LatentProjection(at, heads, sizes, latent, expands=not spec.sparse)
        # The loader slices the tensor; LatentProjection itself knows only this rank's heads.
        self.kv_b_proj.slices = shards.value_slices
        rotary_class = InterleavedRotary if interleaved else RotaryEmbedding
        self.rotary = rotary_class(site.at("rotary"), rotary, rotary)
        self.attn = Attention(site.at("attn"), spec)
        self.o_proj = shards.output(site.at("o_proj"))
        # Built even where it never pays off, as that depends on the batch.
        self.expanded = ExpandedAttention(site.at("attn"), spec, sizes.plain, sizes.value)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, plan: Any, rows: Tensor | None
    ) -> Tensor:
        """Compute attention and output projection: ``[T, H]``, or ``[rows, H]`` of ``rows``.

        Args:
            x: ``[T, H]``.
            cos, sin: ``[T, R / 2]``, float32 or wider.
            cache, plan: cache and plan of the attention backend.
            rows: int64, indices into T.
        """
        plain, rotated, vectors = self.parts(x, self.query_input(x), cos, sin)
        backend, is_batch = self.attn.backend, isinstance(plan, AttentionBatch)
        # Expansion bypasses the backend's attention, so the cache must have the standard layout.
        if is_batch and isinstance(backend, LatentBackend) and self.expanded.pays(plan):
            backend.write(vectors, cache, plan.slots)
            query = torch.cat((plain, rotated), dim=-1)
            mixed = self.expanded(query, vectors, self.kv_b_proj.expanded, cache, plan)
            return self.o_proj((mixed if rows is None else mixed[rows]).flatten(1))  # type: ignore[no-any-return]
        query = self.absorbed(plain, rotated)
        value = vectors[..., : self.spec.latent_size]
        return self.projected(self.attn(query, vectors, value, cache, plan), rows)

    def latent_parts(self) -> LatentParts | None:
        """Return the parts for a fused call; None for a subclass, which may compute otherwise.

        A fused call must not serve steps for which ``ExpandedAttention.pays``.
        """
        if type(self) is not LatentAttention:
            return None
        plain, value = self.kv_b_proj.sizes
        return LatentParts(
            query_compression=self.q_a_proj if self.has_latent_queries else None,
            query_norm=self.q_a_layernorm if self.has_latent_queries else None,
            query_projection=self.q_b_proj if self.has_latent_queries else self.q_proj,
            vector_projection=self.kv_a_proj_with_mqa,
            vector_norm=self.kv_a_layernorm,
            rotary=self.rotary,
            absorption=self.kv_b_proj,
            attn=self.attn,
            output=self.o_proj,
            sizes=(plain, self.rotary_size, self.spec.latent_size, value),
        )

    def projected(self, mixed: Tensor, rows: Tensor | None) -> Tensor:
        """Apply value and output projections to ``[T, N, C]``: ``[T, H]`` or ``[rows, H]``."""
        if rows is not None:
            mixed = mixed[rows]
        return self.o_proj(self.kv_b_proj.values(mixed).flatten(1))  # type: ignore[no-any-return]

    def query_input(self, x: Tensor) -> Tensor:
        """Return the input of the query projection: compressed queries, or ``x`` itself."""
        return self.q_a_layernorm(self.q_a_proj(x)) if self.has_latent_queries else x

    def parts(
        self, x: Tensor, query_input: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries ``[T, N, D]`` and ``[T, N, R]``, and vectors to cache ``[T, 1, C + R]``.

        Args:
            query_input: the result of the method ``query_input``.
        """
        latent_size, rotary_size = self.spec.latent_size, self.rotary_size
        projected = (
            self.q_b_proj(query_input) if self.has_latent_queries else self.q_proj(query_input)
        )
        query = projected.unflatten(-1, (self.spec.num_heads, -1))  # [T, N, D + R]
        plain, rotated = query.split((self.plain_size, rotary_size), dim=-1)
        latent, key = self.kv_a_proj_with_mqa(x).split((latent_size, rotary_size), dim=-1)
        rotated, key = self.rotary(rotated.contiguous(), key.unsqueeze(1), cos, sin)
        latent = self.kv_a_layernorm(latent.contiguous())
        return plain, rotated, torch.cat((latent.unsqueeze(1), key), dim=-1)

    def absorbed(self, plain: Tensor, rotated: Tensor) -> Tensor:
        """Build latent queries ``[T, N, C + R]`` from the plain and the rotated query part."""
        return torch.cat((self.kv_b_proj.absorbed(plain), rotated), dim=-1)


class SparseLatentAttention(LatentAttention):
    """Latent attention to the tokens that an indexer selects for each query.

    Args:
        indexer: the indexer's spec, of type ``indexer``.
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
        """Compute sparse attention and output projection, as ``LatentAttention`` does.

        Args:
            cache, plan: two of each: of the attention backend and of the indexer's.
        """
        query_input = self.query_input(x)
        selected = self.indexer(x, query_input, cos, sin, cache[1], plan[1])  # [T, X]
        plain, rotated, vectors = self.parts(x, query_input, cos, sin)
        query = self.absorbed(plain, rotated)
        return self.projected(self.attn(query, vectors, selected, cache[0], plan[0]), rows)


_LARGEST_WIDTH = 2**24
_LARGEST_STRETCH = 2**24


class LatentFamily(GroupedFamily):
    """Base of families with latent attention (MLA) and group-limited MoE layers."""

    # True only so that _check_heads can refuse other values than 1 with its own error text.
    reads_partial_rotary_factor: ClassVar[bool] = True
    kv_lora_rank: Positive = 512
    q_lora_rank: Positive | None = 1536
    qk_nope_head_dim: Positive = 128
    qk_rope_head_dim: Positive = 64
    v_head_dim: Positive = 128
    moe_layer_freq: Literal[1] = 1
    n_shared_experts: Annotated[int, Field(gt=0, lt=2**16)] = 1

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads: one, because all heads read the same latent vectors."""
        return 1

    @property
    def head_size(self) -> int:
        """Elements of a cached vector; ``head_dim`` in a config is only the rotary part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def rotary_size(self) -> int:
        """Number of rotated elements of each head."""
        return self.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        """The factor of attention scores, with YaRN's correction for extended contexts."""
        scale = float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)
        weight, factor = self._yarn_scale()
        # YaRN's attention scaling; squared, as it applies to queries and keys alike.
        if weight and factor > 1:
            scale *= (0.1 * weight * math.log(factor) + 1.0) ** 2
        return scale

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the latent attention spec of layer ``index``."""
        spec = super().attention_spec(site, index, page_size)
        facts: dict[str, Any] = {"latent": True, "latent_size": self.kv_lora_rank}
        return replace(spec, scale=self.score_scale, **facts)

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the self-attention module of layer ``index``, with its projections."""
        head_sizes = self.q_lora_rank, self.qk_nope_head_dim, self.v_head_dim
        sizes = LatentSizes(self.hidden_size, *head_sizes)
        return LatentAttention(site, spec, sizes, self.interleaved, self.attention_bias)

    @property
    def interleaved(self) -> bool:
        """Whether rotary embedding rotates adjacent elements, not the halves of the rotary part."""
        return True

    def _yarn_scale(self) -> tuple[float, float]:
        """Return YaRN's ``mscale_all_dim`` and ``factor``; (0, 1) without scaling."""
        rope = self.rope_parameters
        if rope.get("rope_type", rope.get("type", "default")) == "default":
            return 0.0, 1.0
        numbers = []
        for name, default in (("mscale_all_dim", 0.0), ("factor", 1.0)):
            number = rope.get(name)
            number = default if number is None else number
            if type(number) not in (int, float) or not 0 <= number <= _LARGEST_STRETCH:
                raise ValueError(
                    f"{name} of rope_parameters is {number!r}, must be a number from 0 to "
                    f"{_LARGEST_STRETCH}"
                )
            numbers.append(float(number))
        return numbers[0], numbers[1]

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads not in (None, heads):
            raise ValueError(
                f"num_key_value_heads {kv_heads} is not num_attention_heads {heads}, but latent "
                "attention makes keys for every head"
            )
        size = self.qk_nope_head_dim + max(self.qk_rope_head_dim, self.v_head_dim)
        if heads * size > _LARGEST_WIDTH:
            raise ValueError(
                f"{heads} heads of {size} exceed the limit of {_LARGEST_WIDTH} elements"
            )
        if self.partial_rotary_factor != 1:
            raise ValueError(
                f"partial_rotary_factor is {self.partial_rotary_factor}, but qk_rope_head_dim "
                "states the rotated elements"
            )
        self._yarn_scale()
        return self
