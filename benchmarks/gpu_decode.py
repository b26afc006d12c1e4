"""Decode and prefill of whole models on an accelerator, beside transformers.

    python benchmarks/gpu_decode.py [MODEL_DIR ...] [--shapes llama-3-8b,qwen3-0.6b]
        [--precisions bf16,fp8,int4] [--batches 1,8,64,256] [--engines interposer,static]
        [--work DIR] [--seconds N] [--json FILE]

A shape is one of ``random_model.py``, whose weights are drawn on the device once and kept in the
folder for work. Engines are loaded one after the other, so that each has the memory to itself:
interposer, with graphs where it has them (``plain`` without), transformers, and transformers with a
static cache that it compiles itself (``static``). A step ends when the host has its tokens, so that
the host's clock measures it. Weights and what is read of the cache, over the bandwidth of a copy
that was measured before, are the least that a decode step can take; figures are medians of steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from evidence.record import Deadline, Record, add_step_options
from gpu_clock import clock_of, placement_of, roofs_by
from gpu_engines import Engine, InterposerEngine, TransformersModel
from interposer import Placement
from interposer_engine.roofline import Roofs
from interposer_models.families import DecoderFamily
from random_model import SHAPES, write_model

# Bits of a weight of the blocks, with its scales, and of the head, by precision.
_BITS = {"bf16": (16.0, 16.0), "fp8": (8.0, 8.0), "int4": (4.0 + 32 / 128, 8.0)}
METHODS = {"bf16": None, "fp8": "fp8", "int4": "int4"}
# A large batch of long contexts would take minutes to prefill.
_TOKENS_AT_ONCE = 65536
_LEAST_S = 5.0


@dataclass(frozen=True)
class Work:
    """The workload of every engine."""

    batch: int
    context: int
    new_tokens: int
    prefill: int


@dataclass
class Figure:
    """Medians of one engine; shares are those of the measured roofs."""

    model: str
    precision: str
    engine: str
    batch: int
    context: int
    decode_step_s: float
    decode_share: float
    prefill_tokens: int
    prefill_s: float
    prefill_share: float
    notes: str = ""


def main() -> None:
    options = parsed()
    placement = placement_of(options.platform, options.tiny)
    record, deadline = Record(options.json), Deadline(options.seconds)
    clock = clock_of(placement.device.torch_device, options.tiny)
    roofs = roofs_by(clock, placement, options.tiny)
    del clock
    record.facts |= {"device": placement.device.name, "torch": torch.__version__}
    record.facts["roofs"] = asdict(roofs)
    record.say(f"{placement.device.name}, torch {torch.__version__}; {roofs}")
    with ExitStack() as folders:
        work = options.work or Path(folders.enter_context(tempfile.TemporaryDirectory()))
        paths = [*options.model_dirs]
        paths += [folder_of(shape, work, placement, record) for shape in options.shapes]
        decode = Decode(placement, roofs, record, deadline, options)
        jobs = [
            (path, precision, engine)
            for path in paths
            for engine in options.engines
            for precision in options.precisions
            if precision == "bf16" or engine in InterposerEngine.GRAPHS
        ]
        for job in jobs:
            if not deadline.allows(_LEAST_S):
                record.skip(f"no time for {job[0].name} {job[1]} by {job[2]}")
                continue
            decode.run(*job)
    record.headline = headline(decode.figures)
    record.say(record.headline)


def folder_of(shape: str, work: Path, placement: Placement, record: Record) -> Path:
    """Return the folder with a model of the shape, which is written if it is not there."""
    path = work / "models" / shape
    if not (path / "model.safetensors.index.json").is_file():
        start = time.perf_counter()
        write_model(shape, path, placement.device.torch_device)
        record.say(f"{shape} written in {time.perf_counter() - start:.0f} s")
    return path


class Decode:
    """Measures engines on one device, one after the other."""

    def __init__(
        self,
        placement: Placement,
        roofs: Roofs,
        record: Record,
        deadline: Deadline,
        options: argparse.Namespace,
    ) -> None:
        self.placement = placement
        self.roofs = roofs
        self.record = record
        self.deadline = deadline
        self.options = options
        self.figures: list[Figure] = []

    def run(self, path: Path, precision: str, name: str) -> None:
        """Load one engine and measure it on all batches that there is time for."""
        with self.record.guarded(f"{path.name} {precision} by {name}"):
            start = time.perf_counter()
            engine = self.loaded(path, precision, name)
            self.record.say(f"{name} has loaded in {time.perf_counter() - start:.0f} s")
            shape = shape_of(path)
            named = f"batches of {path.name} {precision} by {name}"
            for batch in self.record.within(self.options.batches, self.deadline, named, _LEAST_S):
                with self.record.guarded(f"{path.name} {precision} by {name}, batch {batch}"):
                    work = work_of(batch, self.options)
                    figure = measured(engine, shape, work, self.options.rounds)
                    self.shares(figure, shape, work, precision)
                    figure.model, figure.precision, figure.engine = path.name, precision, name
                    self.figures.append(figure)
                    self.record.row(line(figure), **asdict(figure))
        # Nothing holds the engine any more but what compiled it.
        torch.compiler.reset()
        gc.collect()
        if self.placement.device.torch_device != "cpu":
            torch.accelerator.empty_cache()

    def loaded(self, path: Path, precision: str, name: str) -> Engine:
        if name not in InterposerEngine.GRAPHS:
            return TransformersModel(path, self.placement.device.torch_device, name == "static")
        works = [work_of(batch, self.options) for batch in self.options.batches]
        return InterposerEngine(
            path,
            self.placement,
            METHODS[precision],
            name,
            cache_tokens=max(w.batch * (w.context + w.new_tokens + 16) for w in works)
            + self.options.prefill,
            max_sequences=max(work.batch for work in works),
            max_step_tokens=max(self.options.prefill, 1024),
        )

    def shares(self, figure: Figure, shape: DecoderFamily, work: Work, precision: str) -> None:
        step_bytes, flops = least_work(shape, work, _BITS[precision])
        figure.decode_share = step_bytes / self.roofs.bytes_per_s / figure.decode_step_s
        figure.prefill_share = flops / self.roofs.flops_per_s / figure.prefill_s


def work_of(batch: int, options: argparse.Namespace) -> Work:
    context = max(1, min(options.context, _TOKENS_AT_ONCE // batch))
    return Work(batch, context, options.new_tokens, options.prefill)


def shape_of(path: Path) -> DecoderFamily:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return DecoderFamily.parse(config, str(path))


def measured(engine: Engine, shape: DecoderFamily, work: Work, rounds: int) -> Figure:
    """Return the medians of an engine; the first round warms up, compiles and captures."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int, length: int) -> list[list[int]]:
        ids: list[list[int]] = torch.randint(
            shape.vocab_size, (count, length), generator=generator
        ).tolist()
        return ids

    prompts, long = drawn(work.batch, work.context), drawn(1, work.prefill)
    steps: list[float] = []
    prefills: list[float] = []
    for turn in range(rounds + 1):
        found = engine.decode(prompts, work.new_tokens)
        prefill = engine.prefill(long)
        if turn:
            steps += found
            prefills.append(prefill)
    return Figure(
        "",
        "",
        "",
        work.batch,
        work.context,
        statistics.median(steps),
        0.0,
        work.prefill,
        statistics.median(prefills),
        0.0,
        engine.notes,
    )


def least_work(
    shape: DecoderFamily, work: Work, bits: tuple[float, float] = _BITS["bf16"]
) -> tuple[int, int]:
    """Return the bytes that a decode step reads, and the operations of a prefill.

    A step reads all weights but the embedding's, and the keys and values of its contexts in
    bfloat16, on average those of the middle of the decode. A prefill multiplies every token by all
    weights of the blocks and the last one by the head; causal attention is half of a square for
    each of its two products.

    Args:
        bits: of a weight of the blocks, and of the head.
    """
    hidden, heads, size = shape.hidden_size, shape.num_attention_heads, shape.head_size
    kv_width = shape.num_kv_heads * size
    block = hidden * (2 * heads * size + 2 * kv_width) + 3 * hidden * shape.intermediate_size
    blocks, head = shape.num_hidden_layers * block, hidden * shape.vocab_size
    read = work.batch * (work.context + work.new_tokens // 2)
    weights = int(blocks * bits[0] + head * bits[1]) // 8
    step_bytes = weights + 2 * 2 * shape.num_hidden_layers * kv_width * read
    mixing = 2 * 2 * shape.num_hidden_layers * heads * size * work.prefill**2 // 2
    return step_bytes, 2 * blocks * work.prefill + 2 * head + mixing


def line(figure: Figure) -> str:
    rate = figure.batch / figure.decode_step_s
    notes = f" ({figure.notes})" if figure.notes else ""
    return (
        f"{figure.model:12}{figure.precision:5}{figure.engine:13}batch {figure.batch:>3} "
        f"{1e3 * figure.decode_step_s:>9.3f} ms a step,{rate:>9.1f} tokens/s,"
        f"{figure.decode_share:>5.0%} of bandwidth; prefill "
        f"{figure.prefill_tokens / figure.prefill_s:>9.0f} tokens/s,{figure.prefill_share:>5.0%} "
        f"of the peak{notes}"
    )


def comparisons(figures: list[Figure]) -> Iterator[str]:
    """Yield each figure of ours at the smallest batch, beside what there is to compare with."""
    by_name = {(f.model, f.precision, f.engine, f.batch): f for f in figures}
    least = min((figure.batch for figure in figures), default=1)
    for (model, precision, name, batch), figure in by_name.items():
        if name != "interposer" or batch != least:
            continue
        told = f"{model} {precision} {1e3 * figure.decode_step_s:.2f} ms, {figure.decode_share:.0%}"
        rivals = {
            "transformers' static cache": (model, "bf16", "static", batch),
            "bf16": (model, "bf16", "interposer", batch),
        }
        for rival, key in rivals.items():
            if key in by_name and by_name[key] is not figure:
                told += f", x{by_name[key].decode_step_s / figure.decode_step_s:.2f} of {rival}"
        yield told


def headline(figures: list[Figure]) -> str:
    return "; ".join(comparisons(figures)) or "nothing was measured"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    def numbers(text: str) -> list[int]:
        return [int(number) for number in names(text)]

    parser.add_argument("model_dirs", type=Path, nargs="*")
    add_step_options(parser)
    parser.add_argument("--shapes", type=names, default=[], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--precisions", type=names, default=[*_BITS])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 64, 256])
    parser.add_argument("--engines", type=names, default=["interposer", "static"])
    parser.add_argument("--work", type=Path, help="folder that keeps the models of the shapes")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.tiny:
        options.context, options.new_tokens, options.prefill, options.rounds = 6, 3, 8, 1
    known = (*InterposerEngine.GRAPHS, "transformers", "static")
    given = {
        "--precisions": (options.precisions, _BITS),
        "--engines": (options.engines, known),
    }
    given["--shapes"] = (options.shapes, SHAPES)
    for option, (wanted, all_known) in given.items():
        for name in wanted:
            if name not in all_known:
                parser.error(f"{option} {name!r} is none of {', '.join(all_known)}")
    return options


if __name__ == "__main__":
    main()
