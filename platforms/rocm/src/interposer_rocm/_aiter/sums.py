"""Sums over GPUs of one host by AITER's custom and quick all-reduce.

Its import initialises HIP and may compile, so it happens when the communicator is made. A kernel
waits on the device for the other ranks: of a rank that is lost, the host learns nothing from it.
Arguments are tested on the processor against classes of the same meaning; on GPUs they were not
run.

The quick one has kernels that also normalise. They keep the residual stream in 16 bits, models
keep it in float32, so that they are left out. Its sums of float16 end at 65504, not at infinity.

Source: ``CustomAllreduce`` in aiter/dist/device_communicators/custom_all_reduce.py of ROCm/aiter: a
group that is not NCCL's, 2, 4, 6 or 8 ranks of one host, sizes that are multiples of 16 bytes, and
up to 64 MiB unless AITER_CUSTOM_AR_MAX_SIZE says otherwise. ``QuickAllReduce`` beside it, the same
in amd-aiter 0.1.7.post2.dev18 and on its main branch: 2, 4 or 8 ranks, multiples of 16 bytes from
those of ``_QR_MIN_SIZE`` on. It reads the environment when it is imported, and when it is made:
AITER_QUICK_REDUCE_QUANTIZATION names what is sent and is NONE unless it is set, and
AITER_QUICK_REDUCE_CAST_BF16_TO_FP16 is 1. AITER_QUICK_REDUCE_MAX_SIZE_BYTES_MB is half of the size
of its buffer in MiB, and 2048.
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
"""The most bytes of a sum by the custom all-reduce."""
_MODULES = "aiter.dist.device_communicators"
_REGIME, _EXACT = "AITER_QUICK_REDUCE_QUANTIZATION", "FP"
_CAST, _SIZE = "AITER_QUICK_REDUCE_CAST_BF16_TO_FP16", "AITER_QUICK_REDUCE_MAX_SIZE_BYTES_MB"
# MiB from which AITER takes its exact regime, by dtype and ranks.
_LEAST = {"float16": {2: 1, 4: 1, 8: 16}, "bfloat16": {2: 2, 4: 8, 8: 16}}


def judge(request: Request) -> Verdict:
    """Accept where AITER is installed and has kernels for the architecture."""
    return judge_device(request.capability.architecture)


def judge_quick(request: Request) -> Verdict:
    """Accept where it sends what it was given, and AITER itself would take it for the size."""
    read = variables()
    if (regime := read.get(_REGIME, "not set")) != _EXACT:
        return Verdict.refuse(
            "AITER rounds what it sends to 8 bits or fewer, or leaves it off, as "
            f"{_REGIME} is {regime}. Try: {_REGIME}={_EXACT}"
        )
    if request.dtype == "bfloat16" and read.get(_CAST, "1") != "0":
        return Verdict.refuse(f"sends bfloat16 as float16, which ends at 65504. Try: {_CAST}=0")
    ranks, num_bytes = (int(request.dims[name]) for name in ("ranks", "bytes"))
    least = _LEAST[request.dtype][ranks]
    if num_bytes < least << 20:
        return Verdict.refuse(
            f"AITER takes it for {request.dtype} on {ranks} ranks from {least} MiB on, "
            f"got {num_bytes} bytes"
        )
    return judge(request)


class AiterCommunicator(Communicator):
    """Sums by kernels that read the memory of the other GPUs."""

    @cached_property
    def _own(self) -> Any:
        made = import_module(f"{_MODULES}.custom_all_reduce").CustomAllreduce
        return made(self.ranks.group, self.device, max_size=MOST_BYTES)

    def open(self) -> None:
        """Meet the other ranks."""
        self._own  # noqa: B018 it is computed once

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks in memory of its own.

        Raises: RequestError: AITER takes no tensor of this size here.
        """
        found: Tensor | None = self._own.custom_all_reduce(x.contiguous())
        if found is None:
            raise RequestError(
                f"AITER adds up no {x.nbytes} bytes over {self.ranks.size} ranks here. Try: unset "
                "AITER_CUSTOM_AR_MAX_SIZE and AITER_CUSTOM_AR_MIN_SIZE, or "
                'Config(communicators={"all_reduce": "rccl"})'
            )
        return found

    def close(self) -> None:
        """Give back what the GPUs share; doing so twice does nothing."""
        if "_own" in vars(self):
            self._own.close()


class AiterQuickCommunicator(AiterCommunicator):
    """Large sums, in the order of the ranks and rounded after each addition, by one rank each."""

    @cached_property
    def _own(self) -> Any:
        own = import_module(f"{_MODULES}.quick_all_reduce").QuickAllReduce
        made = own(self.ranks.group, self.device)
        if made.disabled:
            raise ConfigError(
                f"AITER has its quick all-reduce off on {self.device} of {self.ranks.size} ranks. "
                f"Try: {_REGIME}={_EXACT} in the environment of every rank before Python starts"
            )
        return made

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks in memory of its own.

        Raises: RequestError: the size is no multiple of 16 bytes, or its buffer is smaller.
        """
        if not x.numel():
            return x
        if x.nbytes % 16 or x.nbytes > self._own.qr_max_size:
            raise RequestError(
                f"AITER adds up multiples of 16 bytes up to {self._own.qr_max_size}, not "
                f"{x.nbytes}. Try: {_SIZE}, or "
                'Config(communicators={"all_reduce": "rccl"})'
            )
        return self._own.quick_all_reduce(x.contiguous())  # type: ignore[no-any-return]
