"""Time MoE layers on the CPU platform and compare them with other implementations.

    python benchmarks/cpu_experts.py [--threads N] [--rounds N] [--clock thread|wall]

The other implementations are the portable kernel, and the platform's own ``linear`` called expert
by expert, with tokens gathered before and summed after. ``one matrix`` is a dense projection with
as many weights per token, whose speed is the target. All take turns, each time with other experts,
so that weights come from memory and other load affects all alike. Times are medians of the calling
thread's processor time, which excludes waiting; with several threads, use ``--clock wall``. GB/s
count the weights of the chosen experts once each.

T tokens, H hidden size, I intermediate size, E experts, K experts per token.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interposer_cpu import native
from interposer_cpu._kernels import activations as native_activations
from interposer_cpu._kernels import experts as native_experts
from interposer_cpu._kernels import linear as native_linear
from interposer_ops.experts import fused_experts_in_turn, fused_experts_mxfp4_in_turn
from interposer_ops.quantizers import quantize_mxfp4

TOKENS = (1, 8, 512)
HIDDEN, INNER, EXPERTS, TOP_K = 1024, 512, 32, 4
DTYPE = torch.bfloat16
GROUP = 32
# Number of different routings per token count, used in turn.
ROUTINGS = 8

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x, weights, ids
Way = Callable[[Routing], object]

CLOCKS = {"thread": time.thread_time, "wall": time.perf_counter}


def random_matrices(outputs: int, inputs: int) -> torch.Tensor:
    numbers = torch.randn(EXPERTS, outputs, inputs).mul_(1 / math.sqrt(inputs))
    return numbers.to(DTYPE)


def routings(tokens: int) -> list[Routing]:
    made = []
    for _ in range(ROUTINGS):
        ids = torch.rand(tokens, EXPERTS).argsort(-1)[:, :TOP_K].to(torch.int32).contiguous()
        weights = torch.rand(tokens, TOP_K).softmax(-1)
        made.append((torch.randn(tokens, HIDDEN).to(DTYPE), weights, ids))
    return made


def plain_ways(gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, Way]:
    constants: dict[str, Any] = {
        "gate_up": gate_up,
        "gate_up_bias": None,
        "down": down,
        "down_bias": None,
    }
    prepared = native_experts.pack_fused_experts(**constants)
    first = [native_linear.pack(matrix, None)["weight"] for matrix in gate_up]
    second = [native_linear.pack(matrix, None)["weight"] for matrix in down]
    return {
        "one call": lambda given: _called(native_experts.fused_experts, prepared, given),
        "any device": lambda given: _called(fused_experts_in_turn, constants, given),
        "one by one": lambda given: _one_by_one(
            lambda rows, expert: native_linear.linear(rows, first[expert], None),
            lambda rows, expert: native_linear.linear(rows, second[expert], None),
            given,
        ),
        "one matrix": _one_matrix(
            lambda weight: native_linear.pack(weight, None)["weight"],
            lambda x, packed: native_linear.linear(x, packed, None),
        ),
    }


def mxfp4_ways(gate_up: torch.Tensor, down: torch.Tensor) -> dict[str, Way]:
    codes, scales = quantize_mxfp4(gate_up)
    down_codes, down_scales = quantize_mxfp4(down)
    constants: dict[str, Any] = {
        "gate_up": codes,
        "gate_up_scale": scales,
        "gate_up_bias": None,
        "down": down_codes,
        "down_scale": down_scales,
        "down_bias": None,
    }
    prepared = native_experts.pack_fused_experts_mxfp4(**constants)
    first = [
        native_linear.pack_mxfp4(*parts, None)["weight"]
        for parts in zip(codes, scales, strict=True)
    ]
    second = [
        native_linear.pack_mxfp4(*parts, None)["weight"]
        for parts in zip(down_codes, down_scales, strict=True)
    ]
    return {
        "one call": lambda given: _called(native_experts.fused_experts_mxfp4, prepared, given),
        "any device": lambda given: _called(fused_experts_mxfp4_in_turn, constants, given),
        "one by one": lambda given: _one_by_one(
            lambda rows, expert: native_linear.mxfp4_linear(rows, first[expert], None, None),
            lambda rows, expert: native_linear.mxfp4_linear(rows, second[expert], None, None),
            given,
        ),
        "one matrix": _one_matrix(
            lambda weight: native_linear.pack_mxfp4(*quantize_mxfp4(weight), None)["weight"],
            lambda x, packed: native_linear.mxfp4_linear(x, packed, None, None),
        ),
    }


WAYS = {"bfloat16": (plain_ways, 2.0), "mxfp4": (mxfp4_ways, 0.5 + 1 / GROUP)}
"""The computation of each form, and the bytes of a number."""


def _called(function: Callable[..., object], constants: dict[str, Any], given: Routing) -> object:
    x, weights, ids = given
    return function(x, *constants.values(), weights, ids, "silu")


def _one_by_one(
    first: Callable[[torch.Tensor, int], torch.Tensor],
    second: Callable[[torch.Tensor, int], torch.Tensor],
    given: Routing,
) -> torch.Tensor:
    x, weights, ids = given
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        hidden = native_activations.silu_and_mul(first(x[tokens], expert))
        returned = second(hidden, expert).float()
        total.index_add_(0, tokens, returned * weights[tokens, choices, None])
    return total.to(x.dtype)


def _one_matrix(
    pack: Callable[[torch.Tensor], Any], product: Callable[[torch.Tensor, Any], object]
) -> Way:
    numbers = torch.randn(TOP_K * 3 * INNER, HIDDEN) * HIDDEN**-0.5
    # As large as all experts together, so that these weights come from memory too.
    packed = [pack(numbers.to(DTYPE)) for _ in range(EXPERTS // TOP_K)]
    turn = iter(range(1 << 60))
    return lambda given: product(given[0], packed[next(turn) % len(packed)])


def measure(
    ways: dict[str, Way], given: Sequence[Routing], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Time all implementations; return the seconds of every call by implementation."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            routing = given[number % len(given)]
            start = clock()
            way(routing)
            if number:  # the first call of all allocates
                taken[name].append(clock() - start)
    return taken


def report(form: str, tokens: int, taken: dict[str, list[float]], given: Sequence[Routing]) -> None:
    numbers = 3 * INNER * HIDDEN
    size = WAYS[form][1]
    chosen = statistics.mean(len(ids.unique()) for _, _, ids in given)
    flops = 2.0 * tokens * TOP_K * numbers
    base = taken["one call"]
    for name, times in taken.items():
        median = statistics.median(times)
        ratio = statistics.median(b / a for a, b in zip(base, times, strict=True))
        read = (TOP_K if name == "one matrix" else chosen) * numbers * size
        print(
            f"{form:8} T={tokens:<4} {name:10} {median * 1e3:9.3f} ms  x{ratio:5.2f}"
            f"  {read / median / 1e9:6.1f} GB/s  {flops / median / 1e9:7.1f} GFLOP/s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--clock", choices=CLOCKS, default="thread")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{native.level()}, {options.threads} threads, torch {torch.__version__}")
    print(f"H={HIDDEN} I={INNER} E={EXPERTS} K={TOP_K}; x: time as a multiple of one call's")
    with torch.inference_mode():
        for form, (ways_of, _) in WAYS.items():
            ways = ways_of(random_matrices(2 * INNER, HIDDEN), random_matrices(HIDDEN, INNER))
            for tokens in TOKENS:
                given = routings(tokens)
                rounds = options.rounds if tokens < 64 else max(5, options.rounds // 5)
                taken = measure(ways, given, rounds, CLOCKS[options.clock])
                report(form, tokens, taken, given)


if __name__ == "__main__":
    main()
