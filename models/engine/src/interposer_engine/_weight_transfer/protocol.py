"""The protocol of weight transfers: connections, votes of the ranks, and headers of buckets.

A trainer sends tensors in buckets. A ``Header`` lists the tensors, or pieces of tensors, in a
bucket. A ``Channel`` broadcasts headers and buckets, and counts the votes of all ranks.
"""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from interposer.errors import ConfigError, RankError

HEADER_BYTES = 1 << 16
# Each piece starts at a multiple, which aligns tensors of any dtype.
ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of bytes of one tensor; mostly the complete tensor.

    Attributes:
        shape: shape of the complete tensor.
        start: offset of the first byte in the tensor.
        count: number of bytes.
        is_apart: sent in a broadcast of its own, from the tensor's own memory.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    count: int
    is_apart: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the piece's complete tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Say whether the piece covers the complete tensor."""
        return self.count == self.num_bytes

    @property
    def row_bytes(self) -> int:
        """Size of one row of the piece's tensor in bytes, along the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def is_last(self) -> bool:
        """Say whether the piece contains the end of the tensor."""
        return self.start + self.count == self.num_bytes

    @property
    def text(self) -> str:
        """The piece as JSON text, for a header."""
        dtype = str(self.dtype).removeprefix("torch.")
        return json.dumps([self.name, dtype, self.shape, self.start, self.count, self.is_apart])

    @classmethod
    def of(cls, fields: Any) -> Piece:
        """Return the piece that fields of a header describe.

        Raises: ValueError: the fields describe no valid piece.
        """
        match fields:
            case [str(name), str(dtype_name), [*shape], int(start), int(count), bool(is_apart)]:
                dtype = getattr(torch, dtype_name, None)
                has_sizes = all(type(size) is int and size >= 0 for size in shape)
                if isinstance(dtype, torch.dtype) and has_sizes:
                    piece = cls(name, dtype, tuple(shape), start, count, is_apart)
                    if piece._is_inside():
                        return piece
        raise ValueError(f"{fields!r:.200} states no piece of a tensor")

    def _is_inside(self) -> bool:
        sizes = self.start, self.count
        is_aligned = all(size >= 0 and size % self.dtype.itemsize == 0 for size in sizes)
        return is_aligned and sum(sizes) <= self.num_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The list of pieces in the next bucket, or the end of the transfer.

    Attributes:
        ends: no bucket follows this header.
        failure: why the weights are incomplete; empty if all were sent.
    """

    pieces: tuple[Piece, ...] = ()
    ends: bool = False
    failure: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the bucket in bytes."""
        return max((start + piece.count for start, piece in self.placed()), default=0)

    def placed(self) -> Iterator[tuple[int, Piece]]:
        """Yield each piece with its byte offset in the bucket: ``(offset, piece)``."""
        start = 0
        for piece in self.pieces:
            yield start, piece
            start = aligned(start + piece.count)

    def transfers(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield the byte ranges of the bucket that are broadcast together.

        Neighbouring pieces share a broadcast, unless ``is_apart`` is set.

        Returns: tuples ``(start, stop, piece number)``; the number is None for pieces sent
            together.
        """
        first: int | None = None
        for number, (start, piece) in enumerate(self.placed()):
            if first is None:  # the start of pieces that are sent together
                first = start
            if piece.is_apart:
                if first < start:
                    yield first, start, None
                if piece.count:
                    yield start, start + piece.count, number
                first = None
        if first is not None and first < self.num_bytes:
            yield first, self.num_bytes, None

    def encoded(self) -> torch.Tensor:
        """Return the header as a tensor, uint8 ``[HEADER_BYTES]``: JSON, padded with blanks."""
        pieces = ",".join(piece.text for piece in self.pieces)
        text = _text(pieces, self.ends, self.failure)
        # The failure of a trainer can be any text.
        while len(text) > HEADER_BYTES and self.failure:
            text = _text(pieces, self.ends, self.failure[: HEADER_BYTES // 16])
        return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES).encode()), dtype=torch.uint8)

    @classmethod
    def decoded(cls, encoded: torch.Tensor, bucket_bytes: int) -> Header:
        """Return the header that ``encoded`` has converted to a tensor.

        Raises: ValueError: the tensor contains no header, or the bucket would be larger than
            ``bucket_bytes``.
        """
        content = json.loads(bytes(encoded.cpu().numpy()))
        match content:
            case {"pieces": [*pieces], "ends": bool(ends), "failure": str(failure)}:
                header = cls(tuple(map(Piece.of, pieces)), ends, failure)
                if header.num_bytes <= bucket_bytes and not (ends and pieces):
                    return header
        raise ValueError(f"{content!r:.200} is no header of a bucket of {bucket_bytes} bytes")


def fits(texts: Iterable[str]) -> bool:
    """Say whether pieces whose JSON texts are ``texts`` fit into one header."""
    return len(_text("", True, "")) + sum(len(text) + 1 for text in texts) <= HEADER_BYTES


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to the alignment of pieces in a bucket."""
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _text(pieces: str, ends: bool, failure: str) -> str:
    fields = json.dumps({"ends": ends, "failure": failure})
    return f'{{"pieces":[{pieces}],{fields[1:]}'


class Work(Protocol):
    """Handle of a collective operation that has been started."""

    def wait(self, timeout: timedelta, /) -> bool:
        """Wait until the collective has ended; raise RuntimeError if the collective failed."""
        ...


class Link(Protocol):
    """Collective operations among the processes of one weight transfer.

    Attributes:
        device: device of the transferred tensors: the host if the group uses gloo for the host.
    """

    rank: int
    size: int
    device: torch.device

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start to broadcast a tensor of rank ``source`` to the tensors of the other ranks."""
        ...

    def gather(self, gathered: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        """Start an all-gather of ``tensor`` into ``gathered``, one tensor for each rank."""
        ...

    def break_up(self) -> None:
        """Mark the connections as unusable after a failed transfer."""
        ...


class GroupLink:
    """Collective operations over an existing process group; None is the default group."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        """Use a process group that the program has created, or the default group.

        Raises: ConfigError: the program has no process group.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError(
                "Weights are sent over a process group, and this process is in none. "
                "Try: torch.distributed.init_process_group, or a Meeting as group"
            )
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        # A process outside of the group has no backend.
        self.device = device_of(distributed.get_backend_config(group)) if self.rank >= 0 else _HOST
        self._group = group

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        work: Any = distributed.broadcast(
            tensor, group_src=source, group=self._group, async_op=True
        )
        return work  # type: ignore[no-any-return]

    def gather(self, gathered: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        work: Any = distributed.all_gather(gathered, tensor, group=self._group, async_op=True)
        return work  # type: ignore[no-any-return]

    def break_up(self) -> None:
        """Do nothing: the program that created the process group ends it."""


_HOST = torch.device("cpu")


def device_of(config: str) -> torch.device:
    """Return the device on which a process group can transfer tensors.

    Args:
        config: devices and backends of the group, such as ``"cpu:gloo,acme:accl"``. A backend of an
            accelerator is preferred.
    """
    pairs = [pair.partition(":") for pair in config.lower().split(",")]
    accelerators = [device for device, _, backend in pairs if device != "cpu" and backend != "gloo"]
    return torch.device(accelerators[0] if accelerators else "cpu")


@dataclass(frozen=True, slots=True)
class Meeting:
    """Network address at which a trainer and receivers connect to transfer weights.

    Pass the meeting as ``group`` to ``send_weights`` and ``WeightsFrom``. Its connections are
    separate from the process groups of the program, are reused by later transfers, and last until
    the process ends. Tensors are sent with gloo, from host memory.

    Attributes:
        address: ``"tcp://host:port"`` of the process with rank 0, or ``"file:///path"`` of a file
            that does not exist yet and that all processes can write.
        rank: rank of this process. For a model on several ranks, the rank of its rank 0; its other
            ranks have the following numbers.
        size: number of processes.
    """

    address: str
    rank: int
    size: int


def linked(meeting: Meeting, timeout_seconds: float) -> Link:
    """Connect to the address of a meeting, and return the link once all processes are connected.

    Raises:
        ConfigError: the rank or the address is invalid.
        RankError: the other processes did not connect in time.
    """
    if not 0 <= meeting.rank < meeting.size:
        raise ConfigError(
            f"The rank of this process at {meeting.address} is {meeting.rank} of {meeting.size}. "
            f"Try: a rank from 0 to {meeting.size - 1}; for a model on several ranks, the rank of "
            "its first process"
        )
    if not meeting.address.startswith(("tcp://", "file://")):
        raise ConfigError(
            f"{meeting.address!r} is not an address of a Meeting. "
            "Try: 'tcp://host:port' or 'file:///path'"
        )
    # Later transfers of the process reuse the connections: an address can be used only once.
    if meeting not in _LINKS:
        _LINKS[meeting] = _MeetingLink(meeting, timedelta(seconds=timeout_seconds))
    return _LINKS[meeting]


class _MeetingLink:
    """Collective operations over the connections that were made at a meeting."""

    device = torch.device("cpu")

    def __init__(self, meeting: Meeting, timeout: timedelta) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._meeting = meeting
        try:
            rendezvous_results = rendezvous(meeting.address, self.rank, self.size, timeout=timeout)
            store, *_ = next(iter(rendezvous_results))
            store.set_timeout(timeout)
            self._store = store  # keep alive: rank 0 serves the store to the other ranks
            self._group: Any = distributed.ProcessGroupGloo(store, self.rank, self.size, timeout)
        except (RuntimeError, ValueError, OSError) as error:  # of torch
            reason = str(error).splitlines()[0]
            raise RankError(
                self.rank,
                f"{self.size} processes did not connect at {meeting.address} within "
                f"{timeout.total_seconds():g} s ({reason:.300}). Try: see which one is missing; an "
                "address that was not used before",
            ) from error

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._group.broadcast(tensor, source)  # type: ignore[no-any-return]

    def gather(self, gathered: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self._group.allgather(gathered, tensor)  # type: ignore[no-any-return]

    def break_up(self) -> None:
        _LINKS.pop(self._meeting, None)


_LINKS: dict[Meeting, _MeetingLink] = {}
# Ends the threads of gloo. A thread that frees tensors while Python exits aborts the process.
atexit.register(_LINKS.clear)


FORMAT = "interposer-weights-2"
_VOTE_BYTES = 4096
_MAX_REASON_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Posted:
    """A tensor that is being broadcast, and whose memory is in use until ``wait`` returns."""

    tensor: torch.Tensor
    wait: Callable[[], None]


class Channel:
    """Connection of a trainer (rank ``source``) and receivers: broadcasts tensors, counts votes.

    A call that does not end within ``timeout_seconds``, or during which a rank dies, raises
    RankError. The group is unusable after that.

    Attributes:
        device: device of the transferred tensors: the host if the group uses gloo for the host.
        bucket_bytes: bucket size of the trainer; known to receivers after the first vote.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | Meeting | None,
        source: int | None,
        timeout_seconds: float,
        bucket_bytes: int = 0,
    ) -> None:
        """Check the process group, or wait for the processes of a meeting; send nothing yet.

        Args:
            source: rank of the trainer; None if this process is the trainer.
        Raises:
            ConfigError: there is no such group, or no other process is in it.
            RankError: other processes did not connect to a meeting.
        """
        self._link: Link = (
            linked(group, timeout_seconds) if isinstance(group, Meeting) else GroupLink(group)
        )
        self.rank, self.size = self._link.rank, self._link.size
        if self.rank < 0 or self.size < 2:
            fault = "does not contain this process" if self.rank < 0 else "has no other process"
            raise ConfigError(f"The process group {fault}. Try: a group of trainer and receivers")
        self.source = self.rank if source is None else source
        if source is not None and (source == self.rank or not 0 <= source < self.size):
            raise ConfigError(
                f"source is {source}, and this process is rank {self.rank} of {self.size}. "
                "Try: the rank of the trainer in the group"
            )
        self.bucket_bytes = bucket_bytes
        self.device = self._link.device
        self._timeout = timedelta(seconds=timeout_seconds)

    def post(self, tensor: torch.Tensor) -> Posted:
        """Start to broadcast a tensor from the source to tensors of the other ranks."""
        with self._raise_rank_errors():
            work = self._link.broadcast(tensor, self.source)
        return Posted(tensor, lambda: self._wait(work))

    def vote(self, stage: str, refusal: str = "") -> None:
        """Send this rank's consent or refusal to all ranks; return only if all ranks consent.

        Args:
            stage: stage of the transfer; must be the same on all ranks.
            refusal: why this rank refuses; empty to consent. A refusing rank does not raise for the
                refusals of other ranks.
        Raises: RankError: a rank refuses, or is at another stage.
        """
        facts: dict[str, Any] = {
            "format": FORMAT,
            "stage": stage,
            "source": self.source,
            "bucket_bytes": self.bucket_bytes,
            "refusal": refusal[:_MAX_REASON_CHARACTERS],
        }
        # All votes have one size, as required by an all-gather: shorten a refusal if necessary.
        text = json.dumps(facts)
        while len(text) > _VOTE_BYTES:
            facts["refusal"] = facts["refusal"][: len(facts["refusal"]) // 2]
            text = json.dumps(facts)
        ballot = _as_tensor(text).to(self.device)
        votes = [torch.empty_like(ballot) for _ in range(self.size)]
        with self._raise_rank_errors():
            work = self._link.gather(votes, ballot)
        self._wait(work)
        if not refusal:
            self._count([bytes(vote.cpu().numpy()) for vote in votes], facts)

    def _count(self, votes: list[bytes], facts: dict[str, Any]) -> None:
        """Raise RankError if a rank refuses, or votes on another transfer than this rank."""
        refusals = []
        for rank, vote in enumerate(votes):
            try:
                fields = json.loads(vote)
                different = [
                    key for key in ("format", "stage", "source") if fields[key] != facts[key]
                ]
                reason = fields["refusal"]
                if rank == self.source:
                    self.bucket_bytes = int(fields["bucket_bytes"])
            except (ValueError, KeyError, TypeError):
                # Another version, or another use of the group.
                different, reason = ["message"], ""
                fields = {"message": vote[:100]}
            if different:
                differences = ", ".join(
                    f"{key} {fields[key]!r} in place of {facts.get(key)!r}" for key in different
                )
                reason = f"takes part in another transfer, or has another version: {differences}"
            if reason:
                refusals.append(f"rank {rank}: {reason}")
        if refusals:
            raise RankError(
                self.rank, f"The update of weights is refused by {'; by '.join(refusals)}"
            )

    def _wait(self, work: Work) -> None:
        with self._raise_rank_errors():
            if not work.wait(self._timeout):
                raise RuntimeError("it did not end")

    @contextmanager
    def _raise_rank_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # every backend of torch.distributed raises this type
            self._link.break_up()
            limit = self._timeout.total_seconds()
            raise RankError(
                self.rank,
                f"The update of weights with {self.size - 1} other ranks ended, for one of them "
                f"died or did not answer for {limit:g} s ({str(error).splitlines()[0]:.300}). "
                "Try: see why, and make a new process group, or meet at a new address",
            ) from error


def _as_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.ljust(_VOTE_BYTES).encode()), dtype=torch.uint8)
