"""Those that decode on an accelerator: our engine, and transformers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from interposer import Config, Placement
from interposer_engine import SamplingParams, load

__all__ = ["Engine", "InterposerEngine", "TransformersModel"]


class Engine(ABC):
    """A model that is loaded.

    Attributes:
        notes: what is to be said of the figures, as that nothing was compiled.
    """

    notes = ""

    @abstractmethod
    def decode(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """Return the seconds of decode steps, after a prefill of the prompts."""

    @abstractmethod
    def prefill(self, prompts: list[list[int]]) -> float:
        """Return the seconds until the first token of each prompt is there."""


class InterposerEngine(Engine):
    """Our engine, step by step."""

    GRAPHS: ClassVar[Mapping[str, Literal["auto", "off"]]] = {"interposer": "auto", "plain": "off"}

    def __init__(
        self, path: Path, placement: Placement, method: str | None, name: str, **sizes: Any
    ) -> None:
        config = Config(platform=placement.platform.name, graphs=self.GRAPHS[name])
        self._lm = load(path, dtype="bfloat16", config=config, quantization=method, **sizes)
        if name != "plain" and not self._lm.graphs:
            self.notes = "without graphs"

    def decode(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        engine = self._lm.engine
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        sequences = [engine.add(prompt, params) for prompt in prompts]
        while not all(sequence.output for sequence in sequences):
            engine.step()
        # Those that had their prompts read first end first, and leave a smaller batch.
        full = new_tokens - max(len(sequence.output) for sequence in sequences)
        steps = []
        while engine.busy:
            start = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
        return steps[: max(1, full)]

    def prefill(self, prompts: list[list[int]]) -> float:
        engine = self._lm.engine
        start = time.perf_counter()
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True))
        while engine.busy:
            engine.step()
        return time.perf_counter() - start


class TransformersModel(Engine):
    """``generate`` of transformers: a prefill alone, and then the rest of the time."""

    def __init__(self, path: Path, device: str, static: bool) -> None:
        from transformers import AutoModelForCausalLM

        # Any, because the type of generate's self excludes what from_pretrained returns.
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        self._model = model.to(device).eval()
        self._device = device
        self._static = static

    def decode(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        first = self._generate(prompts, 1)
        whole = self._generate(prompts, new_tokens)
        # It compiles where it thinks that this pays, on a device that it knows.
        if self._static and getattr(self._model, "_compiled_call", None) is None:
            self.notes = "nothing was compiled"
        return [(whole - first) / (new_tokens - 1)]

    def prefill(self, prompts: list[list[int]]) -> float:
        return self._generate(prompts, 1)

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> float:
        ids = torch.tensor(prompts, device=self._device)
        how: dict[str, Any] = {"cache_implementation": "static"} if self._static else {}
        self._synchronize()
        start = time.perf_counter()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **how,
        )
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device != "cpu":
            torch.accelerator.synchronize()
