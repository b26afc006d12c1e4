"""Self-attention of a decoder block.

Dimensions: T tokens, M selected tokens, H hidden size, N heads, K kv heads, D head size, R rotated
size.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from interposer import AttentionSpec, BoundKernel, PluggableLayer, Site
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.tensor_parallel.projection_pairs import ProjectionNames, shard_attention
from interposer_ops.norms._head_norms import qk_norm

__all__ = ["SelfAttention"]


class SelfAttention(PluggableLayer):
    """Merged QKV projection, optional QK norm, rotary embedding, attention, output projection.

    Each part is a layer, which loads weights and binds kernels. A replacement class may compute
    several parts at once, as long as the replaced parts hold the weights.

    Args:
        rotary_size: R.
        norm_eps: epsilon of the query and key norms; None: no such norms.
        qkv_bias: whether the QKV projection has a bias.
        bias: whether the output projection has a bias.

    Class attributes for subclasses: ``norm_type`` and ``rotary_type`` are the classes of the norms
    and of the rotary embedding; ``part_names`` are the names of output projection, query norm and
    key norm; ``undivided`` says why ranks cannot divide the heads; a class that sets
    ``ends_in_projection`` in its body returns the output projection's result unchanged.
    """

    layer_id = "self_attention"
    reduces = True
    ends_in_projection: ClassVar[bool] = True
    norm_type: type[RMSNorm] = RMSNorm
    rotary_type: type[RotaryEmbedding] = RotaryEmbedding
    part_names: ClassVar[tuple[str, str, str]] = ("o_proj", "q_norm", "k_norm")
    undivided: ClassVar[str] = ""
    _both_norms: BoundKernel[..., Any] | None = None

    def __init__(
        self,
        site: Site,
        spec: AttentionSpec,
        hidden_size: int,
        rotary_size: int,
        norm_eps: float | None = None,
        qkv_bias: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__(site)
        size = self.head_size = spec.head_size
        out, of_query, of_key = self.part_names
        names = ProjectionNames("qkv_proj", out, qkv_bias, bias)
        shards = shard_attention(site, spec, hidden_size, names, undivided=self.undivided)
        self.qkv_proj, self.o_proj = shards.first(), shards.last()
        self.sizes, spec = shards.sizes, shards.spec
        self.q_norm = self.k_norm = None
        if norm_eps is not None:
            self.q_norm = self.norm_type(site.at(of_query), size, norm_eps)
            self.k_norm = self.norm_type(site.at(of_key), size, norm_eps)
            if type(self.q_norm) is type(self.k_norm) is RMSNorm:
                heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
                # One kernel for both norms; q_norm and k_norm remain as holders of the weights.
                self._both_norms = site.bind_kernel(qk_norm, **heads, head_size=size)
        self.rotary = self.rotary_type(site.at("rotary"), size, rotary_size)
        self.attn = shards.attention(site.at("attn"))

    def finalize(self) -> None:
        """Prepare the weights of query norm and key norm, if one kernel computes both norms."""
        if self._both_norms is not None and self.q_norm is not None and self.k_norm is not None:
            weights = {"query_weight": self.q_norm.weight, "key_weight": self.k_norm.weight}
            self._norm_weights = tuple(self._both_norms.prepared(**weights).values())

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, plan: object, rows: Tensor | None
    ) -> Tensor:
        """Compute attention and the output projection ``[T, H]``, or ``[M, H]`` of selected tokens.

        Args:
            x: ``[T, H]``.
            cos, sin: ``[T, R / 2]``, float32 or wider.
            cache, plan: arguments of the attention backend.
            rows: ``[M]`` int64, the selected tokens.
        """
        mixed = self.attn(*self.heads(x, cos, sin), cache, plan)
        if rows is not None:
            mixed = mixed[rows]
        return self.o_proj(mixed.flatten(1))  # type: ignore[no-any-return]

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query ``[T, N, D]``, key and value ``[T, K, D]`` for the attention layer."""
        parts = self.qkv_proj(x).split(self.sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            # The joint kernel bypasses the norm modules, so their hooks would not run.
            if self._both_norms is None or _is_watched(self.q_norm) or _is_watched(self.k_norm):
                query, key = self.q_norm(query), self.k_norm(key)
            else:
                weights, eps = self._norm_weights, self.q_norm.eps
                query, key = self._both_norms.function(query, key, *weights, eps)
        query, key = self.rotary(query, key, cos, sin)
        return query, key, value


def _is_watched(module: nn.Module) -> bool:
    """Check whether a forward hook or pre-hook observes a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
