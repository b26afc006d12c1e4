"""Time the CPU platform's kernels against their ops' references, and ``sdpa`` against ``paged``.

Both are called in turns, so that other load on the machine affects both alike. ``median`` is the
ratio of medians, ``best`` the ratio of minimums; above 1 the kernel is faster. Matmuls with
quantized weights are measured by ``cpu_ops.py``, MoE layers and samplers by their own benchmarks.

    python benchmarks/cpu_kernels.py [--threads N] [--rounds N] [NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import torch

from interposer import (
    AttentionBatch,
    AttentionSpec,
    Config,
    Device,
    Kernel,
    Registry,
    Request,
    Resolver,
    Site,
    current_registry,
)
from interposer.records import load_target
from interposer_cpu import CPUPlatform
from interposer_cpu._attention import SdpaBackend
from interposer_ops.devices.host_memory import cache_memory
from interposer_ops.layers.attention import PagedBackend

TOKENS = (1, 8, 64, 512)
HIDDEN = (256, 1024, 4096)
DTYPES = (torch.float32, torch.bfloat16)
HEAD_SIZE = 64
PAGE_SIZE = 16
# Short, so that many turns pass before the system schedules something else.
MEASURE_S = 5e-4
# Larger than the last-level cache, so that weights come from memory as in a model.
WEIGHTS_BYTES = 64 << 20

# Names that `arguments` supports.
OPS = (
    "embedding",
    "fused_add_rms_norm",
    "gelu_and_mul",
    "linear",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
)

Call = Callable[[], object]
Arguments = dict[str, Any]
Row = tuple[str, Call, Call]


def arguments(op: str, t: int, h: int, dtype: torch.dtype) -> tuple[Arguments, dict[str, int]]:
    """Draw random arguments by name, and return the dims of the request."""
    x = torch.randn(t, h).to(dtype)
    weight = torch.randn(h).to(dtype)
    if op == "rms_norm":
        return {"x": x, "weight": weight, "eps": 1e-5}, {"hidden_size": h}
    if op == "fused_add_rms_norm":
        return {"x": x, "residual": x.clone(), "weight": weight, "eps": 1e-5}, {"hidden_size": h}
    if op in ("silu_and_mul", "gelu_and_mul"):
        given: Arguments = {"x": torch.randn(t, 2 * h).to(dtype)}
        return given | ({"approximate": "tanh"} if op[0] == "g" else {}), {"intermediate_size": h}
    if op == "linear":
        given = {"x": x, "weight": torch.randn(h, h).to(dtype), "bias": None}
        return given, {"in_features": h, "out_features": h}
    if op == "embedding":
        given = {
            "token_ids": torch.randint(0, 4000, (t,)),
            "weight": torch.randn(4000, h).to(dtype),
        }
        return given, {"vocab_size": 4000, "hidden_size": h}
    heads = h // HEAD_SIZE
    sizes = (heads, max(heads // 4, 1), max(heads // 4, 1))
    query, key, value = torch.randn(t, sum(sizes), HEAD_SIZE).to(dtype).split(sizes, dim=1)
    if op == "rotary_embedding":
        cos, sin = torch.randn(2, t, HEAD_SIZE // 2)
        given = {"query": query, "key": key, "cos": cos, "sin": sin}
        return given, {"head_size": HEAD_SIZE, "rotary_size": HEAD_SIZE}
    caches = torch.zeros(2, 1024 // PAGE_SIZE, PAGE_SIZE, *key.shape[1:], dtype=dtype)
    given = {"key": key, "value": value, "key_cache": caches[0], "value_cache": caches[1]}
    return given | {"slots": torch.randperm(1024)[:t]}, {"page_size": PAGE_SIZE}


def kernel_rows(registry: Registry, device: Device, wanted: Sequence[str]) -> Iterator[Row]:
    for op_name in wanted or OPS:
        kernels = [c for c in registry.candidates("kernel", op_name) if _is_ours(c.record)]
        op = load_target(registry.ops[op_name].target)
        for dtype in DTYPES:
            for h in HIDDEN:
                for t in TOKENS:
                    copies = 1
                    if op_name == "linear":
                        copies = min(max(WEIGHTS_BYTES // (h * h * dtype.itemsize), 1), 16)
                    given = [arguments(op_name, t, h, dtype) for _ in range(copies)]
                    name = str(dtype).removeprefix("torch.")
                    capability, dims = device.capability, given[0][1]
                    request = Request("kernel", op_name, "cpu", capability, name, dims)
                    for candidate in kernels:
                        if candidate.judge(request):
                            pair = _calls(op, candidate.record, [args for args, _ in given])
                            yield f"{candidate.name:32} {name:8} T={t:<4} H={h:<4}", *pair


def _is_ours(record: object) -> bool:
    """Check whether a record belongs to this platform or to all platforms."""
    ours = ("interposer_cpu.", "interposer_ops.")
    return isinstance(record, Kernel) and record.target.startswith(ours)


def _calls(op: Any, record: Any, given: list[Arguments]) -> tuple[Call, Call]:
    prepared = given
    if record.prepare:
        prepare = load_target(record.prepare)
        prepared = [args | prepare(**{n: args[n] for n in op.constants}) for args in given]
    return _turns(op.reference, given), _turns(load_target(record.target), prepared)


def _turns(function: Callable[..., object], given: list[Arguments]) -> Call:
    """Build a call that cycles through the sets of arguments."""
    turn = cycle([tuple(args.values()) for args in given])
    return lambda: function(*next(turn))


def attention_rows(registry: Registry, device: Device) -> Iterator[Row]:
    steps = [(1, 1, 128), (1, 1, 1024), (8, 1, 128), (8, 1, 1024), (1, 64, 64), (1, 512, 512)]
    steps += [(1, 128, 1024)]
    for dtype in DTYPES:
        site = Site(Resolver(registry, device, Config()), "attention", dtype)
        for num_heads, num_kv_heads, head_size in ((4, 2, 64), (16, 8, 128)):
            spec = AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                dtype=dtype,
                cache_dtype=dtype,
                page_size=PAGE_SIZE,
                scale=head_size**-0.5,
            )
            for num_seqs, query_tokens, context in steps:
                batch = _batch(num_seqs, query_tokens, context)
                calls = [
                    _step(backend(spec, site), spec, batch)
                    for backend in (PagedBackend, SdpaBackend)
                ]
                name = str(dtype).removeprefix("torch.")
                heads = f"N={num_heads:<2} K={num_kv_heads} D={head_size:<3}"
                shape = f"B={num_seqs} Q={query_tokens:<3} L={context:<4}"
                yield f"sdpa {name:8} {heads} {shape}", calls[0], calls[1]


def _batch(num_seqs: int, query_tokens: int, context: int) -> AttentionBatch:
    """Build a batch of sequences of equal length, each on consecutive pages."""
    pages = torch.arange(num_seqs * context // PAGE_SIZE).view(num_seqs, -1)
    positions = torch.arange(context - query_tokens, context)
    slots = pages[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return AttentionBatch(
        query_starts=torch.arange(num_seqs + 1) * query_tokens,
        seq_lens=torch.full((num_seqs,), context),
        page_table=pages,
        slots=slots.flatten(),
        max_query_tokens=query_tokens,
        max_seq_tokens=context,
    )


def _step(backend: Any, spec: AttentionSpec, batch: AttentionBatch) -> Call:
    num_tokens = batch.slots.shape[0]
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    given = torch.randn(num_tokens, sum(heads), spec.head_size).to(spec.dtype).split(heads, dim=1)
    cache = backend.kv_layout().allocate(1, batch.page_table.numel(), "cpu", cache_memory)[0]
    plan = backend.plan(batch)
    return lambda: backend.forward(*given, cache, plan)


def compare(reference: Call, kernel: Call, rounds: int) -> str:
    calls = (reference, kernel)
    repeats = [_repeats(call) for call in calls]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, number, taken in zip(calls, repeats, times, strict=True):
            taken.append(_time_us(call, number))
    medians = [statistics.median(taken) for taken in times]
    bests = [min(taken) for taken in times]
    return (
        f"{medians[0]:10.1f} us {medians[1]:10.1f} us  "
        f"median x{medians[0] / medians[1]:.2f}  best x{bests[0] / bests[1]:.2f}"
    )


def _repeats(call: Call) -> int:
    call()
    return max(1, min(2000, int(MEASURE_S * 1e6 / _time_us(call, 1))))


def _time_us(call: Call, number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="ops to measure, or sdpa; all without any")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    if unknown := set(options.names) - {*OPS, "sdpa"}:
        parser.error(f"unknown names: {', '.join(sorted(unknown))}; known: sdpa, {', '.join(OPS)}")
    torch.set_num_threads(options.threads)
    registry, device = current_registry(), CPUPlatform().devices()[0]
    print(f"{device.name}, {options.threads} threads, torch {torch.__version__}")
    with torch.inference_mode():
        names = [name for name in options.names if name != "sdpa"]
        if names or not options.names:
            for label, reference, kernel in kernel_rows(registry, device, names):
                print(label, compare(reference, kernel, options.rounds), flush=True)
        if not options.names or "sdpa" in options.names:
            for label, reference, kernel in attention_rows(registry, device):
                print(label, compare(reference, kernel, options.rounds), flush=True)


if __name__ == "__main__":
    main()
