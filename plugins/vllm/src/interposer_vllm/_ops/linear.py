"""The op ``linear`` by vLLM's matmul with packed weights. T tokens, I input, O output features."""

from __future__ import annotations

import torch

from interposer_vllm._ops.library import op

__all__ = ["linear", "prepare"]


def prepare(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Pack the weight into the layout of vLLM's matmul, and convert the bias to float32."""
    packed = op("_C::convert_weight_packed")(weight.contiguous())
    return {"weight": packed, "bias": None if bias is None else bias.float()}


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply ``x`` ``[..., I]`` by a packed weight, and add the bias if there is one.

    Args:
        weight: packed by ``prepare``.
        bias: converted by ``prepare``.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty((len(rows), len(weight)))
    if len(rows):
        op("_C::weight_packed_linear")(out, rows, weight, bias, True)
    return out.view(*x.shape[:-1], len(weight))
