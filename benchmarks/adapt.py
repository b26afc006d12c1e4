"""Speed of an adapted model of transformers beside the same model as it is, in paired runs.

    python benchmarks/adapt.py decoder [--threads 2] [--rounds 7] [--quantization int8] [--compiled]
    python benchmarks/adapt.py encoders [--threads 2] [--rounds 7]
    python benchmarks/adapt.py cost

``decoder`` is the shape of Qwen3-0.6B in bfloat16: transformers with sdpa, the same model adapted,
the adapted model in the engine, this project's own loader, and, if asked for, transformers compiled
with a static cache.
``encoders`` are the shapes of MiniLM, of a ViT-B and of the encoder of Whisper small, for one input
and for a batch. ``cost`` is the time to adapt, and the memory that the process grows by. Weights
are random; every round runs all contenders in a new order, and ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    StaticCache,
    ViTConfig,
    WhisperConfig,
    logging,
)

from decode import interposer_run
from interposer_models import LanguageModel, adapt, language_model, load
from random_model import SHAPES

_SHAPE = "qwen3-0.6b"
Run = Callable[[], tuple[float, float]]


def decoder_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SHAPES[_SHAPE](), dtype=torch.bfloat16).eval()


def steps_of(model: Any, context: int, steps: int, cache: Callable[[], Any], call: Any) -> Run:
    """Return a contender that calls the model's forward, as ``generate`` does, token by token."""
    ids = torch.randint(0, 1000, (1, context), generator=torch.Generator().manual_seed(1))

    def run() -> tuple[float, float]:
        held, times = cache(), []
        start = time.perf_counter()
        out = model(ids, past_key_values=held, use_cache=True, logits_to_keep=1)
        prefill = time.perf_counter() - start
        token = out.logits[:, -1:].argmax(-1)
        for _ in range(steps):
            start = time.perf_counter()
            out = call(token, past_key_values=held, use_cache=True)
            times.append(time.perf_counter() - start)
            token = out.logits[:, -1:].argmax(-1)
        return prefill, statistics.median(times)

    return run


def own_loader(path: Path, context: int, steps: int, quantization: str | None) -> Run:
    return in_engine(
        load(path, quantization=quantization, cache_tokens=4 * context), context, steps
    )


def in_engine(lm: LanguageModel, context: int, steps: int) -> Run:
    run = interposer_run(lm)
    ids = torch.randint(0, 1000, (context,), generator=torch.Generator().manual_seed(1)).tolist()

    def both() -> tuple[float, float]:
        prefill, rest = run([ids], steps + 1)
        return prefill, rest / steps

    return both


def compare(title: str, runs: dict[str, Run], rounds: int, base: str) -> None:
    """Print medians and the median ratio within a round to ``base``."""
    order, generator = list(runs), random.Random(0)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        generator.shuffle(order)
        for name in order:
            found = runs[name]()
            if index:  # the first round warms up
                times[name].append(found)
    for part, label in enumerate(("first", "then")):
        if not times[base][0][part]:
            continue
        cells = []
        for name, taken in times.items():
            pairs = zip(times[base], taken, strict=True)
            ratio = statistics.median(b[part] / f[part] for b, f in pairs)
            cells.append(f"{name} {1e3 * statistics.median(f[part] for f in taken):.1f} ms")
            cells.append(f"x{ratio:.2f}")
        print(f"{title:28s} {label:6s} " + "  ".join(cells), flush=True)


def decoder(arguments: argparse.Namespace) -> None:
    context, steps = arguments.context, arguments.steps
    eager, adapted = decoder_model(), decoder_model()
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        eager.save_pretrained(folder)
        handle = adapt(adapted, quantization=arguments.quantization)
        runs["sdpa"] = steps_of(eager, context, steps, lambda: None, eager)
        runs["adapted"] = steps_of(adapted, context, steps, handle.new_cache, adapted)
        runs["engine"] = in_engine(language_model(handle, cache_tokens=4 * context), context, steps)
        runs["loader"] = own_loader(Path(folder), context, steps, arguments.quantization)
        if arguments.compiled:
            compiled: Any = torch.compile(eager, mode="default")

            def static() -> Any:
                return StaticCache(eager.config, max_cache_len=context + steps + 1)

            runs["compiled"] = steps_of(eager, context, steps, static, compiled)
        title = f"{_SHAPE} context {context}"
        compare(title, runs, arguments.rounds, "sdpa")


def encoders(arguments: argparse.Namespace) -> None:
    bert = BertConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12
    )
    whisper = WhisperConfig(
        d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072
    )

    def text(batch: int) -> dict[str, Any]:
        return {"input_ids": torch.randint(0, 1000, (batch, 64))}

    def picture(batch: int) -> dict[str, Any]:
        return {"pixel_values": torch.randn(batch, 3, 224, 224)}

    def sound(batch: int) -> dict[str, Any]:
        return {"input_features": torch.randn(batch, 80, 3000)}

    works: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
        "minilm": (bert, text, (1, 16)),
        "vit-b": (ViTConfig(), picture, (1, 8)),
        "whisper-small encoder": (whisper, sound, (1, 2)),
    }
    for dtype in (torch.float32, torch.bfloat16):
        for name, (config, inputs, batches) in works.items():
            models = []
            for _ in range(2):
                torch.manual_seed(0)
                model: Any = AutoModel.from_config(config, dtype=dtype).eval()
                models.append(model.encoder if name.startswith("whisper") else model)
            adapt(models[1])
            for batch in batches:
                given = inputs(batch)
                given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}

                def run_of(model: Any, given: dict[str, Any] = given) -> Run:
                    def run() -> tuple[float, float]:
                        start = time.perf_counter()
                        model(**given)
                        return time.perf_counter() - start, 0.0

                    return run

                runs = {"sdpa": run_of(models[0]), "adapted": run_of(models[1])}
                short = str(dtype).removeprefix("torch.")
                compare(f"{name} {short} x {batch}", runs, arguments.rounds, "sdpa")


def cost(arguments: argparse.Namespace) -> None:
    model = decoder_model()
    gc.collect()
    size = sum(parameter.nbytes for parameter in model.parameters())
    before = _resident()
    start, used = time.perf_counter(), time.process_time()
    handle = adapt(model, quantization=arguments.quantization)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    gc.collect()
    after = _resident()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    bound = sum(place.is_bound for place in handle.places)
    print(
        f"adapted {bound} of {len(handle.places)} modules in {seconds:.1f} s, "
        f"{used:.1f} s of processors; weights "
        f"{size / 2**20:.0f} MiB, resident {before / 2**20:.0f} MiB before, "
        f"{after / 2**20:.0f} after (x{1 + (after - before) / size:.2f} of the weights), "
        f"{peak / 2**20:.0f} at most"
    )
    if arguments.quantization is None:
        start = time.perf_counter()
        handle.restore()
        print(f"restored in {time.perf_counter() - start:.1f} s")


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["decoder", "encoders", "cost"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    logging.set_verbosity_error()
    {"decoder": decoder, "encoders": encoders, "cost": cost}[arguments.work](arguments)


if __name__ == "__main__":
    main()
