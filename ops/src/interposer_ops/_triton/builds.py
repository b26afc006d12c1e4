"""What is compiled ahead of time: for every kernel, calls of the sizes that models use.

A build is a call of the kernel's own function on tensors without memory, so that what is compiled
is what such a call would launch, tile and warps included.
"""

from __future__ import annotations

from interposer_ops.activations import _elementwise_builds as elementwise
from interposer_ops.attention import _paged_attention_builds as paged_attention
from interposer_ops.attention import _ragged_attention_builds as ragged_attention
from interposer_ops.caches import _cache_copies_builds as cache_copies
from interposer_ops.embedding import _row_copies_builds as row_copies
from interposer_ops.experts import _experts_builds as experts
from interposer_ops.experts import _routing_builds as routing
from interposer_ops.latent_attention import _latent_attention_builds as latent_attention
from interposer_ops.linear import _split_linear_builds as split_linear
from interposer_ops.lora import _lora_builds as lora
from interposer_ops.quantized_linear import _microscaled_linear_builds as microscaled_linear
from interposer_ops.quantized_linear import _scaled_linear_builds as scaled_linear
from interposer_ops.quantized_linear import _w4a8_linear_builds as w4a8_linear
from interposer_ops.quantized_linear import _weight_only_linear_builds as weight_only_linear
from interposer_ops.quantizers import _quantizers_builds as quantizers
from interposer_ops.sampling import _logits_builds as logits
from interposer_ops.sampling import _sampling_builds as sampling

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
