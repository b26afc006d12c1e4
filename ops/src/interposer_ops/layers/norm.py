"""RMS normalisation, with or without a residual stream. T tokens, H hidden size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from interposer import BoundKernel, PluggableLayer, Site
from interposer_ops.layers.fusion import bind_quantizing
from interposer_ops.layers.linear import Linear
from interposer_ops.norms._norms import (
    fused_add_gemma_rms_norm,
    fused_add_rms_norm,
    fused_add_rms_norm_quantize_fp8,
    gemma_rms_norm,
    rms_norm,
    rms_norm_quantize_fp8,
)

__all__ = ["GemmaRMSNorm", "RMSNorm"]


class RMSNorm(PluggableLayer):
    """RMS norm over the last dimension; see the ops ``rms_norm`` and ``fused_add_rms_norm``."""

    layer_id = "rms_norm"
    ops = (rms_norm, fused_add_rms_norm)

    def __init__(self, site: Site, hidden_size: int, eps: float) -> None:
        super().__init__(site)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=site.dtype), requires_grad=False)
        # ``forward`` and ``forward_add`` are two ops, which may have two different kernels.
        plain = site.bind_kernel(self.ops[0], hidden_size=hidden_size)
        stream = str(_stream_dtype(site.dtype)).removeprefix("torch.")
        sizes = {"hidden_size": hidden_size}
        adding = site.bind_kernel(self.ops[1], **sizes, residual_dtype=stream)
        self.norm, self.add_norm = plain.function, adding.function
        self._bound: tuple[BoundKernel[..., Any], ...] = (plain, adding)
        self._receiver: tuple[Linear, ...] = ()
        # Set if ``forward_add`` does the all-reduce of the projection before it.
        self.fused_all_reduce: tuple[Any, ...] = ()
        # A tuple keeps torch from registering the weight twice.
        self.constants: tuple[Any, ...] = (self.weight, self.weight)

    def finalize(self) -> None:
        """Prepare the weight for the norm kernels."""
        self.constants = tuple(b.prepared(weight=self.weight)["weight"] for b in self._bound)

    def quantize_for(self, site: Site, receiver: Linear) -> None:
        """Quantize the result of ``forward_add`` for ``receiver``, if a fused kernel exists.

        Args:
            receiver: the only layer that reads the normalised rows.
        """
        sizes = {"hidden_size": self.weight.shape[0]}
        stream = str(_stream_dtype(site.dtype)).removeprefix("torch.")
        kernels = bind_quantizing(
            site,
            receiver,
            (rms_norm_quantize_fp8, sizes),
            (fused_add_rms_norm_quantize_fp8, {**sizes, "residual_dtype": stream}),
        )
        if kernels:
            self._bound += kernels
            self._receiver = (receiver,)  # a tuple hides the module from torch's child modules
            self._quantized_dtype = receiver.method.input_codes

    @property
    def can_fuse_all_reduce(self) -> bool:
        """Whether ``forward_add`` can also do the all-reduce of the preceding projection."""
        return type(self) is RMSNorm and not self._receiver

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ``[..., H]``."""
        return self.norm(x, self.constants[0], self.eps)

    def forward_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream; return ``(normalised stream, stream)``.

        The stream stays in float32 or wider, whatever the dtype of ``x``: rounding the stream after
        every block would be the largest error of a 16-bit model.

        Args:
            x: ``[..., H]``.
            residual: ``[..., H]``, the stream; None counts as zero.
        """
        if self._receiver:
            return self._quantized(x, residual)
        if residual is None:
            return self.norm(x, self.constants[0], self.eps), x.to(_stream_dtype(x.dtype))
        if self.fused_all_reduce and self.fused_all_reduce[0].is_fused():
            return self.fused_all_reduce[0].add_norm(self, x, residual)  # type: ignore[no-any-return]
        return self.add_norm(x, residual, self.constants[1], self.eps)

    def _quantized(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the residual, normalise, quantize; return ``(quantized result, residual stream)``."""
        norm, add_norm = self._bound[2].function, self._bound[3].function
        scale, (_, _, weight, add_weight) = self._receiver[0].operands[0], self.constants
        if residual is None:
            quantized = norm(x, weight, scale, self.eps, self._quantized_dtype)
            return quantized, x.to(_stream_dtype(x.dtype))
        return add_norm(x, residual, add_weight, scale, self.eps, self._quantized_dtype)  # type: ignore[no-any-return]


class GemmaRMSNorm(RMSNorm):
    """RMS norm that scales by ``1 + weight``; see the op ``gemma_rms_norm``."""

    ops = (gemma_rms_norm, fused_add_gemma_rms_norm)


def _stream_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
