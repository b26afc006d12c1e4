"""The process of a follower rank that a command started."""

from __future__ import annotations

import signal
import socket
import sys
from datetime import timedelta
from typing import Any

from interposer_models._parallel.process_end import end_with_parent

_START_TIMEOUT = timedelta(minutes=5)


def main() -> None:
    """Join the ranks, and execute commands of rank 0 until rank 0 ends."""
    parent, lifeline, connection = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    # Before the imports below, which take seconds.
    end_with_parent(parent, lifeline)

    import torch.distributed as dist

    from interposer import place
    from interposer.errors import InterposerError
    from interposer_models._parallel.channel import Channel
    from interposer_models._parallel.follower import Follower, FollowerCoordinator
    from interposer_models._parallel.group import Group
    from interposer_models._parallel.threads import bound_to_share_of_cores

    channel = Channel(socket.socket(fileno=connection))
    rank, size, path, secret, timeout_seconds, config = channel.receive_call(channel.receive()[2])
    try:
        with bound_to_share_of_cores(place(config).platform, rank, size):
            store = file_store(path, size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            group = Group(
                dist.group.WORLD, lambda _: FollowerCoordinator(channel), timeout_seconds, secret
            )
            Follower(channel, group).run()
            dist.destroy_process_group()
    except InterposerError as error:
        sys.exit(f"error: {error}")


def file_store(path: str, size: int) -> Any:
    """Return the store in a file by which ranks find each other."""
    import torch.distributed as dist

    store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    store.set_timeout(_START_TIMEOUT)
    return store
