"""Load a server for a while, or compare it with the engine without a server.

    python benchmarks/serve.py load MODEL --seconds 600 --clients 64
    python benchmarks/serve.py compare MODEL --rounds 20
    python benchmarks/serve.py protocols MODEL --rounds 20

`load`: clients ask with prompts and answers of mixed lengths, streamed and whole, and a tenth of
them leaves. It fails where an answer is lost or cut, where the cache holds a page in the end, or
where memory grows. Before and after, the engine gets the same requests without a server, and the
rates of tokens are told side by side, by time and by processor time. `compare`: alternates between
`lm.generate` and the server, and prints medians of ratios within a round, of time and of processor
time. `protocols`: alternates between the APIs of the server, which stream the same chats, and
prints the time, the server's processor time and the time to the first event of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

NAME = "model"
VOCABULARY = 4000
FLAT_BYTES = 32 * 2**20


@dataclass
class Server:
    port: int
    process: subprocess.Popen[str]

    @property
    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024

    @property
    def processor_seconds(self) -> float:
        """The seconds that all threads of the server have computed so far."""
        ticks = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


@contextmanager
def serving(model: str, *options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "interposer_tools", "serve", model, "--port=0"]
    command += ["--log-level=warning", f"--name={NAME}", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        told = ""
        while not (found := re.search(r"at http://127.0.0.1:(\d+),", told)):
            line = process.stderr.readline()
            if not line:
                sys.exit(told)
            told += line
        try:
            yield Server(int(found[1]), process)
        finally:
            process.terminate()
            process.wait(60)


@dataclass
class Answer:
    status: int
    num_tokens: int
    reason: str | None
    first_s: float | None


async def ask(
    port: int,
    body: dict[str, Any],
    leaves_after_s: float | None = None,
    path: str = "/v1/completions",
) -> Answer | None:
    """Return the answer; None where the client left before it was whole."""
    content = json.dumps({"model": NAME, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + content)
        async with asyncio.timeout(leaves_after_s):
            first, parts = None, [await reader.readuntil(b"\r\n\r\n")]
            while part := await reader.read(1 << 16):
                if first is None:
                    first = time.perf_counter() - started
                parts.append(part)
    except TimeoutError:
        return None
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return _answer(b"".join(parts), bool(body.get("stream")), first)


_ENDS = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.inc",
)


def _answer(response: bytes, streams: bool, first_s: float | None) -> Answer:
    status = int(response.split(b" ", 2)[1])
    found = re.findall(rb'"(?:completion|output)_tokens": ?(\d+)', response)
    reasons = re.findall(rb'"(?:finish_reason|stop_reason|status)": ?"(\w+)"', response)
    whole = not streams or any(end in response for end in _ENDS)
    if status != 200 or not (reasons and whole):
        return Answer(status, 0, None, first_s)
    # Not every server tells it in a stream.
    num_tokens = int(found[-1]) if found else 0
    return Answer(status, num_tokens, reasons[-1].decode(), first_s)


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Wish:
    """The request of a client, and the time at which it leaves, if it does."""

    prompt: list[int]
    most: int
    temperature: float
    seed: int
    leaves_after_s: float | None

    @classmethod
    def drawn(cls, dice: random.Random) -> Wish:
        prompt = [dice.randrange(1, VOCABULARY) for _ in range(int(2 ** dice.uniform(1, 9)))]
        most = int(2 ** dice.uniform(0, 8))
        leaves = dice.uniform(0, 2) if dice.random() < 0.1 else None
        return cls(prompt, most, dice.choice((0.0, 0.8)), dice.randrange(1000), leaves)


async def client(port: int, dice: random.Random, until: float, tally: Tally) -> None:
    while time.monotonic() < until:
        wish, streams = Wish.drawn(dice), dice.random() < 0.7
        most = wish.most
        body = {"prompt": wish.prompt, "max_tokens": most, "ignore_eos": True, "stream": streams}
        body |= {"temperature": wish.temperature, "seed": wish.seed}
        if streams:
            body["stream_options"] = {"include_usage": True}
        answer = await ask(port, body, wish.leaves_after_s)
        if answer is None:
            tally.counts["left"] += 1
        elif (answer.status, answer.num_tokens, answer.reason) == (200, most, "length"):
            tally.counts["answered"] += 1
            if streams and answer.first_s is not None:
                tally.first_s.append(answer.first_s)
        else:
            tally.wrong.append(f"{answer} instead of {most} tokens")


async def sampled(server: Server, until: float, sizes: list[int]) -> None:
    while time.monotonic() < until:
        sizes.append(server.resident_bytes)
        await asyncio.sleep(1)


@dataclass(frozen=True)
class Spent:
    """The tokens of a while, and what they took."""

    tokens: float = 0
    seconds: float = 0
    processor_seconds: float = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Spent) -> Spent:
        return Spent(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def rates(self) -> dict[str, float]:
        return {
            "per_second": round(self.tokens / self.seconds, 1),
            "per_processor_second": round(self.tokens / self.processor_seconds, 1),
        }


def bare(lm: Any, num_clients: int, seconds: float) -> Spent:
    """Let the engine answer as many clients that ask for the same, without a server.

    It counts from the half of the time on: until then, all began at once.
    """
    from interposer_engine import SamplingParams

    dice = [random.Random(seed) for seed in range(num_clients)]
    running: list[tuple[Any, float] | None] = [None] * num_clients
    half, until, tokens = time.monotonic() + seconds / 2, time.monotonic() + seconds, 0
    began = None
    while time.monotonic() < until:
        if began is None and time.monotonic() > half:
            began = Spent(tokens, time.monotonic(), time.process_time())
        for number, entry in enumerate(running):
            if entry is None:
                wish = Wish.drawn(dice[number])
                dice[number].random()  # whether it streams
                params = SamplingParams(
                    max_new_tokens=wish.most,
                    temperature=wish.temperature,
                    seed=wish.seed,
                    ignore_eos=True,
                )
                upto = time.monotonic() + (wish.leaves_after_s or math.inf)
                running[number] = (lm.start(wish.prompt, params), upto)
        lm.engine.step()
        for number, entry in enumerate(running):
            assert entry is not None
            stream, upto = entry
            while stream.num_unread and not stream.ended:
                stream.read()
                tokens += 1
            if stream.ended or time.monotonic() > upto:
                lm.engine.cancel(stream.sequence)
                running[number] = None
    assert began is not None
    spent = Spent(tokens, time.monotonic(), time.process_time()) - began
    for entry in running:
        if entry is not None:
            lm.engine.cancel(entry[0].sequence)
    return spent


def load(options: argparse.Namespace) -> None:
    from interposer_engine import load as load_model

    lm = load_model(options.model, cache_tokens=options.cache_tokens, max_sequences=64)
    alone = bare(lm, options.clients, options.seconds / 10)
    with serving(options.model, f"--cache-tokens={options.cache_tokens}") as server:
        tally, sizes = Tally(), list[int]()

        def now() -> Spent:
            tokens = server.metrics()["interposer_generated_tokens_total"]
            return Spent(tokens, time.monotonic(), server.processor_seconds)

        marks: list[Spent] = []

        async def run() -> None:
            until = time.monotonic() + options.seconds

            async def watch() -> None:
                await sampled(server, until - options.seconds * 0.9, sizes)
                marks.append(await asyncio.to_thread(now))
                await sampled(server, until, sizes)
                marks.append(await asyncio.to_thread(now))

            clients = [
                client(server.port, random.Random(seed), until, tally)
                for seed in range(options.clients)
            ]
            await asyncio.gather(watch(), *clients)

        asyncio.run(run())
        time.sleep(1)
        metrics = server.metrics()
    alone += bare(lm, options.clients, options.seconds / 10)
    served = marks[1] - marks[0]
    half = len(sizes) // 2
    grown = max(sizes[half:]) - max(sizes[:half])
    held = {name: metrics[f"interposer_{name}"] for name in STATES}
    facts = {
        "seconds": options.seconds,
        "clients": options.clients,
        **tally.counts,
        "wrong": tally.wrong[:9],
        "tokens_of_server": served.rates,
        "tokens_of_engine": alone.rates,
        "share": {n: round(served.rates[n] / rate, 3) for n, rate in alone.rates.items()},
        "first_token_ms": _spread([1e3 * s for s in tally.first_s]),
        "resident_mib": [sizes[0] >> 20, max(sizes[:half]) >> 20, max(sizes[half:]) >> 20],
        "held_in_the_end": held,
    }
    print(json.dumps(facts, indent=2))
    if tally.wrong or any(held.values()) or grown > FLAT_BYTES:
        sys.exit("something was lost, held, or grew")


STATES = ("cache_pages_held", "sequences_running", "sequences_waiting")


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    last = len(ordered) - 1
    return {name: round(ordered[int(share * last)], 1) for name, share in shares.items()}


def compare(options: argparse.Namespace) -> None:
    from interposer_engine import load as load_model

    lm = load_model(options.model, cache_tokens=options.cache_tokens)
    prompts = [[1 + i, *range(50, 65)] for i in range(options.streams)]
    settings: dict[str, Any] = {"ignore_eos": True}

    def offline() -> float:
        started = time.perf_counter()
        lm.generate(prompts, max_new_tokens=options.tokens, **settings)
        return time.perf_counter() - started

    def first() -> float:
        started = time.perf_counter()
        stream = lm.stream(prompts[0], max_new_tokens=2, **settings)
        next(stream)
        seconds = time.perf_counter() - started
        list(stream)
        return seconds

    with serving(options.model, f"--cache-tokens={options.cache_tokens}") as server:

        async def online(streams: bool) -> float:
            body = {"max_tokens": options.tokens, "stream": streams, **settings}
            body |= {"stream_options": {"include_usage": True}} if streams else {}
            started = time.perf_counter()
            asked = [ask(server.port, {"prompt": prompt, **body}) for prompt in prompts]
            answers = await asyncio.gather(*asked)
            assert all(a is not None and a.num_tokens == options.tokens for a in answers), answers
            return time.perf_counter() - started

        async def first_online() -> float:
            body = {"prompt": prompts[0], "max_tokens": 2, "stream": True, **settings}
            answer = await ask(server.port, body)
            assert answer is not None
            assert answer.first_s is not None
            return answer.first_s

        runs: dict[str, Callable[[], float]] = {
            "offline": offline,
            "whole": lambda: asyncio.run(online(False)),
            "streamed": lambda: asyncio.run(online(True)),
            "first_offline": first,
            "first_online": lambda: asyncio.run(first_online()),
        }

        def processor_seconds(name: str) -> float:
            return time.process_time() if "offline" in name else server.processor_seconds

        seconds: dict[str, list[float]] = {name: [] for name in runs}
        spent: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(options.rounds + 1):
            for name, run in runs.items():
                before = processor_seconds(name)
                found = run()
                if round_:  # the first one warms up
                    seconds[name].append(found)
                    spent[name].append(processor_seconds(name) - before)
    median = {name: statistics.median(values) for name, values in seconds.items()}

    def paired(values: dict[str, list[float]]) -> dict[str, float]:
        ratios = {
            name: [a / b for a, b in zip(values["offline"], values[name], strict=True)]
            for name in ("whole", "streamed")
        }
        return {name: round(statistics.median(ratio), 3) for name, ratio in ratios.items()}

    later = statistics.median(
        served - alone
        for alone, served in zip(seconds["first_offline"], seconds["first_online"], strict=True)
    )
    facts = {
        "streams": options.streams,
        "tokens": options.tokens,
        "median_seconds": {name: round(value, 4) for name, value in median.items()},
        "throughput_of_generate": paired(seconds),
        "throughput_by_processor_time": paired(spent),
        "median_processor_seconds": {n: round(statistics.median(v), 4) for n, v in spent.items()},
        "first_token_later_ms": round(1e3 * later, 2),
    }
    print(json.dumps(facts, indent=2))


def protocols(options: argparse.Namespace) -> None:
    texts = [f"Write function number {number}." for number in range(options.streams)]
    most, streamed = options.tokens, {"stream": True}
    usage = {"stream_options": {"include_usage": True}}

    def messages(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    bodies: dict[str, Callable[[str], dict[str, Any]]] = {
        "/v1/chat/completions": lambda text: {
            **{"messages": messages(text), "max_tokens": most, **streamed, **usage}
        },
        "/v1/responses": lambda text: {"input": text, "max_output_tokens": most, **streamed},
        "/v1/messages": lambda text: {"messages": messages(text), "max_tokens": most, **streamed},
    }
    seconds: dict[str, list[float]] = {path: [] for path in bodies}
    processor_seconds: dict[str, list[float]] = {path: [] for path in bodies}
    first_s: dict[str, list[float]] = {path: [] for path in bodies}
    num_tokens: dict[str, int] = {}
    with serving(options.model, f"--cache-tokens={options.cache_tokens}") as server:

        async def stream(path: str, chosen: list[str]) -> list[Answer]:
            asked = [ask(server.port, bodies[path](text), path=path) for text in chosen]
            answers = await asyncio.gather(*asked)
            return [answer for answer in answers if answer is not None]

        for round_ in range(options.rounds + 1):
            for path in bodies:
                before, started = server.processor_seconds, time.perf_counter()
                answers = asyncio.run(stream(path, texts))
                if not round_:  # the first one warms up
                    num_tokens[path] = sum(answer.num_tokens for answer in answers)
                    continue
                seconds[path].append(time.perf_counter() - started)
                processor_seconds[path].append(server.processor_seconds - before)
                (alone,) = asyncio.run(stream(path, texts[:1]))
                first_s[path].append(alone.first_s or math.nan)
    chats = "/v1/chat/completions"
    assert {*num_tokens.values()} == {num_tokens[chats]}, num_tokens

    def compared(values: dict[str, list[float]]) -> dict[str, dict[str, float]]:
        return {
            path: {
                "median_ms": round(1e3 * statistics.median(each), 2),
                "of_chats": round(
                    statistics.median(a / b for a, b in zip(each, values[chats], strict=True)), 3
                ),
            }
            for path, each in values.items()
        }

    facts = {
        "streams": options.streams,
        "tokens": num_tokens[chats],
        "time": compared(seconds),
        "processor_time": compared(processor_seconds),
        "first_event": compared(first_s),
    }
    print(json.dumps(facts, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    for run, settings in (
        (load, {"seconds": 600, "clients": 64}),
        (compare, {"rounds": 20, "streams": 8, "tokens": 128}),
        (protocols, {"rounds": 20, "streams": 8, "tokens": 128}),
    ):
        command = commands.add_parser(run.__name__)
        command.add_argument("model")
        command.add_argument("--cache-tokens", type=int, default=32768)
        for name, default in settings.items():
            command.add_argument(f"--{name}", type=int, default=default)
        command.set_defaults(run=run)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
