"""The op ``topk_softmax`` by vllm-xpu-kernels.

Call arguments are tested with a stand-in package on the CPU; no GPU has run this module. The order
of experts with equal logits is unknown.

Dimensions: T tokens, E experts, K chosen experts.
"""

from __future__ import annotations

import torch

from interposer_xpu._packages.kernel_package import op


def topk_softmax(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the op ``topk_softmax`` with vllm-xpu-kernels."""
    shape = (len(logits), top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    # The op also writes the row of each slot, which interposer's permutation does not need.
    ids, rows = (torch.empty(shape, dtype=torch.int32, device=logits.device) for _ in range(2))
    if len(logits):
        op("_moe_C", "topk_softmax")(
            weights, ids, rows, logits.contiguous(), renormalize, None, None
        )
    return weights, ids
