"""vLLM's build for CPUs: its engine in this process, step by step."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from cpu_contenders.contract import MAX_BATCH, MAX_CONTEXT, MAX_STEP_TOKENS, Contender

__all__ = ["open_contender"]


class Engine:
    """Requests of the engine that run as one batch."""

    def __init__(self, path: Path, threads: int) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.vllm: Any = importlib.import_module("vllm")
        llm = self.vllm.LLM(
            model=str(path),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_num_seqs=MAX_BATCH,
            max_model_len=MAX_CONTEXT,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            enable_prefix_caching=False,
        )
        self.engine = llm.llm_engine
        self.ids = 0
        self.names: list[str] = []
        self.counts: dict[str, int] = {}

    def reserve(self, batch: int, tokens: int) -> None:
        """Do nothing: the cache is made when the model loads."""

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=new_tokens + 1, ignore_eos=True, detokenize=False
        )
        self.names = []
        for prompt in prompts:
            self.ids += 1
            self.names.append(str(self.ids))
            self.engine.add_request(str(self.ids), {"prompt_token_ids": prompt}, params)
        self.counts = dict.fromkeys(self.names, 0)
        return self.step()

    def step(self) -> list[int]:
        """Step until each request has a token more; results may come a step later."""
        wanted = min(self.counts.values()) + 1
        tokens: dict[str, int] = {}
        while min(self.counts.values()) < wanted:
            for output in self.engine.step():
                found = output.outputs[0].token_ids
                self.counts[output.request_id] = len(found)
                tokens[output.request_id] = found[-1]
        return [tokens[name] for name in self.names]

    def end(self) -> None:
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def facts(self) -> dict[str, object]:
        return {"vllm-cpu": self.vllm.__version__}


def open_contender(path: Path, option: str, threads: int) -> Contender:
    """Load the model in bfloat16."""
    return Engine(path, threads)
