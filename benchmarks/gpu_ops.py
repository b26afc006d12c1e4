"""Time the kernels of every op on an accelerator, against its roofs and against torch.

Each kernel is checked against the reference on the sample that is timed before it is timed. Per op
and number of tokens: microseconds, the share of the measured memory bandwidth and of the measured
matrix peak, and how many times slower eager torch and torch.compile(max-autotune) run the
reference. All contenders take turns; the caches hold nothing of theirs.

    python benchmarks/gpu_ops.py [--platform NAME] [--dtype bfloat16] [--tokens 1,64,4096]
        [--rounds 30] [--json FILE] [OP ...]

Kernels are those of all plugins that are installed; it needs a plugin for the accelerator.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from gpu_clock import Call, Clock, Roofs, accelerator_placement, measured_roofs
from interposer import Case, CustomOp, Device, Kernel, Registry, Request, current_registry
from interposer.errors import described, foreign_errors
from interposer.records import load_target
from interposer_testing import check_kernel

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


@dataclass
class Figure:
    """The times of one kernel; None where torch could not run or compile the reference."""

    op: str
    num_tokens: int
    kernel: str
    seconds: float
    bytes_share: float
    flops_share: float
    eager_seconds: float | None
    compiled_seconds: float | None


def main() -> None:
    options = parsed()
    placement = accelerator_placement(options.platform)
    device, dtype = placement.device, getattr(torch, options.dtype)
    clock = Clock(device.torch_device, options.rounds)
    roofs = measured_roofs(clock)
    print(f"{device.name} ({device.capability.architecture}), torch {torch.__version__}; {roofs}")
    print(
        f"{'op':30}{'tokens':>7}  {'kernel':34}{'us':>9}{'bytes':>7}{'flops':>7}"
        f"{'eager':>8}{'compiled':>10}"
    )
    registry = current_registry()
    figures: list[Figure] = []
    for name in options.ops or sorted(registry.ops):
        op: CustomOp[..., Any] = load_target(registry.ops[name].target)
        if op.sample is None:
            continue
        for num_tokens in options.tokens:
            for found in measured(registry, name, op, device, dtype, num_tokens, clock, roofs):
                print(found if isinstance(found, str) else line(found), flush=True)
                if isinstance(found, Figure):
                    figures.append(found)
    if options.json:
        facts = {
            "device": device.name,
            "architecture": device.capability.architecture,
            "torch": torch.__version__,
            "dtype": options.dtype,
            "roofs": asdict(roofs),
            "figures": [asdict(figure) for figure in figures],
        }
        options.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def measured(
    registry: Registry,
    name: str,
    op: CustomOp[..., Any],
    device: Device,
    dtype: torch.dtype,
    num_tokens: int,
    clock: Clock,
    roofs: Roofs,
) -> Iterator[Figure | str]:
    """Yield a figure for each kernel that takes a sample, or a sentence if it cannot run."""
    assert op.sample is not None
    head = f"{name:30}{num_tokens:>7}  "
    try:
        case = op.sample(dtype, DIMS, num_tokens, 0)
    except foreign_errors() as error:
        yield f"{head}no sample: {described(error)}"
        return
    arguments = {
        key: value.to(device.torch_device) if isinstance(value, torch.Tensor) else value
        for key, value in case.arguments.items()
    }
    positional = op.signature.bind(**arguments).args
    ours = dict(contenders(registry, name, op, case, arguments, device, dtype))
    torchs = {"eager": lambda: op.reference(*positional), **compiled(op, positional)}
    calls = {key: call for key, call in {**ours, **torchs}.items() if callable(call)}
    taken = dict(zip(calls, clock.time(list(calls.values())), strict=True))
    moved, flops = work_of(op, positional)
    found = {kernel: call for kernel, call in ours.items() if callable(call)}
    yield from (f"{head}{kernel:34}{call}" for kernel, call in ours.items() if kernel not in found)
    for kernel in found or ("eager",):
        seconds = taken[kernel]
        yield Figure(
            name,
            num_tokens,
            kernel,
            seconds,
            moved / seconds / roofs.bytes_per_s,
            flops / seconds / roofs.flops_per_s,
            taken["eager"],
            taken.get("compiled"),
        )


def line(figure: Figure) -> str:
    ratios = (
        f"{other / figure.seconds:>{width - 1}.2f}x" if other else f"{'-':>{width}}"
        for other, width in ((figure.eager_seconds, 8), (figure.compiled_seconds, 10))
    )
    return (
        f"{figure.op:30}{figure.num_tokens:>7}  {figure.kernel:34}{1e6 * figure.seconds:>9.1f}"
        f"{figure.bytes_share:>7.0%}{figure.flops_share:>7.0%}" + "".join(ratios)
    )


def contenders(
    registry: Registry,
    name: str,
    op: CustomOp[..., Any],
    case: Case,
    arguments: Mapping[str, Any],
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
        except foreign_errors() as error:
            yield record.name, f"fails: {described(error)}"
            continue
        if faults:
            yield record.name, f"is wrong: {faults[0]}"
        else:
            constants = {key: arguments[key] for key in op.constants}
            given = {**arguments, **(prepare(**constants) if prepare else {})}
            yield record.name, partial(function, *op.signature.bind(**given).args)


def compiled(op: CustomOp[..., Any], positional: tuple[Any, ...]) -> dict[str, Call]:
    """Return a call of the compiled reference, nothing where it cannot be compiled."""
    torch.compiler.reset()
    function = torch.compile(op.reference, mode="max-autotune-no-cudagraphs", dynamic=False)
    try:
        function(*positional)
    except foreign_errors():
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


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--platform", default="", help="the one in force, unless said otherwise")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[1, 64, 4096]
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("ops", nargs="*")
    return parser.parse_args()


if __name__ == "__main__":
    main()
