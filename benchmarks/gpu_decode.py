"""Decode and prefill of a whole model on an accelerator, beside transformers.

    python benchmarks/random_model.py llama-3-8b DIR
    python benchmarks/gpu_decode.py DIR [--batch 1] [--context 1024] [--new-tokens 64]
        [--prefill 8192] [--rounds 5] [--without static] [--json FILE]

Contenders are loaded one after the other, so that each has the memory to itself: interposer with
graphs and without, transformers, and transformers with a static cache under
torch.compile(max-autotune). A step ends when the host has its tokens, so that the host's clock
measures it. Weights and what is read of the cache, over the bandwidth of a copy that was measured
before, are the least that a decode step can take; figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gpu_clock import Clock, Roofs, accelerator_placement, measured_roofs
from interposer import Config, Placement
from interposer_models import DecoderConfig, SamplingParams, load

Run = Callable[[list[list[int]], int], tuple[float, float, list[list[int]]]]
"""Prompts and new tokens to seconds of prefill, seconds of decode, and the new tokens."""


@dataclass(frozen=True)
class Work:
    """The workload of every contender."""

    batch: int
    context: int
    new_tokens: int
    prefill: int


@dataclass
class Figure:
    """Medians of one contender; shares are those of the measured roofs."""

    contender: str
    decode_step_s: float
    decode_share: float
    prefill_s: float
    prefill_share: float
    tokens: list[list[int]]


def main() -> None:
    options = parsed()
    placement = accelerator_placement(options.platform)
    device = placement.device.torch_device
    clock = Clock(device)
    roofs = measured_roofs(clock)
    del clock
    print(f"{placement.device.name}, torch {torch.__version__}; {roofs}", flush=True)
    work = Work(options.batch, options.context, options.new_tokens, options.prefill)
    shape = DecoderConfig.parse(
        json.loads((options.model_dir / "config.json").read_text(encoding="utf-8")),
        str(options.model_dir),
    )
    step_bytes, prefill_flops = least_work(shape, work)
    makers: dict[str, Callable[[], Run]] = {
        "graphs": lambda: engine_run(options.model_dir, placement, work, "on"),
        "plain": lambda: engine_run(options.model_dir, placement, work, "off"),
        "transformers": lambda: transformers_run(options.model_dir, device, static=False),
        "static": lambda: transformers_run(options.model_dir, device, static=True),
    }
    figures = []
    for name, make in makers.items():
        if name not in options.without:
            figure = measured(name, make(), shape.vocab_size, work, options.rounds)
            figure.decode_share = step_bytes / roofs.bytes_per_s / figure.decode_step_s
            figure.prefill_share = prefill_flops / roofs.flops_per_s / figure.prefill_s
            figures.append(figure)
            print(line(figure, work), flush=True)
            gc.collect()
            torch.accelerator.empty_cache()
    report(figures, roofs, work, options.json)


def engine_run(path: Path, placement: Placement, work: Work, graphs: Literal["on", "off"]) -> Run:
    """Return a contender that drives the engine step by step."""
    longest = max(work.context + work.new_tokens, work.prefill + 1)
    lm = load(
        path,
        dtype="bfloat16",
        config=Config(platform=placement.platform.name, graphs=graphs),
        cache_tokens=work.batch * (longest + 16),
        max_sequences=work.batch,
        max_step_tokens=max(work.prefill, work.batch * work.context),
    )

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[list[int]]]:
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        start = time.perf_counter()
        sequences = [lm.engine.add(prompt, params) for prompt in prompts]
        while not all(sequence.output for sequence in sequences):
            lm.engine.step()
        middle = time.perf_counter()
        while lm.engine.busy:
            lm.engine.step()
        end = time.perf_counter()
        return middle - start, end - middle, [sequence.output for sequence in sequences]

    return run


def transformers_run(path: Path, device: str, static: bool) -> Run:
    """Return a contender that uses ``generate``: prefill alone, then the rest of its time."""
    from transformers import AutoModelForCausalLM, CompileConfig

    # Any, because the type of generate's self excludes what from_pretrained returns.
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = model.to(device).eval()
    how: dict[str, Any] = {}
    if static:
        compiled = CompileConfig(mode="max-autotune", fullgraph=False)
        how = {"cache_implementation": "static", "compile_config": compiled}

    def generate(prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        ids = torch.tensor(prompts, device=device)
        torch.accelerator.synchronize()
        start = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **how,
        )
        torch.accelerator.synchronize()
        return time.perf_counter() - start, out[:, ids.shape[1] :].tolist()

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, float, list[list[int]]]:
        prefill, first = generate(prompts, 1)
        if new_tokens == 1:
            return prefill, 0.0, first
        whole, tokens = generate(prompts, new_tokens)
        return prefill, whole - prefill, tokens

    return run


def measured(name: str, run: Run, vocab_size: int, work: Work, rounds: int) -> Figure:
    """Return the medians of a contender; the first round warms up, compiles and captures."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int, length: int) -> list[list[int]]:
        ids: list[list[int]] = torch.randint(
            vocab_size, (count, length), generator=generator
        ).tolist()
        return ids

    prompts, long = drawn(work.batch, work.context), drawn(1, work.prefill)
    steps, prefills = [], []
    tokens: list[list[int]] = []
    for turn in range(rounds + 1):
        _, decode, tokens = run(prompts, work.new_tokens)
        prefill, _, _ = run(long, 1)
        if turn:
            steps.append(decode / (work.new_tokens - 1))
            prefills.append(prefill)
    return Figure(name, statistics.median(steps), 0.0, statistics.median(prefills), 0.0, tokens)


def least_work(shape: DecoderConfig, work: Work) -> tuple[int, int]:
    """Return the bytes that a decode step reads in bfloat16, and the operations of a prefill.

    A step reads all weights but the embedding's, and the keys and values of its contexts, on
    average those of the middle of the decode. A prefill multiplies every token by all weights of
    the blocks and the last one by the head; causal attention is half of a square for each of its
    two products.
    """
    hidden, heads, size = shape.hidden_size, shape.num_attention_heads, shape.head_size
    kv_width = shape.num_kv_heads * size
    block = hidden * (2 * heads * size + 2 * kv_width) + 3 * hidden * shape.intermediate_size
    blocks, head = shape.num_hidden_layers * block, hidden * shape.vocab_size
    read = work.batch * (work.context + work.new_tokens // 2)
    step_bytes = 2 * (blocks + head + 2 * shape.num_hidden_layers * kv_width * read)
    mixing = 2 * 2 * shape.num_hidden_layers * heads * size * work.prefill**2 // 2
    return step_bytes, 2 * blocks * work.prefill + 2 * head + mixing


def line(figure: Figure, work: Work) -> str:
    rate = work.batch / figure.decode_step_s
    return (
        f"{figure.contender:14}{1e3 * figure.decode_step_s:>9.3f} ms a step, {rate:>8.1f} tokens/s,"
        f"{figure.decode_share:>5.0%} of weights over bandwidth; prefill "
        f"{work.prefill / figure.prefill_s:>9.0f} tokens/s,{figure.prefill_share:>5.0%} of the peak"
    )


def report(figures: list[Figure], roofs: Roofs, work: Work, file: Path | None) -> None:
    """Print the comparison of contenders, and write all figures to the given file."""
    by_name = {figure.contender: figure for figure in figures}
    if {"graphs", "plain"} <= by_name.keys():
        same = by_name["graphs"].tokens == by_name["plain"].tokens
        print(f"greedy tokens with and without graphs are {'equal' if same else 'NOT EQUAL'}")
    if {"graphs", "static"} <= by_name.keys():
        ratio = by_name["static"].decode_step_s / by_name["graphs"].decode_step_s
        print(f"{ratio:.2f} times as fast as transformers with static cache and torch.compile")
    if file is not None:
        facts = {
            "torch": torch.__version__,
            "roofs": asdict(roofs),
            "work": asdict(work),
            "figures": [asdict(figure) for figure in figures],
        }
        file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--platform", default="", help="the one in force, unless said otherwise")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without", action="append", default=[], help="a contender to leave out")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
