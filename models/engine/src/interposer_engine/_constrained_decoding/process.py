"""Child process that compiles untrusted constraints before the server itself does."""

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
from interposer_engine._constrained_decoding.grammar import malformed
from interposer_engine._constrained_decoding.limits import ConstraintLimits
from interposer_engine._sampling_params import Constraint

STACK_BYTES = 8 * 2**20
# On a busy machine the child gets only part of a core, so that wall time exceeds processor time.
_WALL_PER_PROCESSOR_SECOND = 4
_START_SECONDS = 60.0
_EXIT_SECONDS = 5.0  # from the end of the child's output to its exit
_MAX_RESPONSE_BYTES = 64 * 2**10
# The child's heap while it compiles, as a multiple of the limit on the compiled constraint.
_MEMORY_TO_COMPILE = 4
_MODULE = "interposer_engine._constrained_decoding.child"


class TransientRequestError(RequestError):
    """A constraint could not be compiled this time, but may be compiled later."""


class ConstraintProcess:
    """Compiles constraints in a child process, and returns the memory of each compiled constraint.

    The child starts with this object. It starts again as soon as a constraint has ended it, so that
    the next constraint need not wait for the start. Any thread may call the methods; one constraint
    is compiled at a time.
    """

    def __init__(self, serialized: str, vocab_size: int, limits: ConstraintLimits) -> None:
        """Start the child process.

        Args:
            serialized: Content of the tokenizer.json.
            vocab_size: Number of logits of the model.
            limits: Limits on constraints.
        """
        content = serialized.encode()
        self._file = tempfile.TemporaryFile(prefix="interposer-")  # noqa: SIM115 - kept open
        self._file.write(content)
        self._file.flush()
        self._limits = limits
        self._arguments = (
            len(content),
            vocab_size,
            limits.compile_seconds,
            _MEMORY_TO_COMPILE * limits.compiled_bytes,
        )
        self._lock = Lock()
        self._closed = False
        self._start()

    def _start(self) -> None:
        descriptor = self._file.fileno()
        arguments = map(str, (descriptor, *self._arguments, STACK_BYTES))
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[descriptor],
            # In a session of its own the child does not get the Ctrl-C of the terminal.
            start_new_session=True,
            env=child_environment(PYTHONSAFEPATH="1", MALLOC_ARENA_MAX="2"),
        )
        self._stop = weakref.finalize(self, _stop, self._process)
        self._is_starting = True

    def close(self) -> None:
        """End the child process, even during a compilation; later calls raise RequestError."""
        self._closed = True
        self._stop()
        self._file.close()

    def num_bytes(self, constraint: Constraint) -> int:
        """Compile a constraint in the child process, and return the compiled size in bytes.

        Raises: RequestError: the constraint is malformed, or exceeds a limit on time or memory.
        """
        with self._lock:
            try:
                response = self._exchange(json.dumps(asdict(constraint)).encode())
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                if self._closed:
                    raise TransientRequestError("The model was closed. Try: a new one") from None
                transient, reason = self._stop_reason(error)
                self._start()
                refusal = malformed(constraint, reason)
                raise (TransientRequestError(str(refusal)) if transient else refusal) from None
        if "error" in response:
            raise RequestError(str(response["error"]))
        num_bytes = int(response["bytes"])
        allowed = self._limits.compiled_bytes
        if num_bytes > allowed:
            reason = f"the compiled constraint has {num_bytes} bytes; allowed are {allowed}"
            raise malformed(constraint, reason)
        return num_bytes

    def _exchange(self, content: bytes) -> dict[str, Any]:
        """Send a request to the child process, and return the response.

        Raises: OSError, EOFError: the child has ended. TimeoutError: it did not respond in time.
        """
        assert self._process.stdin is not None
        # The child's limit has whole seconds, so that it may take up to one second longer.
        seconds = _WALL_PER_PROCESSOR_SECOND * (self._limits.compile_seconds + 1)
        deadline = time.monotonic() + seconds + (_START_SECONDS if self._is_starting else 0)
        self._process.stdin.write(struct.pack(">I", len(content)) + content)
        self._process.stdin.flush()
        (size,) = struct.unpack(">I", self._read(4, deadline))
        if size > _MAX_RESPONSE_BYTES:
            raise EOFError
        response: dict[str, Any] = json.loads(self._read(size, deadline))
        self._is_starting = False
        return response

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, content = self._process.stdout.fileno(), b""
        while len(content) < size:
            milliseconds = max(0.0, 1e3 * (deadline - time.monotonic()))
            # Unlike select, poll takes a descriptor above 1023, which a server reaches.
            readable = select.poll()
            readable.register(descriptor, select.POLLIN)
            if not readable.poll(milliseconds):
                raise TimeoutError
            chunk = os.read(descriptor, size - len(content))
            if not chunk:
                raise EOFError
            content += chunk
        return content

    def _stop_reason(self, error: Exception) -> tuple[bool, str]:
        """End the child process, and return why it did not respond.

        Returns: whether the same constraint may be compiled later, and the reason for users.
        """
        try:
            code = self._process.wait(0 if isinstance(error, TimeoutError) else _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        self._stop()
        seconds = self._limits.compile_seconds
        if code is None:
            # A busy machine may have kept the child from its processor time.
            return True, f"compiling takes longer than the allowed {seconds:g} s"
        if code == -signal.SIGXCPU:
            return False, f"compiling takes longer than the allowed {seconds:g} s"
        if code == -signal.SIGSEGV:
            return False, "it is nested too deeply for the compiler's stack"
        reason = (
            "compiling takes more memory than allowed, or the compiler fails "
            f"(its process ended with {_exit_name(code)})"
        )
        # The kernel kills the child if the machine has no memory, whatever the constraint.
        return code == -signal.SIGKILL, reason


def _exit_name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
