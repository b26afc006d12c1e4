"""Time every kernel that the selection accepts on this machine, against the roofline.

    python benchmarks/cpu_ops.py [--threads 2,1] [--rounds 15] [--json FILE] [NAME ...]

Matmuls at the shapes of Qwen3-0.6B, with unquantized, 8-bit and 4-bit weights, for 1 to 512 rows;
attention over a cache in 16 bits, e4m3 or int8; and prompts of 1024 tokens. Copies of weights and
caches are used in turn, so that they come from memory. All kernels for a request take turns too.
Results are medians; shares are fractions of the bandwidth and of the bf16 GEMM measured before.
The reference is the op's definition in torch; where it unpacks quantized values, it is omitted for
large shapes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from cpu_attention import CACHES, attention_requests
from cpu_roofs import READ_BYTES, roofs_of
from interposer import CustomOp, Kernel, Registry, Request, current_registry
from interposer.errors import described, foreign_errors
from interposer.records import load_target
from interposer_cpu import CPUPlatform
from interposer_engine.roofline import Roofs

Call = Callable[[], object]
ROWS = (1, 2, 4, 8, 32, 512)
SHAPES = {
    "qkv": (1024, 4096),
    "o": (2048, 1024),
    "gate_up": (1024, 6144),
    "down": (3072, 1024),
    "head": (1024, 151936),
    "square": (4096, 4096),
}
# Total bytes of all copies of a weight: larger than the last-level cache.
OUT_OF_CACHE_BYTES = 96 << 20
# Up to this many multiplications, a reference that unpacks quantized values is called.
REFERENCE_PRODUCTS = 8 << 20
# Calls are repeated until a sample takes this long; of slow calls, few are timed.
SAMPLE_S = 2e-3
LONG_S, FEW_ROUNDS = 0.25, 3

_FP8 = "float8_e4m3fn"
_GROUPED: dict[str, Any] = {"asymmetric": False, "scale_dtype": "bfloat16"}
_W4A8: dict[str, Any] = {
    "x_scales": "token",
    "asymmetric_inputs": False,
    "asymmetric_weights": False,
}
_TOKENS = {"x_scales": "token", "weight_scales": "channel"}


@dataclass(frozen=True)
class Format:
    """Weight format: the op, the inputs per scale if any, and further dims."""

    op: str
    group_size: int | None = None
    dims: dict[str, Any] = field(default_factory=dict)

    def dims_of(self, in_features: int, out_features: int) -> dict[str, Any]:
        sizes = {"in_features": in_features, "out_features": out_features, **self.dims}
        if self.group_size is None:
            return sizes
        group = self.group_size or in_features
        return {**sizes, "group_size": group, "num_groups": in_features // group}


FORMATS = {
    "bf16": Format("linear"),
    "int8": Format("int8_linear", None, {**_TOKENS, "asymmetric": False}),
    "w8a16": Format("w8a16_linear", 0, {"asymmetric": False}),
    "int4-g32": Format("w4a16_linear", 32, _GROUPED),
    "int4-g128": Format("w4a16_linear", 128, _GROUPED),
    "w4a8-g32": Format("w4a8_linear", 32, _W4A8),
    "w4a8-g128": Format("w4a8_linear", 128, _W4A8),
    "fp8": Format("fp8_linear", None, {**_TOKENS, "x_dtype": _FP8, "weight_dtype": _FP8}),
    "mxfp4": Format("mxfp4_linear"),
}


@dataclass(frozen=True)
class Measure:
    """Result of one kernel for one request; shares are fractions of the measured roofline."""

    name: str
    what: str
    kernel: str
    threads: int
    microseconds: float
    lowest: float
    highest: float
    gb_per_s: float
    of_bandwidth: float
    gflop_per_s: float
    of_peak: float

    def line(self) -> str:
        spread = f"({self.lowest:.0f}-{self.highest:.0f})"
        return (
            f"| {self.name} | {self.what} | {self.threads} | {self.kernel} "
            f"| {self.microseconds:.1f} {spread} | {self.gb_per_s:.1f} | {self.of_bandwidth:.0%} "
            f"| {self.gflop_per_s:.0f} | {self.of_peak:.0%} |"
        )


@dataclass(frozen=True)
class Work:
    """Timed workload: calls by kernel, each cycling through its copies."""

    name: str
    what: str
    num_bytes: float
    flops: float
    calls: dict[str, Call]


def linear_work(
    registry: Registry,
    name: str,
    shape: tuple[int, int],
    rows: list[int],
    room_bytes: int = OUT_OF_CACHE_BYTES,
) -> Iterator[Work | str]:
    """Yield the workload of a format at a shape, or the reason why a kernel cannot be called."""
    form, device = FORMATS[name], CPUPlatform().devices()[0]
    op: CustomOp[..., Any] = load_target(registry.ops[form.op].target)
    assert op.sample is not None
    dims = form.dims_of(*shape)
    case = op.sample(torch.bfloat16, dims, max(rows), 0)
    constants = {key: case.arguments[key] for key in op.constants}
    weight_bytes = sum(t.nbytes for t in constants.values() if isinstance(t, torch.Tensor))
    request = Request("kernel", form.op, "cpu", device.capability, "bfloat16", dims)
    held: dict[str, tuple[Callable[..., object], list[dict[str, Any]]]] = {}
    copies = -(-room_bytes // weight_bytes)
    for candidate in registry.candidates("kernel", form.op):
        if isinstance(candidate.record, Kernel) and candidate.judge(request):
            try:
                held[candidate.name] = prepared(candidate.record, constants, copies)
            except foreign_errors() as error:
                yield f"{name} {shape} {candidate.name}: {described(error)}"
    defined = op.reference if name == "bf16" or _fits(min(rows), shape) else None
    plain = [{k: _cloned(v) for k, v in constants.items()} for _ in range(copies if defined else 0)]
    for count in rows:
        given = dict(case.arguments)
        for key in op.batched:
            if isinstance(given[key], torch.Tensor) and given[key].shape[0] == max(rows):
                given[key] = given[key][:count].contiguous()
        calls = {
            kernel: turns(function, [given | constants for constants in sets])
            for kernel, (function, sets) in held.items()
        }
        if defined and (name == "bf16" or _fits(count, shape)):
            calls["reference"] = turns(defined, [given | each for each in plain])
        moved = weight_bytes + 2.0 * count * sum(shape)
        what = f"{shape[0]} to {shape[1]}, {count} rows"
        yield Work(name, what, moved, 2.0 * count * shape[0] * shape[1], calls)


def prepared(
    record: Kernel, constants: dict[str, Any], copies: int
) -> tuple[Callable[..., object], list[dict[str, Any]]]:
    prepare = load_target(record.prepare) if record.prepare else dict
    sets = [prepare(**{k: _cloned(v) for k, v in constants.items()}) for _ in range(copies)]
    return load_target(record.target), sets


def _fits(rows: int, shape: tuple[int, int]) -> bool:
    return rows * shape[0] * shape[1] <= REFERENCE_PRODUCTS


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def turns(function: Callable[..., object], sets: list[dict[str, Any]]) -> Call:
    """Build a call that cycles through the sets of arguments."""
    turn = itertools.cycle([tuple(given.values()) for given in sets])
    return lambda: function(*next(turn))


def measured(work: Work, roofs: Roofs, rounds: int) -> Iterator[Measure | str]:
    """Measure all kernels, taking turns in every round, and yield a result for each."""
    repeats: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for kernel, call in work.calls.items():
        try:
            call()
            once = max(seconds(call, 1), 1e-7)
        except foreign_errors() as error:
            yield f"{work.name} {work.what} {kernel}: {described(error)}"
            continue
        repeats[kernel] = max(1, int(SAMPLE_S / once))
        wanted[kernel] = min(rounds, FEW_ROUNDS) if once > LONG_S else rounds
    taken: dict[str, list[float]] = {kernel: [] for kernel in repeats}
    for index, kernel in itertools.product(range(rounds), repeats):
        if index < wanted[kernel]:
            taken[kernel].append(seconds(work.calls[kernel], repeats[kernel]))
    for kernel, values in taken.items():
        middle = statistics.median(values)
        yield Measure(
            work.name,
            work.what,
            kernel,
            roofs.threads,
            middle * 1e6,
            min(values) * 1e6,
            max(values) * 1e6,
            work.num_bytes / middle / 1e9,
            work.num_bytes / middle / roofs.bytes_per_s,
            work.flops / middle / 1e9,
            work.flops / middle / roofs.flops_per_s,
        )


def seconds(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def all_work(registry: Registry, options: argparse.Namespace) -> Iterator[Work | str]:
    for name in FORMATS:
        for shape in (SHAPES[label] for label in options.shapes):
            if not options.names or name in options.names:
                yield from linear_work(registry, name, shape, options.rows)
    for name in CACHES:
        if not options.names or name in options.names:
            sizes = (options.contexts, options.batches, options.prefill)
            for found in attention_requests(registry, name, *sizes, OUT_OF_CACHE_BYTES):
                yield Work(found.name, found.what, found.num_bytes, found.flops, found.calls)


def parsed() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join([*FORMATS, *CACHES])}; or all")
    parser.add_argument("--threads", type=numbers, default=[2, 1])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=numbers, default=list(ROWS))
    parser.add_argument("--contexts", type=numbers, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--prefill", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--read-mib", type=int, default=READ_BYTES >> 20)
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args()
    unknown = set(options.names) - {*FORMATS, *CACHES}
    if unknown:
        parser.error(f"unknown names: {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = parsed()
    roofs = [roofs_of(n, options.rounds, options.read_mib << 20) for n in options.threads]
    for roof in roofs:
        print(
            f"{roof.threads} threads: reading {roof.bytes_per_s / 1e9:.1f} GB/s by {roof.read_by}, "
            f"bf16 products {roof.flops_per_s / 1e9:.0f} GFLOP/s; torch {torch.__version__}"
        )
    print("\n| | request | threads | kernel | us | GB/s | of read | GFLOP/s | of bf16 peak |")
    print("|---" * 9 + "|", flush=True)
    figures: list[dict[str, Any]] = []
    with torch.inference_mode():
        for work in all_work(current_registry(), options):
            found = [work] if isinstance(work, str) else []
            if not isinstance(work, str):
                for roof in roofs:
                    torch.set_num_threads(roof.threads)
                    for measure in measured(work, roof, options.rounds):
                        found.append(measure if isinstance(measure, str) else measure.line())
                        if isinstance(measure, Measure):
                            figures.append(asdict(measure))
            print("\n".join(found), flush=True)
    if options.json:
        text = {"roofs": [asdict(roof) for roof in roofs], "figures": figures}
        options.json.write_text(json.dumps(text, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
