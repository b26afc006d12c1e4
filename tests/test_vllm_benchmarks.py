"""The served benchmark starts both servers, stops one while the other is asked, and compares."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "vllm_serve.py"

# Plays the Python that has vLLM: its server, and the client, whose figures are of the server asked.
PLAYED = """#!{python}
import http.server, json, os, pathlib, sys, urllib.request

def value(name):
    return sys.argv[sys.argv.index(name) + 1]

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["VLLM_PLUGINS"].encode())

port = int(value("--port"))
if "vllm.entrypoints.openai.api_server" in sys.argv:
    if os.environ["VLLM_PLUGINS"] and not os.environ.get("KEPT"):
        print("interposer: 3 layers run on kernels that were chosen here", flush=True)
    http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
with urllib.request.urlopen(f"http://127.0.0.1:{{port}}/") as answer:
    bridged = answer.read() == b"interposer"
names = ["median_ttft_ms", "p95_ttft_ms", "median_tpot_ms", "p95_tpot_ms"]
found = dict.fromkeys(names, 4.0 if bridged else 8.0)
found |= {{"output_throughput": 30.0 if bridged else 20.0, "failed": 0}}
pathlib.Path(value("--result-dir"), value("--result-filename")).write_text(json.dumps(found))
"""


def run(tmp_path: Path, **variables: str) -> str:
    played = tmp_path / "python"
    played.write_text(PLAYED.format(python=sys.executable), encoding="utf-8")
    played.chmod(0o755)
    options = ("--python", played, "--clients", "2", "--repeat", "2", "--timeout", "60")
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), str(tmp_path), *map(str, options)],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rounds_are_compared_server_by_server(tmp_path: Path) -> None:
    printed = run(tmp_path)
    assert "NOT RUN" not in printed
    assert "x1.50" in printed  # 30 tokens/s with interposer, 20 without
    assert "x0.50" in printed  # 4 ms for a token with interposer, 8 without


def test_vllm_is_not_measured_beside_itself(tmp_path: Path) -> None:
    assert "NOT RUN: nothing was taken over" in run(tmp_path, KEPT="1")


def test_a_python_that_is_not_there_is_named() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), ".", "--python", "/no/python"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "/no/python does not exist. Try: make test-vllm" in done.stderr
