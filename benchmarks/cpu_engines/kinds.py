"""Kinds of measured batches, with newly drawn random prompts.

A kind takes an engine and a row, and returns seconds and token counts. Standard library only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from cpu_engines.contract import MAX_STEP_TOKENS, BatchEngine, Unsupported

__all__ = ["KINDS"]

Row = dict[str, Any]
END_TOKENS = 20
JOIN_STEPS = 8


def drawn(row: Row, batch: int, length: int) -> list[list[int]]:
    """Draw random prompts, the same for every engine of a round."""
    generator = random.Random(f"{row['seed']} {row['kind']} {length}")
    return [generator.choices(range(row["vocab_size"]), k=length) for _ in range(batch)]


def decode(engine: BatchEngine, row: Row) -> dict[str, float]:
    """Decode requests after prompts of ``context`` tokens, with ``adapters`` if given.

    With ``mixed_lengths``, prompt lengths alternate between 1/4, 1/2, 3/4 and all of it.
    """
    batch, new, adapters = row["batch"], row["new_tokens"], row.get("adapters")
    # Requests that are prefilled first already decode during the others' prefill.
    ahead = -(-batch * row["context"] // MAX_STEP_TOKENS)
    engine.reserve(batch, row["context"] + new + 1 + ahead)
    if adapters is not None:
        engine.use_adapters(adapters)
    prompts = drawn(row, batch, row["context"])
    if row.get("mixed_lengths"):
        prompts = [p[: len(p) * (1 + n % 4) // 4] for n, p in enumerate(prompts)]
    start = time.perf_counter()
    engine.prefill(prompts, new + 1 + ahead)
    ends, counts = [time.perf_counter()], set()
    for _ in range(new):
        counts.add(len(engine.step()))
        ends.append(time.perf_counter())
    engine.end()
    if adapters is not None:
        engine.use_adapters([])
    if counts != {batch}:
        raise RuntimeError(f"steps gave {sorted(counts)} tokens instead of {batch}")
    return {
        "prefill": sum(map(len, prompts)) / (ends[0] - start),
        "decode": batch * new / (ends[-1] - ends[0]),
        "gap_ms": p95_ms([late - early for early, late in pairwise(ends)]),
    }


def p95_ms(gaps: list[float]) -> float:
    """Compute the 95th percentile of the gaps between tokens, in milliseconds."""
    return 1e3 * sorted(gaps)[int(0.95 * (len(gaps) - 1))]


def extend(engine: BatchEngine, row: Row) -> dict[str, float]:
    """Prefill ``context`` tokens, then a prompt that extends them by ``new_tokens``."""
    behind, more = row["context"], row["new_tokens"]
    engine.reserve(1, behind + more + 2)
    (prompt,) = drawn(row, 1, behind + more)
    start = time.perf_counter()
    engine.prefill([prompt[:behind]], 1)
    middle = time.perf_counter()
    engine.end()
    again = time.perf_counter()
    engine.extend(prompt, behind)
    end = time.perf_counter()
    engine.end()
    return {"new": behind / (middle - start), "known": more / (end - again)}


def shared(engine: BatchEngine, row: Row) -> dict[str, float]:
    """Time the first token after a new prefix, then after the same prefix with another ending."""
    common = row["context"]
    engine.reserve(1, common + END_TOKENS + 2)
    (prompt,) = drawn(row, 1, common + 2 * END_TOKENS)
    other = prompt[:common] + prompt[-END_TOKENS:]
    start = time.perf_counter()
    engine.prefill([prompt[:-END_TOKENS]], 1)
    middle = time.perf_counter()
    engine.end()
    again = time.perf_counter()
    engine.extend(other, common)
    end = time.perf_counter()
    engine.end()
    tokens = common + END_TOKENS
    return {"new": tokens / (middle - start), "known": tokens / (end - again)}


def mixed(engine: BatchEngine, row: Row) -> dict[str, float]:
    """Decode requests while a prompt of ``joining`` tokens joins every eighth step."""
    batch, new, size = row["batch"], row["new_tokens"], row["joining"]
    ahead = -(-batch * row["context"] // MAX_STEP_TOKENS)
    engine.reserve(batch + 1, max(row["context"] + new + ahead, size) + 2)
    joins = iter(drawn(row, -(-new // JOIN_STEPS), size))
    engine.prefill(drawn(row, batch, row["context"]), new + 1 + ahead)
    gaps = []
    start = time.perf_counter()
    for number in range(new):
        began = time.perf_counter()
        if number % JOIN_STEPS == 0:
            engine.join(next(joins))
        engine.step()
        gaps.append(time.perf_counter() - began)
    seconds = time.perf_counter() - start
    engine.end()
    return {"tokens": batch * new / seconds, "gap_ms": p95_ms(gaps)}


def guesses(engine: BatchEngine, row: Row) -> dict[str, float]:
    """Continue the row's prompt with speculative decoding, one request at a time."""
    new, prompt = row["new_tokens"], row["prompt"]
    engine.reserve(1, len(prompt) + new + 8)
    engine.draw(row["temperature"], row["seed"])
    engine.prefill([prompt], new + 8)
    start, tokens = time.perf_counter(), 0
    while tokens < new:
        tokens += len(engine.several()[0])
    seconds = time.perf_counter() - start
    engine.end()
    return {"tokens": tokens / seconds}


KINDS: dict[str, Callable[[BatchEngine, Row], dict[str, float]]] = {
    "decode": decode,
    "extend": extend,
    "guesses": guesses,
    "mixed": mixed,
    "shared": shared,
}


def run(engine: BatchEngine, row: Row) -> dict[str, Any]:
    """Measure a row; return its results, or the reason why the library cannot run it."""
    try:
        return dict(KINDS[row["kind"]](engine, row))
    except Unsupported as error:
        engine.end()
        return {"unsupported": str(error)}
