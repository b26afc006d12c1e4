"""All-reduce over the GPUs of one host by AITER's custom and quick all-reduce.

Importing AITER initialises HIP and may compile, so the import waits until the communicator opens.
The kernels wait for the other ranks on the device, so the host gets no error if a rank is lost.
Call arguments are tested on the CPU against stand-in classes; no GPU has run this module.

The fused all-reduce + RMSNorm kernels of the quick all-reduce are not used: models keep the
residual stream in float32, these kernels in 16 bits. Quick float16 sums saturate at 65504.

Source: ``CustomAllreduce`` in aiter/dist/device_communicators/custom_all_reduce.py of ROCm/aiter: a
group that is not NCCL's, 2, 4, 6 or 8 ranks of one host, sizes that are multiples of 16 bytes, and
up to 64 MiB unless AITER_CUSTOM_AR_MAX_SIZE is set. ``QuickAllReduce`` in the same folder, equal in
amd-aiter 0.1.7.post2.dev18 and on the main branch: 2, 4 or 8 ranks, multiples of 16 bytes, at least
``_QR_MIN_SIZE``. The class reads environment variables at import and at construction:
AITER_QUICK_REDUCE_QUANTIZATION is the transfer format (NONE, the default, turns it off; FP is
exact), AITER_QUICK_REDUCE_CAST_BF16_TO_FP16 defaults to 1, and
AITER_QUICK_REDUCE_MAX_SIZE_BYTES_MB (default 2048) is half of its buffer size in MiB.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any

from torch import Tensor

from interposer import Communicator, Request, Verdict
from interposer.errors import ConfigError, RequestError
from interposer.tooling import variables
from interposer_rocm._aiter.package import judge_device

MOST_BYTES = 64 << 20
"""Size in bytes of the largest tensor that the custom all-reduce takes."""
_MODULES = "aiter.dist.device_communicators"
_QUANTIZATION, _EXACT = "AITER_QUICK_REDUCE_QUANTIZATION", "FP"
_CAST, _SIZE = "AITER_QUICK_REDUCE_CAST_BF16_TO_FP16", "AITER_QUICK_REDUCE_MAX_SIZE_BYTES_MB"
# Smallest size in MiB for which AITER uses the exact transfer format, by dtype and ranks.
_MIN_EXACT_MIB = {"float16": {2: 1, 4: 1, 8: 16}, "bfloat16": {2: 2, 4: 8, 8: 16}}


def judge(request: Request) -> Verdict:
    """Accept if AITER is installed and has kernels for the architecture."""
    return judge_device(request.capability.architecture)


def judge_quick(request: Request) -> Verdict:
    """Accept if the transfer is exact and AITER uses the quick all-reduce for this size."""
    environment = variables()
    if (quantization := environment.get(_QUANTIZATION, "not set")) != _EXACT:
        return Verdict.refuse(
            "AITER rounds the transfer to 8 bits or fewer, or turns it off, because "
            f"{_QUANTIZATION} is {quantization}. Try: {_QUANTIZATION}={_EXACT}"
        )
    if request.dtype == "bfloat16" and environment.get(_CAST, "1") != "0":
        return Verdict.refuse(f"sends bfloat16 as float16, which ends at 65504. Try: {_CAST}=0")
    ranks, num_bytes = (int(request.dims[name]) for name in ("ranks", "bytes"))
    min_mib = _MIN_EXACT_MIB[request.dtype][ranks]
    if num_bytes < min_mib << 20:
        return Verdict.refuse(
            f"AITER uses the quick all-reduce for {request.dtype} on {ranks} ranks from {min_mib} "
            f"MiB on, got {num_bytes} bytes"
        )
    return judge(request)


class AiterCommunicator(Communicator):
    """AITER's custom all-reduce: kernels read the memory of the other GPUs directly."""

    @cached_property
    def _communicator(self) -> Any:
        communicator = import_module(f"{_MODULES}.custom_all_reduce").CustomAllreduce
        return communicator(self.ranks.group, self.device, max_size=MOST_BYTES)

    def open(self) -> None:
        """Create AITER's communicator together with the other ranks."""
        self._communicator  # noqa: B018 it is computed once

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks as a new tensor.

        Raises: RequestError: AITER does not take a tensor of this size.
        """
        total: Tensor | None = self._communicator.custom_all_reduce(x.contiguous())
        if total is None:
            raise RequestError(
                f"AITER reduces no {x.nbytes} bytes over {self.ranks.size} ranks here. Try: unset "
                "AITER_CUSTOM_AR_MAX_SIZE and AITER_CUSTOM_AR_MIN_SIZE, or "
                'Config(communicators={"all_reduce": "rccl"})'
            )
        return total

    def close(self) -> None:
        """Free the memory that the GPUs share; further calls do nothing."""
        if "_communicator" in vars(self):
            self._communicator.close()


class AiterQuickCommunicator(AiterCommunicator):
    """AITER's quick all-reduce for large tensors: each rank adds one shard in rank order."""

    @cached_property
    def _communicator(self) -> Any:
        communicator_class = import_module(f"{_MODULES}.quick_all_reduce").QuickAllReduce
        communicator = communicator_class(self.ranks.group, self.device)
        if communicator.disabled:
            raise ConfigError(
                f"AITER has its quick all-reduce off on {self.device} of {self.ranks.size} ranks. "
                f"Try: {_QUANTIZATION}={_EXACT} in the environment of every rank before Python "
                "starts"
            )
        return communicator

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks as a new tensor.

        Raises: RequestError: the size is not a multiple of 16 bytes, or exceeds the buffer.
        """
        if not x.numel():
            return x
        if x.nbytes % 16 or x.nbytes > self._communicator.qr_max_size:
            raise RequestError(
                f"AITER reduces multiples of 16 bytes up to {self._communicator.qr_max_size}, not "
                f"{x.nbytes}. Try: {_SIZE}, or "
                'Config(communicators={"all_reduce": "rccl"})'
            )
        return self._communicator.quick_all_reduce(x.contiguous())  # type: ignore[no-any-return]
