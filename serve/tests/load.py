"""Ask for everything of ``attacks.py`` while a stream runs, and say what others noticed of it.

Run by ``make test-load``. It fails where /health waited or the gaps of the stream grew by more than
``MOST_SECONDS``, where memory did not come back, or where the stream's text changed.
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

from serve.tests.attacks import BODIES, CONNECTIONS, FORMS, NUM_ITEMS, body_of
from serve.tests.conftest import NAME
from tests.processes import served

MOST_SECONDS = 0.25
MOST_BYTES = 64 * 2**20
SETTLING_SECONDS = 10.0
CONTROL_SECONDS = 10.0
_TIMES = 4  # as large as in the tests, up to the 4 MiB that a body may have


@dataclass
class Watch:
    """The times at which others were answered.

    Attributes:
        health: seconds that each request of /health took.
        gaps: seconds between two events of the stream.
        faults: whatever went wrong for others.
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
    """Ask as others do until the block ends."""
    watch, is_over = Watch(), threading.Event()
    threads = [
        threading.Thread(target=each, args=(port, watch, is_over)) for each in (_probe, _stream)
    ]
    for thread in threads:
        thread.start()
    try:
        yield watch
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return 1024 * int(line.split()[1])


def attacks() -> dict[str, Callable[[int], str]]:
    """Return what each attack is answered, by its name."""
    found: dict[str, Callable[[int], str]] = {}
    for name, (path, content, _) in BODIES.items():
        # Lists and texts get as long as a body may be.
        large = content
        for item in ("-1,", "null,", "1,", "x "):
            large = large.replace(item * NUM_ITEMS, item * (_TIMES * NUM_ITEMS))
            large = large.replace(item * (NUM_ITEMS - 1), item * (_TIMES * NUM_ITEMS))
        found[name] = lambda port, path=path, large=large: _answered(port, path, body_of(large))  # type: ignore[misc]
    for name, (fields, _) in FORMS.items():
        body = json.dumps({"model": NAME, "prompt": "x", **fields}).encode()
        found[name] = lambda port, body=body: _answered(port, "/v1/completions", body)  # type: ignore[misc]
    for name, attack in CONNECTIONS.items():
        found[name] = lambda port, attack=attack: attack(port) or "ended"  # type: ignore[misc]
    return found


def _answered(port: int, path: str, content: bytes) -> str:
    status, answer = _post(port, path, content)
    with suppress(ValueError, KeyError, TypeError):
        return f"{status} {json.loads(answer)['error']['message']:.60}"
    return str(status)


def main() -> int:
    """Print a line for each attack, and return 1 where one hurt others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="attacks whose names have this part")
    wanted = parser.parse_args().only
    model = Path(__file__).parents[2] / "examples" / "models" / NAME
    command = [sys.executable, "-m", "interposer_tools", "serve", str(model), "--port=0"]
    with served([*command, "--dtype=float32"]) as (url, process):
        return _run(int(url.rpartition(":")[2]), process, wanted)


def _run(port: int, process: subprocess.Popen[Any], wanted: str) -> int:
    # What the first requests leave in memory is no attack's.
    fine = {"model": NAME, "prompt": "x", "structured_outputs": {"choice": ["a", "b"]}}
    _post(port, "/v1/completions", json.dumps(fine).encode())
    with watched(port) as control:
        time.sleep(CONTROL_SECONDS)
    longest = max(control.gaps)
    print(f"alone: /health {max(control.health):.3f} s, gaps of the stream {longest:.3f} s, median")
    print(f"       {statistics.median(control.gaps):.4f} s; allowed are {MOST_SECONDS} s more")
    print(f"{'attack':<30} {'s':>6} {'/health':>8} {'gap':>7} {'MiB':>6}  answer")
    before, hurt = _resident(process.pid), list(control.faults)
    for name, attack in attacks().items():
        if wanted not in name:
            continue
        began = time.monotonic()
        with watched(port) as watch:
            time.sleep(0.5)
            answer = attack(port)
        seconds = time.monotonic() - began
        health, gap = max(watch.health), max(watch.gaps, default=0.0)
        grown = (_resident(process.pid) - before) / 2**20
        print(f"{name:<30} {seconds:6.1f} {health:8.3f} {gap:7.3f} {grown:6.0f}  {answer}")
        hurt += [f"{name}: {fault}" for fault in watch.faults]
        if health > MOST_SECONDS or gap - longest > MOST_SECONDS:
            hurt.append(f"{name}: others waited")
        if process.poll() is not None:
            print(f"the server ended with {process.returncode}")
            return 1
    time.sleep(SETTLING_SECONDS)
    grown_bytes = _resident(process.pid) - before
    print(f"after {SETTLING_SECONDS:g} s: {grown_bytes / 2**20:.0f} MiB more than before")
    if grown_bytes > MOST_BYTES:
        hurt.append("memory did not come back")
    print("\n".join(hurt) or "nobody was hurt")
    return int(bool(hurt))


if __name__ == "__main__":
    sys.exit(main())
