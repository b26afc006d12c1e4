"""Speed of an adapted model of transformers beside the same model as it is, in paired runs.

    python benchmarks/adapt.py decoder [--threads 2] [--rounds 7] [--quantization int8] [--parts]
    python benchmarks/adapt.py compiled [--threads 2] [--rounds 7]
    python benchmarks/adapt.py encoders [--threads 2] [--rounds 7] [--only vit]
    python benchmarks/adapt.py speech [--threads 2] [--rounds 7]
    python benchmarks/adapt.py convolutions [--threads 2] [--rounds 7]
    python benchmarks/adapt.py cost [--quantization int8]

``decoder`` is the shape of Qwen3-0.6B in bfloat16: transformers with sdpa, the same model adapted,
the adapted model in the engine, and this project's own loader, quantized as the adapted model is;
with ``--parts`` also an adapted model whose layers are computed part by part.
``compiled`` is the adapted model beside transformers' steps compiled by inductor, with a static
cache. ``encoders`` are the shapes of MiniLM, of a ViT-B and of the encoder of Whisper small, for
one input and for a batch; ``speech`` is all of Whisper small. ``convolutions`` are convolutions
over patches beside the product of the same patches, those that ``adapt`` leaves included, in
processor time. ``cost`` is the time to adapt, and the memory that the process grows by. Weights are
random; every round runs all models in a new order, and ratios are medians over the rounds.
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
    AutoModelForSpeechSeq2Seq,
    BertConfig,
    StaticCache,
    ViTConfig,
    WhisperConfig,
    logging,
)

from decode import interposer_run
from interposer import Config
from interposer_adapt import adapt, language_model
from interposer_engine import LanguageModel, load
from interposer_ops.devices import host_memory
from random_model import SHAPES

_SHAPE = "qwen3-0.6b"
WHISPER = WhisperConfig(
    d_model=768,
    encoder_layers=12,
    encoder_attention_heads=12,
    encoder_ffn_dim=3072,
    decoder_layers=12,
    decoder_attention_heads=12,
    decoder_ffn_dim=3072,
)
Run = Callable[[], tuple[float, float]]


def decoder_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SHAPES[_SHAPE](), dtype=torch.bfloat16).eval()


def steps_of(model: Any, context: int, steps: int, cache: Callable[[], Any], call: Any) -> Run:
    """Return a function that calls the model's forward, as ``generate`` does, token by token."""
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


def compare(title: str, runs: dict[str, Run], rounds: int, *bases: str) -> None:
    """Print medians, and the median ratio within a round to each of ``bases``."""
    order, generator = list(runs), random.Random(0)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        generator.shuffle(order)
        for name in order:
            found = runs[name]()
            if index:  # the first round warms up
                times[name].append(found)
    for part, label in enumerate(("first", "then")):
        if not times[bases[0]][0][part]:
            continue
        cells = []
        for name, taken in times.items():
            cells.append(f"{name} {1e3 * statistics.median(f[part] for f in taken):.1f} ms")
            for base in bases:
                if name != base:
                    pairs = zip(times[base], taken, strict=True)
                    ratio = statistics.median(b[part] / f[part] for b, f in pairs)
                    cells.append(f"x{ratio:.2f} of {base}" if len(bases) > 1 else f"x{ratio:.2f}")
        print(f"{title:28s} {label:6s} " + "  ".join(cells), flush=True)


def decoder(arguments: argparse.Namespace) -> None:
    context, steps, method = arguments.context, arguments.steps, arguments.quantization
    eager, adapted = decoder_model(), decoder_model()
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        eager.save_pretrained(folder)
        handle = adapt(adapted, quantization=method)
        runs["sdpa"] = steps_of(eager, context, steps, lambda: None, eager)
        runs["adapted"] = steps_of(adapted, context, steps, handle.new_cache, adapted)
        lm = language_model(handle, cache_tokens=4 * context)
        runs["engine"] = in_engine(lm, context, steps)
        if arguments.parts:
            parted = decoder_model()
            handle = adapt(
                parted, Config(layers={"decoder_block": "standard"}), quantization=method
            )
            runs["parts"] = steps_of(parted, context, steps, handle.new_cache, parted)
        runs["loader"] = own_loader(Path(folder), context, steps, method)
        title = f"{_SHAPE} {method or 'bfloat16'} context {context}"
        compare(title, runs, arguments.rounds, "sdpa", "loader")


def compiled(arguments: argparse.Namespace) -> None:
    """Compare with what ``generate`` does for a static cache: one compiled graph a step."""
    context, steps = arguments.context, arguments.steps
    eager, adapted = decoder_model(), decoder_model()
    handle = adapt(adapted)
    held = StaticCache(eager.config, max_cache_len=context + steps + 2)

    def static() -> Any:
        held.reset()
        return held

    step: Any = torch.compile(eager, fullgraph=True)
    runs = {"adapted": steps_of(adapted, context, steps, handle.new_cache, adapted)}
    static_run = steps_of(eager, context, steps, static, step)
    start = time.perf_counter()
    try:
        static_run()
    except RuntimeError as error:  # which every error of compilation is
        print(f"{_SHAPE} does not compile: {type(error).__name__}: {error}")
        return
    print(f"{_SHAPE} compiled, and ran once, in {time.perf_counter() - start:.1f} s", flush=True)
    runs["compiled"] = static_run
    compare(f"{_SHAPE} context {context}", runs, arguments.rounds, "compiled")


def inputs_of(dtype: torch.dtype, batch: int, name: str) -> dict[str, Any]:
    torch.manual_seed(1)
    if name == "minilm":
        return {"input_ids": torch.randint(0, 1000, (batch, 64))}
    if name == "vit-b":
        return {"pixel_values": torch.randn(batch, 3, 224, 224).to(dtype)}
    return {"input_features": torch.randn(batch, 80, 3000).to(dtype)}


def encoders(arguments: argparse.Namespace) -> None:
    bert = BertConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12
    )
    works: dict[str, tuple[Any, tuple[int, ...]]] = {
        "minilm": (bert, (1, 16)),
        "vit-b": (ViTConfig(), (1, 8)),
        "whisper-small encoder": (WHISPER, (1, 2)),
    }
    for dtype in (torch.float32, torch.bfloat16):
        for name, (config, batches) in works.items():
            if arguments.only and arguments.only not in name:
                continue
            models = []
            for _ in range(2):
                torch.manual_seed(0)
                model: Any = AutoModel.from_config(config, dtype=dtype).eval()
                models.append(model.encoder if name.startswith("whisper") else model)
            adapt(models[1])
            for batch in batches:
                given = inputs_of(dtype, batch, name)

                def run_of(model: Any, given: dict[str, Any] = given) -> Run:
                    def run() -> tuple[float, float]:
                        start = time.perf_counter()
                        model(**given)
                        return time.perf_counter() - start, 0.0

                    return run

                runs = {"sdpa": run_of(models[0]), "adapted": run_of(models[1])}
                short = str(dtype).removeprefix("torch.")
                compare(f"{name} {short} x {batch}", runs, arguments.rounds, "sdpa")


def speech(arguments: argparse.Namespace) -> None:
    """Compare 30 seconds of sound and the first tokens, then steps, as of Whisper small."""
    for dtype in (torch.float32, torch.bfloat16):
        runs: dict[str, Run] = {}
        sound = inputs_of(dtype, 1, "sound")["input_features"]
        for name in ("sdpa", "adapted"):
            torch.manual_seed(0)
            model: Any = AutoModelForSpeechSeq2Seq.from_config(WHISPER, dtype=dtype).eval()
            handle = adapt(model) if name == "adapted" else None
            runs[name] = spoken(model, sound, arguments.steps, handle)
        short = str(dtype).removeprefix("torch.")
        compare(f"whisper-small {short}", runs, arguments.rounds, "sdpa")


PATCHES = (
    (3, 768, (16, 16), (224, 224)),
    (3, 1024, (14, 14), (224, 224)),
    (3, 768, (32, 32), (224, 224)),
    (3, 96, (4, 4), (224, 224)),
    (96, 192, (2, 2), (56, 56)),
    (3, 768, (2, 16, 16), (8, 224, 224)),
    (3, 1280, (2, 14, 14), (2, 14, 14)),
)


def convolutions(arguments: argparse.Namespace) -> None:
    kinds: dict[int, Any] = {2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
    for dtype in (torch.float32, torch.bfloat16):
        for channels, outputs, kernel, size in PATCHES:
            own = kinds[len(kernel)](channels, outputs, kernel, kernel).to(dtype).eval()
            row: Any = torch.nn.Linear(own.weight[0].numel(), outputs).to(dtype).eval()
            row.weight.data.copy_(own.weight.flatten(1))
            row.bias.data.copy_(own.bias)
            adapt(row)
            for batch in (256,) if kernel == size else (1, 8):
                x = torch.randn(batch, channels, *size).to(dtype)

                def product(x: Any = x, row: Any = row, kernel: Any = kernel) -> Any:
                    counts = [n // k for n, k in zip(x.shape[2:], kernel, strict=True)]
                    pairs = [each for pair in zip(counts, kernel, strict=True) for each in pair]
                    axes = range(len(kernel))
                    order = [0, *(2 + 2 * a for a in axes), 1, *(3 + 2 * a for a in axes)]
                    rows = x.view(*x.shape[:2], *pairs).permute(order).reshape(-1, row.in_features)
                    return row(rows).view(len(x), *counts, -1).movedim(-1, 1).contiguous()

                def convolved(x: Any = x, own: Any = own) -> Any:
                    return own(x)

                def run_of(call: Callable[[], Any]) -> Run:
                    def run() -> tuple[float, float]:
                        start = time.thread_time()
                        for _ in range(4):
                            call()
                        return (time.thread_time() - start) / 4, 0.0

                    return run

                runs = {
                    "torch": run_of(convolved),
                    "product": run_of(product),
                }
                short = str(dtype).removeprefix("torch.")
                title = f"{short} {'x'.join(map(str, kernel))} to {outputs} x {batch}"
                compare(title, runs, arguments.rounds, "torch")


def spoken(model: Any, sound: torch.Tensor, steps: int, handle: Any) -> Run:
    start_ids = torch.tensor([[50258, 50259, 50359, 50363]])

    def run() -> tuple[float, float]:
        cache = None if handle is None else handle.new_cache()
        times, token, seen = [], start_ids, None
        for _ in range(steps + 1):
            start = time.perf_counter()
            if seen is None:
                out = model(input_features=sound, decoder_input_ids=token, past_key_values=cache)
                seen, cache = (out.encoder_last_hidden_state,), out.past_key_values
            else:
                out = model(encoder_outputs=seen, decoder_input_ids=token, past_key_values=cache)
            token = out.logits[:, -1:].argmax(-1)
            times.append(time.perf_counter() - start)
        return times[0], statistics.median(times[1:])

    return run


def cost(arguments: argparse.Namespace) -> None:
    model = decoder_model()
    gc.collect()
    size = sum(parameter.nbytes for parameter in model.parameters())
    host_memory.trim()
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    start, used = time.perf_counter(), time.process_time()
    handle = adapt(model, quantization=arguments.quantization)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    gc.collect()
    after = _resident()
    peak = _peak()
    bound = sum(place.is_bound for place in handle.places)
    print(
        f"adapted {bound} of {len(handle.places)} modules in {seconds:.1f} s, "
        f"{used:.1f} s of processors; weights "
        f"{size / 2**20:.0f} MiB, resident {before / 2**20:.0f} MiB before, "
        f"{after / 2**20:.0f} after (x{1 + (after - before) / size:.2f} of the weights), "
        f"{peak / 2**20:.0f} at most (x{1 + (peak - before) / size:.2f})"
    )
    if arguments.quantization is None:
        start = time.perf_counter()
        handle.restore()
        print(f"restored in {time.perf_counter() - start:.1f} s")


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    works = {
        work.__name__: work for work in (decoder, compiled, encoders, speech, convolutions, cost)
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=list(works))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--parts", action="store_true", help="beside layers in parts, no blocks")
    parser.add_argument("--only", default="", help="encoders whose name holds this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    logging.set_verbosity_error()
    works[arguments.work](arguments)


if __name__ == "__main__":
    main()
