"""The attention of a decoder block.

Dimensions: T tokens, H hidden size, N heads, K kv heads, D head size, R rotated size.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from interposer import AttentionSpec, BoundKernel, PluggableLayer, Site
from interposer_ops.layers.divided_pairs import PairNames, share_heads
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.norms._head_norms import qk_norm

__all__ = ["SelfAttention"]


class SelfAttention(PluggableLayer):
    """Merged QKV projection, optional norms of heads, rotary embedding, attention, projection.

    Its parts are layers of their own, which load their weights and bind their kernels. A
    replacement may compute what several of them do at once, as long as they hold what it takes.

    Args:
        rotary_size: R.
        norm_eps: of the norms of query and key heads; None where there are none.
        qkv_bias: of the first projection.
        bias: of the last one.

    ``norm_type`` and ``rotary_type`` are the layers that a subclass may take others for;
    ``part_names`` are those of the last projection, and of the norms of queries and keys;
    ``undivided`` says why ranks cannot share the heads of a subclass out; a class that sets
    ``ends_in_projection`` in its body returns what the last projection does.
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
        names = PairNames("qkv_proj", out, qkv_bias, bias)
        shares = share_heads(site, spec, hidden_size, names, undivided=self.undivided)
        self.qkv_proj, self.o_proj = shares.first(), shares.last()
        self.sizes, spec = shares.sizes, shares.spec
        self.q_norm = self.k_norm = None
        if norm_eps is not None:
            self.q_norm = self.norm_type(site.at(of_query), size, norm_eps)
            self.k_norm = self.norm_type(site.at(of_key), size, norm_eps)
            if type(self.q_norm) is type(self.k_norm) is RMSNorm:
                heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
                self._both_norms = site.bind_kernel(qk_norm, **heads, head_size=size)
        self.rotary = self.rotary_type(site.at("rotary"), size, rotary_size)
        self.attn = shares.attention(site.at("attn"))

    def finalize(self) -> None:
        """Prepare the weights of the norms of heads, where one kernel computes both."""
        if self._both_norms is not None and self.q_norm is not None and self.k_norm is not None:
            weights = {"query_weight": self.q_norm.weight, "key_weight": self.k_norm.weight}
            self._norm_weights = tuple(self._both_norms.prepared(**weights).values())

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, plan: object, rows: Tensor | None
    ) -> Tensor:
        """Return the output projection ``[T, H]``, or ``[rows, H]`` of the tokens they name.

        Args:
            x: ``[T, H]``.
            cos, sin: ``[T, R / 2]``, float32 or wider.
            cache, plan: of the attention backend.
            rows: int64, indices into T.
        """
        mixed = self.attn(*self.heads(x, cos, sin), cache, plan)
        if rows is not None:
            mixed = mixed[rows]
        return self.o_proj(mixed.flatten(1))  # type: ignore[no-any-return]

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query ``[T, N, D]``, key and value ``[T, K, D]``, ready for the attention."""
        merged = self.qkv_proj(x).split(self.sizes, dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in merged)
        if self.q_norm is not None and self.k_norm is not None:
            if self._both_norms is None or _is_watched(self.q_norm) or _is_watched(self.k_norm):
                query, key = self.q_norm(query), self.k_norm(key)
            else:
                weights, eps = self._norm_weights, self.q_norm.eps
                query, key = self._both_norms.function(query, key, *weights, eps)
        query, key = self.rotary(query, key, cos, sin)
        return query, key, value


def _is_watched(module: nn.Module) -> bool:
    """Say whether somebody wants to see what a module is given or returns."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
