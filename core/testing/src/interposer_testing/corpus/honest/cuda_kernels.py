"""Honest kernels that use streams of CUDA.

Kind: state
Source: own
Needs: cuda
"""

import torch
from torch.nn import functional


def _silu_and_mul(x):
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def joined_stream(x):
    """Computes on a stream of its own, which waits for the caller's stream and is waited for.

    Op: silu_and_mul
    """
    current, side = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
    result = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result.copy_(_silu_and_mul(x))
    current.wait_stream(side)
    return result


def synchronized_device(x, weight, eps):
    """Waits for the device before it returns.

    Op: rms_norm
    """
    wide = x.float()
    result = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    torch.cuda.synchronize(x.device)
    return result.to(x.dtype)
