"""The exchange of bytes between ranks: no pickles, and signed with the secret of a launch.

The connections of a process group are those of its library, and have no authentication. A message
that does not carry the signature of its rank is refused before anything of it is read.
"""

from __future__ import annotations

import hmac
from typing import Any

from interposer._contract.errors import RankError

MOST_BYTES = 1 << 30
"""Of one message."""

_DIGEST_BYTES = 32


def gather_bytes(content: bytes, group: Any, secret: bytes = b"") -> list[bytes]:
    """Return the bytes of every rank, in order; every rank calls this at the same time.

    Args:
        group: of torch.distributed, over the host's memory.
        secret: that the ranks alone know; empty if nobody gave them one.
    Raises:
        RankError: a message is too long, or has another signature than that of its rank.
        RuntimeError: a rank is lost, as the library says it.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    message = _signature(content, rank, size, secret) + content
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(message)]), group=group)
    counts = [int(length) for length in lengths]
    for other, count in enumerate(counts):
        if not _DIGEST_BYTES <= count <= MOST_BYTES:
            raise RankError(rank, f"rank {other} announced a message of {count} bytes", [other])
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    messages = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(messages, padded, group=group)
    contents = []
    for other, (count, tensor) in enumerate(zip(counts, messages, strict=True)):
        received = tensor[:count].numpy().tobytes()
        signature, received = received[:_DIGEST_BYTES], received[_DIGEST_BYTES:]
        if not hmac.compare_digest(signature, _signature(received, other, size, secret)):
            raise RankError(
                rank,
                f"a message of rank {other} has not the signature of this launch: another process "
                "of this host wrote it",
                [other],
            )
        contents.append(received)
    return contents


def _signature(content: bytes, rank: int, size: int, secret: bytes) -> bytes:
    return hmac.digest(secret, b"%d of %d " % (rank, size) + content, "sha256")
