"""``topk_softmax`` by vllm-xpu-kernels.

Arguments are tested against a package that plays the op on the processor; on a GPU it was not run.
Which of two experts with equal logits comes first is not known of it.

Dimensions: T tokens, E experts, K chosen experts.
"""

from __future__ import annotations

import torch

from interposer_xpu._packages.kernel_package import op


def topk_softmax(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``topk_softmax``."""
    shape = (len(logits), top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids, rows = (torch.empty(shape, dtype=torch.int32, device=logits.device) for _ in range(2))
    if len(logits):
        op("_moe_C", "topk_softmax")(
            weights, ids, rows, logits.contiguous(), renormalize, None, None
        )
    return weights, ids
