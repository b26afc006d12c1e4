"""Communicators that add up in memory which all ranks have mapped.

An op of torch.ops.symm_mem waits on the device for the other ranks, without a limit: of a rank that
is lost, the host learns nothing from it. Arguments are tested on the processor against functions of
the same meaning. One shot and two shots were exact in two processes on one H100.

Source: CUDASymmetricMemoryOps.cu and CUDASymmetricMemory-inl.cuh in
torch/csrc/distributed/c10d/symm_mem of pytorch/pytorch: bfloat16 and float32, contiguous, sizes and
offsets that are multiples of 4 bytes and of an element. ``load_and_reduce`` adds up in the order of
the ranks and rounds each sum to the dtype; multimem adds up in the switch, bfloat16 in float32.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from interposer import Communicator, Ranks, Request, Verdict
from interposer.errors import RequestError

MOST_BYTES = 8 << 20
"""The bytes of the shared buffer of each communicator, up to which a sum may have."""
_ALIGNED_BYTES = 16  # loads of the widest kind; what is added to the end is never read


def judge(request: Request) -> Verdict:
    """Refuse where torch has no symmetric memory on CUDA."""
    del request
    if torch.version.cuda is None or not torch.distributed.is_available():
        return Verdict.refuse("needs a torch that was built for CUDA with torch.distributed")
    return Verdict.accept()


def confirm(request: Request) -> Verdict:
    """Refuse where a GPU cannot read the memory of another."""
    here, num = torch.cuda.current_device(), int(request.dims["ranks"])
    if torch.cuda.device_count() < num:
        return Verdict.refuse(
            f"{num} ranks need {num} GPUs that every rank sees, this one sees "
            f"{torch.cuda.device_count()}. Try: the same CUDA_VISIBLE_DEVICES in all of them"
        )
    others = [other for other in range(num) if other != here]
    cannot = [other for other in others if not torch.cuda.can_device_access_peer(here, other)]
    if cannot:
        return Verdict.refuse(f"GPU {here} cannot read the memory of GPUs {cannot}")
    return Verdict.accept()


def confirm_multimem(request: Request) -> Verdict:
    """Refuse also where the switch between the GPUs adds up nothing."""
    verdict = confirm(request)
    has = _memory().has_multicast_support
    kind: Any = torch._C._autograd.DeviceType.CUDA
    if verdict and not has(kind, torch.cuda.current_device()):
        return Verdict.refuse("the GPUs have no multicast, which needs NVSwitch and its driver")
    return verdict


class OneShot(Communicator):
    """Every rank reads what all others have, and adds it up."""

    in_place: ClassVar[bool] = True

    def __init__(self, ranks: Ranks, device: str) -> None:
        super().__init__(ranks, device)
        self._group = ranks.group.group_name

    @cached_property
    def _buffer(self) -> Tensor | None:
        """The buffer that all ranks read; None once it was given back."""
        buffer = _shared_buffer(self.device)
        _memory().rendezvous(buffer, self._group)
        return buffer

    def open(self) -> None:
        """Meet the other ranks."""
        self._buffer  # noqa: B018 it is computed once

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return ``x``, which holds the sum over the ranks.

        Args:
            x: bfloat16 or float32, up to ``MOST_BYTES``.
        Raises: RequestError: there are more bytes, so that the ranks have no room for them.
        """
        assert self._buffer is not None
        if not x.numel():
            return x
        if x.nbytes > self._buffer.nbytes:
            raise RequestError(
                f"{x.nbytes} bytes are to be added up in shared memory of {self._buffer.nbytes}. "
                'Try: Config(communicators={"all_reduce": "torch"})'
            )
        padded = -(-x.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        shared = self._buffer[:padded].view(x.dtype)
        own = shared[: x.numel()].view(x.shape)
        own.copy_(x)
        return x.copy_(self._sum(shared)[: x.numel()].view(x.shape))

    def _sum(self, shared: Tensor) -> Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._group)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give back the shared buffer; doing so twice does nothing."""
        self._buffer = None


class TwoShot(OneShot):
    """Every rank adds up its share of the elements, and writes it to all others."""

    def _sum(self, shared: Tensor) -> Tensor:
        return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group)  # type: ignore[no-any-return]


class Multimem(OneShot):
    """The switch between the GPUs adds up and writes to all."""

    def _sum(self, shared: Tensor) -> Tensor:
        return torch.ops.symm_mem.multimem_all_reduce_(shared, "sum", self._group)  # type: ignore[no-any-return]


def _memory() -> Any:
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory


def _shared_buffer(device: str) -> Tensor:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(MOST_BYTES, dtype=torch.uint8, device=torch.device(device))
