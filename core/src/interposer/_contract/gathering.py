"""Exchange of bytes between ranks, without pickles, signed with the secret of a launch.

The process group's library opens the connections, without authentication. A message without the
signature of its rank is therefore refused unread.
"""

from __future__ import annotations

import hmac
from typing import Any

from interposer._contract.errors import RankError

MOST_BYTES = 1 << 30
"""The largest accepted size of one message."""

_DIGEST_BYTES = 32


def gather_bytes(content: bytes, group: Any, secret: bytes = b"") -> list[bytes]:
    """Return the bytes of every rank, in order; every rank must call this at the same time.

    Args:
        group: process group of torch.distributed over host memory.
        secret: known to the ranks alone; empty if the launch has none.
    Raises:
        RankError: a message is too long, or lacks the sender's signature.
        RuntimeError: a rank is lost, as reported by torch.distributed.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    message = _signature(content, rank, size, secret) + content
    # all_gather needs tensors of one size, so exchange the lengths first and pad the messages.
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(message)]), group=group)
    counts = [int(length) for length in lengths]
    for sender, count in enumerate(counts):
        if not _DIGEST_BYTES <= count <= MOST_BYTES:
            raise RankError(rank, f"rank {sender} announced a message of {count} bytes", [sender])
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    messages = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(messages, padded, group=group)
    contents = []
    for sender, (count, tensor) in enumerate(zip(counts, messages, strict=True)):
        received = tensor[:count].numpy().tobytes()
        signature, received = received[:_DIGEST_BYTES], received[_DIGEST_BYTES:]
        if not hmac.compare_digest(signature, _signature(received, sender, size, secret)):
            raise RankError(
                rank,
                f"a message of rank {sender} has not the signature of this launch: another process "
                "of this host wrote it",
                [sender],
            )
        contents.append(received)
    return contents


def _signature(content: bytes, rank: int, size: int, secret: bytes) -> bytes:
    # The rank and the number of ranks are signed too, so that no rank can replay another's
    # message.
    return hmac.digest(secret, b"%d of %d " % (rank, size) + content, "sha256")
