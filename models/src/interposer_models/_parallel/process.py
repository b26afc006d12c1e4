"""The process of a rank that a command started."""

from __future__ import annotations

import json
import signal
import socket
import sys
from datetime import timedelta

from interposer_models._parallel.ending import end_with_parent

_START = timedelta(minutes=5)


def main() -> None:
    """Join the ranks that the first argument names, and follow rank 0 until it ends."""
    facts = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(facts["parent"], facts["lifeline"])

    import torch.distributed as dist

    from interposer import Config, place
    from interposer.errors import InterposerError
    from interposer_models._parallel.channel import Channel
    from interposer_models._parallel.follower import Follower, Following
    from interposer_models._parallel.group import Group
    from interposer_models._parallel.threads import own_cores

    rank, size = facts["rank"], facts["size"]
    channel = Channel(socket.socket(fileno=facts["channel"]))
    config = None if facts["platform"] is None else Config.model_validate_json(facts["platform"])
    try:
        with own_cores(place(config).platform, rank, size):
            store = dist.TCPStore("127.0.0.1", facts["port"], is_master=False, timeout=_START)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            group = Group(dist.group.WORLD, lambda _: Following(channel), facts["timeout_seconds"])
            Follower(channel, group).run()
    except InterposerError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
