"""Time ragged and latent attention of the CPU platform: encoders, prompts, MLA decoding.

Times are one thread's processor time, medians of several calls. Operations are counted for visible
keys only.

N heads, K kv heads, D size of a query and key, E size of a value, C latent size, R rotary size.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch

from interposer_cpu._kernels.dense import latent_attention_decode, ragged_attention

_LATENT, _ROTARY, _PAGE = 512, 64, 64
_FAR_BYTES = 64_000_000  # larger than any CPU cache


def seconds(call: Callable[[], object], repeat: int) -> float:
    """Measure the median processor seconds of a call."""
    call()
    times = []
    for _ in range(repeat):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def report(what: str, took: float, flops: float) -> None:
    """Print a line."""
    print(f"{what:<48} {took * 1e3:9.3f} ms {flops / took / 1e9:7.1f} GFLOP/s")


def ragged(tokens: int, heads: tuple[int, int, int, int], causal: bool, repeat: int) -> None:
    """Time one sequence; ``heads`` are N, K, D, E."""
    num_heads, num_kv_heads, size, value_size = heads
    query = torch.randn(tokens, num_heads, size).bfloat16()
    key = torch.randn(tokens, num_kv_heads, size).bfloat16()
    value = torch.randn(tokens, num_kv_heads, value_size).bfloat16()
    starts = torch.tensor([0, tokens])

    def call() -> object:
        facts = (starts, starts, tokens, tokens, size**-0.5, causal, None, None, None, None)
        return ragged_attention(query, key, value, *facts)

    flops = 2.0 * num_heads * (size + value_size) * tokens**2 / (2 if causal else 1)
    kind = "causal" if causal else "encoder"
    report(f"{kind}, {tokens} tokens, heads {heads}", seconds(call, repeat), flops)


def latent(num_heads: int, context: int, cache_dtype: torch.dtype, repeat: int) -> None:
    """Time one token of one sequence; several caches in turn exceed the CPU caches."""
    width, pages = _LATENT + _ROTARY, -(-context // _PAGE)
    num_bytes = pages * _PAGE * width * cache_dtype.itemsize
    copies = -(-_FAR_BYTES // num_bytes)
    caches = [torch.randn(pages, _PAGE, width).bfloat16().to(cache_dtype) for _ in range(copies)]
    query = torch.randn(1, num_heads, width).bfloat16()
    table, starts = torch.randperm(pages)[None], torch.tensor([0, 1])
    scale = None if cache_dtype == query.dtype else torch.ones(1)
    turn = itertools.cycle(caches)

    def call() -> object:
        lengths = (starts, torch.tensor([context]), 1, _LATENT)
        return latent_attention_decode(query, next(turn), table, *lengths, width**-0.5, scale)

    flops = 2.0 * num_heads * (2 * _LATENT + _ROTARY) * context
    stored = str(cache_dtype).removeprefix("torch.")
    report(f"latent, {num_heads} heads, {context} tokens, {stored}", seconds(call, repeat), flops)


def main() -> None:
    """Print all lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    repeat = parser.parse_args().repeat
    torch.set_num_threads(1)
    for causal in (True, False):
        ragged(1024, (16, 8, 128, 128), causal, repeat)
    ragged(512, (12, 12, 64, 64), False, repeat)
    ragged(1024, (16, 16, 192, 128), True, repeat)
    for num_heads, context in itertools.product((16, 128), (1024, 8192)):
        for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
            latent(num_heads, context, cache_dtype, repeat)


if __name__ == "__main__":
    main()
