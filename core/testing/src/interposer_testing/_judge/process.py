"""The process of a kernel: requests, replies, and its memory while the process is stopped."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from interposer.tooling import child_environment
from interposer_testing._judge.memory import SharedMemory

_PROGRAM = "serve.py"
_HOME = Path(__file__).parent
# Files of this package that the process imports.
_PROGRAM_FILES = {
    _PROGRAM: _HOME / "worker.py",
    "exact_interpreter.py": _HOME.parent / "exact_interpreter.py",
}
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_MAX_REPLY_BYTES = 64 << 20
_MAX_OUTPUT_CHARACTERS = 4000
_START_SECONDS = 120.0
_LOADING_SECONDS = 300.0
_POLL_SECONDS = 1.0
_STOP_SECONDS = 2e-5
_SETTLING_SECONDS, _IDLE_SECONDS = 0.3, 0.2
# What a process needs in order to find the compiler, libraries, caches and its threads.
_VARIABLES = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY"),
    *("TRITON_INTERPRET", "TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CC", "CXX"),
)


class ProcessEndedError(Exception):
    """The process of the kernel ended, hung, or broke the protocol."""


class KernelError(Exception):
    """The kernel raised an exception in its process."""

    representation = ""

    def __repr__(self) -> str:
        """Return the ``repr`` that the exception has in the kernel's process."""
        return self.representation or super().__repr__()


def kernel_error(name: str, message: str, trace: str, representation: str = "") -> KernelError:
    """Create the error for an exception of another process, in a class of the same name."""
    class_name = name if name.isidentifier() else "Exception"
    kind = type(class_name, (KernelError,), {"representation": representation})
    error: KernelError = kind(message)
    error.add_note(trace)
    return error


class KernelProcess:
    """A process that holds functions of a solution, and neither references nor expected values.

    Attributes:
        memory: memory that is shared with the process.
        num_calls: number of calls that the process was asked to make.
    """

    def __init__(
        self,
        sources: Mapping[str, bytes],
        *,
        paths: tuple[str, ...] = (),
        limit_seconds: float = 120.0,
        environment: Mapping[str, str] | None = None,
        is_shell_child: bool = False,
        is_watched: bool = True,
        memory: Callable[[], SharedMemory] = SharedMemory,
    ) -> None:
        """Configure the process; the ``with`` statement starts the process.

        Args:
            sources: content of the files in the process's folder, by relative path.
            paths: folders to import installed modules from, besides those of this Python.
            limit_seconds: time limit of one request.
            environment: variables besides those that every program needs.
            is_watched: find changes of settings by functions; takes 0.1 ms
                for each call.
            is_shell_child: start the process from a shell, as a terminal or a service does.
            memory: creates the memory for arguments and results.
        """
        self._sources = sources
        self._paths = paths
        self._limit_seconds = limit_seconds
        self._environment = dict(environment or {})
        self._is_shell_child = is_shell_child
        self._is_watched = is_watched
        self._create_memory = memory
        self._has_stopped = False
        self.num_calls = 0

    def __enter__(self) -> KernelProcess:
        with ExitStack() as stack:
            self.memory = stack.enter_context(self._create_memory())
            ours, theirs = socket.socketpair()
            self._channel = stack.enter_context(ours)
            with theirs:
                self._start(theirs, stack)
            stack.callback(self._end)
            # A fork can be read by this process only if it does not inherit this.
            stack.enter_context(_unreadable_memory())
            self._received = bytearray()
            layout = self.memory.layout()
            hello = self._exchange(
                {"action": "base", "layout": layout, "is_watched": self._is_watched},
                _START_SECONDS,
            )
            self.base, self.num_threads = int(hello["base"]), int(hello["threads"])
            # The functions of the solution are not loaded yet, so the number is right.
            self._pid = int(hello["process"])
            self._open = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def _start(self, channel: socket.socket, stack: ExitStack) -> None:
        """Start the process with one end of the channel; ``stack`` closes the process's files."""
        # Python imports from the folder of the program first, so the sources are in another.
        program_folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  by the stack
        for name, origin in _PROGRAM_FILES.items():
            (program_folder / name).write_bytes(origin.read_bytes())
        for name, content in self._sources.items():
            file = self._folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        variables = child_environment()
        environment = {name: variables[name] for name in _VARIABLES if name in variables}
        environment |= self._environment
        if self._paths:
            environment["PYTHONPATH"] = os.pathsep.join(self._paths)
        descriptors = (channel.fileno(), self.memory.descriptor)
        # faulthandler prints the frames of a crash.
        program = str(program_folder / _PROGRAM)
        command = [sys.executable, "-X", "faulthandler", "-s", program, *map(str, descriptors)]
        if self._is_shell_child:
            command = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *command]
        self._process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            start_new_session=True,
        )

    def request(self, action: str, **content: Any) -> dict[str, Any]:
        """Send a request for an action to the process, and return the reply.

        Raises:
            KernelError: the action raised an exception.
            ProcessEndedError: the process ended, hung, or gave a reply that is none.
        """
        # Loading may compile.
        limit_seconds = max(_LOADING_SECONDS, self._limit_seconds)
        limit = limit_seconds if action == "load" else self._limit_seconds
        reply = self._exchange({"action": action, **content}, limit)
        self.raise_error(reply)
        return reply

    def raise_error(self, reply: Mapping[str, Any]) -> None:
        """Raise the exception of the kernel that a reply describes, if there is one."""
        if "error" in reply:
            raise kernel_error(*_texts(reply["error"], 4))

    def _exchange(self, request: Mapping[str, Any], limit_seconds: float) -> dict[str, Any]:
        self.send(request)
        return self.receive(limit_seconds)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request; raise ProcessEndedError if the process has ended."""
        self.memory.settle()
        self.resume()
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise ProcessEndedError(self._end_of_process()) from error

    def receive(self, limit_seconds: float | None = None) -> dict[str, Any]:
        """Wait for and return the next reply of the process.

        Raises: ProcessEndedError: there is no reply in time, or the reply is malformed.
        """
        end = time.monotonic() + (limit_seconds or self._limit_seconds)
        while b"\n" not in self._received:
            remaining_seconds = end - time.monotonic()
            if remaining_seconds <= 0:
                limit = limit_seconds or self._limit_seconds
                raise ProcessEndedError(f"the process did not answer within {limit:g} s")
            if not select.select([self._channel], [], [], min(remaining_seconds, _POLL_SECONDS))[0]:
                continue
            try:
                part = self._channel.recv(1 << 20)
            except OSError:
                part = b""
            if not part or len(self._received) > _MAX_REPLY_BYTES:
                raise ProcessEndedError(self._end_of_process())
            self._received += part
        line, _, extra = bytes(self._received).partition(b"\n")
        self._received = bytearray(extra)
        if extra:
            raise ProcessEndedError("the process answered more than it was asked")
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProcessEndedError("the process answered something else than JSON") from error
        if not isinstance(reply, dict):
            raise ProcessEndedError("the process answered something else than a JSON object")
        return reply

    def stop(self) -> None:
        """Stop all threads of the process until the next request, or until ``resume``.

        Raises: ProcessEndedError: the process has ended.
        """
        if self._has_stopped:
            return
        try:
            os.kill(self._pid, signal.SIGSTOP)
            while not self.is_stopped():
                time.sleep(_STOP_SECONDS)
        except OSError as error:
            raise ProcessEndedError(self._end_of_process()) from error
        self._has_stopped = True

    def resume(self) -> None:
        """Let the stopped process continue."""
        if self._has_stopped:
            self.memory.settle()
            self._has_stopped = False
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGCONT)

    def is_stopped(self) -> bool:
        """Tell whether every thread of the process is stopped.

        Raises: OSError: the process has ended.
        """
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the thread has just ended
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                if state in "ZX":
                    raise ProcessLookupError(f"process {self._pid} has ended")
                if state not in "Tt":
                    return False
        return True

    def read(self, address: int, target: int, num_bytes: int) -> None:
        """Copy memory of the process, which should be stopped, to an address of this process.

        Raises: ProcessEndedError: the process has no such memory, or may not be read.
        """
        num_read = 0
        while num_read < num_bytes:
            local = _Range(target + num_read, num_bytes - num_read)
            remote = _Range(address + num_read, num_bytes - num_read)
            count = _LIBC.process_vm_readv(
                self._pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0
            )
            if count <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise ProcessEndedError(
                    f"the memory of the result cannot be read at {address:#x} ({reason})"
                )
            num_read += count

    def idle_share(self) -> float:
        """Return the fraction of a core that the process uses while no request is pending.

        Raises: ProcessEndedError: the process has ended.
        """
        self.resume()
        time.sleep(_SETTLING_SECONDS)  # OpenMP's threads spin for a while after a parallel region
        try:
            start, before = time.perf_counter(), self._cpu_seconds()
            time.sleep(_IDLE_SECONDS)
            return (self._cpu_seconds() - before) / (time.perf_counter() - start)
        except OSError as error:
            raise ProcessEndedError(self._end_of_process()) from error

    def _cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def output(self) -> str:
        """Return the end of the standard output and standard error of the process."""
        size = os.fstat(self._output.fileno()).st_size
        start = max(0, size - _MAX_OUTPUT_CHARACTERS)
        return os.pread(self._output.fileno(), _MAX_OUTPUT_CHARACTERS, start).decode(
            errors="replace"
        )

    def _end_of_process(self) -> str:
        """Wait for the process to end, and describe its exit code or signal."""
        # A process that closed its channel may still run.
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "the process closed its channel"
        how = f"left with exit code {code}"
        # A shell reports a signal as 128 and its number.
        number = code - 128 if self._is_shell_child else -code
        if number > 0:
            how = f"was killed by {signal.Signals(number).name}"
        return f"the process of the kernel {how}, instead of returning a result"

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def _unreadable_memory() -> Iterator[None]:
    """Prevent unprivileged processes from reading this process's memory within a block."""
    before = _LIBC.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    try:
        yield
    finally:
        # 2 can be read, but not set.
        _LIBC.prctl(_PR_SET_DUMPABLE, int(before == 1), 0, 0, 0)


class _Range(ctypes.Structure):
    """``struct iovec``: an address and a number of bytes."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)


def _texts(values: Any, count: int) -> list[str]:
    texts = [str(value) for value in values] if isinstance(values, list) else []
    return [*texts, *[""] * count][:count]
