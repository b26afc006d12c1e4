"""Sums over GPUs of one host by AITER's custom all-reduce.

Its import initialises HIP and may compile, so it happens when the communicator is made. A kernel
waits on the device for the other ranks: of a rank that is lost, the host learns nothing from it.
Arguments are tested on the processor against a class of the same meaning; on GPUs they were not
run.

AITER's quick all-reduce is left out: it rounds what it sends to 8, 6, 4 or 3 bits, or in its exact
regime is switched on by the environment alone.

Source: ``CustomAllreduce`` in aiter/dist/device_communicators/custom_all_reduce.py of ROCm/aiter: a
group that is not NCCL's, 2, 4, 6 or 8 ranks of one host, sizes that are multiples of 16 bytes, and
up to 64 MiB unless AITER_CUSTOM_AR_MAX_SIZE says otherwise.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any

from torch import Tensor

from interposer import Communicator, Request, Verdict
from interposer.errors import RequestError
from interposer_rocm._aiter.package import judge_device

_MODULE = "aiter.dist.device_communicators.custom_all_reduce"
MOST_BYTES = 64 << 20
"""The most bytes of a sum."""


def judge(request: Request) -> Verdict:
    """Accept where AITER is installed and has kernels for the architecture."""
    return judge_device(request.capability.architecture)


class AiterCommunicator(Communicator):
    """Sums by kernels that read the memory of the other GPUs."""

    @cached_property
    def _own(self) -> Any:
        made = import_module(_MODULE).CustomAllreduce
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
