"""What is compiled ahead of time: for every kernel, calls of the sizes that models use.

A build is a call of the kernel's own function on tensors without memory, so that what is compiled
is what such a call would launch, tile and warps included.
"""

from __future__ import annotations

from interposer_ops.triton.builds import (
    cache_copies,
    elementwise,
    experts,
    latent_attention,
    logits,
    lora,
    microscaled_linear,
    paged_attention,
    quantizers,
    ragged_attention,
    routing,
    row_copies,
    sampling,
    scaled_linear,
    split_linear,
    w4a8_linear,
    weight_only_linear,
)

__all__ = ["BUILDS"]

BUILDS = (
    *elementwise.BUILDS,
    *experts.BUILDS,
    *weight_only_linear.BUILDS,
    *scaled_linear.BUILDS,
    *split_linear.BUILDS,
    *w4a8_linear.BUILDS,
    *microscaled_linear.BUILDS,
    *lora.BUILDS,
    *quantizers.BUILDS,
    *row_copies.BUILDS,
    *logits.BUILDS,
    *routing.BUILDS,
    *sampling.BUILDS,
    *ragged_attention.BUILDS,
    *paged_attention.BUILDS,
    *cache_copies.BUILDS,
    *latent_attention.BUILDS,
)
"""All builds, those of one kernel together."""
