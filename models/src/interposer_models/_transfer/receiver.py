"""The model's side: tensors of a trainer come in buckets, while those before are prepared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import torch
from torch import distributed

from interposer.errors import RankError
from interposer_models._checkpoint.offer import Offer, Room, Rooms
from interposer_models._transfer.channel import Channel, Posted
from interposer_models._transfer.header import HEADER_BYTES, Header, Piece
from interposer_models._transfer.meeting import Meeting
from interposer_ops.devices import host_memory

_TRANSFER_THREADS = 2

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WeightsFrom:
    """The weights that ``send_weights`` sends from another process, for ``update_weights``.

    All processes of the group take part, each receiver with a model of its own or a part of one.

    Attributes:
        group: of torch.distributed; None is the default one. Or a ``Meeting``.
        source: the rank of the trainer in the group.
        timeout_seconds: within which the others come, and each bucket does.
        keeps_memory: the memory of weights that are replaced, and that in which others were
            received, is kept for the next ones. So the model takes as much from then on as it does
            in each exchange: more than twice that of its weights. On the host only.
    """

    group: distributed.ProcessGroup | Meeting | None = None
    source: int = 0
    timeout_seconds: float = 300.0
    keeps_memory: bool = False


def at_rank(given: WeightsFrom, rank: int) -> WeightsFrom:
    """Return what a rank of a model that several processes compute takes part in."""
    if isinstance(given.group, Meeting):
        return replace(given, group=replace(given.group, rank=given.group.rank + rank))
    return given


def offer_of(tensors: Tensors | WeightsFrom) -> Offer:
    """Return the tensors that ``update_weights`` is given, from wherever they come."""
    if isinstance(tensors, WeightsFrom):
        return Reception(tensors)
    return Offer(tensors.items() if isinstance(tensors, Mapping) else tensors)


@dataclass(slots=True)
class _Bucket:
    """A bucket that is on its way.

    Attributes:
        rooms: by the number of a piece, where the tensor belongs that it is of.
        landed: numbers of the pieces that are received there.
    """

    header: Header
    bucket: torch.Tensor
    posted: list[Posted] = field(default_factory=list)
    rooms: dict[int, Room] = field(default_factory=dict)
    landed: set[int] = field(default_factory=set)


class Reception(Offer):
    """One exchange of weights with a trainer.

    All ranks vote three times: before the first bucket, when the weights are prepared, and when
    they are those of the models. So a refusal of one is an error of all, and changes nothing.
    """

    def __init__(self, given: WeightsFrom) -> None:
        super().__init__(())
        self._channel = Channel(given.group, given.source, given.timeout_seconds)
        self._buckets = self._coming()
        self.keeps_memory = given.keeps_memory
        self._given: torch.Tensor | None = None
        self._rooms: Rooms = _no_room
        self._threads = 1  # outside
        self._begun: tuple[Piece, Room] | None = None  # the last piece of a tensor that goes on
        self._stage = "ready"  # the next one to vote on; "" where nobody listens any more

    def __enter__(self) -> Self:
        """Leave cores to the transfer, which one thread takes here, and one of a trainer beside."""
        self._threads = torch.get_num_threads()
        if self._channel.device.type == "cpu":
            # Threads that share out a weight wait for the last one, and spin where others work.
            torch.set_num_threads(max(1, self._threads - _TRANSFER_THREADS))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tell the others of the end."""
        torch.set_num_threads(self._threads)
        if error is None:
            try:
                self._vote()
            except RankError as broken:
                broken.add_note("The weights of this rank are exchanged.")
                raise
        # After an interrupt the others are left to their timeout: this process is to end.
        elif self._stage and isinstance(error, Exception):
            with suppress(RankError):  # the error at hand comes first
                self._rooms = _no_room
                for _ in self._buckets if self._stage == "prepared" else ():
                    pass
                self._vote(f"{type(error).__name__}: {error}")

    def gives(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor was put together in memory of its own."""
        return tensor is self._given

    def agree(self) -> None:
        """Return if all ranks have prepared the weights."""
        self._vote()

    def _vote(self, refusal: str = "") -> None:
        stage, self._stage = self._stage, ""
        self._channel.vote(stage, refusal)
        self._stage = {"ready": "prepared", "prepared": "applied"}.get(stage, "")

    def given(self, rooms: Rooms) -> Iterator[tuple[str, torch.Tensor | Room]]:
        """Yield the tensors, or the rooms that they were received in."""
        self._rooms = rooms
        self._vote()
        begun: torch.Tensor | None = None
        for arrived in self._buckets:
            for number, (start, piece) in enumerate(arrived.header.placed()):
                content = arrived.bucket[start : start + piece.count]
                room = arrived.rooms.get(number)
                if room is not None:
                    if number not in arrived.landed:
                        rows = content.view(piece.dtype).view(-1, *piece.shape[1:])
                        room.put(piece.start // piece.row_bytes, rows)
                    if piece.is_last:
                        yield piece.name, room
                elif piece.is_whole:
                    yield piece.name, content.view(piece.dtype).view(piece.shape)
                else:
                    if not piece.start:
                        begun = self._memory(piece.num_bytes)
                    elif begun is None or len(begun) != piece.num_bytes:
                        raise self._nonsense(f"a piece of {piece.name!r} comes before its first")
                    begun[piece.start : piece.start + piece.count] = content
                    if piece.is_last:
                        self._given = begun.view(piece.dtype).view(piece.shape)
                        begun = None
                        yield piece.name, self._given
                        self._given = None
        if begun is not None:
            raise self._nonsense("the last tensor lacks pieces")

    def _coming(self) -> Iterator[_Bucket]:
        """Yield buckets; while one is in use, the next one and the header after it come."""
        try:
            yield from self._in_turns()
        except RankError:
            self._stage = ""
            raise

    def _in_turns(self) -> Iterator[_Bucket]:
        channel = self._channel
        buckets = [self._memory(channel.bucket_bytes) for _ in range(2)]
        waiting: _Bucket | None = None
        posted = channel.post(self._memory(HEADER_BYTES))
        while True:
            header = self._header(posted)
            if not header.ends:
                coming = self._posted(header, buckets[0])
                posted = channel.post(self._memory(HEADER_BYTES))
            buckets.reverse()
            if waiting is not None:
                for part in waiting.posted:
                    part.wait()
                yield waiting
            if header.ends:
                break
            waiting = coming
        if self._begun is not None:
            raise self._nonsense("the last tensor lacks pieces")
        if header.failure:
            raise RankError(
                channel.rank,
                f"The trainer, rank {channel.source}, failed before all weights were sent: "
                f"{header.failure}",
            )

    def _posted(self, header: Header, bucket: torch.Tensor) -> _Bucket:
        """Have the tensors of a bucket sent to where they belong, or to the bucket."""
        found = _Bucket(header, bucket)
        for number, piece in enumerate(header.pieces):
            if piece.is_apart or not piece.is_whole:
                room = self._room(piece)
                if room is not None:
                    found.rooms[number] = room
        for start, stop, apart in header.transfers():
            target = bucket[start:stop]
            room = None if apart is None else found.rooms.get(apart)
            if apart is not None and room is not None:
                piece = header.pieces[apart]
                first = piece.start // piece.row_bytes
                memory = room.memory(first, first + piece.count // piece.row_bytes)
                own = memory is not None and memory.device.type == target.device.type
                if memory is not None and own and memory.dtype == piece.dtype:
                    target = memory.view(-1).view(torch.uint8)
                    found.landed.add(apart)
            found.posted.append(self._channel.post(target))
        return found

    def _room(self, piece: Piece) -> Room | None:
        """Return where a piece belongs, None where its tensor is to be put together."""
        if not piece.start:
            # Of longer rows, pieces hold parts.
            fits = 0 < piece.row_bytes <= self._channel.bucket_bytes
            room = self._rooms(piece.name, piece.shape, piece.dtype) if fits else None
        elif self._begun is None:
            return None
        else:
            before, room = self._begun
            if (before.name, before.start + before.count) != (piece.name, piece.start):
                raise self._nonsense(f"a piece of {piece.name!r} comes before its first")
        if room is not None and piece.count % piece.row_bytes:
            raise self._nonsense(f"a piece of {piece.name!r} holds a part of a row")
        self._begun = None if room is None or piece.is_last else (piece, room)
        return room

    def _header(self, posted: Posted) -> Header:
        posted.wait()
        try:
            return Header.decoded(posted.tensor, self._channel.bucket_bytes)
        except ValueError as error:
            raise self._nonsense(str(error)) from error

    def _nonsense(self, found: str) -> RankError:
        self._stage = ""
        source = self._channel.source
        return RankError(
            self._channel.rank,
            f"Rank {source} sent what is no weights of send_weights: {found}. "
            "Try: the same version of interposer there, and a new process group",
        )

    def _memory(self, num_bytes: int) -> torch.Tensor:
        device = self._channel.device
        if device.type == "cpu":
            return host_memory.empty((num_bytes,), torch.uint8)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _no_room(name: str, shape: Sequence[int], dtype: torch.dtype) -> Room | None:
    return None
