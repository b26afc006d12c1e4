"""Entry point of the child process, which compiles untrusted constraints first.

The child reads requests from standard input and writes responses to standard output. Each message
is a big-endian length of four bytes, then JSON. The operating system ends the child when it exceeds
its memory or processor time; the child exits by itself when standard input closes.
"""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from interposer.errors import RequestError
from interposer_engine._constrained_decoding.grammar import (
    compile_constraint,
    grammar_tokenizer,
    heap_bytes,
)
from interposer_engine._sampling_params import Constraint

_NICE = 10  # lower priority than the server, so that compiling does not slow other requests


def main() -> None:
    """Compile the constraints that arrive on standard input, until the input closes.

    Command line: file descriptor of the tokenizer.json, its size in bytes, vocabulary size,
    processor seconds for one constraint, bytes of memory on top of the tokenizer's, bytes of stack.
    """
    descriptor, size, vocab_size, seconds, num_bytes, stack_bytes = map(float, sys.argv[1:])
    with suppress(OSError):
        os.nice(_NICE)
    serialized = os.pread(int(descriptor), int(size), 0).decode()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, responses = sys.stdin.buffer, sys.stdout.buffer
    # Compile in a thread with a stack of known size, as the main thread's depends on the system.
    threading.stack_size(int(stack_bytes))
    arguments = (requests, responses, serialized, int(vocab_size), seconds, int(num_bytes))
    thread = threading.Thread(target=_serve, args=arguments)
    thread.start()
    thread.join()


def _serve(
    requests: BinaryIO,
    responses: BinaryIO,
    serialized: str,
    vocab_size: int,
    seconds: float,
    num_bytes: int,
) -> None:
    try:
        tokenizer, _ = grammar_tokenizer(serialized, vocab_size)
    except RequestError as error:
        response: dict[str, Any] = {"error": str(error)}
        while read(requests) is not None:
            write(responses, response)
        return
    # The tokenizer is exempt from the limit, so the limit is set after it is built.
    _limit_memory(num_bytes)
    while (fields := read(requests)) is not None:
        _limit_time(seconds)
        heap_before = heap_bytes()
        try:
            matcher = compile_constraint(tokenizer, Constraint(**fields), bounded=True)
            response = {"bytes": max(0, heap_bytes() - heap_before)}
            del matcher
        except RequestError as error:
            response = {"error": str(error)}
        write(responses, response)


def read(stream: BinaryIO) -> Any:
    """Read the next message from a stream; return None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    (size,) = struct.unpack(">I", header)
    content = stream.read(size)
    return json.loads(content) if len(content) == size else None


def write(stream: BinaryIO, message: Any) -> None:
    """Write a message to a stream, and flush the stream."""
    content = json.dumps(message).encode()
    stream.write(struct.pack(">I", len(content)) + content)
    stream.flush()


def _limit_memory(num_bytes: int) -> None:
    """Limit the process's address space to its present size plus ``num_bytes``."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(seconds: float) -> None:
    """Limit the process's processor time to the time spent so far plus ``seconds``.

    The sum is rounded up, as the operating system takes whole seconds only.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard_limit))


if __name__ == "__main__":
    main()
