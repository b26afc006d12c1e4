"""Host memory as a tensor of the device, which reads and writes it over the bus.

torch has no such view for these GPUs; the package vllm-xpu-kernels has one. What is refused is
tested, the rest against a package that plays it; on a GPU it was not run.
"""

from __future__ import annotations

import torch

from interposer.errors import ConfigError
from interposer_ops.devices.host_memory import require_pinned
from interposer_xpu._packages import kernel_package


def mapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` on the current device, without a copy.

    Raises: ConfigError: it is not pinned or not contiguous, or the package cannot be used.
    """
    require_pinned(tensor)
    if not tensor.is_contiguous():
        raise ConfigError(
            f"only contiguous memory is mapped, strides are {tensor.stride()} for the shape "
            f"{tuple(tensor.shape)}. Try: tensor.contiguous()"
        )
    verdict = kernel_package.judge_ops("view_of_host")
    if not verdict:
        raise ConfigError(f"host memory cannot be mapped: {verdict.reason}")
    view: torch.Tensor = kernel_package.op("_C", "get_xpu_view_from_cpu_tensor")(tensor)
    return view
