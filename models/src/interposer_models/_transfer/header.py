"""Headers of buckets: the list of tensors, or pieces of tensors, in a bucket."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

HEADER_BYTES = 1 << 16
# Each piece starts at a multiple, which aligns tensors of any dtype.
ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of one tensor; mostly the complete tensor.

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
        """Size of the complete tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Say whether the piece is the complete tensor."""
        return self.count == self.num_bytes

    @property
    def row_bytes(self) -> int:
        """Size of one row of the tensor in bytes, along the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def is_last(self) -> bool:
        """Say whether the tensor ends with the piece."""
        return self.start + self.count == self.num_bytes

    @property
    def text(self) -> str:
        """The piece as JSON, for a header."""
        dtype = str(self.dtype).removeprefix("torch.")
        return json.dumps([self.name, dtype, self.shape, self.start, self.count, self.is_apart])

    @classmethod
    def of(cls, fields: Any) -> Piece:
        """Return the piece from fields in a header.

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
    """The pieces of the next bucket, or the end of the transfer.

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
        """Yield ``(offset in the bucket, piece)``."""
        start = 0
        for piece in self.pieces:
            yield start, piece
            start = aligned(start + piece.count)

    def transfers(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield the broadcasts of the bucket.

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
        """Return the header as uint8 ``[HEADER_BYTES]``: JSON, padded with blanks."""
        pieces = ",".join(piece.text for piece in self.pieces)
        text = _text(pieces, self.ends, self.failure)
        # The failure of a trainer can be any text.
        while len(text) > HEADER_BYTES and self.failure:
            text = _text(pieces, self.ends, self.failure[: HEADER_BYTES // 16])
        return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES).encode()), dtype=torch.uint8)

    @classmethod
    def decoded(cls, encoded: torch.Tensor, bucket_bytes: int) -> Header:
        """Return the header that ``encoded`` returned as a tensor.

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
    """Say whether pieces with such texts fit into one header."""
    return len(_text("", True, "")) + sum(len(text) + 1 for text in texts) <= HEADER_BYTES


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to the alignment of pieces."""
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _text(pieces: str, ends: bool, failure: str) -> str:
    fields = json.dumps({"ends": ends, "failure": failure})
    return f'{{"pieces":[{pieces}],{fields[1:]}'
