"""Time the kernels of 4-bit weights on an accelerator, by launch parameters.

    python benchmarks/gpu_parameters.py [--kernels w4a16,w4a8] [--tokens 1,16,64]
        [--shapes 4096x28672,14336x4096] [--jobs 14] [--seconds N] [--json FILE]

Processes compile all of them first, beside each other. Then each is called in a graph, over as many
weights as no cache holds. What is fastest goes into the JSON files of ``tuning`` by hand. Results
are not checked; ``interposer verify`` does that. This program itself has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch

from evidence.record import Deadline, Record, add_step_options
from gpu_clock import accelerator_placement
from interposer.records import load_target

_FAMILY = "interposer_ops.quantized_linear"
_MODULES = {
    "w4a8": f"{_FAMILY}._w4a8_linear_triton",
    "w4a16": f"{_FAMILY}._weight_only_linear_triton",
}
_GROUP, _INPUTS = 128, 128
# More than any last-level cache holds.
_READ_BYTES = 300 << 20
_TURNS = 7


@dataclass(frozen=True)
class Launch:
    """A call of a kernel with launch parameters."""

    kernel: str
    tokens: int
    in_features: int
    out_features: int
    features: int
    num_warps: int
    num_stages: int
    programs: int

    def __call__(self, inputs: tuple[torch.Tensor, ...], weights: list[Any]) -> None:
        """Call the kernel once for each weight."""
        module = _MODULES[self.kernel]
        function = load_target(f"{module}:{self.kernel}_linear_triton")
        tile = load_target(f"{_FAMILY}._linear_tiles_triton:FeatureTile")(
            self.features,
            max(16, self.tokens),
            _INPUTS,
            {"num_warps": self.num_warps, "num_stages": self.num_stages},
            self.programs,
        )
        with mock.patch(f"{module}._tile", return_value=tile):
            for weight, scale in weights:
                if self.kernel == "w4a8":
                    x, x_scale = inputs
                    function(x, weight, x_scale, scale, None, None, None, torch.bfloat16)
                else:
                    function(inputs[0], weight, scale, None)

    def inputs(self, device: str) -> tuple[torch.Tensor, ...]:
        shape = self.tokens, self.in_features
        if self.kernel == "w4a8":
            x = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
            return x, torch.rand(self.tokens, 1, device=device)
        return (torch.randn(shape, dtype=torch.bfloat16, device=device),)

    def weights(self, device: str, num_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = self.out_features, self.in_features // 2
        count = max(1, num_bytes // (shape[0] * shape[1]))
        scales = self.out_features, self.in_features // _GROUP
        return [
            (
                torch.randint(0, 256, shape, dtype=torch.uint8, device=device),
                torch.rand(scales, device=device) / 100,
            )
            for _ in range(count)
        ]


def launches(options: argparse.Namespace) -> Iterator[Launch]:
    """Yield the launches to time, one combination of shape, kernel and tokens after the other."""
    for shape, kernel, tokens in itertools.product(
        options.shapes.split(","), options.kernels.split(","), options.tokens.split(",")
    ):
        in_features, out_features = map(int, shape.split("x"))
        for parameters in itertools.product((16, 32, 64), (2, 4, 8), (3, 4, 6), (1, 512, 1024)):
            # Two warps have no registers for 64 features.
            if parameters[:2] != (64, 2):
                yield Launch(kernel, int(tokens), in_features, out_features, *parameters)


def microseconds(launch: Launch, device: str, inputs: Any, weights: list[Any]) -> float:
    """Return the median time of a call in a graph, after one that compiles."""
    launch(inputs, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(inputs, weights)
    times = []
    for _ in range(_TURNS):
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return statistics.median(times) / len(weights) * 1e3


def compile_share(options: argparse.Namespace, device: str) -> None:
    """Compile every ``jobs``-th of the launches, so that whoever times them finds them."""
    for number, launch in enumerate(launches(options)):
        if number % options.jobs == options.share:
            launch(launch.inputs(device), launch.weights(device, 0))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", default="w4a16,w4a8")
    parser.add_argument("--tokens", default="1,16,64")
    parser.add_argument("--shapes", default="4096x28672,14336x4096", help="inputs x outputs")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    add_step_options(parser)
    options = parser.parse_args()
    placement = accelerator_placement(options.platform)
    device = placement.device.torch_device
    if options.share is not None:
        compile_share(options, device)
        return
    deadline, record = Deadline(options.seconds), Record(options.json)
    record.facts |= {"device": placement.device.name, "torch": torch.__version__}
    command = [sys.executable, *sys.argv, "--share"]
    for process in [subprocess.Popen([*command, str(n)]) for n in range(options.jobs)]:
        process.wait()
    for _, alike in itertools.groupby(
        launches(options), lambda launch: (launch.kernel, launch.tokens, launch.in_features)
    ):
        some = list(alike)
        inputs, weights = some[0].inputs(device), some[0].weights(device, _READ_BYTES)
        found = []
        for launch in record.within(some, deadline, "launches"):
            with record.guarded(str(launch)):
                found.append((microseconds(launch, device, inputs, weights), launch))
                record.row(microseconds=found[-1][0], **asdict(launch))
        for taken, launch in sorted(found, key=lambda pair: pair[0])[:4]:
            record.say(f"{taken:8.1f} us {launch}")
    record.headline = f"{len(record.rows)} launches timed"
    record.say(record.headline)


if __name__ == "__main__":
    main()
