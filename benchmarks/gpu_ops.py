"""Time the kernels of every op on an accelerator, against its roofs and against torch.

    python benchmarks/gpu_ops.py [--platform NAME] [--dtype bfloat16] [--seconds N] [--json FILE]
        [OP ...]

First the ops of an 8-billion model on the very shapes that it asks for, in bfloat16, fp8, int4 and
W4A8, then all others, then torch.compile for the former, as far as the time goes. Per op and number
of tokens: microseconds, the share of the measured memory bandwidth and of the measured matrix peak,
and how many times slower torch runs the reference, eagerly and compiled. The result of each kernel
is compared with that of the reference on the same device. All kernels take turns; the caches
hold nothing of theirs. Kernels are those of all plugins that are installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree

from evidence.record import Deadline, Record, add_step_options
from gpu_clock import Call, Clock, clock_of, placement_of, roofs_by
from gpu_workload import Item, items_of_model, items_of_others, moved_bytes, num_flops
from interposer import CustomOp, Device, Kernel, Registry, Request, current_registry
from interposer.errors import described, foreign_errors
from interposer.records import load_target
from interposer_engine.roofline import Roofs

METHODS = {"bf16": None, "fp8": "fp8", "int4": "int4", "w4a8": "w4a8"}
_TINY_OPS = ("silu_and_mul", "rms_norm", "relu2")
# A rounding more or less for each of some sums; what is wrong is off by far more.
_ROUNDINGS = 8
_MOST_ERROR = 0.25
_MOST_CODES = 0.02
# Compiling one reference takes at least so long.
_COMPILING_S = 8.0


@dataclass
class Figure:
    """The times of one kernel; None where torch could not run or compile the reference."""

    op: str
    precision: str
    dims: Mapping[str, Any]
    num_tokens: int
    kernel: str
    seconds: float
    num_bytes: int
    num_flops: int
    bytes_share: float
    flops_share: float
    eager_seconds: float | None
    compiled_seconds: float | None = None


def main() -> None:
    options = parsed()
    placement = placement_of(options.platform, options.tiny)
    record, deadline = Record(options.json), Deadline(options.seconds)
    device, dtype = placement.device, getattr(torch, options.dtype)
    clock = clock_of(device.torch_device, options.tiny)
    roofs = roofs_by(clock, placement, options.tiny)
    record.facts |= {"device": device.name, "torch": torch.__version__, "dtype": options.dtype}
    record.facts["roofs"] = asdict(roofs)
    record.say(f"{device.name} ({device.capability.architecture}); {roofs}")
    record.say(heading())
    registry = current_registry()
    model = list(
        items_of_model("tiny" if options.tiny else "llama-3-8b", placement, METHODS, options.tiny)
    )
    others = list(items_of_others(registry, {item.op for item in model}, options.tiny))
    wanted = options.ops or (_TINY_OPS if options.tiny else ())
    if wanted:
        model = [item for item in model if item.op in wanted]
        others = [item for item in others if item.op in wanted]
    bench = Bench(registry, device, dtype, clock, roofs, record)
    for item in record.within([*model, *others], deadline, "ops"):
        bench.measure(item)
    if options.tiny:
        record.skip("a rehearsal compiles nothing")
    else:
        for item in record.within(model, deadline, "ops that torch compiles", _COMPILING_S):
            bench.compile(item)
    record.headline = headline(bench.figures)
    record.say(record.headline)


class Bench:
    """Measures items on one device."""

    def __init__(
        self,
        registry: Registry,
        device: Device,
        dtype: torch.dtype,
        clock: Clock,
        roofs: Roofs,
        record: Record,
    ) -> None:
        self.registry = registry
        self.device = device
        self.dtype = dtype
        self.clock = clock
        self.roofs = roofs
        self.record = record
        self.figures: list[Figure] = []

    def measure(self, item: Item) -> None:
        """Measure all kernels that take the item, on all its numbers of tokens."""
        op: CustomOp[..., Any] = load_target(self.registry.ops[item.op].target)
        if op.sample is None:
            return
        for num_tokens in item.tokens:
            with self.record.guarded(f"{item.op} {num_tokens}"), torch.inference_mode():
                arguments = self._arguments(op, item, num_tokens)
                for figure in self._figures(op, item, num_tokens, arguments):
                    self.figures.append(figure)
                    self.record.row(line(figure), **asdict(figure))

    def compile(self, item: Item) -> None:
        """Measure the compiled reference beside the figures that are there, on the last tokens."""
        op: CustomOp[..., Any] = load_target(self.registry.ops[item.op].target)
        places = [place for place, figure in enumerate(self.figures) if _is_of(figure, item)]
        for num_tokens in item.tokens:
            known = [p for p in places if self.figures[p].num_tokens == num_tokens]
            if not known:
                continue
            with self.record.guarded(f"{item.op} {num_tokens} compiled"), torch.inference_mode():
                arguments = self._arguments(op, item, num_tokens)
                call = compiled(op, op.signature.bind(**arguments).args)
                if call is None:
                    continue
                (seconds,) = self.clock.time([call])
                for place in known:
                    self.figures[place].compiled_seconds = seconds
                    self.record.rows[place]["compiled_seconds"] = seconds
                self.record.say(line(self.figures[known[0]]))

    def _arguments(self, op: CustomOp[..., Any], item: Item, num_tokens: int) -> dict[str, Any]:
        assert op.sample is not None
        case = op.sample(self.dtype, item.dims, num_tokens, 0)
        return {
            name: value.to(self.device.torch_device) if isinstance(value, torch.Tensor) else value
            for name, value in case.arguments.items()
        }

    def _figures(
        self, op: CustomOp[..., Any], item: Item, num_tokens: int, arguments: dict[str, Any]
    ) -> Iterator[Figure]:
        flops, result = num_flops(op, copied(arguments))
        moved = moved_bytes(op, arguments, result)
        ours = dict(self._kernels(op, item, arguments))
        positional = op.signature.bind(**arguments).args
        calls: dict[str, Call] = {**ours, "eager": lambda: op.reference(*positional)}
        taken = dict(zip(calls, self.clock.time(list(calls.values())), strict=True))
        for kernel in ours or ("eager",):
            seconds = taken[kernel]
            yield Figure(
                item.op,
                item.precision,
                dict(item.dims) if item.precision else {},
                num_tokens,
                kernel,
                seconds,
                moved,
                flops,
                moved / seconds / self.roofs.bytes_per_s,
                flops / seconds / self.roofs.flops_per_s,
                taken["eager"],
            )

    def _kernels(
        self, op: CustomOp[..., Any], item: Item, arguments: dict[str, Any]
    ) -> Iterator[tuple[str, Call]]:
        """Yield the kernels that take the item; one that is wrong is a fault and not timed."""
        name = str(self.dtype).removeprefix("torch.")
        device = self.device
        request = Request("kernel", item.op, device.platform, device.capability, name, item.dims)
        for candidate in self.registry.candidates("kernel", item.op):
            kernel = candidate.record
            if not isinstance(kernel, Kernel) or not candidate.judge(request):
                continue
            with self.record.guarded(f"{item.op} {kernel.name}"):
                function = load_target(kernel.target)
                prepare = load_target(kernel.prepare) if kernel.prepare else None
                constants = {key: arguments[key] for key in op.constants}
                given = {**arguments, **(prepare(**constants) if prepare else {})}
                if fault := difference(op, function, given, arguments):
                    self.record.fault(f"{item.op} {kernel.name}: {fault}")
                    continue
                yield kernel.name, partial(function, *op.signature.bind(**given).args)


def difference(
    op: CustomOp[..., Any],
    function: Any,
    given: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> str:
    """Return how a kernel's results and mutations differ from the reference's; nothing if alike."""
    prepared = {name for name in given if given[name] is not arguments.get(name)}
    ours, theirs = copied(given), copied(arguments)
    found = function(*op.signature.bind(**ours).args)
    wanted = op.reference(*op.signature.bind(**theirs).args)
    kept = [
        {name: v for name, v in side.items() if name not in prepared} for side in (ours, theirs)
    ]
    pairs = zip(_tensors((found, kept[0])), _tensors((wanted, kept[1])), strict=True)
    for place, (one, other) in enumerate(pairs):
        if one.shape != other.shape:
            return f"result {place} is {[*one.shape]}, must be {[*other.shape]}"
        if one.is_floating_point():
            scale = other.double().nan_to_num().norm()
            error = float((one.double() - other.double()).nan_to_num().norm() / (scale + 1e-30))
            if bool((one.isnan() != other.isnan()).any()):
                return f"result {place} has NaN where the reference has none, or none where it has"
            if error > min(_ROUNDINGS * torch.finfo(other.dtype).eps, _MOST_ERROR):
                return f"result {place} is {error:.2g} from the reference's, of its norm"
        else:
            share = float((one != other).double().mean()) if one.numel() else 0.0
            if share > _MOST_CODES and int((one != other).sum()) > 1:
                return f"{share:.1%} of the integers of result {place} are not the reference's"
    return ""


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that a call may change."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def compiled(op: CustomOp[..., Any], positional: tuple[Any, ...]) -> Call | None:
    """Return a call of the compiled reference, None where it cannot be compiled."""
    torch.compiler.reset()
    function = torch.compile(op.reference, dynamic=False)
    try:
        function(*positional)
    except foreign_errors() as error:
        print(f"{op.name} is not compiled: {described(error)[:200]}", flush=True)
        return None
    return lambda: function(*positional)


def heading() -> str:
    return (
        f"{'op':27}{'':6}{'tokens':>6}  {'kernel':30}{'us':>9}{'bytes':>7}{'flops':>7}"
        f"{'eager':>8}{'compiled':>10}"
    )


def line(figure: Figure) -> str:
    """Return one line of the table."""
    ratios = (
        f"{other / figure.seconds:>{width - 1}.2f}x" if other else f"{'-':>{width}}"
        for other, width in ((figure.eager_seconds, 8), (figure.compiled_seconds, 10))
    )
    return (
        f"{figure.op:27}{figure.precision:6}{figure.num_tokens:>6}  {figure.kernel:30}"
        f"{1e6 * figure.seconds:>9.1f}{figure.bytes_share:>7.0%}{figure.flops_share:>7.0%}"
        + "".join(ratios)
    )


def headline(figures: list[Figure]) -> str:
    """Return how many of the large calls reach 85 % of a roof, with the fastest kernel of each."""
    fastest: dict[Any, Figure] = {}
    for figure in figures:
        key = (figure.op, figure.precision, str(figure.dims), figure.num_tokens)
        if key not in fastest or figure.seconds < fastest[key].seconds:
            fastest[key] = figure
    large = [f for f in fastest.values() if f.num_bytes >= 4 << 20]
    near = [f for f in large if max(f.bytes_share, f.flops_share) >= 0.85]
    beaten = [f for f in fastest.values() if f.eager_seconds and f.seconds <= f.eager_seconds]
    return (
        f"{len(near)} of {len(large)} calls of 4 MiB or more reach 85 % of a roof; "
        f"{len(beaten)} of {len(fastest)} take no longer than eager torch"
    )


def _is_of(figure: Figure, item: Item) -> bool:
    same = (figure.op, figure.precision) == (item.op, item.precision)
    return same and dict(figure.dims) == dict(item.dims)


def _tensors(values: object) -> Iterator[torch.Tensor]:
    for leaf in chain(_pytree.tree_leaves(values)):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_step_options(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("ops", nargs="*")
    return parser.parse_args()


if __name__ == "__main__":
    main()
