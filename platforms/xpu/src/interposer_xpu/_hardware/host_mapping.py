"""Zero-copy views of pinned host memory on an XPU device.

torch has no such view for Intel GPUs, so the package vllm-xpu-kernels creates the view. Calls are
tested with a stand-in package on the CPU; no GPU has run this module.
"""

from __future__ import annotations

import torch

from interposer.errors import ConfigError
from interposer_ops.devices.host_memory import require_pinned
from interposer_xpu._packages import kernel_package


def device_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of pinned ``tensor`` on the current device, without a copy.

    Raises: ConfigError: ``tensor`` is not pinned or not contiguous, or the package cannot be used.
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
