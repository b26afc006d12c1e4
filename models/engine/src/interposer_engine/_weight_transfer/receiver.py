"""Receiver of weights from a trainer: buckets arrive while earlier ones are prepared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import distributed

from interposer.errors import RankError
from interposer_engine._checkpoint.files import stored_tensors
from interposer_engine._checkpoint.updates import BufferFor, Offer, TensorBuffer
from interposer_engine._weight_transfer.protocol import (
    HEADER_BYTES,
    Channel,
    Header,
    Meeting,
    Piece,
    Posted,
)
from interposer_ops.devices import host_memory

_TRANSFER_THREADS = 2

Tensors = str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WeightsFrom:
    """Settings with which ``update_weights`` receives the weights of ``send_weights``.

    All processes of the group take part. Each receiver has its own model, or a part of one.

    Attributes:
        group: a process group of torch.distributed, None for the default one, or a ``Meeting``.
        source: the rank of the trainer in the group.
        timeout_seconds: time limit for the other processes to connect, and for each bucket.
        keeps_memory: keep the memory of replaced weights and of receive buffers for the next
            update. The process then uses permanently as much memory as during an update: more than
            twice the size of its weights. On the host only.
    """

    group: distributed.ProcessGroup | Meeting | None = None
    source: int = 0
    timeout_seconds: float = 300.0
    keeps_memory: bool = False


def at_rank(weights_from: WeightsFrom, rank: int) -> WeightsFrom:
    """Return these settings for one rank of a model that runs on several ranks."""
    group = weights_from.group
    if isinstance(group, Meeting):
        return replace(weights_from, group=replace(group, rank=group.rank + rank))
    return weights_from


def offer_of(tensors: Tensors | WeightsFrom) -> Offer:
    """Return an ``Offer`` of the tensors, folder or trainer given to ``update_weights``."""
    if isinstance(tensors, WeightsFrom):
        return Reception(tensors)
    if isinstance(tensors, str | Path):
        return Offer(stored_tensors(Path(tensors)))
    return Offer(tensors.items() if isinstance(tensors, Mapping) else tensors)


@dataclass(slots=True)
class _Bucket:
    """A bucket of tensor pieces whose broadcast has been started.

    Attributes:
        buffers: model memory for the tensors of some pieces, by the number of the piece.
        received_numbers: numbers of the pieces that arrive directly in such memory.
    """

    header: Header
    memory: torch.Tensor
    posted: list[Posted] = field(default_factory=list)
    buffers: dict[int, TensorBuffer] = field(default_factory=dict)
    received_numbers: set[int] = field(default_factory=set)


class Reception(Offer):
    """An ``Offer`` of weights that arrive from a trainer.

    All ranks vote three times: before the first bucket, when the weights are prepared, and after
    the models have changed. If one rank refuses, all ranks raise an error and no model changes.
    """

    def __init__(self, weights_from: WeightsFrom) -> None:
        super().__init__(())
        self._channel = Channel(
            weights_from.group, weights_from.source, weights_from.timeout_seconds
        )
        self._buckets = self._received_buckets()
        self.keeps_memory = weights_from.keeps_memory
        self._assembled: torch.Tensor | None = None
        self._buffer_for: BufferFor = _no_buffer
        self._num_threads = 1  # before the transfer
        # The last piece of an incomplete tensor, and the buffer of that tensor.
        self._last_piece: tuple[Piece, TensorBuffer] | None = None
        self._stage = "ready"  # the next stage to vote on; "" if the group is unusable

    def __enter__(self) -> Self:
        """Reduce the number of threads, to leave cores for the transfer and for a local trainer."""
        self._num_threads = torch.get_num_threads()
        if self._channel.device.type == "cpu":
            # Threads that work on one weight spin until the slowest is done, which would take
            # cores from the transfer.
            torch.set_num_threads(max(1, self._num_threads - _TRANSFER_THREADS))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Vote on the end of the transfer: consent, or refuse with the error."""
        torch.set_num_threads(self._num_threads)
        if error is None:
            try:
                self._vote()
            except RankError as broken:
                broken.add_note("The weights of this rank are updated.")
                raise
        # After KeyboardInterrupt this process must end at once: other ranks reach their timeout.
        elif self._stage and isinstance(error, Exception):
            with suppress(RankError):  # the original error is more important
                # Receive the other buckets: the trainer votes after sending all of them.
                self._buffer_for = _no_buffer
                for _ in self._buckets if self._stage == "prepared" else ():
                    pass
                self._vote(f"{type(error).__name__}: {error}")

    def is_exclusive(self, tensor: torch.Tensor) -> bool:
        """Say whether the tensor was assembled from pieces in its own memory."""
        return tensor is self._assembled

    def confirm(self) -> None:
        """Vote, and return once all ranks have prepared the weights."""
        self._vote()

    def _vote(self, refusal: str = "") -> None:
        # If the vote fails, the group is unusable and the stage stays empty.
        stage, self._stage = self._stage, ""
        self._channel.vote(stage, refusal)
        self._stage = {"ready": "prepared", "prepared": "applied"}.get(stage, "")

    def tensors(self, buffer_for: BufferFor) -> Iterator[tuple[str, torch.Tensor | TensorBuffer]]:
        """Yield names with tensors, or with filled buffers of tensors that arrived by rows."""
        self._buffer_for = buffer_for
        self._vote()
        assembled: torch.Tensor | None = None
        for bucket in self._buckets:
            for number, (start, piece) in enumerate(bucket.header.placed()):
                content = bucket.memory[start : start + piece.count]
                buffer = bucket.buffers.get(number)
                if buffer is not None:
                    if number not in bucket.received_numbers:
                        rows = content.view(piece.dtype).view(-1, *piece.shape[1:])
                        buffer.put(piece.start // piece.row_bytes, rows)
                    if piece.is_last:
                        yield piece.name, buffer
                elif piece.is_whole:
                    yield piece.name, content.view(piece.dtype).view(piece.shape)
                else:
                    if not piece.start:
                        assembled = self._memory(piece.num_bytes)
                    elif assembled is None or len(assembled) != piece.num_bytes:
                        raise self._protocol_error(
                            f"a piece of {piece.name!r} comes before its first"
                        )
                    assembled[piece.start : piece.start + piece.count] = content
                    if piece.is_last:
                        self._assembled = assembled.view(piece.dtype).view(piece.shape)
                        assembled = None
                        yield piece.name, self._assembled
                        self._assembled = None
        if assembled is not None:
            raise self._protocol_error("the last tensor lacks pieces")

    def _received_buckets(self) -> Iterator[_Bucket]:
        """Yield received buckets, while the next bucket and header arrive."""
        try:
            yield from self._pipelined_buckets()
        except RankError:
            self._stage = ""
            raise

    def _pipelined_buckets(self) -> Iterator[_Bucket]:
        channel = self._channel
        # Double buffering: one bucket arrives while the caller uses the other.
        memories = [self._memory(channel.bucket_bytes) for _ in range(2)]
        previous: _Bucket | None = None
        posted_header = channel.post(self._memory(HEADER_BYTES))
        while True:
            header = self._header(posted_header)
            if not header.ends:
                bucket = self._start_bucket(header, memories[0])
                posted_header = channel.post(self._memory(HEADER_BYTES))
            memories.reverse()
            if previous is not None:
                for posted in previous.posted:
                    posted.wait()
                yield previous
            if header.ends:
                break
            previous = bucket
        if self._last_piece is not None:
            raise self._protocol_error("the last tensor lacks pieces")
        if header.failure:
            raise RankError(
                channel.rank,
                f"The trainer, rank {channel.source}, failed before all weights were sent: "
                f"{header.failure}",
            )

    def _start_bucket(self, header: Header, memory: torch.Tensor) -> _Bucket:
        """Start the broadcasts of a bucket, into model memory if possible, else into ``memory``."""
        bucket = _Bucket(header, memory)
        for number, piece in enumerate(header.pieces):
            if piece.is_apart or not piece.is_whole:
                buffer = self._buffer(piece)
                if buffer is not None:
                    bucket.buffers[number] = buffer
        for start, stop, number_apart in header.transfers():
            target = memory[start:stop]
            buffer = None if number_apart is None else bucket.buffers.get(number_apart)
            if number_apart is not None and buffer is not None:
                piece = header.pieces[number_apart]
                first = piece.start // piece.row_bytes
                # Receive directly into the model if dtype and device match; otherwise convert.
                rows = buffer.memory(first, first + piece.count // piece.row_bytes)
                is_same_device = rows is not None and rows.device.type == target.device.type
                if rows is not None and is_same_device and rows.dtype == piece.dtype:
                    target = rows.view(-1).view(torch.uint8)
                    bucket.received_numbers.add(number_apart)
            bucket.posted.append(self._channel.post(target))
        return bucket

    def _buffer(self, piece: Piece) -> TensorBuffer | None:
        """Return model memory for a piece; None if the tensor must be assembled elsewhere."""
        if not piece.start:
            # A row that is longer than a bucket is split between pieces.
            has_rows = 0 < piece.row_bytes <= self._channel.bucket_bytes
            buffer = self._buffer_for(piece.name, piece.shape, piece.dtype) if has_rows else None
        elif self._last_piece is None:
            return None
        else:
            last, buffer = self._last_piece
            if (last.name, last.start + last.count) != (piece.name, piece.start):
                raise self._protocol_error(f"a piece of {piece.name!r} comes before its first")
        # send_weights splits tensors between rows if a row fits into a bucket.
        if buffer is not None and piece.count % piece.row_bytes:
            raise self._protocol_error(f"a piece of {piece.name!r} holds a part of a row")
        self._last_piece = None if buffer is None or piece.is_last else (piece, buffer)
        return buffer

    def _header(self, posted: Posted) -> Header:
        posted.wait()
        try:
            return Header.decoded(posted.tensor, self._channel.bucket_bytes)
        except ValueError as error:
            raise self._protocol_error(str(error)) from error

    def _protocol_error(self, fault: str) -> RankError:
        self._stage = ""
        source = self._channel.source
        return RankError(
            self._channel.rank,
            f"Rank {source} broke the protocol of send_weights: {fault}. "
            "Try: the same version of interposer there, and a new process group",
        )

    def _memory(self, num_bytes: int) -> torch.Tensor:
        device = self._channel.device
        if device.type == "cpu":
            return host_memory.empty((num_bytes,), torch.uint8)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _no_buffer(name: str, shape: Sequence[int], dtype: torch.dtype) -> TensorBuffer | None:
    return None
