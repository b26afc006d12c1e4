"""Say which kernels of an accelerator a decode step consists of, and how long each runs.

    python benchmarks/gpu_profile.py [--shapes qwen3-0.6b,llama-3-8b] [--precisions bf16,int4]
        [--batches 1,64] [--work DIR] [--seconds N] [--json FILE]

Models are those of ``gpu_decode.py``. A decode of few tokens and one of many are profiled: their
difference, divided by the steps that one has more, is a step without the prefill. What of a step's
time, measured without the profiler, no kernel ran is said as "between".
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from evidence.record import Deadline, Record, add_step_options
from gpu_clock import placement_of
from gpu_decode import METHODS, folder_of, shape_of, work_of
from gpu_engines import InterposerEngine
from random_model import SHAPES

_LEAST_S = 10.0
_FEW, _MANY = 4, 20
_LONGEST_NAME = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_step_options(parser)
    parser.add_argument("--shapes", default="qwen3-0.6b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--precisions", default="bf16", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--work", type=Path, help="folder that keeps the models of the shapes")
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    options.new_tokens, options.prefill = _MANY, 0
    if options.tiny:
        options.shapes, options.batches, options.context = "tiny", "2", 6
    placement = placement_of(options.platform, options.tiny)
    record, deadline = Record(options.json), Deadline(options.seconds)
    record.facts |= {"device": placement.device.name, "torch": torch.__version__}
    with ExitStack() as folders:
        work = options.work or Path(folders.enter_context(TemporaryDirectory()))
        for shape in options.shapes.split(","):
            path = folder_of(shape, work, placement, record)
            for precision in options.precisions.split(","):
                for batch in map(int, options.batches.split(",")):
                    label = f"{shape} {precision} batch {batch}"
                    if not deadline.allows(_LEAST_S):
                        record.skip(f"no time for {label}")
                        continue
                    with record.guarded(label):
                        job = work_of(batch, options)
                        engine = InterposerEngine(
                            path,
                            placement,
                            METHODS[precision],
                            "interposer",
                            cache_tokens=batch * (job.context + _MANY + 16),
                            max_sequences=batch,
                        )
                        words = shape_of(path).vocab_size
                        prompts = torch.randint(words, (batch, job.context)).tolist()
                        tell(label, engine, prompts, placement.device.torch_device, record)
                        del engine
    record.headline = "; ".join(row["told"] for row in record.rows) or "nothing was profiled"
    record.say(record.headline)


def tell(
    label: str, engine: InterposerEngine, prompts: list[list[int]], device: str, record: Record
) -> None:
    """Profile one engine, and record the kernels of its step, the longest first."""
    engine.decode(prompts, _MANY)
    step_us = 1e6 * statistics.median(engine.decode(prompts, _MANY))
    few, many = (kernels(engine, prompts, new, device) for new in (_FEW, _MANY))
    steps = _MANY - _FEW
    found = {
        name: ((count - few[name][0]) / steps, (us - few[name][1]) / steps)
        for name, (count, us) in many.items()
        if count > few[name][0]
    }
    launches = sum(count for count, _ in found.values())
    busy = sum(us for _, us in found.values())
    told = f"{label}: {step_us:.0f} us a step, {launches:.0f} kernels, {busy:.0f} us in them"
    lines = [told] + [
        f"  {us:>8.1f} us {count:>6.1f} x {us / count:>7.2f} us  {name[:_LONGEST_NAME]}"
        for name, (count, us) in sorted(found.items(), key=lambda item: -item[1][1])
    ]
    lines.append(f"  {step_us - busy:>8.1f} us between")
    record.row("\n".join(lines), told=told, step_us=step_us, kernels=found)


def kernels(
    engine: InterposerEngine, prompts: list[list[int]], new_tokens: int, device: str
) -> dict[str, tuple[int, float]]:
    """Return how often each kernel ran in a decode, and for how many microseconds.

    On a processor, where this is rehearsed, they are operators of torch.
    """
    on_host = device == "cpu"
    with profile(activities=[ProfilerActivity.CPU if on_host else ProfilerActivity.CUDA]) as found:
        engine.decode(prompts, new_tokens)
        if not on_host:
            torch.accelerator.synchronize()
    totals: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in found.key_averages():
        count, us = totals[event.key]
        spent = event.self_cpu_time_total if on_host else event.self_device_time_total
        totals[event.key] = count + event.count, us + spent
    return totals


if __name__ == "__main__":
    main()
