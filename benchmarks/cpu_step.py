"""Split the time of a decode step into its ops, and into Python and dispatch.

    python benchmarks/cpu_step.py DIR [--quantization int4-g32] [--context 128] [--threads 2,1]

Three measurements:

- The same model with the smallest widths and the same kernels bound: the time of its step is the
  overhead of a step besides its kernels' work. Printed is its fraction of the model's step. The
  steps of both models take turns.
- The layers that a step calls are timed as they run; a fused layer counts as one.
- Every bound kernel is timed. For that, fused layers must call their parts one by one, which makes
  the step longer; the remaining time is outside all kernels.

The cost of the timing wrapper is subtracted. Python time inside a layer or kernel counts as its
own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from cpu_engines.interposer_engine import settings_of
from cpu_models import config_of, write_hugging_face
from interposer import Config
from interposer_engine import LanguageModel, SamplingParams, load
from interposer_ops.quantized_linear import CodedProduct

# Multiples of the groups of scales and of the block sizes of kernels.
NARROW = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 512}


def loaded(path: Path, quantization: str, context: int, steps: int) -> LanguageModel:
    found = importlib.util.find_spec("interposer_example_norm")
    return load(
        path,
        "bfloat16",
        config=Config(disable=("interposer-example-norm",) if found else ()),
        quantization=settings_of(quantization),
        cache_tokens=2 * (context + steps) + 64,
        max_sequences=1,
    )


class Decoding:
    """A request that is decoded step by step; restarted after the longest context."""

    def __init__(self, lm: LanguageModel, context: int, steps: int) -> None:
        self.lm = lm
        self.prompt = list(range(1, context + 1))
        self.steps = steps
        self.left = 0

    def step(self) -> float:
        """Decode one step and return its seconds."""
        if not self.left:
            params = SamplingParams(max_new_tokens=self.steps + 1, ignore_eos=True)
            self.prompt = [token % NARROW["vocab_size"] for token in self.prompt]
            sequence = self.lm.engine.add(self.prompt, params)
            while not sequence.output:
                self.lm.engine.step()
            self.left = self.steps
        start = time.perf_counter()
        self.lm.engine.step()
        seconds = time.perf_counter() - start
        self.left -= 1
        return seconds


Bound = tuple[Any, str, str]
"""The holder of a function, its attribute there, and its label in tables."""


class Timed:
    """Times calls of functions bound in a model, by label, during a ``with`` block."""

    def __init__(self, bound: Iterable[Bound]) -> None:
        self.bound = list(bound)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.held: list[dict[str, Any]] = []

    def __enter__(self) -> Timed:
        for owner, name, label in self.bound:
            self.held.append({key: vars(owner)[key] for key in (name,) if key in vars(owner)})
            setattr(owner, name, self._timed(getattr(owner, name), label))
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name, _label), held in zip(self.bound, self.held, strict=True):
            delattr(owner, name)
            for key, value in held.items():
                setattr(owner, key, value)

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        seconds, calls, clock = self.seconds, self.calls, time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = function(*args, **kwargs)
            seconds[label] += clock() - start
            calls[label] += 1
            return result

        return timed


def layers_of(lm: LanguageModel) -> Iterator[Bound]:
    """Yield the layers of the model that a step calls."""
    model, decoder = lm.engine.model, lm.engine.model.model
    for layer in (decoder.embed_tokens, *decoder.layers, model.lm_head, lm.engine.sampler):
        yield layer, "forward", f"{layer.layer_id}: {type(layer).__name__}"
    yield decoder.norm, "forward_add", f"{decoder.norm.layer_id}: {type(decoder.norm).__name__}"


def kernels_of(lm: LanguageModel) -> Iterator[Bound]:
    """Yield the kernels bound in the model, including attention's."""
    engine = lm.engine
    for module in [*engine.model.modules(), *engine.sampler.modules()]:
        for name, value in vars(module).items():
            if isinstance(value, CodedProduct):
                yield module, name, value.product.__name__
            elif callable(value) and getattr(value, "__module__", "") in kernel_modules(lm):
                yield module, name, value.__name__
    for backend in {id(b): b for b in engine.runner.backends}.values():
        for name in ("forward", "plan"):
            yield backend, name, f"{type(backend).__name__}.{name}"


def kernel_modules(lm: LanguageModel) -> frozenset[str]:
    """List the modules of the selected kernels and of the references."""
    names = set()
    for choice, _ in lm.resolver.choices.values():
        if choice.request.kind == "kernel":
            target = getattr(choice.chosen.record, "target", "")
            names.add(target.partition(":")[0])
    return frozenset(names)


def wrapper_seconds(calls: int = 20000) -> float:
    """Measure the seconds that a timing wrapper adds to a call."""
    holder = type("Holder", (), {})()
    holder.call = lambda: None
    plain = _timeit(holder, calls)
    with Timed([(holder, "call", "x")]):
        return max(0.0, _timeit(holder, calls) - plain)


def _timeit(holder: Any, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        holder.call()
    return (time.perf_counter() - start) / calls


def chosen(lm: LanguageModel) -> set[str]:
    return {
        f"{choice.request.name}: {choice.chosen.name}"
        for choice, _ in lm.resolver.choices.values()
        if choice.request.kind in ("kernel", "attention")
    }


def write_narrow(source: Path, target: Path) -> None:
    """Write the model with the smallest widths: as many layers, one head of the same size."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    narrow = dict(NARROW, num_hidden_layers=config["num_hidden_layers"])
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    narrow |= {"head_dim": head_size, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {"qwen3": "qwen3-0.6b", "llama": "llama-100m"}[config["model_type"]]
    write_hugging_face(config_of(shape, **narrow), target)


def measured(
    models: dict[str, LanguageModel], context: int, steps: int, rounds: int
) -> dict[str, list[float]]:
    """Measure the median step of each round, in seconds; the models take turns."""
    runs = {name: Decoding(lm, context, steps) for name, lm in models.items()}
    medians: dict[str, list[float]] = {name: [] for name in models}
    for index in range(rounds + 1):
        for name, run in runs.items():
            taken = [run.step() for _ in range(steps)]
            if index:
                medians[name].append(statistics.median(taken))
    return medians


def print_table(
    title: str, lm: LanguageModel, bound: Iterable[Bound], context: int, steps: int
) -> None:
    """Print the calls of a step, sorted by time, and the remaining time of the step."""
    run, own = Decoding(lm, context, steps), wrapper_seconds()
    whole: list[float] = []
    taken: defaultdict[str, list[float]] = defaultdict(list)
    with Timed(bound) as timed:
        run.step()
        for _ in range(steps - 1):
            timed.seconds.clear()
            timed.calls.clear()
            whole.append(run.step() - own * sum(timed.calls.values()))
            for label, seconds in timed.seconds.items():
                # About half of the wrapper's time is between its two clock reads.
                taken[label].append(seconds - own / 2 * timed.calls[label])
    step = statistics.median(whole)
    parts = {label: statistics.median(seconds) for label, seconds in taken.items()}
    print(f"\n{title}, a step of {step * 1e6:.0f} us")
    print("\n| called | calls a step | us a step | share |\n|---|---|---|---|")
    for label, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        calls = timed.calls[label]
        print(f"| {label} | {calls} | {seconds * 1e6:.0f} | {seconds / step:.1%} |")
    rest = step - sum(parts.values())
    print(f"| outside of these | | {rest * 1e6:.0f} | {rest / step:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model_dir", type=Path, help="what cpu_models.py wrote")
    parser.add_argument("--quantization", default="bf16", help="as in interposer:METHOD")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--steps", type=int, default=32, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    source = options.model_dir / "hf"
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        with tempfile.TemporaryDirectory() as folder:
            write_narrow(source, Path(folder, "hf"))
            places = {"model": source, "narrow": Path(folder, "hf")}
            models = {
                name: loaded(path, options.quantization, options.context, options.steps)
                for name, path in places.items()
            }
            medians = measured(models, options.context, options.steps, options.rounds)
        whole = statistics.median(medians["model"])
        narrow = statistics.median(medians["narrow"])
        share = statistics.median(
            narrow / wide for narrow, wide in zip(medians["narrow"], medians["model"], strict=True)
        )
        print(
            f"\n{threads} threads, {options.quantization}, context {options.context}: step "
            f"{whole * 1e6:.0f} us ({min(medians['model']) * 1e6:.0f}-"
            f"{max(medians['model']) * 1e6:.0f}), narrow {narrow * 1e6:.0f} us, "
            f"overhead {share:.1%}"
        )
        only = chosen(models["model"]) ^ chosen(models["narrow"])
        if only:
            print(f"kernels that only one of both has: {', '.join(sorted(only))}")
        lm = models["model"]
        for title, bound in (
            ("Layers as they run", layers_of(lm)),
            ("Kernels one by one", kernels_of(lm)),
        ):
            print_table(title, lm, bound, options.context, options.steps)


if __name__ == "__main__":
    main()
