"""Adapter of interposer's engine, called step by step."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from cpu_engines.contract import MAX_STEP_TOKENS, BatchEngine, Settings

__all__ = ["open_engine", "settings_of"]

_HEADS = {"int4": "int4", "w4a8": "int4", "int8": "int8", "fp8": "int8"}


class Engine:
    """Batch of requests in the engine."""

    def __init__(self, path: Path, option: str, threads: int, settings: Settings) -> None:
        import torch

        torch.set_num_threads(threads)
        models = importlib.import_module("interposer_engine")
        config: Any = importlib.import_module("interposer").Config
        if level := os.environ.get("BENCHMARK_LEVEL"):
            importlib.import_module("interposer_cpu.native").force_level(level)
        # The example plugin's kernels have a high score and would be selected if installed.
        disabled = importlib.util.find_spec("interposer_example_norm") is not None
        without = ("interposer-example-norm",) if disabled else ()
        self.lm = models.load(
            path,
            config=config(platform="cpu", disable=without),
            dtype="bfloat16",
            quantization=settings_of(option),
            cache_tokens=settings.cache_tokens,
            max_sequences=settings.requests,
            max_step_tokens=MAX_STEP_TOKENS,
            prefix_cache=settings.prefixes,
            speculation=models.Speculation(tokens=4) if settings.guesses else None,
        )
        self.params: Any = models.SamplingParams
        self.adapters = settings.adapters
        self.sequences: list[Any] = []
        self.joined: list[Any] = []
        self.named: list[int | None] = []
        self.drawing: dict[str, Any] = {"temperature": 0.0}

    def reserve(self, batch: int, tokens: int) -> None:
        """Do nothing: the cache is allocated when the model loads."""

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        numbers = self.named or [None] * len(prompts)
        # One extra token, so that the last timed step is like all others.
        self.sequences = [
            self._add(prompt, new_tokens + 1, number)
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        while not all(sequence.output for sequence in self.sequences):
            self.lm.engine.step()
        return [sequence.output[0] for sequence in self.sequences]

    def step(self) -> list[int]:
        return [tokens[-1] for tokens in self.several()]

    def extend(self, prompt: list[int], known: int) -> list[int]:
        # The engine finds the previous request's pages by their tokens.
        return self.prefill([prompt], 1)

    def join(self, prompt: list[int]) -> None:
        self.joined.append(self._add(prompt, 1, None))

    def several(self) -> list[list[int]]:
        found: dict[int, list[int]] = {id(sequence): [] for sequence in self.sequences}
        while not all(found.values()):
            if not self.lm.engine.busy:
                raise RuntimeError("a request ended before it was asked for a token")
            for event in self.lm.engine.step():
                found.get(id(event.sequence), []).append(event.token_id)
        return list(found.values())

    def draw(self, temperature: float, seed: int) -> None:
        self.drawing = {"temperature": temperature, "seed": seed}

    def use_adapters(self, numbers: list[int | None]) -> None:
        wanted = sorted({number for number in numbers if number is not None})
        for name in self.lm.adapters:
            self.lm.remove_adapter(name)
        for number in wanted:
            self.lm.load_adapter(str(number), self.adapters[number])
        self.named = numbers

    def end(self) -> None:
        for sequence in (*self.sequences, *self.joined):
            self.lm.engine.cancel(sequence)
        self.joined = []

    def facts(self) -> dict[str, object]:
        import torch

        loading = importlib.import_module("loading")
        choices = {
            f"{choice.request.name}: {choice.chosen.name}"
            for choice, _ in self.lm.resolver.choices.values()
            if choice.request.kind in ("kernel", "attention")
        }
        return {
            "torch": torch.__version__,
            "weights_mib": round(loading.num_bytes(loading.held(self.lm)) / 2**20),
            "cache_mib": round(self.lm.engine.runner.cache_bytes / 2**20),
            "chosen": sorted(choices),
        }

    def _add(self, prompt: list[int], new_tokens: int, adapter: int | None) -> Any:
        name = None if adapter is None else str(adapter)
        params = self.params(
            max_new_tokens=new_tokens, ignore_eos=True, adapter=name, **self.drawing
        )
        return self.lm.engine.add(prompt, params)


def settings_of(option: str) -> dict[str, Any] | None:
    """Translate an option to settings: int4-g32-a8 is int4, groups of 32, 8-bit inputs.

    None means bf16. a16 keeps inputs unquantized; without an a-suffix, the method decides. The
    lm_head and its tied embedding get the same bits and groups as the other layers, and the same
    quantized inputs if these are integers: as in llama.cpp's "pure" files, where all matmul inputs
    are rounded.
    """
    method, *parts = option.split("-")
    settings: dict[str, Any] = {"quant_method": method, "head": _HEADS.get(method, "plain")}
    inputs = {"int8": "int8", "w4a8": "int8"}.get(method, "none")
    for part in parts:
        if part.startswith("g"):
            settings["group_size"] = int(part[1:])
        else:
            settings["activations"] = inputs = {"a8": "int8", "a16": "none"}[part]
    return None if method == "bf16" else settings | {"head_activations": inputs}


def open_engine(
    path: Path, option: str, threads: int, settings: Settings | None = None
) -> BatchEngine:
    """Load the model in bfloat16, or quantized by ``option``, for example int4-g32."""
    return Engine(path, option, threads, settings or Settings())
