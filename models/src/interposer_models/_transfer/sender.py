"""The trainer's side: weights are packed into buckets, two of which are on their way at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import distributed

from interposer.errors import CheckpointError, ConfigError, RankError
from interposer_models._transfer.channel import Channel, Posted
from interposer_models._transfer.header import HEADER_BYTES, Header, Piece, after, fits

BUCKET_BYTES = 32 << 20
_LEAST_BYTES = 4096


def send_weights(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    group: distributed.ProcessGroup | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_seconds: float = 300.0,
) -> None:
    """Renew the weights of models in all other processes of a group, of all of them or of none.

    Each of these calls ``update_weights(WeightsFrom(group, source))`` with the rank of this
    process. Tensors are copied into two buckets in turns, so that one is packed while the other is
    sent; a larger tensor is sent in pieces. Returns when every model computes with the new weights.

    Args:
        tensors: by the names, and in the formats, of the checkpoint; on any device.
        group: of torch.distributed; None is the default one.
        bucket_bytes: of each of the two buckets, here and at each receiver.
        timeout_seconds: within which the others come, and take each bucket.
    Raises:
        RankError: a receiver refused, which changes none of them, or died or did not answer.
        CheckpointError: an item is no tensor with a name that can be sent. No model was changed.
        ConfigError: the group or a number is not usable.
    """
    if bucket_bytes < _LEAST_BYTES:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}, must be at least {_LEAST_BYTES}")
    channel = Channel(group, None, timeout_seconds, after(bucket_bytes))
    channel.vote("ready")
    outbox = _Outbox(channel)
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    try:
        for name, tensor in items:
            outbox.put(name, tensor)
        outbox.send()
    except RankError:
        raise
    except Exception as error:
        outbox.end(f"{type(error).__name__}: {error}")
        raise
    outbox.end()
    channel.vote("prepared")
    channel.vote("applied")


class _Outbox:
    """A bucket that is filled, and one that is sent meanwhile."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._buckets = [self._new(), self._new()]  # the first one is being filled
        self._sent: list[list[Posted]] = [[], []]
        self._pieces: list[Piece] = []
        self._texts: list[str] = []
        self._filled = 0

    def _new(self) -> torch.Tensor:
        channel = self._channel
        return torch.empty(channel.bucket_bytes, dtype=torch.uint8, device=channel.device)

    @torch.no_grad()
    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Pack a tensor, and send each bucket that is full."""
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
        while True:
            at, total = after(self._filled), tensor.nbytes
            count = min(total - start, self._channel.bucket_bytes - at)
            count -= count % dtype.itemsize
            # A tensor that fits into a bucket stays whole.
            is_cut = start + count < total
            piece = Piece(name, dtype, shape, start, count)
            if self._pieces and (
                (is_cut and total <= self._channel.bucket_bytes)
                or count <= 0 < total
                or not fits([*self._texts, piece.text])
            ):
                self.send()
                continue
            target = self._buckets[0][at : at + count].view(dtype)
            if piece.is_whole:
                target.view(shape).copy_(tensor)
            else:
                flat = tensor.reshape(-1) if flat is None else flat
                size = dtype.itemsize
                target.copy_(flat[start // size : (start + count) // size])
            self._pieces.append(piece)
            self._texts.append(piece.text)
            self._filled, start = at + count, start + count
            if start == total:
                return

    def send(self) -> None:
        """Begin to send what is packed, and wait for the bucket before."""
        if not self._pieces:
            return
        header = Header(tuple(self._pieces))
        posted = [self._channel.post(header.encoded().to(self._channel.device))]
        if self._filled:
            posted.append(self._channel.post(self._buckets[0][: self._filled]))
        self._sent[0] = posted
        self._buckets.reverse()
        self._sent.reverse()
        self._pieces, self._texts, self._filled = [], [], 0
        self._settle()

    def end(self, failure: str = "") -> None:
        """Say that nothing follows, or why not all does."""
        header = Header(ends=True, failure=failure).encoded()
        last = self._channel.post(header.to(self._channel.device))
        self._settle()
        self._buckets.reverse()
        self._sent.reverse()
        self._settle()
        last.wait()

    def _settle(self) -> None:
        for posted in self._sent[0]:
            posted.wait()
        self._sent[0] = []
