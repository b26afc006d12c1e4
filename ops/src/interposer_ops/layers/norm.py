"""RMS normalisation, with or without a residual stream."""

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
    """Normalise over the last dimension; see the ops ``rms_norm`` and ``fused_add_rms_norm``."""

    layer_id = "rms_norm"
    ops = (rms_norm, fused_add_rms_norm)

    def __init__(self, site: Site, hidden_size: int, eps: float) -> None:
        super().__init__(site)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=site.dtype), requires_grad=False)
        plain = site.bind_kernel(self.ops[0], hidden_size=hidden_size)
        stream = str(_stream_dtype(site.dtype)).removeprefix("torch.")
        sizes = {"hidden_size": hidden_size}
        adding = site.bind_kernel(self.ops[1], **sizes, residual_dtype=stream)
        self.norm, self.add_norm = plain.function, adding.function
        self._bound: tuple[BoundKernel[..., Any], ...] = (plain, adding)
        self._receiver: tuple[Linear, ...] = ()
        self.left: tuple[Any, ...] = ()  # the LeftSum that forward_add takes, where ranks have one
        # In a tuple, so that they are no parameters of their own.
        self.constants: tuple[Any, ...] = (self.weight, self.weight)

    def finalize(self) -> None:
        """Prepare the weight for each of the kernels."""
        self.constants = tuple(b.prepared(weight=self.weight)["weight"] for b in self._bound)

    def quantize_for(self, site: Site, receiver: Linear) -> None:
        """Return codes from ``forward_add``, if ``receiver`` takes some and a kernel is there.

        Args:
            receiver: all that reads the normalised rows.
        """
        sizes = {"hidden_size": self.weight.shape[0]}
        stream = str(_stream_dtype(site.dtype)).removeprefix("torch.")
        bound = bind_quantizing(
            site,
            receiver,
            (rms_norm_quantize_fp8, sizes),
            (fused_add_rms_norm_quantize_fp8, {**sizes, "residual_dtype": stream}),
        )
        if bound:
            self._bound += bound
            self._receiver = (receiver,)  # in a tuple, so that it is no module of its own
            self._codes = receiver.method.input_codes

    @property
    def takes_sums(self) -> bool:
        """Say whether ``forward_add`` may be left a sum over ranks."""
        return type(self) is RMSNorm and not self._receiver

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, ``[..., H]``."""
        return self.norm(x, self.constants[0], self.eps)

    def forward_add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``(normalised sum, sum)``; a missing residual counts as zero.

        The sum stays in float32 or wider, whatever the dtype of ``x``: rounding it after every
        block is the largest error of a model in 16 bits.
        """
        if self._receiver:
            return self._quantized(x, residual)
        if residual is None:
            return self.norm(x, self.constants[0], self.eps), x.to(_stream_dtype(x.dtype))
        if self.left and self.left[0].is_left():
            return self.left[0].add_norm(self, x, residual)  # type: ignore[no-any-return]
        return self.add_norm(x, residual, self.constants[1], self.eps)

    def _quantized(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``(codes, sum)``."""
        norm, add_norm = self._bound[2].function, self._bound[3].function
        scale, (_, _, weight, add_weight) = self._receiver[0].operands[0], self.constants
        if residual is None:
            codes = norm(x, weight, scale, self.eps, self._codes)
            return codes, x.to(_stream_dtype(x.dtype))
        return add_norm(x, residual, add_weight, scale, self.eps, self._codes)  # type: ignore[no-any-return]


class GemmaRMSNorm(RMSNorm):
    """Normalise as ``gemma_rms_norm`` does, by one more than the weight."""

    ops = (gemma_rms_norm, fused_add_gemma_rms_norm)


def _stream_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the sum of all block outputs is kept."""
    return torch.promote_types(dtype, torch.float32)
