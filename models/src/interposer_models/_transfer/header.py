"""The head of a bucket: the tensors, or pieces of them, that lie in it one after another."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

HEADER_BYTES = 1 << 16
# Every tensor begins where one of any dtype may.
ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of one tensor, mostly all of them.

    Attributes:
        shape: of the whole tensor.
        start: the first byte of the tensor that is meant.
        count: bytes from there.
        is_apart: sent by a broadcast of its own, from the tensor's own memory.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    count: int
    is_apart: bool = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Say whether the piece is all of the tensor."""
        return self.count == self.num_bytes

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row of the tensor, along its first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def is_last(self) -> bool:
        """Say whether the tensor ends with the piece."""
        return self.start + self.count == self.num_bytes

    @property
    def text(self) -> str:
        """Return the piece as it stands in a header."""
        dtype = str(self.dtype).removeprefix("torch.")
        return json.dumps([self.name, dtype, self.shape, self.start, self.count, self.is_apart])

    @classmethod
    def of(cls, fields: Any) -> Piece:
        """Return the piece that a header states.

        Raises: ValueError: it is none.
        """
        match fields:
            case [str(name), str(dtype), [*shape], int(start), int(count), bool(apart)]:
                kind = getattr(torch, dtype, None)
                sizes = all(type(size) is int and size >= 0 for size in shape)
                if isinstance(kind, torch.dtype) and sizes:
                    piece = cls(name, kind, tuple(shape), start, count, apart)
                    if piece._is_inside():
                        return piece
        raise ValueError(f"{fields!r:.200} states no piece of a tensor")

    def _is_inside(self) -> bool:
        sizes = self.start, self.count
        whole_numbers = all(size >= 0 and size % self.dtype.itemsize == 0 for size in sizes)
        return whole_numbers and sum(sizes) <= self.num_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The pieces of a bucket, or the end.

    Attributes:
        ends: no bucket follows, nor belongs to this header.
        failure: the reason why the weights are not complete, at such an end.
    """

    pieces: tuple[Piece, ...] = ()
    ends: bool = False
    failure: str = ""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the bucket."""
        return max((start + piece.count for start, piece in self.placed()), default=0)

    def placed(self) -> Iterator[tuple[int, Piece]]:
        """Yield each piece after the byte at which it begins in the bucket."""
        start = 0
        for piece in self.pieces:
            yield start, piece
            start = after(start + piece.count)

    def transfers(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield the broadcasts of the bucket: its bytes, and the number of a piece sent apart."""
        begun: int | None = None
        for number, (start, piece) in enumerate(self.placed()):
            if begun is None:
                begun = start
            if piece.is_apart:
                if begun < start:
                    yield begun, start, None
                if piece.count:
                    yield start, start + piece.count, number
                begun = None
        if begun is not None and begun < self.num_bytes:
            yield begun, self.num_bytes, None

    def encoded(self) -> torch.Tensor:
        """Return it as ``[HEADER_BYTES]`` uint8: JSON, and blanks behind it."""
        pieces = ",".join(piece.text for piece in self.pieces)
        text = _text(pieces, self.ends, self.failure)
        while len(text) > HEADER_BYTES and self.failure:
            text = _text(pieces, self.ends, self.failure[: HEADER_BYTES // 16])
        return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES).encode()), dtype=torch.uint8)

    @classmethod
    def decoded(cls, encoded: torch.Tensor, bucket_bytes: int) -> Header:
        """Return what ``encoded`` made a tensor of.

        Raises: ValueError: it is no header, or one of a larger bucket.
        """
        found = json.loads(bytes(encoded.cpu().numpy()))
        match found:
            case {"pieces": [*pieces], "ends": bool(ends), "failure": str(failure)}:
                header = cls(tuple(map(Piece.of, pieces)), ends, failure)
                if header.num_bytes <= bucket_bytes and not (ends and pieces):
                    return header
        raise ValueError(f"{found!r:.200} is no header of a bucket of {bucket_bytes} bytes")


def fits(texts: Iterable[str]) -> bool:
    """Say whether a header has room for pieces whose texts are these."""
    return len(_text("", True, "")) + sum(len(text) + 1 for text in texts) <= HEADER_BYTES


def after(num_bytes: int) -> int:
    """Return where the next piece may begin."""
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _text(pieces: str, ends: bool, failure: str) -> str:
    rest = json.dumps({"ends": ends, "failure": failure})
    return f'{{"pieces":[{pieces}],{rest[1:]}'
