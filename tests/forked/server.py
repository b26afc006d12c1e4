"""Run programs as forks of a process that has imported torch and interposer, which takes long.

    python server.py SOCKET

Prints a line once programs can be asked for at the socket; ``client.py`` does so.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
import types
import weakref
from typing import Any, NoReturn

if __name__ == "__main__":
    gc.disable()  # imports leave almost no garbage, and take longer while some is sought
import torch
import torch._dynamo
import transformers.models.llama.modeling_llama
import uvicorn

import interposer
import interposer_adapt
import interposer_engine
import interposer_serve
import interposer_tools.options

# Loaded on first use, which would be in each program. Neither reads the environment, nor what is
# installed. The plugin of pytest is left to pytest, which rewrites what it imports.
LOADED = (
    interposer.Resolver,
    interposer.explain,
    interposer_adapt.load_encoder,
    interposer_engine.load,
    interposer_serve.application,
    interposer_tools.doctor,
    transformers.AutoTokenizer,
    uvicorn.Server,
)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(sys.argv[1])
        listening.listen()
        # Those of torch's libraries would take half a second at the end of each program.
        for finalizer in vars(weakref.finalize)["_registry"]:
            finalizer.atexit = False
        gc.freeze()
        gc.enable()
        print(f"torch {torch.__version__} and {interposer_tools.__name__} are there", flush=True)
        while True:
            asking, _ = listening.accept()
            request, files = received(asking)
            if not os.fork():
                break
            asking.close()
            for file in files:
                os.close(file)
    answer(asking, request, files)


def received(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the request, and the descriptors of standard input, output and errors."""
    _, files, _, _ = socket.recv_fds(asking, 1, 3)
    with asking.makefile("rb") as request:
        return json.load(request), list(files)


def answer(asking: socket.socket, request: dict[str, Any], files: list[int]) -> NoReturn:
    """Run the program in a process of its own; send how it ended, as subprocess would say it.

    The program is killed if its client is.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (child := os.fork()):
        asking.close()
        run(request, files)
    if sys.platform == "linux":
        poll, end = select.poll(), os.pidfd_open(child)
        poll.register(end, select.POLLIN)
        poll.register(asking, 0)  # without events, poll still reports that the client is gone
        if end not in dict(poll.poll()):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):
        asking.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def run(request: dict[str, Any], files: list[int]) -> NoReturn:
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["arguments"]]
    own = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = ["", *own.split(os.pathsep)] if own else [""]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(request["source"], "<forked>", "exec"), program.__dict__)
        sys.exit()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - the program's, told as Python would
        traceback.print_exc()
        status = 1
    # What Python does at the end, but for freeing one by one what it shares with this program.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
