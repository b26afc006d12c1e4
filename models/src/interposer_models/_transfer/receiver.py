"""The model's side: tensors of a trainer come in buckets, while those before are prepared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import distributed

from interposer.errors import RankError
from interposer_models._checkpoint.offer import Offer
from interposer_models._transfer.channel import Channel, Posted
from interposer_models._transfer.header import HEADER_BYTES, Header
from interposer_ops.devices import host_memory

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class WeightsFrom:
    """The weights that ``send_weights`` sends from another process, for ``update_weights``.

    All processes of the group take part, each receiver with a model of its own or a part of one.

    Attributes:
        group: of torch.distributed; None is the default one.
        source: the rank of the trainer in the group.
        timeout_seconds: within which the others come, and each bucket does.
    """

    group: distributed.ProcessGroup | None = None
    source: int = 0
    timeout_seconds: float = 300.0


def offer_of(tensors: Tensors | WeightsFrom) -> Offer:
    """Return the tensors that ``update_weights`` is given, from wherever they come."""
    if isinstance(tensors, WeightsFrom):
        return Reception(tensors)
    return Offer(tensors.items() if isinstance(tensors, Mapping) else tensors)


class Reception(Offer):
    """One exchange of weights with a trainer.

    All ranks vote three times: before the first bucket, when the weights are prepared, and when
    they are those of the models. So a refusal of one is an error of all, and changes nothing.
    """

    def __init__(self, given: WeightsFrom) -> None:
        super().__init__(self._received())
        self._channel = Channel(given.group, given.source, given.timeout_seconds)
        self._buckets = self._coming()
        self._given: torch.Tensor | None = None
        self._stage = "ready"  # the next one to vote on; "" where nobody listens any more

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tell the others of the end."""
        if error is None:
            try:
                self._vote()
            except RankError as broken:
                broken.add_note("The weights of this rank are exchanged.")
                raise
        # After an interrupt the others are left to their timeout: this process is to end.
        elif self._stage and isinstance(error, Exception):
            with suppress(RankError):  # the error at hand comes first
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

    def _received(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._vote()
        begun: torch.Tensor | None = None
        for header, bucket in self._buckets:
            for start, piece in header.placed():
                content = bucket[start : start + piece.count]
                if piece.is_whole:
                    yield piece.name, content.view(piece.dtype).view(piece.shape)
                    continue
                if not piece.start:
                    begun = self._memory(piece.num_bytes)
                elif begun is None or len(begun) != piece.num_bytes:
                    raise self._nonsense(f"a piece of {piece.name!r} comes before its first one")
                begun[piece.start : piece.start + piece.count] = content
                if piece.start + piece.count == piece.num_bytes:
                    self._given = begun.view(piece.dtype).view(piece.shape)
                    begun = None
                    yield piece.name, self._given
                    self._given = None
        if begun is not None:
            raise self._nonsense("the last tensor lacks pieces")

    def _coming(self) -> Iterator[tuple[Header, torch.Tensor]]:
        """Yield buckets; while one is in use, the next one and the header after it come."""
        try:
            yield from self._in_turns()
        except RankError:
            self._stage = ""
            raise

    def _in_turns(self) -> Iterator[tuple[Header, torch.Tensor]]:
        channel = self._channel
        buckets = [self._memory(channel.bucket_bytes) for _ in range(2)]
        waiting: tuple[Header, Posted | None] | None = None
        posted = channel.post(self._memory(HEADER_BYTES))
        while True:
            header = self._header(posted)
            if not header.ends:
                content = buckets[0][: header.num_bytes]
                coming = header, channel.post(content) if len(content) else None
                posted = channel.post(self._memory(HEADER_BYTES))
            buckets.reverse()
            if waiting is not None:
                if waiting[1] is not None:
                    waiting[1].wait()
                yield waiting[0], buckets[0]
            if header.ends:
                break
            waiting = coming
        if header.failure:
            raise RankError(
                channel.rank,
                f"The trainer, rank {channel.source}, failed before all weights were sent: "
                f"{header.failure}",
            )

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
