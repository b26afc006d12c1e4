"""Starts, watches and ends the follower processes of a command; this process is rank 0."""

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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from interposer import Config, effective_config, place
from interposer.errors import ConfigError, RankError
from interposer.tooling import child_environment
from interposer_models._language_model import LanguageModel
from interposer_models._loader import load
from interposer_models._parallel.channel import Channel
from interposer_models._parallel.codec import encode
from interposer_models._parallel.group import TIMEOUT_SECONDS, Group
from interposer_models._parallel.joining import check_number
from interposer_models._parallel.leader import Leader, Losses
from interposer_models._parallel.process import file_store
from interposer_models._parallel.process_end import describe_exit
from interposer_models._parallel.threads import bound_to_share_of_cores

_SECRET_BYTES = 32
_CLOSE_SECONDS = 5.0
_GRACE_SECONDS = 10.0  # for this process to end by itself after a rank was lost
_EXIT_SECONDS = 2.0  # for a follower to exit after its connection was closed
_CLOSED = select.POLLHUP | getattr(select, "POLLRDHUP", 0)
_NUM_LAST_LINES = 20
_PROGRAM = "from interposer_models._parallel.process import main; main()"


class Launched:
    """Follower processes of this process, within a ``with`` block.

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
        """Check the number of ranks; start no process.

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
                f"--tensor-parallel {size} starts processes, and this one is among others already. "
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
        """End the followers.

        Raises: RankError: a follower was lost.
        """
        self._close()
        self._raise(error)

    def load(
        self, path: str | Path, dtype: Any = "auto", config: Config | None = None, **options: Any
    ) -> LanguageModel:
        """Load a model on all ranks; see ``load`` of ``interposer_models``."""
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
        """Wait until a follower closes its connection, and report a loss if the process hangs."""
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
        """Raise the loss of a follower instead of the resulting error on this rank."""
        loss = self._losses.first
        if loss is not None and isinstance(error, RankError | KeyboardInterrupt | None):
            raise loss from error


def _read(rank: int, process: subprocess.Popen[bytes], lines: deque[str]) -> None:
    """Forward a follower's output, and keep the last lines."""
    assert process.stderr is not None
    for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        lines.append(text)
        sys.stderr.write(f"[rank {rank}] {text}\n")
    process.stderr.close()
