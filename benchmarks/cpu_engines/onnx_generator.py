"""Adapter of onnxruntime-genai: one generator for all requests."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from cpu_engines.contract import MAX_CONTEXT, Engine

__all__ = ["open_engine"]


class Generator:
    """Batch of requests of equal length; every batch gets a new generator and cache."""

    def __init__(self, path: Path, threads: int) -> None:
        self.genai: Any = importlib.import_module("onnxruntime_genai")
        self.numpy: Any = importlib.import_module("numpy")
        config = self.genai.Config(str(path))
        session = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self.model = self.genai.Model(config)
        self.generator: Any = None

    def reserve(self, batch: int, tokens: int) -> None:
        params = self.genai.GeneratorParams(self.model)
        length = min(tokens + 1, MAX_CONTEXT)
        params.set_search_options(
            batch_size=batch, do_sample=False, max_length=length, min_length=length
        )
        self.generator = self.genai.Generator(self.model, params)

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        self.generator.append_tokens(self.numpy.array(prompts, dtype="int32"))
        return self.step()

    def step(self) -> list[int]:
        self.generator.generate_next_token()
        return [int(token) for token in self.generator.get_next_tokens()]

    def end(self) -> None:
        self.generator = None

    def facts(self) -> dict[str, object]:
        return {"onnxruntime-genai": self.genai.__version__}


def open_engine(path: Path, option: str, threads: int) -> Engine:
    """Load the folder of the model builder with ``option`` in its name."""
    return Generator(path, threads)
