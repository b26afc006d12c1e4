"""All-reduce over the GPUs of one host by FlashInfer, optionally fused with RMSNorm.

Kernels are compiled when the communicator opens, which needs nvcc or the package
flashinfer-jit-cache. The kernels wait on the device for the other ranks without a time limit, so a
lost rank hangs the device and the host gets no error. Call arguments are tested on the CPU against
stand-in functions; no GPU has run this module.

The fused kernel has one dtype for all inputs and outputs. Models keep the residual stream in
float32, so only float32 all-reduces are fused.

Dimensions: N ranks, T rows, H hidden.
Source: ``create_allreduce_fusion_workspace`` and ``allreduce_fusion`` in
flashinfer/comm/allreduce.py of flashinfer-python 0.7.2, and trtllm_allreduce_fusion.cuh: 2, 4 or 8
ranks, the only numbers for which the choice between one shot and two shots is defined; rows of
multiples of 16 bytes, up to 8 blocks of up to 1024 threads per row, 16 bytes per thread, and at
least N threads per block. One shot and two shots both add in rank order; ``fp32_acc`` adds 16-bit
floats in float32. The fused norm adds up a row in pieces whose number depends on T.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from interposer import Communicator, Request, Verdict
from interposer_cuda._providers import FLASHINFER_0_7
from interposer_cuda._symmetric_memory import sums
from interposer_ops.norms import fused_add_rms_norm

MOST_BYTES = 8 << 20
"""Largest piece in bytes of one kernel call; the workspace takes 4 N times as much."""
_MODULE = "flashinfer.comm"
# Keyword arguments that this module passes, checked against the installed functions.
_KEYWORDS = {
    "create_allreduce_fusion_workspace": {
        *("backend", "world_size", "rank", "max_token_num", "hidden_dim", "dtype", "group"),
    },
    "allreduce_fusion": {
        *("input", "workspace", "pattern", "output", "residual_in", "residual_out", "norm_out"),
        *("rms_gamma", "rms_eps", "fp32_acc"),
    },
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion": {"workspace"},
}
_WIDTH = 1024  # row width for all-reduce without norm, where any legal width works
_ALIGNED_BYTES = 16
# Rows of the fused norm: 32 floats divide among 8 blocks of 16-byte loads; at most 512 threads.
_NORM_WIDTH_MULTIPLE, _MAX_NORM_WIDTH = 32, 16384


def judge(request: Request) -> Verdict:
    """Refuse an unsuitable torch build or FlashInfer version, without importing FlashInfer."""
    return sums.judge(request) and FLASHINFER_0_7.judge()


def confirm(request: Request) -> Verdict:
    """Refuse GPUs without peer access and FlashInfer functions with other parameters."""
    return sums.confirm(request) and FLASHINFER_0_7.confirm(_MODULE, _KEYWORDS)


class FlashInferCommunicator(Communicator):
    """All-reduce of 16-bit floats: added in float32 in rank order, rounded once."""

    _dtype: ClassVar[torch.dtype] = torch.bfloat16  # float16 has the same workspace

    @cached_property
    def _workspace(self) -> Any:
        """The memory that the ranks share; None after ``close``."""
        with torch.accelerator.device_index(torch.device(self.device).index):
            return self._package.create_allreduce_fusion_workspace(
                backend="trtllm",  # the other backends ignore the group, or need NVSwitch
                world_size=self.ranks.size,
                rank=self.ranks.rank,
                max_token_num=MOST_BYTES // (_WIDTH * self._dtype.itemsize),
                hidden_dim=_WIDTH,
                dtype=self._dtype,
                group=self.ranks.group,
            )

    @cached_property
    def _package(self) -> Any:
        return import_module(_MODULE)

    def open(self) -> None:
        """Create the shared workspace together with the other ranks."""
        self._workspace  # noqa: B018 it is computed once

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks as a new tensor."""
        if not x.numel():
            return x
        flat = x.reshape(-1)
        if padding := -len(flat) % _WIDTH:
            flat = torch.cat((flat, flat.new_zeros(padding)))
        rows = _aligned(flat).view(-1, _WIDTH)
        sums_of_rows = torch.empty_like(rows)
        for piece, output in self._pieces(rows, sums_of_rows):
            self._run("kAllReduce", piece, output=output)
        return sums_of_rows.view(-1)[: x.numel()].view(x.shape)

    def close(self) -> None:
        """Free the workspace; further calls do nothing."""
        workspace, self._workspace = vars(self).get("_workspace"), None
        if workspace is not None:
            # destroy() alone leaks: the package holds the memory through this list of handles.
            self._package.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace.ipc_handles)
            workspace.destroy()

    def _run(self, pattern: str, rows: Tensor, **tensors: Any) -> None:
        self._package.allreduce_fusion(
            input=rows,
            workspace=self._workspace,
            pattern=getattr(self._package.AllReduceFusionPattern, pattern),
            fp32_acc=True,
            **tensors,
        )

    def _pieces(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Split all tensors along rows, at the same rows, into pieces of at most ``MOST_BYTES``."""
        row_bytes = tensors[0].shape[-1] * self._dtype.itemsize
        return zip(*(tensor.split(MOST_BYTES // row_bytes) for tensor in tensors), strict=True)


class FlashInferFloat32Communicator(FlashInferCommunicator):
    """All-reduce of float32 in rank order, optionally fused with the residual add and RMSNorm."""

    _dtype: ClassVar[torch.dtype] = torch.float32

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Sum ``x`` over the ranks, then apply ``fused_add_rms_norm``.

        The fused kernel takes H up to 16384 in multiples of 32; other sizes call the op separately.

        Args:
            x, residual: ``[T, H]``, float32.
            weight: ``[H]``, float32.
        """
        hidden = x.shape[-1]

        if not x.numel() or hidden % _NORM_WIDTH_MULTIPLE or hidden > _MAX_NORM_WIDTH:
            return fused_add_rms_norm(self.all_reduce(x), residual, weight, eps)
        x, residual, weight = (_aligned(tensor) for tensor in (x, residual, weight))
        normed, total = torch.empty_like(x), torch.empty_like(x)
        for piece, stream, norm_out, residual_out in self._pieces(x, residual, normed, total):
            self._run(
                "kARResidualRMSNorm",
                piece,
                residual_in=stream,
                residual_out=residual_out,
                norm_out=norm_out,
                rms_gamma=weight,
                rms_eps=eps,
            )
        return normed, total


def _aligned(x: Tensor) -> Tensor:
    """Return ``x`` contiguous and aligned to 16 bytes, copied only if necessary."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED_BYTES else x
