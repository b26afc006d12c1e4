"""llama.cpp through the C interface that llama-cpp-python exposes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from cpu_contenders.contract import MAX_STEP_TOKENS, Contender

__all__ = ["open_contender"]


class Context:
    """A context as large as the requests, made anew when they become larger or smaller."""

    def __init__(self, path: Path, threads: int) -> None:
        self.lib: Any = importlib.import_module("llama_cpp")
        self.numpy: Any = importlib.import_module("numpy")
        self.threads = threads
        self._log = self.lib.llama_log_callback(lambda *_: None)
        self.lib.llama_log_set(self._log, None)
        self.lib.llama_backend_init()
        params = self.lib.llama_model_default_params()
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        vocab = self.lib.llama_model_get_vocab(self.model)
        self.vocab_size = self.lib.llama_vocab_n_tokens(vocab)
        self.shape = (0, 0)
        self.context: Any = None
        self.batch = self.lib.llama_batch_init(MAX_STEP_TOKENS, 0, 1)
        self.tokens: list[int] = []
        self.position = 0

    def reserve(self, batch: int, tokens: int) -> None:
        shape = (batch, -(-tokens // 256) * 256)
        if shape != self.shape:
            if self.context:
                self.lib.llama_free(self.context)
            params = self.lib.llama_context_default_params()
            params.n_ctx = shape[0] * shape[1]
            params.n_batch = MAX_STEP_TOKENS
            params.n_seq_max = batch
            params.n_threads = params.n_threads_batch = self.threads
            self.context = self.lib.llama_init_from_model(self.model, params)
            if not self.context:
                raise RuntimeError(f"llama.cpp makes no context of {shape}")
            self.shape = shape
        memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_clear(memory, False)

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        size = len(prompts[0])
        rows = [
            (token, place, number, place == size - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        self.position = size
        return self._decode(rows)

    def step(self) -> list[int]:
        rows = [(token, self.position, number, True) for number, token in enumerate(self.tokens)]
        self.position += 1
        return self._decode(rows)

    def end(self) -> None:
        self.tokens = []

    def facts(self) -> dict[str, object]:
        return {"llama-cpp-python": self.lib.__version__}

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        batch = self.batch
        batch.n_tokens = len(rows)
        for at, (token, place, sequence, wanted) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = place
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = sequence
            batch.logits[at] = wanted
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        self.tokens = [
            int(self.numpy.argmax(self._logits(at))) for at, row in enumerate(rows) if row[3]
        ]
        return self.tokens

    def _logits(self, at: int) -> Any:
        found = self.lib.llama_get_logits_ith(self.context, at)
        return self.numpy.ctypeslib.as_array(found, shape=(self.vocab_size,))


def open_contender(path: Path, option: str, threads: int) -> Contender:
    """Load the GGUF file; ``option`` is in its name."""
    return Context(path, threads)
