"""The trainer's side: weights are packed into buckets, two of which are on their way at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import distributed

from interposer.errors import CheckpointError, ConfigError, RankError
from interposer_models._transfer.channel import Channel, Posted
from interposer_models._transfer.header import HEADER_BYTES, Header, Piece, after, fits
from interposer_models._transfer.meeting import Meeting

BUCKET_BYTES = 32 << 20
_LEAST_BYTES = 4096
# Below, a broadcast takes longer than a copy does.
_LEAST_APART_BYTES = 1 << 18


def send_weights(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    group: distributed.ProcessGroup | Meeting | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_seconds: float = 300.0,
) -> None:
    """Renew the weights of models in all other processes of a group, of all of them or of none.

    Each of these calls ``update_weights(WeightsFrom(group, source))`` with the rank of this
    process. Small tensors are copied into two buckets in turns, so that one is packed while the
    other is sent; larger ones are sent from their own memory, if they are contiguous and lie where
    the group sends from. Returns when every model computes with the new weights.

    Args:
        tensors: by the names, and in the formats, of the checkpoint; on any device. Those of a
            mapping stay as they are until the end; what an iterator yields, until the next one.
        group: of torch.distributed; None is the default one. Or a ``Meeting``.
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
    keeps = isinstance(tensors, Mapping)
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    try:
        for name, tensor in items:
            outbox.put(name, tensor)
            if not keeps:
                outbox.release()
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
        # By the number of the piece, what is sent from where it lies.
        self._apart: dict[int, torch.Tensor] = {}
        self._lent = False  # what is on its way lies there

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
        is_apart = (
            tensor.nbytes >= min(_LEAST_APART_BYTES, self._channel.bucket_bytes)
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.device.type == self._channel.device.type
        )
        size, total = dtype.itemsize, tensor.nbytes
        # Whole rows, so that who needs parts of them, or has memory for them, can take them so.
        row_bytes = total // shape[0] if shape and total else size
        unit = row_bytes if row_bytes <= self._channel.bucket_bytes else size
        while True:
            at = after(self._filled)
            count = min(total - start, self._channel.bucket_bytes - at)
            # A tensor that fits into a bucket stays whole.
            is_cut = start + count < total
            if is_cut:
                count -= count % unit
            piece = Piece(name, dtype, shape, start, count, is_apart)
            if self._pieces and (
                (is_cut and total <= self._channel.bucket_bytes)
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
                    self._buckets[0][at : at + count].view(dtype).copy_(content)
            else:
                self._buckets[0][at : at + count].view(dtype).view(shape).copy_(tensor)
            self._pieces.append(piece)
            self._texts.append(piece.text)
            self._filled, start = at + count, start + count
            if start == total:
                return

    def release(self) -> None:
        """Return when nothing is to be sent any more from memory that is not the outbox's."""
        if self._apart:
            self.send()
        if self._lent:
            self._settle_all()

    def send(self) -> None:
        """Begin to send what is packed, and wait for the bucket before."""
        if not self._pieces:
            return
        header = Header(tuple(self._pieces))
        posted = [self._channel.post(header.encoded().to(self._channel.device))]
        for start, stop, number in header.transfers():
            lies = self._buckets[0][start:stop] if number is None else self._apart[number]
            posted.append(self._channel.post(lies))
        self._lent = bool(self._apart)
        self._sent[0] = posted
        self._buckets.reverse()
        self._sent.reverse()
        self._pieces, self._texts, self._filled, self._apart = [], [], 0, {}
        self._settle()

    def end(self, failure: str = "") -> None:
        """Say that nothing follows, or why not all does."""
        header = Header(ends=True, failure=failure).encoded()
        last = self._channel.post(header.to(self._channel.device))
        self._settle_all()
        last.wait()

    def _settle_all(self) -> None:
        self._settle()
        self._sent.reverse()
        self._settle()
        self._sent.reverse()
        self._lent = False

    def _settle(self) -> None:
        for posted in self._sent[0]:
            posted.wait()
        self._sent[0] = []
