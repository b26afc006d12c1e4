"""Send every request of ``attacks.py`` to a server, and measure how other clients are affected.

Run by ``make test-load``. Meanwhile one client requests /health and another one reads a stream. The
run fails if /health takes longer than ``MAX_DELAY_SECONDS``, if the longest gap of the stream grows
by more than that, if the stream's text changes, or if the server's memory keeps growing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from serve.tests.attacks import BODIES, CONNECTIONS, CONSTRAINTS, NUM_ITEMS, body_of
from serve.tests.conftest import NAME
from tests.processes import served

MAX_DELAY_SECONDS = 0.25
MAX_GROWN_BYTES = 64 * 2**20
SETTLING_SECONDS = 10.0
CONTROL_SECONDS = 10.0
_SCALE = 4  # size of the bodies relative to the tests; up to the allowed 4 MiB


@dataclass
class Watch:
    """Measurements of the two other clients.

    Attributes:
        health: Time of each request of /health, in seconds.
        gaps: Times between two events of the stream, in seconds.
        faults: Errors of the two clients.
    """

    health: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def _post(port: int, path: str, content: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _probe(port: int, watch: Watch, is_over: threading.Event) -> None:
    while not is_over.wait(0.02):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        began = time.monotonic()
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
            watch.health.append(time.monotonic() - began)
        except OSError as error:
            watch.faults.append(f"/health: {error!r}")
        finally:
            connection.close()


def _stream(port: int, watch: Watch, is_over: threading.Event) -> None:
    body = {"model": NAME, "prompt": "def f(", "max_tokens": 800, "ignore_eos": True, "seed": 1}
    content = json.dumps({**body, "stream": True}).encode()
    texts = set()
    while not is_over.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        try:
            connection.request(
                "POST", "/v1/completions", content, {"content-type": "application/json"}
            )
            last, text = None, ""
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    if last is not None:
                        watch.gaps.append(now - last)
                    last = now
                    text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
            texts.add(text)
        except (OSError, KeyError, ValueError) as error:
            watch.faults.append(f"the stream: {error!r}")
        finally:
            connection.close()
    if len(texts) > 1:
        watch.faults.append(f"{len(texts)} different texts of one seed")


@contextmanager
def watched(port: int) -> Iterator[Watch]:
    """Run the two other clients until the block ends, and yield their measurements."""
    watch, is_over = Watch(), threading.Event()
    threads = [
        threading.Thread(target=target, args=(port, watch, is_over)) for target in (_probe, _stream)
    ]
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


def attacks() -> dict[str, Callable[[int], str]]:
    """Return the attacks by name. Each takes a port, and returns the server's response."""
    functions: dict[str, Callable[[int], str]] = {}
    for name, (path, content, _) in BODIES.items():
        # Lengthen lists and texts to the limit on a body.
        large = content
        for item in ("-1,", "null,", "1,", "x "):
            large = large.replace(item * NUM_ITEMS, item * (_SCALE * NUM_ITEMS))
            large = large.replace(item * (NUM_ITEMS - 1), item * (_SCALE * NUM_ITEMS))
        functions[name] = lambda port, path=path, large=large: _response(port, path, body_of(large))  # type: ignore[misc]
    for name, (fields, _) in CONSTRAINTS.items():
        body = json.dumps({"model": NAME, "prompt": "x", **fields}).encode()
        functions[name] = lambda port, body=body: _response(port, "/v1/completions", body)  # type: ignore[misc]
    for name, attack in CONNECTIONS.items():
        functions[name] = lambda port, attack=attack: attack(port) or "closed"  # type: ignore[misc]
    return functions


def _response(port: int, path: str, content: bytes) -> str:
    status, response = _post(port, path, content)
    with suppress(ValueError, KeyError, TypeError):
        return f"{status} {json.loads(response)['error']['message']:.60}"
    return str(status)


def main() -> int:
    """Print a line for each attack, and return 1 if one affected other clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run only attacks whose names contain this text")
    name_part = parser.parse_args().only
    model = Path(__file__).parents[2] / "examples" / "models" / NAME
    command = [sys.executable, "-m", "interposer_tools", "serve", str(model), "--port=0"]
    with served([*command, "--dtype=float32", "--log-level=warning"]) as (url, process):
        return _run(int(url.rpartition(":")[2]), process, name_part)


def _run(port: int, process: subprocess.Popen[Any], name_part: str) -> int:
    # Memory that the server allocates for its first requests does not count.
    valid = {"model": NAME, "prompt": "x", "structured_outputs": {"choice": ["a", "b"]}}
    _post(port, "/v1/completions", json.dumps(valid).encode())
    with watched(port) as control:
        time.sleep(CONTROL_SECONDS)
    longest = max(control.gaps)
    median = statistics.median(control.gaps)
    print(f"no attack: /health at most {max(control.health):.3f} s")
    print(f"           stream gap at most {longest:.3f} s, median {median:.4f} s")
    print(f"           allowed delay {MAX_DELAY_SECONDS} s")
    print(f"{'attack':<30} {'s':>6} {'/health':>8} {'gap':>7} {'MiB':>6}  response")
    bytes_before, failures = _resident_bytes(process.pid), list(control.faults)
    for name, attack in attacks().items():
        if name_part not in name:
            continue
        began = time.monotonic()
        with watched(port) as watch:
            time.sleep(0.5)
            response = attack(port)
        seconds = time.monotonic() - began
        health, gap = max(watch.health), max(watch.gaps, default=0.0)
        grown = (_resident_bytes(process.pid) - bytes_before) / 2**20
        print(f"{name:<30} {seconds:6.1f} {health:8.3f} {gap:7.3f} {grown:6.0f}  {response}")
        failures += [f"{name}: {fault}" for fault in watch.faults]
        if health > MAX_DELAY_SECONDS or gap - longest > MAX_DELAY_SECONDS:
            failures.append(f"{name}: other clients were delayed")
        if process.poll() is not None:
            print(f"the server exited with status {process.returncode}")
            return 1
    time.sleep(SETTLING_SECONDS)
    grown_bytes = _resident_bytes(process.pid) - bytes_before
    print(f"after {SETTLING_SECONDS:g} s: {grown_bytes / 2**20:.0f} MiB more memory than before")
    if grown_bytes > MAX_GROWN_BYTES:
        failures.append("the memory was not released")
    print("\n".join(failures) or "no attack affected other clients")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
