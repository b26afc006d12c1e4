"""``vllm serve`` with and without interposer-vllm, in alternated rounds, asked by vLLM itself.

    python benchmarks/cpu_models.py qwen3-0.6b DIR
    python benchmarks/vllm_serve.py DIR/hf --python PYTHON [--clients 1 8] [--threads 2]

Both servers live in processes of their own, and one is stopped while the other is asked. The client
is ``vllm bench serve`` with random prompts of the model's own tokenizer; nothing is asked of a
network. Figures are medians over the rounds, with the lowest and the highest in brackets; the ratio
is the median of the ratios within a round: of times, less than 1 is better. TTFT is the time to the
first token, TPOT a request's time per token after it. PYTHON has vLLM and the plugin: see
``make test-vllm``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from cpu_engines.vllm_bridge import PLUGINS
from cpu_peers import Unavailable
from vllm_bridge import Pair

__all__ = ["FIGURES", "Server"]

FIGURES = {
    "tokens/s": "output_throughput",
    "TTFT, median ms": "median_ttft_ms",
    "TTFT, p95 ms": "p95_ttft_ms",
    "TPOT, median ms": "median_tpot_ms",
    "TPOT, p95 ms": "p95_tpot_ms",
}
"""The figures of vLLM's client that are printed."""

CLIENT = Path(__file__).with_name("vllm_client.py")
NAME = "model"
# The log line of a worker whose layers were taken over.
TAKEN = "layers run on kernels that were chosen here"


class Server:
    """A ``vllm serve`` of its own process group, stopped by a signal whenever nobody asks it.

    Threads that spin while they wait would otherwise cost the other one its cores.

    Raises: Unavailable: it does not serve, or was to take layers over and took none.
    """

    def __init__(self, option: str, options: argparse.Namespace) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.log = tempfile.NamedTemporaryFile(mode="w+b", suffix=".log")  # noqa: SIM115 - see end
        cores = sorted(os.sched_getaffinity(0))[: options.threads]
        started = time.monotonic()
        self.process = subprocess.Popen(
            [
                # The server of ``vllm serve``, see vllm_client.py.
                *(str(options.python), "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(options.model_dir)),
                *("--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port)),
                *("--max-num-seqs", str(max(options.clients))),
                *("--max-model-len", str(options.prompt + options.tokens + 16)),
                *("--dtype", options.dtype, "--no-enable-prefix-caching"),
                *options.also,
            ],
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
            env={
                **_environment(),
                "VLLM_PLUGINS": PLUGINS[option],
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_CPU_KVCACHE_SPACE": "1",
            },
        )
        try:
            self._wait(started + options.timeout)
            if option == "bridge" and TAKEN not in self._said():
                raise Unavailable("nothing was taken over: it would be vLLM beside itself")
        except Unavailable:
            self.end()
            raise
        self.load_s = time.monotonic() - started
        self._signal(signal.SIGSTOP)

    def asked(self, clients: int, seed: int, options: argparse.Namespace) -> dict[str, float]:
        """Return the measurements of vLLM's client, by label.

        Raises: Unavailable: the client failed, or requests did.
        """
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *(str(options.python), str(CLIENT), "--backend", "openai"),
                *("--model", NAME, "--tokenizer", str(options.model_dir)),
                *("--host", "127.0.0.1", "--port", str(self.port), "--dataset-name", "random"),
                *("--random-input-len", str(options.prompt)),
                *("--random-output-len", str(options.tokens), "--ignore-eos"),
                *("--num-prompts", str(clients * options.requests), "--seed", str(seed)),
                *("--max-concurrency", str(clients), "--num-warmups", str(clients)),
                *("--temperature", "0", "--metric-percentiles", "95", "--disable-tqdm"),
                *("--save-result", "--result-dir", folder, "--result-filename", "found.json"),
            ]
            self._signal(signal.SIGCONT)
            try:
                done = subprocess.run(
                    command,
                    env=_environment(),
                    capture_output=True,
                    text=True,
                    timeout=options.timeout,
                )
            except subprocess.TimeoutExpired:
                raise Unavailable(f"not answered within {options.timeout:.0f} s") from None
            finally:
                self._signal(signal.SIGSTOP)
            if done.returncode:
                raise Unavailable(f"vllm bench serve: {_last_line(done.stderr)}")
            found = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
        if found["failed"]:
            raise Unavailable(f"{found['failed']} requests failed: {found['errors'][:1]}")
        return {label: float(found[key]) for label, key in FIGURES.items()}

    def end(self) -> None:
        """End the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def _wait(self, upto: float) -> None:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            if self.process.poll() is not None:
                raise Unavailable(_last_line(self._said()))
            if time.monotonic() > upto:
                raise Unavailable(f"does not serve in time: {_last_line(self._said())}")
            time.sleep(0.5)

    def _said(self) -> str:
        return Path(self.log.name).read_text(encoding="utf-8", errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        # The number of a process that was waited for may be another's by now.
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def _environment() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {**os.environ, **offline}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["nothing was said"])[-1][-500:]


def measured(options: argparse.Namespace) -> Pair:
    """Start both, then let them be asked in every round, of which the first warms up."""
    pair, servers = Pair(options.model_dir.name, head="vllm serve"), dict[str, Server]()
    try:
        for option in PLUGINS:
            servers[option] = Server(option, options)
            pair.loads[option] = servers[option].load_s
        for index in range(options.repeat + 1):
            for clients in options.clients:
                # Who is first changes with the round.
                for option in sorted(servers, reverse=bool(index % 2)):
                    found = servers[option].asked(clients, index, options)
                    for label, figure in found.items() if index else ():
                        pair.add(f"{label}, {clients} at once", option, figure)
    except Unavailable as error:
        pair.failures["round"] = str(error)
    finally:
        for server in servers.values():
            server.end()
    return pair


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=4, help="of each client in a round")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a start or round")
    parser.add_argument("--also", nargs=argparse.REMAINDER, default=[], help="of vllm serve")
    options = parser.parse_args(arguments)
    if not options.python.exists():
        sys.exit(f"{options.python} does not exist. Try: make test-vllm, which makes .vllm-env")
    print("vllm_serve:", " ".join(arguments), flush=True)
    print("\n" + measured(options).table(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
