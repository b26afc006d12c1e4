"""Attention over long contexts, beside the roofs of the same minute.

    python benchmarks/long_contexts.py [--contexts 8192,32768,131072] [--caches attention,...]
        [--chunks 512,2048] [--windows 512,1024] [--rounds N] [--threads N] [--parts decode,...]

Attention of one layer of the shape of Qwen3-0.6B, one sequence. Of a decode step, the time over
that of reading its keys and values at the bandwidth of memory; of a chunk of a prompt, its rate
over that of a product of matrices of bfloat16; of a layer with a window, the time over that of a
context that is no longer than the window. Each round takes the roof and then the call, so that a
change of the machine's speed is in both; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from cpu_attention import CACHES, SPEC, attention_call, backends
from interposer import AttentionSpec, current_registry

__all__ = ["main", "ratios", "seen_pairs"]

Call = Callable[[], object]
_PARTS = ("decode", "prefill", "windows")
_READ_BYTES = 256 << 20
_SIDE = 1536
_CACHED_BYTES = 64 << 20  # more than the caches of the processor hold


def ratios(roof: Call, call: Call, rounds: int) -> tuple[float, float]:
    """Return the median seconds of ``call`` and the median of its time over that of ``roof``."""
    roof(), call()
    taken, found = [], []
    for _ in range(rounds):
        first = time.perf_counter()
        roof()
        second = time.perf_counter()
        call()
        taken.append(time.perf_counter() - second)
        found.append(taken[-1] / (second - first))
    return statistics.median(taken), statistics.median(found)


def seen_pairs(query_tokens: int, context: int, window_tokens: int | None) -> int:
    """Return how many pairs of a query and a key that it sees a chunk at the context's end has."""
    window = window_tokens or context
    return sum(min(at + 1, window) for at in range(context - query_tokens, context))


def _spec(cache: str, window_tokens: int | None = None) -> AttentionSpec:
    return replace(SPEC, cache_dtype=CACHES[cache], window_tokens=window_tokens)


def _call(spec: AttentionSpec, query_tokens: int, context: int) -> tuple[Call, int]:
    """Return a call of the backend that is chosen, and the bytes of a token of the cache."""
    _, backend = next(backends(current_registry(), spec))
    token_bytes = backend.kv_layout().page_bytes() // spec.page_size
    copies = max(1, -(-_CACHED_BYTES // (token_bytes * (spec.window_tokens or context))))
    return attention_call(backend, spec, (1, query_tokens, context), min(copies, 4)), token_bytes


def _reading() -> Call:
    """Return the read of memory that was the fastest of several: sums of whole numbers."""
    numbers = torch.ones(_READ_BYTES // 4)
    half = len(numbers) // 2
    ways = (lambda: torch.dot(numbers[:half], numbers[half:]), lambda: torch.sum(numbers))
    return min(ways, key=lambda way: ratios(lambda: None, way, 5)[0])


def _decode(options: argparse.Namespace) -> Iterator[str]:
    reading = _reading()
    for cache in options.caches:
        for context in options.contexts:
            call, token_bytes = _call(_spec(cache), 1, context)
            seconds, ratio = ratios(reading, call, options.rounds)
            num_bytes = context * token_bytes
            bandwidth = num_bytes / seconds * (ratio * _READ_BYTES / num_bytes)
            yield (
                f"decode {cache:14} {context:7} tokens {token_bytes:5} bytes a token "
                f"{seconds * 1e3:8.3f} ms  memory {bandwidth / 1e9:5.1f} GB/s  "
                f"x{ratio * _READ_BYTES / num_bytes:.2f} of its bytes"
            )


def _multiplying() -> Call:
    left, right = (torch.randn(_SIDE, _SIDE).bfloat16() for _ in range(2))
    return lambda: left @ right


def _rate(spec: AttentionSpec, chunk: int, context: int, roof: Call, rounds: int) -> str:
    call, _ = _call(spec, chunk, context)
    seconds, ratio = ratios(roof, call, rounds)
    flops = 4.0 * spec.num_heads * spec.head_size * seen_pairs(chunk, context, spec.window_tokens)
    product = 2.0 * _SIDE**3
    rate = flops / seconds / 1e9
    return (
        f"{seconds * 1e3:8.1f} ms {rate:7.1f} GFLOP/s  "
        f"{100 * flops / product / ratio:5.1f} % of {rate / (flops / product / ratio):.0f} GFLOP/s"
    )


def _prefill(options: argparse.Namespace) -> Iterator[str]:
    multiplying, rounds = _multiplying(), max(3, options.rounds // 3)
    for cache in options.caches:
        for context in options.contexts[:2]:
            for chunk in (n for n in options.chunks if n <= context):
                rate = _rate(_spec(cache), chunk, context, multiplying, rounds)
                yield f"prefill {cache:14} {chunk:5} of {context:7} tokens {rate}"


def _windows(options: argparse.Namespace) -> Iterator[str]:
    multiplying, rounds = _multiplying(), options.rounds
    for cache in options.caches:
        for window in options.windows:
            for context in options.contexts[1:]:
                short, _ = _call(_spec(cache), 1, window)
                call, _ = _call(_spec(cache, window), 1, context)
                seconds, ratio = ratios(short, call, 20 * rounds)
                label = f"{cache:14} window {window:5} of {context:7} tokens"
                alone = f"x{ratio:.2f} of {window} tokens alone"
                yield f"decode  {label} {seconds * 1e6:8.1f} us  {alone}"
                rate = _rate(_spec(cache, window), 512, context, multiplying, rounds)
                yield f"prefill {label} {rate}"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=_numbers, default=[8192, 32768, 131072])
    parser.add_argument("--caches", type=_names, default=list(CACHES))
    parser.add_argument("--chunks", type=_numbers, default=[512, 2048])
    parser.add_argument("--windows", type=_numbers, default=[512, 1024])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--parts", type=_names, default=list(_PARTS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, torch {torch.__version__}")
    with torch.inference_mode():
        for part, lines in zip(_PARTS, (_decode, _prefill, _windows), strict=True):
            if part in options.parts:
                for line in lines(options):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
