"""All-reduce in symmetric memory, which all ranks have mapped.

The ops of torch.ops.symm_mem wait on the device for the other ranks without a time limit, so a lost
rank hangs the device and the host gets no error. Call arguments are tested on the CPU against
stand-in functions. One shot and two shots were exact in two processes on one H100.

Source: CUDASymmetricMemoryOps.cu and CUDASymmetricMemory-inl.cuh in
torch/csrc/distributed/c10d/symm_mem of pytorch/pytorch: bfloat16 and float32, contiguous, sizes and
offsets that are multiples of 4 bytes and of an element. ``load_and_reduce`` adds in rank order and
rounds each sum to the dtype; multimem adds in the NVSwitch, bfloat16 in float32.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from interposer import Communicator, Ranks, Request, Verdict
from interposer.errors import RequestError

MOST_BYTES = 8 << 20
"""Size in bytes of each communicator's shared buffer: the largest tensor of one all-reduce."""
_ALIGNED_BYTES = 16  # the widest loads; the padding at the end is summed but never read


def judge(request: Request) -> Verdict:
    """Refuse a torch without symmetric memory on CUDA."""
    del request
    if torch.version.cuda is None or not torch.distributed.is_available():
        return Verdict.refuse("needs a torch that was built for CUDA with torch.distributed")
    return Verdict.accept()


def confirm(request: Request) -> Verdict:
    """Refuse if this rank's GPU cannot read the memory of every other rank's GPU."""
    current, num_ranks = torch.cuda.current_device(), int(request.dims["ranks"])
    if torch.cuda.device_count() < num_ranks:
        return Verdict.refuse(
            f"{num_ranks} ranks need {num_ranks} GPUs that every rank sees, this one sees "
            f"{torch.cuda.device_count()}. Try: the same CUDA_VISIBLE_DEVICES in all of them"
        )
    other_gpus = [gpu for gpu in range(num_ranks) if gpu != current]
    unreachable = [gpu for gpu in other_gpus if not torch.cuda.can_device_access_peer(current, gpu)]
    if unreachable:
        return Verdict.refuse(f"GPU {current} cannot read the memory of GPUs {unreachable}")
    return Verdict.accept()


def confirm_multimem(request: Request) -> Verdict:
    """Refuse GPUs that ``confirm`` refuses, and GPUs without the multicast of NVSwitch."""
    verdict = confirm(request)
    has_multicast = _memory().has_multicast_support
    kind: Any = torch._C._autograd.DeviceType.CUDA
    if verdict and not has_multicast(kind, torch.cuda.current_device()):
        return Verdict.refuse("the GPUs have no multicast, which needs NVSwitch and its driver")
    return verdict


class OneShot(Communicator):
    """One-shot all-reduce: every rank reads and adds the whole tensors of all ranks."""

    in_place: ClassVar[bool] = True

    def __init__(self, ranks: Ranks, device: str) -> None:
        super().__init__(ranks, device)
        self._group = ranks.group.group_name

    @cached_property
    def _buffer(self) -> Tensor | None:
        """The buffer that all ranks read; None after ``close``."""
        buffer = _shared_buffer(self.device)
        _memory().rendezvous(buffer, self._group)
        return buffer

    def open(self) -> None:
        """Create the shared buffer together with the other ranks."""
        self._buffer  # noqa: B018 it is computed once

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks in place and return ``x``.

        Args:
            x: bfloat16 or float32, up to ``MOST_BYTES``.
        Raises: RequestError: ``x`` is larger than the shared buffer.
        """
        # A closed communicator must not be used.
        assert self._buffer is not None
        if not x.numel():
            return x
        if x.nbytes > self._buffer.nbytes:
            raise RequestError(
                f"{x.nbytes} bytes exceed the shared buffer of {self._buffer.nbytes} bytes. "
                'Try: Config(communicators={"all_reduce": "torch"})'
            )
        padded = -(-x.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        shared = self._buffer[:padded].view(x.dtype)
        local = shared[: x.numel()].view(x.shape)
        local.copy_(x)
        # The sum is in the shared buffer or a new tensor, depending on the algorithm; both are
        # copied, because the next all-reduce overwrites the buffer.
        return x.copy_(self._sum(shared)[: x.numel()].view(x.shape))

    def _sum(self, shared: Tensor) -> Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._group)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Free the shared buffer; further calls do nothing."""
        self._buffer = None


class TwoShot(OneShot):
    """Two-shot all-reduce: every rank adds one shard of the elements and writes it to all ranks."""

    def _sum(self, shared: Tensor) -> Tensor:
        return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group)  # type: ignore[no-any-return]


class Multimem(OneShot):
    """Multimem all-reduce: the NVSwitch adds the tensors and writes the sum to all GPUs."""

    def _sum(self, shared: Tensor) -> Tensor:
        return torch.ops.symm_mem.multimem_all_reduce_(shared, "sum", self._group)  # type: ignore[no-any-return]


def _memory() -> Any:
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory


def _shared_buffer(device: str) -> Tensor:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(MOST_BYTES, dtype=torch.uint8, device=torch.device(device))
