"""Adapter of OpenVINO GenAI's continuous-batching pipeline, called step by step."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from cpu_engines.contract import MAX_BATCH, MAX_STEP_TOKENS, Engine

__all__ = ["open_engine"]


class Pipeline:
    """Batch of requests in the pipeline."""

    def __init__(self, path: Path, threads: int) -> None:
        self.genai: Any = importlib.import_module("openvino_genai")
        self.openvino: Any = importlib.import_module("openvino")
        self.numpy: Any = importlib.import_module("numpy")
        scheduler = self.genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = MAX_STEP_TOKENS
        scheduler.max_num_seqs = MAX_BATCH
        scheduler.enable_prefix_caching = False
        # Precisions are the library's defaults; its KV cache has 8 bits.
        self.settings = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = self.genai.ContinuousBatchingPipeline(
            str(path), scheduler, "CPU", self.settings
        )
        self.ids = 0
        self.handles: list[Any] = []

    def reserve(self, batch: int, tokens: int) -> None:
        """Do nothing: the cache is allocated when the model loads."""

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = new_tokens + 1
        config.ignore_eos = True
        config.do_sample = False
        self.handles = []
        for prompt in prompts:
            self.ids += 1
            tokens = self.openvino.Tensor(self.numpy.array([prompt], dtype="int64"))
            self.handles.append(self.pipeline.add_request(self.ids, tokens, config))
        return self.step()

    def step(self) -> list[int]:
        self.pipeline.step()
        return [
            output.generated_ids[-1] for handle in self.handles for output in handle.read().values()
        ]

    def end(self) -> None:
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        self.handles = []

    def facts(self) -> dict[str, object]:
        return {"openvino-genai": self.genai.__version__}


def open_engine(path: Path, option: str, threads: int) -> Engine:
    """Load the folder of the intermediate representation with ``option`` in its name."""
    return Pipeline(path, threads)
