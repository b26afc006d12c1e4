"""Measure how much LoRA adapters slow down a decode step.

    python benchmarks/cpu_adapters.py [--threads 1] [--rounds 12] [--quantization none int8]

The model has random weights. Every round measures four cases: no adapter loaded, one adapter used
by all requests, several adapters used in turn by the requests, and several adapters loaded but
unused. Results are medians over the rounds of ratios of speeds within a round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from cpu_contenders.interposer_engine import settings_of
from interposer import Config
from interposer_engine import LanguageModel, SamplingParams, load

HIDDEN, BETWEEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 2048, 8192, 4, 32, 8, 64
REQUESTS, PROMPT = 8, 8
MODULES = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_SIZE),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_SIZE),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_SIZE),
    "self_attn.o_proj": (HEADS * HEAD_SIZE, HIDDEN),
    "mlp.gate_proj": (HIDDEN, BETWEEN),
    "mlp.up_proj": (HIDDEN, BETWEEN),
    "mlp.down_proj": (BETWEEN, HIDDEN),
}


def write_model(folder: Path) -> Path:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=BETWEEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        vocab_size=4096,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def write_adapter(folder: Path, rank: int, seed: int) -> Path:
    """Write random LoRA matrices in PEFT's file format for every linear layer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (inputs, outputs) in MODULES.items():
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                key = f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"
                tensors[key] = 0.01 * torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*MODULES]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def seconds_of(lm: LanguageModel, adapters: list[str | None], steps: int) -> float:
    """Measure the median seconds of a decode step; with one thread, in processor time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    sequences = []
    for number in range(REQUESTS):
        params = SamplingParams(
            adapter=adapters[number % len(adapters)], max_new_tokens=steps + 2, ignore_eos=True
        )
        prompt = [(31 * number + 7 * place) % 4000 for place in range(PROMPT)]
        sequences.append(lm.engine.add(prompt, params))
    while not all(sequence.output for sequence in sequences):
        lm.engine.step()
    times = []
    for _ in range(steps):
        start = clock()
        lm.engine.step()
        times.append(clock() - start)
    for sequence in sequences:
        lm.engine.cancel(sequence)
    return statistics.median(times)


def rounds(
    lm: LanguageModel, folders: dict[str, Path], count: int, steps: int
) -> Iterator[dict[str, float]]:
    """Measure all cases of a round, and yield their seconds by name."""
    names = list(folders)
    for _ in range(count):
        found = {"base": seconds_of(lm, [None], steps)}
        lm.load_adapter(names[0], folders[names[0]])
        found["one adapter"] = seconds_of(lm, [names[0]], steps)
        for name in names[1:]:
            lm.load_adapter(name, folders[name])
        found[f"{len(names)} adapters"] = seconds_of(lm, [*names], steps)
        found["loaded, none used"] = seconds_of(lm, [None], steps)
        for name in names:
            lm.remove_adapter(name)
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--quantization", nargs="+", default=["none", "int8"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = write_model(root / "model")
        folders = {
            f"a{seed}": write_adapter(root / f"a{seed}", options.rank, seed)
            for seed in range(options.adapters)
        }
        print(
            f"{REQUESTS} requests, {LAYERS} layers of {HIDDEN} and {BETWEEN}, "
            f"adapters of rank {options.rank} on all linear layers, "
            f"{options.threads} threads, {options.rounds} rounds"
        )
        # The example plugin's kernels have a high score and would be selected if installed.
        found = importlib.util.find_spec("interposer_example_norm") is not None
        config = Config(disable=("interposer-example-norm",) if found else ())
        for quantization in options.quantization:
            lm = load(
                model,
                dtype="bfloat16",
                config=config,
                quantization=settings_of(quantization) if quantization != "none" else None,
                cache_tokens=1024,
                max_sequences=REQUESTS,
            )
            seconds_of(lm, [None], options.steps)
            measured = [*rounds(lm, folders, options.rounds, options.steps)]
            base = statistics.median(one["base"] for one in measured)
            print(f"\n{quantization}: {1e3 * base:.2f} ms a step without adapters\n")
            print("| case | speed, of the base's | lowest and highest round |\n|---|---|---|")
            for case in list(measured[0])[1:]:
                ratios = sorted(one["base"] / one[case] for one in measured)
                middle = statistics.median(ratios)
                print(f"| {case} | {middle:.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f} |")


if __name__ == "__main__":
    main()
