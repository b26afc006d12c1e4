"""Latent sizes that the MLA kernels of CUDA libraries are compiled for."""

from __future__ import annotations

import torch

from interposer import AttentionSpec, Verdict

_DTYPES = (torch.bfloat16, torch.float16)
_LATENT, _ROTARY = 512, 64


def judge_sizes(spec: AttentionSpec) -> Verdict:
    """Accept DeepSeek's latent sizes (512 + 64) in 16 bits."""
    if spec.dtype not in _DTYPES:
        return Verdict.refuse(f"computes in 16 bit floats, got {spec.dtype}")
    latent, rotary = spec.latent_size, spec.head_size - spec.latent_size
    if (latent, rotary) != (_LATENT, _ROTARY):
        return Verdict.refuse(f"needs latents of {_LATENT} + {_ROTARY}, got {latent} + {rotary}")
    return Verdict.accept()
