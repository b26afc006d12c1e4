"""How the kernels of every op do on an accelerator: against its roofs, and against torch.

Each kernel is checked against the reference on the sample that is timed before it is timed. Per op
and number of tokens: microseconds, the share of the measured memory bandwidth and of the measured
matrix peak, and how many times slower eager torch and torch.compile(max-autotune) run the
reference. All contenders take turns; the caches hold nothing of theirs.

    python benchmarks/gpu_ops.py [--device cuda] [--dtype bfloat16] [--tokens 1,64,4096] [OP ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from interposer import Capability, Case, CustomOp, Device, Kernel, Registry, Request
from interposer.errors import FOREIGN_ERRORS, described
from interposer.plugins import Plugins
from interposer.records import load_target
from interposer.testing import check_kernel
from interposer_ops import plugin

# What an 8-billion model of the Llama kind states, and a mixture of experts of the usual size.
DIMS: Mapping[str, int | float | str | bool] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "in_features": 4096,
    "out_features": 4096,
    "vocab_size": 128256,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_size": 128,
    "rotary_size": 128,
    "page_size": 16,
    "windowed": False,
    "softcapped": False,
    "sinks": False,
    "alibi": False,
    "prefix_lm": False,
    "group_size": 128,
    "block_size": 128,
    "num_experts": 64,
    "top_k": 8,
    "num_groups": 8,
    "top_groups": 4,
    "rank": 16,
    "latent_size": 512,
    "rope_size": 64,
}
Call = Callable[[], object]


@dataclass(frozen=True)
class Roofs:
    """What the device was measured to reach."""

    bytes_per_s: float
    flops_per_s: float


def main() -> None:
    options = parsed()
    device, dtype = described_device(options.device), getattr(torch, options.dtype)
    clock = Clock(device.torch_device)
    roofs = measured_roofs(clock, device.torch_device)
    print(
        f"{device.name} ({device.capability.architecture}), torch {torch.__version__}; "
        f"copy {roofs.bytes_per_s / 1e9:.0f} GB/s, matrix product in bfloat16 "
        f"{roofs.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    print(
        f"{'op':30}{'tokens':>7}  {'kernel':34}{'us':>9}{'bytes':>7}{'flops':>7}"
        f"{'eager':>8}{'compiled':>10}"
    )
    registry = Registry(Plugins.of(plugin))
    for name in options.ops or registry.ops:
        op: CustomOp[..., Any] = load_target(registry.ops[name].target)
        if op.sample is None:
            continue
        for num_tokens in options.tokens:
            for line in lines(registry, name, op, device, dtype, num_tokens, clock, roofs):
                print(line, flush=True)


def lines(
    registry: Registry,
    name: str,
    op: CustomOp[..., Any],
    device: Device,
    dtype: torch.dtype,
    num_tokens: int,
    clock: Clock,
    roofs: Roofs,
) -> Iterator[str]:
    assert op.sample is not None
    head = f"{name:30}{num_tokens:>7}  "
    try:
        case = op.sample(dtype, DIMS, num_tokens, 0)
    except FOREIGN_ERRORS as error:
        yield f"{head}no sample: {described(error)}"
        return
    arguments = {
        key: value.to(device.torch_device) if isinstance(value, torch.Tensor) else value
        for key, value in case.arguments.items()
    }
    positional = op.signature.bind(**arguments).args
    ours = dict(contenders(registry, name, op, case, positional, device, dtype))
    torchs = {"eager": lambda: op.reference(*positional), **compiled(op, positional)}
    calls = {key: call for key, call in {**ours, **torchs}.items() if callable(call)}
    taken = dict(zip(calls, clock.time(list(calls.values())), strict=True))
    moved, flops = work_of(op, positional)
    for kernel, call in ours.items():
        if not callable(call):
            yield f"{head}{kernel:34}{call}"
            continue
        seconds = taken[kernel]
        ratios = (
            f"{taken[key] / seconds:>{width - 1}.2f}x" if key in taken else f"{'-':>{width}}"
            for key, width in (("eager", 8), ("compiled", 10))
        )
        yield (
            f"{head}{kernel:34}{1e6 * seconds:>9.1f}{moved / seconds / roofs.bytes_per_s:>7.0%}"
            f"{flops / seconds / roofs.flops_per_s:>7.0%}" + "".join(ratios)
        )
    if not any(callable(call) for call in ours.values()):
        yield f"{head}{'(eager)':34}{1e6 * taken['eager']:>9.1f}"


def contenders(
    registry: Registry,
    name: str,
    op: CustomOp[..., Any],
    case: Case,
    positional: tuple[Any, ...],
    device: Device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Call | str]]:
    """Yield the kernels that take the case: a call of a right one, a sentence of a wrong one."""
    dtype_name = str(dtype).removeprefix("torch.")
    request = Request("kernel", name, device.platform, device.capability, dtype_name, case.dims)
    for candidate in registry.candidates("kernel", name):
        record = candidate.record
        if not isinstance(record, Kernel) or not candidate.judge(request):
            continue
        try:
            function = load_target(record.target)
            prepare = load_target(record.prepare) if record.prepare else None
            faults = check_kernel(op, function, case, prepare=prepare, device=device.torch_device)
        except FOREIGN_ERRORS as error:
            yield record.name, f"fails: {described(error)}"
            continue
        if faults:
            yield record.name, f"is wrong: {faults[0]}"
        else:
            yield record.name, partial(function, *positional)


def compiled(op: CustomOp[..., Any], positional: tuple[Any, ...]) -> dict[str, Call]:
    """Return a call of the compiled reference, nothing where it cannot be compiled."""
    torch.compiler.reset()
    function = torch.compile(op.reference, mode="max-autotune-no-cudagraphs", dynamic=False)
    try:
        function(*positional)
    except FOREIGN_ERRORS:
        return {}
    return {"compiled": lambda: function(*positional)}


def work_of(op: CustomOp[..., Any], positional: tuple[Any, ...]) -> tuple[int, int]:
    """Return the bytes that must be moved once, and the operations of matrix products."""
    with FlopCounterMode(display=False) as counter:
        result = op.reference(*positional)
    leaves = _pytree.tree_leaves((positional, result))
    # Of paged memory only what the tokens take is moved, which the pages don't tell.
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors), int(
        counter.get_total_flops()
    )


class Clock:
    """Times calls by the device's own events, or by the host's clock where it has none."""

    rounds = 30

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.flush = torch.zeros(64 << 20, dtype=torch.int32, device=device)

    def time(self, calls: list[Call]) -> list[float]:
        """Return the median seconds of each call; they take turns."""
        for call in calls:
            for _ in range(3):
                call()
        taken: list[list[float]] = [[] for _ in calls]
        for turn in range(self.rounds):
            for place in range(len(calls)):
                number = (turn + place) % len(calls)
                taken[number].append(self.once(calls[number]))
        return [median(seconds) for seconds in taken]

    def once(self, call: Call) -> float:
        self.flush.add_(1)
        if self.device.type == "cpu":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def measured_roofs(clock: Clock, device: str) -> Roofs:
    small = torch.device(device).type == "cpu"
    source = torch.ones((1 << 26) if small else (1 << 30), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    size = 1024 if small else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied, multiplied = clock.time([lambda: target.copy_(source), lambda: left @ right])
    return Roofs(2 * source.numel() / copied, 2 * size**3 / multiplied)


def described_device(name: str) -> Device:
    """Return the device as its platform would describe it, for kernels that run on any platform."""
    kind = torch.device(name).type
    if kind == "cpu":
        return Device("cpu", "cpu", "cpu", Capability("any"))
    features, architecture = frozenset({"triton"}), kind
    label = torch.get_device_module(kind).get_device_name()
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(name)
        hip = getattr(properties, "gcnArchName", "").partition(":")[0]
        architecture = hip if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return Device(kind, name, label, Capability(architecture, features))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    found = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=found.type if found else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[1, 64, 4096]
    )
    parser.add_argument("ops", nargs="*")
    return parser.parse_args()


if __name__ == "__main__":
    main()
