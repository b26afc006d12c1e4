"""A process in which a constraint is compiled before this process does so."""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import asdict
from threading import Lock
from typing import Any

from interposer.errors import RequestError
from interposer.tooling import child_environment
from interposer_models._constraint import Constraint
from interposer_models._engine.constraint_grammar import malformed
from interposer_models._engine.constraint_limits import ConstraintLimits

STACK_BYTES = 8 * 2**20
# A process that others keep from running has had less processor time than has passed.
_PATIENCE = 4
_STARTING_SECONDS = 60.0
_MOST_ANSWER = 64 * 2**10
_MODULE = "interposer_models._engine.constraint_child"


class ConstraintProcess:
    """Compiles constraints of which this process knows nothing yet, and says what they take.

    The process starts with this object and again after each constraint that ended it, so that the
    next one need not wait for it. Any thread may ask; one constraint is compiled at a time.
    """

    def __init__(self, serialized: str, vocab_size: int, limits: ConstraintLimits) -> None:
        """Start it.

        Args:
            serialized: the content of the tokenizer.json.
        """
        content = serialized.encode()
        self._file = tempfile.TemporaryFile(prefix="interposer-")  # noqa: SIM115 - kept open
        self._file.write(content)
        self._file.flush()
        self._limits = limits
        self._arguments = (len(content), vocab_size, limits.seconds, 4 * limits.each_bytes)
        self._lock = Lock()
        self._closed = False
        self._start()

    def _start(self) -> None:
        number = self._file.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, *map(str, (number, *self._arguments, STACK_BYTES))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            # A Ctrl-C at the terminal is for the server alone.
            start_new_session=True,
            env=child_environment(PYTHONSAFEPATH="1", MALLOC_ARENA_MAX="2"),
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._fresh = True

    def close(self) -> None:
        """End the process, also while it compiles for another thread."""
        self._closed = True
        self._end()
        self._file.close()

    def num_bytes(self, constraint: Constraint) -> int:
        """Return the bytes that a constraint takes once it is compiled.

        Raises: RequestError: it is malformed, or compiling it takes more than the limits allow.
        """
        with self._lock:
            try:
                answer = self._ask(json.dumps(asdict(constraint)).encode())
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                if self._closed:
                    raise RequestError("The model was closed. Try: a new one") from None
                reason = self._ending(error)
                self._start()
                raise malformed(constraint, reason) from None
        if "error" in answer:
            raise RequestError(str(answer["error"]))
        if answer["bytes"] > self._limits.each_bytes:
            reason = (
                f"compiled, it takes {answer['bytes']} bytes; allowed are {self._limits.each_bytes}"
            )
            raise malformed(constraint, reason)
        return int(answer["bytes"])

    def _ask(self, content: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        seconds = _PATIENCE * (self._limits.seconds + 1)
        until = time.monotonic() + seconds + (_STARTING_SECONDS if self._fresh else 0)
        self._process.stdin.write(struct.pack(">I", len(content)) + content)
        self._process.stdin.flush()
        (size,) = struct.unpack(">I", self._read(4, until))
        if size > _MOST_ANSWER:
            raise EOFError
        answer: dict[str, Any] = json.loads(self._read(size, until))
        self._fresh = False
        return answer

    def _read(self, size: int, until: float) -> bytes:
        assert self._process.stdout is not None
        number, content = self._process.stdout.fileno(), b""
        while len(content) < size:
            ready, _, _ = select.select([number], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(number, size - len(content))
            if not part:
                raise EOFError
            content += part
        return content

    def _ending(self, error: Exception) -> str:
        """End the process, and return why it could not answer."""
        if isinstance(error, TimeoutError):
            self._process.kill()
        code = self._process.wait()
        self._end()
        if isinstance(error, TimeoutError) or code == -signal.SIGXCPU:
            return f"compiling it takes longer than the {self._limits.seconds:g} s that are allowed"
        if code == -signal.SIGSEGV:
            return "it nests deeper than can be compiled"
        return (
            "compiling it takes more memory than is allowed, or fails in the library "
            f"(its process ended with {_name(code)})"
        )


def _name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"the exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
