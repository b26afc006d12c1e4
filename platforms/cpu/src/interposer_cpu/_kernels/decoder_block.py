"""A decoder block by one call of the compiled library.

Dimensions: T tokens, R tokens that matter, H hidden size, N heads, K kv heads, D head size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.compiler import is_compiling

from interposer import Site
from interposer_cpu._kernels.additions import Added, ProductHooks
from interposer_cpu._kernels.attention import NativeBackend, Plan
from interposer_cpu._kernels.block_sums import BlockSums, are_shared, is_last, product_of
from interposer_cpu._kernels.block_words import BoundBlock, attention_words
from interposer_cpu._kernels.blocks import NativeGatedMLP, NativeSelfAttention
from interposer_cpu._kernels.decoder_run import DecoderRun
from interposer_cpu._kernels.fusion import FLOATS, input_coding, is_fused
from interposer_cpu._kernels.interface import FLOAT32, TYPES
from interposer_cpu.native import library
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.decoder_block import DecoderBlock
from interposer_ops.layers.norm import RMSNorm
from interposer_ops.layers.self_attention import SelfAttention

_INT64 = torch.int64
# What the library reads of a block: see interposer_block.
_FACTS = struct.Struct("=23q3dq")
_NOTHING = Added((0, 0), None)


@final
class NativeDecoderBlock(DecoderBlock):
    """All of a block in one call; all but its MLP where this is a mixture or holds other kernels.

    Weights are looked up at every call, so that exchanged ones are seen and none is kept. Sums over
    ranks are taken in the call, where the ranks share memory.
    """

    reduces = True

    def __init__(
        self,
        site: Site,
        hidden_size: int,
        norm_eps: float,
        attention: Callable[[Site], SelfAttention],
        mlp: Callable[[Site], nn.Module],
    ) -> None:
        super().__init__(site, hidden_size, norm_eps, attention, mlp)
        mixer: Any = self.self_attn
        last: Any = self.mlp
        self.hidden_size = hidden_size
        self.dtype = site.dtype
        self.is_fusable = (
            site.dtype in TYPES
            and _is_fused_norm(self.input_layernorm)
            and _is_fused_norm(self.post_attention_layernorm)
            and isinstance(mixer, NativeSelfAttention)
            and mixer.is_fusable
            and is_last(mixer.o_proj)
            and are_shared(mixer.o_proj)
            and type(mixer.attn) is Attention
            and isinstance(mixer.attn.backend, NativeBackend)
        )
        self.takes_mlp = (
            self.is_fusable
            and isinstance(last, NativeGatedMLP)
            and last.is_fusable
            and are_shared(mixer.o_proj, last.down_proj)
        )
        # Found faster than submodules are, and with what they hold after weights were exchanged.
        self._parts: Any = ()
        mixers: tuple[Any, ...] = ()
        if self.is_fusable:  # another attention may have other parts
            before, behind = self.input_layernorm, self.post_attention_layernorm
            norms = (before, mixer.q_norm, mixer.k_norm, behind)
            self._parts = (mixer.qkv_proj, mixer.o_proj, *norms, mixer.attn)
            mixers = (*norms, mixer.attn, mixer, mixer.rotary)
        up_and_down = (last.gate_up_proj, last.down_proj) if self.takes_mlp else ()
        self._last: Any = up_and_down
        after = (last, last.activation) if self.takes_mlp else ()
        self._hooks = _hooks(self._parts[:2], mixers)
        self._mlp_hooks = _hooks(up_and_down, after)
        output = mixer.o_proj if self.is_fusable else None
        self.sums = BlockSums(output, last.down_proj if self.takes_mlp else None)
        self._bound = BoundBlock((), False, None)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        plan: object,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what ``DecoderBlock.forward`` does."""
        if not self.is_fusable or is_compiling() or (added := self._hooks.added()) is None:
            return super().forward(x, residual, cos, sin, cache, plan, rows)
        projection, output, norm, query_norm, key_norm, post_norm, attn = self._parts
        kernels: tuple[Any, ...]
        if self.takes_mlp:
            up, down = self._last
            kernels = (projection.kernel, output.kernel, up.kernel, down.kernel)
        else:
            up = down = None
            kernels = (projection.kernel, output.kernel)
        bound = self.bound(kernels, cos)
        if (
            bound.address is None
            or x.dtype is not self.dtype
            or cos.dtype is not FLOAT32
            or type(plan) is not Plan
            or not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous())
            or not (rows is None or (rows.is_contiguous() and rows.dtype is _INT64))
        ):
            return super().forward(x, residual, cos, sin, cache, plan, rows)
        if residual is None:
            is_added, residual = 0, x.to(FLOAT32)
        elif residual.dtype is FLOAT32 and residual.is_contiguous():
            is_added = 1
        else:
            return super().forward(x, residual, cos, sin, cache, plan, rows)
        count = x.shape[0]
        chosen = count if rows is None else rows.shape[0]
        hidden_size = self.hidden_size
        out = torch.empty(chosen, hidden_size, dtype=x.dtype)
        total = torch.empty(chosen, hidden_size, dtype=FLOAT32)
        added_last = self._mlp_hooks.added() if bound.is_whole else None
        is_whole = added_last is not None
        if added_last is None:
            added_last = _NOTHING  # the MLP sees to it
        user = added if added.hook is not None else added_last
        head_stride, page_stride, *_ = cache.stride()
        size = cache.itemsize
        lost = library().decoder_block(
            bound.address,
            projection.operands[0][0].data_ptr(),
            output.operands[0][0].data_ptr(),
            up.operands[0][0].data_ptr() if is_whole else 0,
            down.operands[0][0].data_ptr() if is_whole else 0,
            *bound.input_scales((projection, output, up, down)),
            norm.constants[1 if is_added else 0].data_ptr(),
            0 if query_norm is None else query_norm.constants[0].data_ptr(),
            0 if key_norm is None else key_norm.constants[0].data_ptr(),
            post_norm.constants[1].data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            plan.address,
            cache.data_ptr(),
            head_stride * size,
            page_stride * size,
            *attention_words(attn),
            x.data_ptr(),
            residual.data_ptr(),
            is_added,
            count,
            0 if rows is None else rows.data_ptr(),
            -1 if rows is None else chosen,
            out.data_ptr(),
            total.data_ptr(),
            *added.addresses,
            *added_last.addresses,
            user.ids(count),
            user.ids(chosen),
            self.sums.address,
        )
        self.sums.check(lost)
        return (out if is_whole else self.mlp(out)), total

    @classmethod
    def joined(cls, blocks: Sequence[nn.Module]) -> DecoderRun | None:
        """Return a call of blocks that follow each other; None where one is not in one call."""
        own = [block for block in blocks if isinstance(block, cls) and block.takes_mlp]
        return DecoderRun(own) if len(own) == len(blocks) else None

    def parts(self) -> tuple[Any, ...]:
        """Return what a whole call reads: four projections, four norms or None, the attention."""
        projection, output, *norms, attn = self._parts
        return projection, output, *self._last, *norms, attn

    def hooks(self) -> tuple[Any, ...]:
        """Return the hooks of all parts; none is true where there is no hook."""
        return *self._hooks.dicts, *self._mlp_hooks.dicts

    def bound(self, kernels: tuple[Any, ...], cos: torch.Tensor) -> BoundBlock:
        """Return the fused call for the kernels that the projections hold now."""
        # Weights are exchanged, and kernels with them, without a word to this layer.
        if kernels != self._bound.kernels:
            self._bound = self._bind(kernels, cos)
        return self._bound

    def _bind(self, kernels: tuple[Any, ...], cos: torch.Tensor) -> BoundBlock:
        """Return the fused call for these kernels, read from what they declare."""
        found = [input_coding(kernel) for kernel in kernels]
        if None in found[:2]:
            return BoundBlock(kernels, False, None)
        is_whole = self.takes_mlp and None not in found
        # An MLP that is called by itself leaves both of its places empty.
        codings = [coding or FLOATS for coding in (*found, None, None)][:4]
        words = [word for coding in codings for word in coding.words]
        statics = tuple(coding.is_static for coding in codings)
        mixer: Any = self.self_attn
        last: Any = self.mlp
        heads, kv_heads, _ = mixer.counts
        facts = _FACTS.pack(
            TYPES[self.dtype],
            last.activation_number if is_whole else 0,
            self.hidden_size,
            heads,
            kv_heads,
            mixer.head_size,
            cos.shape[1],
            *words,
            self.input_layernorm.eps,
            mixer.eps,
            self.post_attention_layernorm.eps,
            self.sums.words,
        )
        return BoundBlock(kernels, is_whole, facts, statics if any(statics) else ())


def _hooks(products: Sequence[nn.Module], others: Sequence[nn.Module | None]) -> ProductHooks:
    """Return the hooks on products, and on all else, such as on sums over ranks."""
    own = [product_of(product) for product in products]
    sums = [p for p, product in zip(products, own, strict=True) if p is not product]
    return ProductHooks(own, [m for m in (*others, *sums) if m is not None])


def _is_fused_norm(norm: RMSNorm) -> bool:
    """Say whether fused calls compute a norm, alone and with the residual stream."""
    kernels = {"rms_norm": norm.norm, "fused_add_rms_norm": norm.add_norm}
    return all(is_fused(norm, RMSNorm, kernel, op) for op, kernel in kernels.items())
