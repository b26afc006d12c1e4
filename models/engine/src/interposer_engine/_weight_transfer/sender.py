"""Sender of a trainer's weights: one bucket is packed while another is broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import distributed

from interposer.errors import CheckpointError, ConfigError, RankError
from interposer_engine._weight_transfer.protocol import (
    HEADER_BYTES,
    Channel,
    Header,
    Meeting,
    Piece,
    Posted,
    aligned,
    fits,
)

BUCKET_BYTES = 32 << 20
_MIN_BUCKET_BYTES = 4096
# For smaller tensors, a broadcast of their own takes longer than a copy to the bucket.
_MIN_APART_BYTES = 1 << 18


def send_weights(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    group: distributed.ProcessGroup | Meeting | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_seconds: float = 300.0,
) -> None:
    """Replace the weights of the models in all other processes of a group: of all or of none.

    Each of these processes calls ``update_weights(WeightsFrom(group, source))`` with the rank of
    this process as source. Small tensors are copied into two buckets in turn, so that one is packed
    while the other is sent. Larger tensors are sent from their own memory, if they are contiguous
    and on the device that the group sends from. Returns when every model uses the new weights.

    Args:
        tensors: tensors by checkpoint name, in the checkpoint's format, on any device. Those of a
            mapping must stay unchanged until the call returns; a tensor of an iterator, until the
            next one is requested.
        group: a process group of torch.distributed, None for the default one, or a ``Meeting``.
        bucket_bytes: size of each of the two buckets, here and in each receiver.
        timeout_seconds: time limit for receivers to connect, and to take each bucket.
    Raises:
        RankError: a receiver refused, which leaves all models unchanged, or died or did not answer.
        CheckpointError: an item is not a tensor with a name that can be sent. No model was changed.
        ConfigError: the group or a number is invalid.
    """
    if bucket_bytes < _MIN_BUCKET_BYTES:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}, must be at least {_MIN_BUCKET_BYTES}")
    channel = Channel(group, None, timeout_seconds, aligned(bucket_bytes))
    channel.vote("ready")
    outbox = _Outbox(channel)
    is_mapping = isinstance(tensors, Mapping)
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    try:
        for name, tensor in items:
            outbox.put(name, tensor)
            if not is_mapping:
                outbox.release()
        outbox.send()
    except RankError:
        raise
    except Exception as error:
        # Receivers wait for an end, and must learn that weights are missing.
        outbox.end(f"{type(error).__name__}: {error}")
        raise
    outbox.end()
    channel.vote("prepared")
    channel.vote("applied")


class _Outbox:
    """Two buckets, of which one is filled while the other is broadcast."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._buckets = [self._new_bucket(), self._new_bucket()]  # the first one is being filled
        self._sent: list[list[Posted]] = [[], []]
        self._pieces: list[Piece] = []
        self._texts: list[str] = []
        self._filled_bytes = 0
        # Tensors that are sent from their own memory, by the number of the piece.
        self._apart: dict[int, torch.Tensor] = {}
        self._sends_callers_memory = False  # the bucket being sent has such tensors

    def _new_bucket(self) -> torch.Tensor:
        channel = self._channel
        return torch.empty(channel.bucket_bytes, dtype=torch.uint8, device=channel.device)

    @torch.no_grad()
    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Pack a tensor into the buckets, and broadcast each bucket that is full."""
        path = f"weights of rank {self._channel.rank}"
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(path, f"{name!r:.100} is {type(tensor).__name__}, not a tensor")
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CheckpointError(
                path, f"{name!r} is no dense tensor in memory", "send its codes and scales"
            )
        if not fits([Piece(name, dtype, shape, tensor.nbytes, tensor.nbytes).text]):
            raise CheckpointError(path, f"the name {name!r:.100} exceeds {HEADER_BYTES} bytes")
        flat, start = None, 0
        # NCCL and gloo send contiguous memory on the group's device without a copy.
        is_apart = (
            tensor.nbytes >= min(_MIN_APART_BYTES, self._channel.bucket_bytes)
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.device.type == self._channel.device.type
        )
        size, total = dtype.itemsize, tensor.nbytes
        # Split between rows if possible, so that receivers can write rows into the model's memory.
        row_bytes = total // shape[0] if shape and total else size
        unit = row_bytes if row_bytes <= self._channel.bucket_bytes else size
        while True:
            offset = aligned(self._filled_bytes)
            count = min(total - start, self._channel.bucket_bytes - offset)
            # A tensor that fits into an empty bucket is not split.
            is_split = start + count < total
            if is_split:
                count -= count % unit
            piece = Piece(name, dtype, shape, start, count, is_apart)
            # Send the bucket if the piece does not fit, and try again with an empty one.
            if self._pieces and (
                (is_split and total <= self._channel.bucket_bytes)
                or count <= 0 < total
                or not fits([*self._texts, piece.text])
            ):
                self.send()
                continue
            if is_apart or not piece.is_whole:
                flat = tensor.reshape(-1) if flat is None else flat
                content = flat[start // size : (start + count) // size]
                if is_apart:
                    self._apart[len(self._pieces)] = content.view(torch.uint8)
                else:
                    self._buckets[0][offset : offset + count].view(dtype).copy_(content)
            else:
                self._buckets[0][offset : offset + count].view(dtype).view(shape).copy_(tensor)
            self._pieces.append(piece)
            self._texts.append(piece.text)
            self._filled_bytes, start = offset + count, start + count
            if start == total:
                return

    def release(self) -> None:
        """Wait until no broadcast reads from the caller's memory any more."""
        if self._apart:
            self.send()
        if self._sends_callers_memory:
            self._settle_all()

    def send(self) -> None:
        """Start to broadcast the filled bucket, after the other one has been sent."""
        if not self._pieces:
            return
        header = Header(tuple(self._pieces))
        posted = [self._channel.post(header.encoded().to(self._channel.device))]
        for start, stop, number in header.transfers():
            source = self._buckets[0][start:stop] if number is None else self._apart[number]
            posted.append(self._channel.post(source))
        self._sends_callers_memory = bool(self._apart)
        self._sent[0] = posted
        self._buckets.reverse()
        self._sent.reverse()
        self._pieces, self._texts, self._filled_bytes, self._apart = [], [], 0, {}
        self._settle()

    def end(self, failure: str = "") -> None:
        """Send the end of the transfer, with the reason if the transfer failed."""
        header = Header(ends=True, failure=failure).encoded()
        posted_header = self._channel.post(header.to(self._channel.device))
        self._settle_all()
        posted_header.wait()

    def _settle_all(self) -> None:
        self._settle()
        self._sent.reverse()
        self._settle()
        self._sent.reverse()
        self._sends_callers_memory = False

    def _settle(self) -> None:
        for posted in self._sent[0]:
            posted.wait()
        self._sent[0] = []
