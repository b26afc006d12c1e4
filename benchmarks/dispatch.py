"""Measure the cost of the abstraction: a bound op, the import, the resolution of a model.

python benchmarks/dispatch.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch

from interposer import (
    AttentionBackend,
    BoundKernel,
    Config,
    CustomOp,
    Resolver,
    Site,
    current_registry,
    place,
)
from interposer_models.families import Qwen3
from interposer_ops.layers.norm import RMSNorm

IMPORT = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import interposer
imported = time.perf_counter()
for name in interposer.__all__:
    getattr(interposer, name)
loaded = time.perf_counter()
print(*(seconds * 1e3 for seconds in (imported - middle, loaded - imported, middle - start)))
"""


class TimedResolver(Resolver):
    """Adds up the seconds that are spent in resolution."""

    seconds = 0.0

    def _timed(self, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds += time.perf_counter() - start

    def kernel(self, op: CustomOp[Any, Any], *args: Any) -> BoundKernel[Any, Any]:
        return self._timed(lambda: Resolver.kernel(self, op, *args))  # type: ignore[no-any-return]

    def layer(self, *args: Any) -> Any:
        return self._timed(lambda: Resolver.layer(self, *args))

    def attention(self, *args: Any) -> AttentionBackend:
        return self._timed(lambda: Resolver.attention(self, *args))  # type: ignore[no-any-return]


def bound_call_ns(rounds: int = 301, calls: int = 2000) -> tuple[float, float]:
    """Return medians in ns of a direct call and of a call through a layer's bound attribute.

    The two are interleaved, and the arguments are tiny, so that the call is what is measured.
    """
    site = Site(Resolver(current_registry(), place().device, Config()), "norm", torch.float32)
    layer = RMSNorm(site, 16, 1e-6)
    # A function of next to no cost in the place of the kernel, so that the call alone is measured.
    layer.norm = function = _first
    names = {"layer": layer, "function": function, "x": torch.ones(1, 16), "w": layer.weight}
    direct = timeit.Timer("function(x, w, 1e-6)", globals=names)
    bound = timeit.Timer("layer.norm(x, w, 1e-6)", globals=names)
    pairs = [(direct.timeit(calls), bound.timeit(calls)) for _ in range(rounds)]
    ns = [statistics.median(column) / calls * 1e9 for column in zip(*pairs, strict=True)]
    return ns[0], ns[1]


def _first(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x


def import_ms(rounds: int = 9) -> tuple[float, float, float]:
    """Return medians in ms: the import after torch, all public names after it, torch itself."""
    rows = []
    for _ in range(rounds):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, check=True)
        rows.append([float(field) for field in done.stdout.split()])
    own, names, torch_ms = (statistics.median(column) for column in zip(*rows, strict=True))
    return own, names, torch_ms


def resolution_ms(num_layers: int = 28, rounds: int = 9) -> tuple[float, float, int]:
    """Return medians in ms of resolution and of the whole construction, and the requests made."""
    config = Qwen3.parse(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
        "benchmark",
    )
    registry, device = current_registry(), place().device
    rows = []
    for _ in range(rounds):
        resolver = TimedResolver(registry, device, Config())
        start = time.perf_counter()
        with torch.device("meta"):
            config.build(Site(resolver, "", torch.bfloat16), page_size=16)
        rows.append((resolver.seconds * 1e3, (time.perf_counter() - start) * 1e3))
    requests = sum(len(prefixes) for _, prefixes in resolver.choices.values())
    resolved, built = (statistics.median(column) for column in zip(*rows, strict=True))
    return resolved, built, requests


def main() -> None:
    """Print every figure beside its goal."""
    direct, bound = bound_call_ns()
    print(f"direct call of a function        {direct:8.1f} ns")
    print(f"the same through a bound layer   {bound:8.1f} ns")
    print(f"difference                       {bound - direct:8.1f} ns  (goal: under 50)")
    own, names, torch_ms = import_ms()
    print(f"import interposer after torch    {own:8.1f} ms  (goal: under 30)")
    print(
        f"  then the first use of every public name {names:.1f} ms; torch itself {torch_ms:.0f} ms"
    )
    resolved, built, requests = resolution_ms()
    print(f"resolution of a 28-layer model   {resolved:8.1f} ms  (goal: under 50)")
    print(f"  {requests} requests; whole construction on meta {built:.1f} ms")


if __name__ == "__main__":
    main()
