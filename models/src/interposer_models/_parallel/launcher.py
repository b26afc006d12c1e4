"""The other ranks of a command: started, watched and ended by rank 0, which has the user."""

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
from interposer_models._parallel.ending import ended
from interposer_models._parallel.group import TIMEOUT_SECONDS, Group
from interposer_models._parallel.joining import check_number
from interposer_models._parallel.leader import Leader, Losses
from interposer_models._parallel.process import file_store
from interposer_models._parallel.threads import own_cores

_SECRET_BYTES = 32
_CLOSE_SECONDS = 5.0
_GRACE_SECONDS = 10.0  # in which this process ends by itself when a rank is lost
_EXIT_SECONDS = 2.0  # from the end of a follower's connection to that of its process
_CLOSED = select.POLLHUP | getattr(select, "POLLRDHUP", 0)
_KEPT_LINES = 20
_PROGRAM = "from interposer_models._parallel.process import main; main()"


class Launched:
    """Processes that follow this one, within a ``with`` block.

    A follower that ends before it is told to, or answers nothing to another thread, interrupts the
    main thread, as Ctrl-C does, and the block raises why. A main thread that does not come to that
    within 10 s ends with the process.
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
        """Start nothing yet.

        Args:
            size: how many ranks, with this process.
            config: policy by which the platform is chosen.
            timeout_seconds: within which each rank comes to a step.
            clock: returns seconds, for the time limit of followers that end.
            sleep: waits for so many seconds between two looks at these followers.
        Raises: ConfigError: it is no positive number; or this process is one of several already.
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
        self._secret = secrets.token_bytes(_SECRET_BYTES)  # crosses by an inherited socket alone
        self._losses = Losses(self._end)
        self._followers: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._stack = ExitStack()
        self._group: Group | None = None

    def __enter__(self) -> Self:
        """Start the followers, and wait until they have joined."""
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

        Raises: RankError: one of them was lost.
        """
        self._close()
        self._raise(error)

    def load(
        self, path: str | Path, dtype: Any = "auto", config: Config | None = None, **options: Any
    ) -> LanguageModel:
        """Load a model on all ranks; see ``load`` of ``interposer_models``."""
        assert self._group is not None
        progress = options.pop("progress", None)
        told = {"dtype": dtype, "config": effective_config(config), **options}
        leader = self._leader()
        leader.tell("load", str(path), **told)
        return load(path, tensor_parallel=self._group, progress=progress, **told)

    def _leader(self) -> Leader:
        return Leader(self._channels, self._losses, self._timeout_seconds)

    def _start(self) -> None:
        platform = place(self._config).platform
        # A store in a folder of this user alone: to one with a port, every local process can write.
        folder = tempfile.TemporaryDirectory(prefix="interposer-ranks-", ignore_cleanup_errors=True)
        path = str(Path(self._stack.enter_context(folder), "store"))
        lifeline, held = os.pipe()
        self._stack.callback(os.close, held)
        for rank in range(1, self._size):
            self._start_one(rank, path, lifeline)
        os.close(lifeline)
        # Behind that, as a process may use the cores of the thread that started it.
        self._stack.enter_context(own_cores(platform, 0, self._size))
        store = file_store(path, self._size)
        dist.init_process_group("gloo", store=store, rank=0, world_size=self._size)
        self._group = Group(
            dist.group.WORLD, lambda _: self._leader(), self._timeout_seconds, self._secret
        )

    def _start_one(self, rank: int, path: str, lifeline: int) -> None:
        ours, theirs = socket.socketpair()
        own = [os.getpid(), lifeline, theirs.fileno()]
        config = effective_config(self._config)
        facts = rank, self._size, path, self._secret, self._timeout_seconds, config
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *map(str, own)],
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
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        reader = threading.Thread(target=_read, args=(rank, process, lines), daemon=True)
        reader.start()
        for watch, arguments in (
            (self._watch, (rank, process, reader, lines)),
            (self._watch_connection, (rank, process, ours.fileno())),
        ):
            threading.Thread(target=watch, args=arguments, daemon=True).start()

    def _watch(
        self,
        rank: int,
        process: subprocess.Popen[bytes],
        reader: threading.Thread,
        lines: deque[str],
    ) -> None:
        """Wait for the end of a follower, and end everything if nobody wanted it."""
        code = process.wait()
        reader.join(1.0)
        said = "".join(f"\n  {line}" for line in lines)
        told = f" The end of what it printed:{said}" if said else ""
        self._losses.tell(RankError(0, f"rank {rank} {ended(code)}.{told}", [rank]))

    def _watch_connection(
        self, rank: int, process: subprocess.Popen[bytes], connection: int
    ) -> None:
        """Wait until a follower closes its end, though its process may live on."""
        poll = select.poll()
        poll.register(connection, _CLOSED)
        poll.poll()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_SECONDS)
            return  # ``_watch`` says how it ended
        self._losses.tell(RankError(0, f"rank {rank} closed its connection and hangs", [rank]))

    def _end(self) -> None:
        """Interrupt the main thread, which ends the block, and at last the process."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        late = threading.Timer(_GRACE_SECONDS, self._end_late)
        late.daemon = True
        late.start()

    def _end_late(self) -> None:
        if not self._losses.closed:
            sys.stderr.write(f"error: {self._losses.first}\n")
            sys.stderr.flush()
            self._kill()
            os._exit(1)

    def _close(self) -> None:
        self._losses.close()
        for channel in self._channels:
            channel.close()  # upon which a follower ends
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
            process.kill()  # nothing where it has ended
        for process in self._followers:
            process.wait()

    def _raise(self, error: BaseException | None) -> None:
        """Raise the cause of a follower's loss instead of the error it led to on this rank."""
        lost = self._losses.first
        if lost is not None and isinstance(error, RankError | KeyboardInterrupt | None):
            raise lost from error


def _read(rank: int, process: subprocess.Popen[bytes], lines: deque[str]) -> None:
    """Forward a follower's output and keep its last lines."""
    assert process.stderr is not None
    for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        lines.append(text)
        sys.stderr.write(f"[rank {rank}] {text}\n")
    process.stderr.close()
