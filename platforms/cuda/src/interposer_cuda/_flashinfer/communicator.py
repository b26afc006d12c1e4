"""Sums over GPUs of one host by FlashInfer, alone or with the norm behind them.

Kernels are compiled when the ranks meet, which needs nvcc or the package flashinfer-jit-cache. They
wait on the device for the other ranks: of a rank that is lost, the host learns nothing from them.
Arguments are tested on the processor against functions of the same meaning; on GPUs they were not
run.

The kernel that also normalises has one dtype for all that it reads and writes. Models keep the
residual stream in float32, so that it is for float32 alone.

Dimensions: N ranks, T rows, H hidden.
Source: ``create_allreduce_fusion_workspace`` and ``allreduce_fusion`` in
flashinfer/comm/allreduce.py of flashinfer-python 0.7.2, and trtllm_allreduce_fusion.cuh: 2, 4 or 8
ranks, as its choice between one and two shots knows no other number; rows of multiples of 16 bytes,
up to 8 blocks of up to 1024 threads a row, a thread for 16 bytes, and at least N threads in a
block. Both shots add up in the order of the ranks, 16-bit floats in float32 where ``fp32_acc`` says
so. A norm adds up its row in pieces whose number depends on T.
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
"""The bytes of the largest piece that is added up at once; the workspace has 4 N times as many."""
_MODULE = "flashinfer.comm"
# What each is given by name.
_PASSED = {
    "create_allreduce_fusion_workspace": {
        *("backend", "world_size", "rank", "max_token_num", "hidden_dim", "dtype", "group"),
    },
    "allreduce_fusion": {
        *("input", "workspace", "pattern", "output", "residual_in", "residual_out", "norm_out"),
        *("rms_gamma", "rms_eps", "fp32_acc"),
    },
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion": {"workspace"},
}
_WIDTH = 1024  # of the rows that a sum alone is cut into: its kernel takes any that are legal
_ALIGNED_BYTES = 16
# Of rows that are normalised: eight blocks of whole warps' loads, of at most 512 threads.
_WIDTHS, _WIDEST = 32, 16384


def judge(request: Request) -> Verdict:
    """Refuse where torch or the package is not there, or is another one; neither is imported."""
    return sums.judge(request) and FLASHINFER_0_7.judge()


def confirm(request: Request) -> Verdict:
    """Refuse where a GPU cannot read the memory of another, or a function is another."""
    return sums.confirm(request) and FLASHINFER_0_7.confirm(_MODULE, _PASSED)


class FlashInferCommunicator(Communicator):
    """Sums of 16-bit floats, taken in float32 in the order of the ranks and rounded once."""

    _dtype: ClassVar[torch.dtype] = torch.bfloat16  # float16 has the same workspace

    @cached_property
    def _workspace(self) -> Any:
        """The memory that the ranks share; None once it was given back."""
        with torch.accelerator.device_index(torch.device(self.device).index):
            return self._package.create_allreduce_fusion_workspace(
                backend="trtllm",  # the others know of no group, or need a switch between GPUs
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
        """Meet the other ranks."""
        self._workspace  # noqa: B018 it is computed once

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks in memory of its own."""
        if not x.numel():
            return x
        flat = x.reshape(-1)
        if missing := -len(flat) % _WIDTH:
            flat = torch.cat((flat, flat.new_zeros(missing)))
        rows = _aligned(flat).view(-1, _WIDTH)
        found = torch.empty_like(rows)
        for some, output in self._pieces(rows, found):
            self._run("kAllReduce", some, output=output)
        return found.view(-1)[: x.numel()].view(x.shape)

    def close(self) -> None:
        """Give back the workspace; doing so twice does nothing."""
        workspace, self._workspace = vars(self).get("_workspace"), None
        if workspace is not None:
            # The package keeps its memory by this list, whatever destroy() does.
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
        """Return rows of all tensors together, as many as the workspace has room for."""
        row_bytes = tensors[0].shape[-1] * self._dtype.itemsize
        return zip(*(tensor.split(MOST_BYTES // row_bytes) for tensor in tensors), strict=True)


class FlashInferFloat32Communicator(FlashInferCommunicator):
    """Sums of float32, rounded after each addition in the order of the ranks."""

    _dtype: ClassVar[torch.dtype] = torch.float32

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the op ``fused_add_rms_norm`` of the sum of ``x``.

        Rows of other sizes than multiples of 32 up to 16384 are normalised by the op's definition.

        Args:
            x, residual: ``[T, H]``, float32.
            weight: ``[H]``, float32.
        """
        hidden = x.shape[-1]
        if not x.numel() or hidden % _WIDTHS or hidden > _WIDEST:
            return fused_add_rms_norm(self.all_reduce(x), residual, weight, eps)
        x, residual, weight = (_aligned(tensor) for tensor in (x, residual, weight))
        normed, total = torch.empty_like(x), torch.empty_like(x)
        for some, stream, norm_out, residual_out in self._pieces(x, residual, normed, total):
            self._run(
                "kARResidualRMSNorm",
                some,
                residual_in=stream,
                residual_out=residual_out,
                norm_out=norm_out,
                rms_gamma=weight,
                rms_eps=eps,
            )
        return normed, total


def _aligned(x: Tensor) -> Tensor:
    """Return ``x`` without gaps, where loads of 16 bytes may begin."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED_BYTES else x
