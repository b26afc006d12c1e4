"""Run a model whose weights lie in host memory on an accelerator: tokens, and rates of copies.

    python benchmarks/gpu_offload.py [--shapes qwen3-0.6b,qwen3-moe-16e] [--offload 40%]
        [--work DIR] [--platform NAME] [--seconds N] [--json FILE]

Tokens have to be those of the same model with all weights on the device, without graphs, which
offloaded models have not. A step copies all streamed blocks; their bytes over its median time stand
beside the rate of one plain copy of as many bytes from pinned memory, taken before and after.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from evidence.record import Deadline, Record, add_step_options
from gpu_clock import placement_of
from gpu_decode import folder_of
from interposer import Config, Placement
from interposer_engine import LanguageModel, SamplingParams, load
from random_model import SHAPES

_LEAST_S = 15.0
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_PROMPTS = [[5, 6, 7, 8], [9] * 40]


def main() -> None:
    options = parsed()
    placement = placement_of(options.platform, options.tiny)
    record, deadline = Record(options.json), Deadline(options.seconds)
    record.facts |= {"device": placement.device.name, "torch": torch.__version__}
    told = []
    with ExitStack() as folders:
        work = options.work or Path(folders.enter_context(tempfile.TemporaryDirectory()))
        for shape in record.within(options.shapes, deadline, "models", _LEAST_S):
            with record.guarded(shape):
                path = folder_of(shape, work, placement, record)
                told.append(compared(path, placement, record, options))
            free()
    record.headline = "; ".join(told) or "nothing was measured"
    record.say(record.headline)


def compared(path: Path, placement: Placement, record: Record, options: argparse.Namespace) -> str:
    """Compare a model with itself where its weights are resident; return a sentence on it."""
    resident = loaded(path, placement, offload=False)
    expected, plain_s = measured(resident, options.new_tokens)
    del resident
    free()
    lm = loaded(path, placement, offload=options.offload)
    notes = [note for note in lm.resolver.notes if note.startswith("offload")]
    for note in notes:
        record.say(note)
    streamed = streamed_bytes(notes)
    before = copy_rate(streamed, placement.device.torch_device)
    found, step_s = measured(lm, options.new_tokens)
    rate = (before + copy_rate(streamed, placement.device.torch_device)) / 2
    if found != expected:
        same = sum(a == b for a, b in zip(found, expected, strict=True))
        record.fault(f"{path.name}: {same} of {len(expected)} sequences are those of all resident")
    share = streamed / step_s / rate if rate else 0.0
    told = (
        f"{path.name}: {streamed / 2**20:.0f} MiB streamed in a step of {1e3 * step_s:.2f} ms, "
        f"x{share:.2f} of a plain copy ({rate / 1e9:.1f} GB/s); all resident {1e3 * plain_s:.2f} ms"
    )
    record.row(
        told,
        model=path.name,
        streamed_bytes=streamed,
        step_s=step_s,
        resident_step_s=plain_s,
        copy_bytes_per_s=rate,
        share=share,
        equal=found == expected,
        notes=notes,
    )
    return told


def loaded(path: Path, placement: Placement, offload: str | bool) -> LanguageModel:
    config = Config(platform=placement.platform.name, graphs="off")
    return load(
        path,
        dtype="bfloat16",
        config=config,
        offload=offload,
        cache_tokens=512,
        max_sequences=len(_PROMPTS),
    )


def measured(lm: LanguageModel, new_tokens: int) -> tuple[list[tuple[int, ...]], float]:
    """Return the greedy tokens, and the median seconds of a step of one token each.

    The first round compiles what has to be.
    """
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    steps: list[float] = []
    for _ in range(2):
        sequences = [lm.engine.add(prompt, params) for prompt in _PROMPTS]
        while not all(sequence.output for sequence in sequences):
            lm.engine.step()
        steps.clear()
        while lm.engine.busy:
            start = time.perf_counter()
            lm.engine.step()
            steps.append(time.perf_counter() - start)
    return [tuple(sequence.output) for sequence in sequences], statistics.median(steps)


def streamed_bytes(notes: list[str]) -> int:
    """Return the bytes that every step copies, as the notes of the model say."""
    found = [
        float(size) * _UNITS[unit]
        for note in notes
        for size, unit in re.findall(r"(?:streamed, ([\d.]+) (.iB))", note)
    ]
    return int(sum(found))


def copy_rate(num_bytes: int, device: str) -> float:
    """Return the bytes per second of one plain copy of pinned memory, the median of five."""
    if torch.device(device).type == "cpu" or not num_bytes:
        return 0.0
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(6):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return num_bytes / statistics.median(seconds[1:])


def free() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_step_options(parser)
    parser.add_argument("--shapes", default="qwen3-0.6b,qwen3-moe-16e", help="separated by commas")
    parser.add_argument("--offload", default="50%", help="weights that stay on the device")
    parser.add_argument("--work", type=Path, help="folder that keeps the models of the shapes")
    parser.add_argument("--new-tokens", type=int, default=24)
    options = parser.parse_args()
    options.shapes = ["tiny-deep"] if options.tiny else options.shapes.split(",")
    if options.tiny:
        options.new_tokens, options.offload = 3, "65%"
    for shape in options.shapes:
        if shape not in SHAPES:
            parser.error(f"--shapes {shape!r} is none of {', '.join(SHAPES)}")
    return options


if __name__ == "__main__":
    main()
