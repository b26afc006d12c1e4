"""Kernels of the Hugging Face Hub, loaded by the package ``kernels`` from this machine's cache.

Call arguments are tested on the CPU with folders of stand-in functions; no GPU has run this module.

Dimensions: H hidden size, I intermediate size.
Source: kernels-community/activation, ``torch-ext/activation/__init__.py`` (the result comes first,
operands are contiguous) and ``activation_kernels.cu``; kernels-community/layer-norm,
``ln_api.cpp`` (rows of contiguous matrices, H a multiple of 8 up to 8192, float32 inside).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from interposer import Request, Verdict
from interposer_cuda._hub.cache import ACTIVATION, LAYER_NORM, HubKernel


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Compute the op ``silu_and_mul`` with a kernel from the Hugging Face Hub."""
    return _run_activation("silu_and_mul", x, x.shape[-1] // 2)


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Compute the op ``gelu_and_mul`` with a kernel from the Hugging Face Hub."""
    name = "gelu_tanh_and_mul" if approximate == "tanh" else "gelu_and_mul"
    return _run_activation(name, x, x.shape[-1] // 2)


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Compute the op ``gelu`` with a kernel from the Hugging Face Hub."""
    return _run_activation("gelu_tanh" if approximate == "tanh" else "gelu", x, x.shape[-1])


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute the op ``quick_gelu`` with a kernel from the Hugging Face Hub."""
    return _run_activation("gelu_quick", x, x.shape[-1])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the op ``rms_norm`` with a kernel from the Hugging Face Hub."""
    return _run_norm(x, weight, None, eps, is_rms_norm=True)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute the op ``layer_norm`` with a kernel from the Hugging Face Hub."""
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    return _run_norm(x, weight, bias, eps, is_rms_norm=False)


def confirm_activation(request: Request) -> Verdict:
    """Load the activation kernels; refuse if loading fails or a function is missing."""
    del request
    names = "silu_and_mul gelu_and_mul gelu_tanh_and_mul gelu gelu_tanh gelu_quick"
    return _confirm(ACTIVATION, names)


def confirm_layer_norm(request: Request) -> Verdict:
    """Load the normalization kernels; refuse if loading fails or a function is missing."""
    del request
    return _confirm(LAYER_NORM, "dropout_add_ln_fwd")


def _confirm(kernel: HubKernel, names: str) -> Verdict:
    try:
        module = _module(kernel)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        return Verdict.refuse(f"{kernel.repository} cannot be loaded: {first_line}")
    missing = [name for name in names.split() if not hasattr(module, name)]
    if missing:
        return Verdict.refuse(f"{kernel.repository} has no {', '.join(missing)}")
    return Verdict.accept()


@cache
def _module(kernel: HubKernel) -> Any:
    """Import the kernel's module from the kernel's folder, once per process.

    Raises: FileNotFoundError: the folder is gone, or has no build for this torch.
    """
    folder = kernel.folder()
    if folder is None:
        raise FileNotFoundError(f"{kernel.repository} is no longer in the cache")
    load: Callable[..., Any] = import_module("kernels").get_local_kernel
    return load(folder)


def _run_activation(name: str, x: torch.Tensor, width: int) -> torch.Tensor:
    out = x.new_empty((*x.shape[:-1], width))
    # CUDA cannot launch an empty grid.
    if out.numel():
        getattr(_module(ACTIVATION), name)(out, x.contiguous())
    return out


def _run_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_rms_norm: bool,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if not len(rows):
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    # With p = 0 and without a residual, the dropout-add-norm kernel is a plain norm.
    outputs: list[torch.Tensor] = _module(LAYER_NORM).dropout_add_ln_fwd(
        rows,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        rowscale=None,
        colscale=None,
        x0_subset=None,
        z_subset=None,
        dropout_p=0.0,
        epsilon=eps,
        rowscale_const=1.0,
        z_numrows=len(rows),
        gen=None,
        residual_in_fp32=False,
        is_rms_norm=is_rms_norm,
    )
    return outputs[0].view(x.shape)
