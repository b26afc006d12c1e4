"""The engine of interposer, step by step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from cpu_contenders.contract import MAX_BATCH, MAX_STEP_TOKENS, Contender

__all__ = ["open_contender", "settings_of"]

_HEADS = {"int4": "int4", "w4a8": "int4", "int8": "int8", "fp8": "int8"}


class Engine:
    """Requests of the engine that run as one batch."""

    def __init__(self, path: Path, option: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        models = importlib.import_module("interposer_models")
        config: Any = importlib.import_module("interposer").Config
        settings = settings_of(option)
        # The kernels of the example would win where they are installed, by their score.
        disabled = importlib.util.find_spec("interposer_example_norm") is not None
        self.lm = models.load(
            path,
            config=config(disable=("interposer-example-norm",) if disabled else ()),
            dtype="bfloat16",
            quantization=settings,
            cache_tokens=MAX_STEP_TOKENS,
            max_sequences=MAX_BATCH,
            max_step_tokens=MAX_STEP_TOKENS,
        )
        self.params: Any = models.SamplingParams
        self.sequences: list[Any] = []

    def reserve(self, batch: int, tokens: int) -> None:
        """Do nothing: the cache is made when the model loads."""

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        # A token more than is asked for, so that the last step is like all others.
        params = self.params(temperature=0.0, max_new_tokens=new_tokens + 1, ignore_eos=True)
        self.sequences = [self.lm.engine.add(prompt, params) for prompt in prompts]
        while not all(sequence.output for sequence in self.sequences):
            self.lm.engine.step()
        return [sequence.output[0] for sequence in self.sequences]

    def step(self) -> list[int]:
        return [event.token_id for event in self.lm.engine.step()]

    def end(self) -> None:
        for sequence in self.sequences:
            self.lm.engine.cancel(sequence)

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


def settings_of(option: str) -> dict[str, Any] | None:
    """Return how to quantize: int4-g32-a8 is int4 in groups of 32 with inputs of 8 bits.

    None is for bf16; inputs are left as they are by a16, and the method decides without either. The
    head, with the embedding that is tied to it, has as many bits as the other layers, in the same
    groups, and so have its inputs, where these are integers: so it is in the pure files of
    llama.cpp, which rounds the inputs of every product.
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


def open_contender(path: Path, option: str, threads: int) -> Contender:
    """Load the model in bfloat16, or quantized by the method ``option``, such as int4-g32."""
    return Engine(path, option, threads)
