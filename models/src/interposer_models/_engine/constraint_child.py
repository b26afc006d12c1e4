"""The process that compiles constraints before the server does.

It reads requests from its standard input and writes answers to its standard output, each a length
of four bytes and JSON. It ends where its limits of memory or of processor time are passed, and
with its input.
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
from interposer_models._constraint import Constraint
from interposer_models._engine.constraint_grammar import (
    compile_constraint,
    grammar_tokenizer,
    heap_bytes,
)

_NICE = 10  # answers of others go first


def main() -> None:
    """Serve until the input ends.

    Arguments: the descriptor of the tokenizer, its size, the size of the vocabulary, the seconds
    of processor time and the bytes of memory that a constraint may take, and those of the stack.
    """
    descriptor, size, vocab_size, seconds, num_bytes, stack = map(float, sys.argv[1:])
    with suppress(OSError):
        os.nice(_NICE)
    serialized = os.pread(int(descriptor), int(size), 0).decode()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    threading.stack_size(int(stack))
    arguments = (requests, answers, serialized, int(vocab_size), seconds, int(num_bytes))
    thread = threading.Thread(target=_serve, args=arguments)
    thread.start()
    thread.join()


def _serve(
    requests: BinaryIO,
    answers: BinaryIO,
    serialized: str,
    vocab_size: int,
    seconds: float,
    num_bytes: int,
) -> None:
    try:
        tokenizer, _ = grammar_tokenizer(serialized, vocab_size)
    except RequestError as error:
        answer: dict[str, Any] = {"error": str(error)}
        while read(requests) is not None:
            write(answers, answer)
        return
    _limit_memory(num_bytes)
    while (asked := read(requests)) is not None:
        _limit_time(seconds)
        before = heap_bytes()
        try:
            matcher = compile_constraint(tokenizer, Constraint(**asked), bounded=True)
            answer = {"bytes": max(0, heap_bytes() - before)}
            del matcher
        except RequestError as error:
            answer = {"error": str(error)}
        write(answers, answer)


def read(stream: BinaryIO) -> Any:
    """Return the next message of a stream; None at its end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack(">I", head)
    content = stream.read(size)
    return json.loads(content) if len(content) == size else None


def write(stream: BinaryIO, message: Any) -> None:
    """Write a message at once."""
    content = json.dumps(message).encode()
    stream.write(struct.pack(">I", len(content)) + content)
    stream.flush()


def _limit_memory(num_bytes: int) -> None:
    """Let the process have so many bytes more than it has."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(seconds: float) -> None:
    """Let the process have so much more processor time, in whole seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + seconds)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


if __name__ == "__main__":
    main()
