"""Starts, watches and ends the follower processes of a command whose own process is rank 0."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from interposer import Config, Platform, effective_config, place
from interposer.errors import ConfigError, RankError
from interposer.tooling import child_environment
from interposer_engine._distributed.codec import encode
from interposer_engine._distributed.group import TIMEOUT_SECONDS, Group, check_number
from interposer_engine._distributed.protocol import Channel, describe_exit, end_with_parent
from interposer_engine._distributed.ranks import Leader, Losses
from interposer_engine._language_model import LanguageModel
from interposer_engine._loader import load


@contextmanager
def bound_to_share_of_cores(platform: Platform, rank: int, size: int) -> Iterator[None]:
    """Bind threads to an equal share of the host's cores per rank, within a ``with`` block.

    Nothing changes if the platform cannot bind threads, or has fewer cores than ranks.
    """
    if not all(platform.provides(member) for member in ("cores", "bind_threads")):
        yield
        return
    # A core is a set of processors, which are its hardware threads. Use one thread per core.
    cores = sorted(platform.cores(), key=min)
    num_cores, num_threads = len(cores) // size, torch.get_num_threads()
    if not num_cores:
        yield
        return
    rank_cores = cores[rank * num_cores : (rank + 1) * num_cores]
    platform.bind_threads([core[0] for core in rank_cores])
    try:
        yield
    finally:
        platform.bind_threads([processor for core in cores for processor in core])
        torch.set_num_threads(num_threads)


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
    from interposer_engine._distributed.group import Group
    from interposer_engine._distributed.protocol import Channel
    from interposer_engine._distributed.ranks import Follower, FollowerCoordinator

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
    """Return the torch store, in a file, through which ranks find each other."""
    import torch.distributed as dist

    store = dist.FileStore(path, size)  # type: ignore[attr-defined]
    store.set_timeout(_START_TIMEOUT)
    return store


@contextmanager
def launched(
    tensor_parallel: int | None,
    config: Config | None = None,
    *,
    timeout_seconds: float = 60.0,
) -> Iterator[Callable[..., LanguageModel]]:
    """Start the other ranks of this host, and return a function that loads a model on all ranks.

    The other ranks run that one model in parallel to this process, and end with the ``with`` block.
    Each rank of a host's platform computes on an equal share of the cores.

    Args:
        tensor_parallel: number of ranks, including this process; None or 1 starts none.
        config: policy for the choice of the platform.
        timeout_seconds: time limit for each rank to reach a step.
    Returns: ``load``, without ``tensor_parallel``.
    Raises:
        ConfigError: the number is not positive, or this process is one of several already.
        RankError: another rank was lost. The main thread is interrupted first. If the block does
            not end within 10 s, the process prints the error and ends.
    """
    if tensor_parallel is None or check_number(tensor_parallel) == 1:
        yield load
        return

    with Launched(tensor_parallel, config, timeout_seconds) as ranks:
        yield ranks.load


_SECRET_BYTES = 32
_CLOSE_SECONDS = 5.0
_GRACE_SECONDS = 10.0  # for this process to end by itself after a rank was lost
_EXIT_SECONDS = 2.0  # for a follower to exit after its connection was closed
_CLOSED = select.POLLHUP | getattr(select, "POLLRDHUP", 0)
_NUM_LAST_LINES = 20
_PROGRAM = "from interposer_engine._distributed.launcher import main; main()"


class Launched:
    """Follower processes that run during a ``with`` block; this process is rank 0.

    If a follower ends unexpectedly, or fails to answer another thread, the main thread is
    interrupted like by Ctrl-C, and the block raises the reason. If the main thread does not leave
    the block within 10 s, this process ends.
    """

    def __init__(
        self,
        size: int,
        config: Config | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Check the number of ranks, without starting a process.

        Args:
            size: number of ranks, including this process.
            config: policy for the choice of the platform.
            timeout_seconds: time limit for each rank to reach a step.
            clock: returns seconds, for the time limit of followers that end.
            sleep: waits for a number of seconds between two checks of these followers.
        Raises: ConfigError: the number is not positive, or this process is one of several already.
        """
        check_number(size)
        if dist.is_initialized() or dist.is_torchelastic_launched():
            raise ConfigError(
                f"--tensor-parallel {size} starts processes, but this process has peers already. "
                "Try: without torchrun, or load(..., tensor_parallel=...) in a program of its own"
            )
        self._size, self._config = size, config
        self._timeout_seconds = timeout_seconds
        self._clock, self._sleep = clock, sleep
        self._secret = secrets.token_bytes(_SECRET_BYTES)  # sent over inherited sockets only
        self._losses = Losses(self._interrupt)
        self._followers: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._stack = ExitStack()
        self._group: Group | None = None

    def __enter__(self) -> Self:
        """Start the followers, and wait until all have joined."""
        try:
            self._start()
        except BaseException as error:
            self._close()
            self._raise(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """End the follower processes.

        Raises: RankError: a follower was lost.
        """
        self._close()
        self._raise(error)

    def load(
        self, path: str | Path, dtype: Any = "auto", config: Config | None = None, **options: Any
    ) -> LanguageModel:
        """Load a model on all ranks; see the function ``load`` of ``interposer_engine``."""
        assert self._group is not None
        progress = options.pop("progress", None)
        options = {"dtype": dtype, "config": effective_config(config), **options}
        leader = self._leader()
        leader.call_others("load", str(path), **options)
        return load(path, tensor_parallel=self._group, progress=progress, **options)

    def _leader(self) -> Leader:
        return Leader(self._channels, self._losses, self._timeout_seconds)

    def _start(self) -> None:
        platform = place(self._config).platform
        # A store in a private folder: every local process could write to a store with a port.
        folder = tempfile.TemporaryDirectory(prefix="interposer-ranks-", ignore_cleanup_errors=True)
        path = str(Path(self._stack.enter_context(folder), "store"))
        lifeline, writing_end = os.pipe()
        self._stack.callback(os.close, writing_end)
        for rank in range(1, self._size):
            self._start_one(rank, path, lifeline)
        os.close(lifeline)
        # After that, as a process inherits the cores of the thread that started it.
        self._stack.enter_context(bound_to_share_of_cores(platform, 0, self._size))
        store = file_store(path, self._size)
        dist.init_process_group("gloo", store=store, rank=0, world_size=self._size)
        self._group = Group(
            dist.group.WORLD, lambda _: self._leader(), self._timeout_seconds, self._secret
        )

    def _start_one(self, rank: int, path: str, lifeline: int) -> None:
        ours, theirs = socket.socketpair()
        arguments = [os.getpid(), lifeline, theirs.fileno()]
        config = effective_config(self._config)
        facts = rank, self._size, path, self._secret, self._timeout_seconds, config
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[lifeline, theirs.fileno()],
            process_group=0,  # Ctrl-C is for rank 0 alone
            env=child_environment(),
        )
        theirs.close()
        self._followers.append(process)
        self._channels.append(Channel(ours))
        self._channels[-1].send_call(encode(facts))
        lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        reader = threading.Thread(target=_read, args=(rank, process, lines), daemon=True)
        reader.start()
        for watch, watched in (
            (self._watch, (rank, process, reader, lines)),
            (self._watch_connection, (rank, process, ours.fileno())),
        ):
            threading.Thread(target=watch, args=watched, daemon=True).start()

    def _watch(
        self,
        rank: int,
        process: subprocess.Popen[bytes],
        reader: threading.Thread,
        lines: deque[str],
    ) -> None:
        """Wait for the end of a follower, and report an unexpected end as a loss."""
        code = process.wait()
        reader.join(1.0)
        text = "".join(f"\n  {line}" for line in lines)
        output = f" The end of what it printed:{text}" if text else ""
        self._losses.report(RankError(0, f"rank {rank} {describe_exit(code)}.{output}", [rank]))

    def _watch_connection(
        self, rank: int, process: subprocess.Popen[bytes], connection: int
    ) -> None:
        """Wait until a follower closes its connection; report a loss if its process hangs."""
        # Only the end of the connection: data that arrives belongs to the main thread.
        poll = select.poll()
        poll.register(connection, _CLOSED)
        poll.poll()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_SECONDS)
            return  # ``_watch`` reports the exit
        self._losses.report(RankError(0, f"rank {rank} closed its connection and hangs", [rank]))

    def _interrupt(self) -> None:
        """Interrupt the main thread, and start a timer that ends the process."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        timer = threading.Timer(_GRACE_SECONDS, self._exit_if_alive)
        timer.daemon = True
        timer.start()

    def _exit_if_alive(self) -> None:
        if not self._losses.closed:
            sys.stderr.write(f"error: {self._losses.first}\n")
            sys.stderr.flush()
            self._kill()
            os._exit(1)

    def _close(self) -> None:
        self._losses.close()
        for channel in self._channels:
            channel.close()  # a follower ends when its channel is closed
        end = self._clock() + (_CLOSE_SECONDS if self._losses.first is None else 0.0)
        for process in self._followers:
            while process.poll() is None and self._clock() < end:
                self._sleep(0.01)
        self._kill()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._stack.close()

    def _kill(self) -> None:
        for process in self._followers:
            process.kill()  # has no effect on a process that has ended
        for process in self._followers:
            process.wait()

    def _raise(self, error: BaseException | None) -> None:
        """Raise the loss of a follower instead of the error that the loss caused on this rank."""
        loss = self._losses.first
        if loss is not None and isinstance(error, RankError | KeyboardInterrupt | None):
            raise loss from error


def _read(rank: int, process: subprocess.Popen[bytes], lines: deque[str]) -> None:
    """Forward a follower's output, and keep the last lines for error messages."""
    assert process.stderr is not None
    for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        lines.append(text)
        sys.stderr.write(f"[rank {rank}] {text}\n")
    process.stderr.close()
