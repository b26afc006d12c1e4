"""Build configuration of the installed torch, read without initialising any device."""

from __future__ import annotations

from interposer_ops.devices import torch_build


class TorchBuild(torch_build.TorchBuild):
    """A build of torch, which needs XPU support for GPUs of Intel."""

    toolkit = "XPU"
    wheels = "xpu"
