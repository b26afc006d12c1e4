"""Adapter of llama.cpp through the C API of llama-cpp-python."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

from cpu_engines.contract import (
    MAX_STEP_TOKENS,
    BatchEngine,
    Settings,
    Unsupported,
)

__all__ = ["open_engine"]

_GUESSES = 4
_NGRAM = 3


class Context:
    """A llama.cpp context of the required size, recreated when that size changes."""

    def __init__(self, path: Path, threads: int, settings: Settings) -> None:
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
        self.joining: list[list[int]] = []
        self.texts: list[list[int]] = []
        self.guess: Any = None
        if settings.guesses:
            speculative: Any = importlib.import_module("llama_cpp.llama_speculative")
            self.guess = speculative.LlamaPromptLookupDecoding(_NGRAM, _GUESSES)
        self.adapters = [self._adapter(Path(folder)) for folder in settings.adapters]

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
        self.lib.llama_memory_clear(self._memory, False)

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        size = len(prompts[0])
        rows = [
            (token, place, number, place == size - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        self.position = size
        self.tokens = self._decode(rows)
        self.texts = [[*p, token] for p, token in zip(prompts, self.tokens, strict=True)]
        return self.tokens

    def step(self) -> list[int]:
        rows = [(token, self.position, number, True) for number, token in enumerate(self.tokens)]
        count = len(rows)
        for number, prompt in enumerate(self.joining):
            last = len(prompt) - 1
            rows += [(t, place, count + number, place == last) for place, t in enumerate(prompt)]
        self.position += 1
        self.tokens = self._decode(rows)[:count]
        for number, _ in enumerate(self.joining):
            self.lib.llama_memory_seq_rm(self._memory, count + number, -1, -1)
        self.joining = []
        return self.tokens

    def extend(self, prompt: list[int], known: int) -> list[int]:
        self.lib.llama_memory_seq_rm(self._memory, 0, known, -1)
        last = len(prompt) - 1
        rows = [(t, place, 0, place == last) for place, t in enumerate(prompt) if place >= known]
        self.position, self.tokens = len(prompt), self._decode(rows)
        return self.tokens

    def join(self, prompt: list[int]) -> None:
        self.joining.append(prompt)

    def several(self) -> list[list[int]]:
        """Verify draft tokens of the library's prompt lookup in one batch, as ``Llama`` does.

        ``Llama`` also copies the logits of every token; this method copies those of drafts only.
        """
        if self.guess is None:
            return [[token] for token in self.step()]
        (text,) = self.texts
        guessed = [int(t) for t in self.guess(self.numpy.array(text, dtype=self.numpy.intc))]
        rows = [(t, self.position + n, 0, True) for n, t in enumerate([text[-1], *guessed])]
        drawn = self._decode(rows)
        wrong = (n for n, token in enumerate(guessed) if drawn[n] != token)
        found = drawn[: next(wrong, len(guessed)) + 1]
        self.position += len(found)
        self.lib.llama_memory_seq_rm(self._memory, 0, self.position, -1)
        text += found
        self.tokens = found[-1:]
        return [found]

    def draw(self, temperature: float, seed: int) -> None:
        if temperature:
            raise Unsupported("guesses of llama-cpp-python are verified greedily here")

    def use_adapters(self, numbers: list[int | None]) -> None:
        """Set the adapter of the context, which applies to all its requests."""
        wanted = {*numbers}
        if len(wanted) > 1:
            raise Unsupported("a context of llama.cpp has one adapter for all requests")
        chosen = [self.adapters[n] for n in wanted if n is not None]
        pointers = (self.lib.llama_adapter_lora_p_ctypes * len(chosen))(*chosen)
        scales = (ctypes.c_float * len(chosen))(*[1.0] * len(chosen))
        if self.lib.llama_set_adapters_lora(self.context, pointers, len(chosen), scales):
            raise RuntimeError("llama.cpp does not set the adapter")

    def end(self) -> None:
        self.tokens, self.joining, self.texts = [], [], []

    def facts(self) -> dict[str, object]:
        return {"llama-cpp-python": self.lib.__version__}

    @property
    def _memory(self) -> Any:
        return self.lib.llama_get_memory(self.context)

    def _adapter(self, folder: Path) -> Any:
        file = folder.with_suffix(".gguf")
        found = self.lib.llama_adapter_lora_init(self.model, str(file).encode())
        if not found:
            raise RuntimeError(f"llama.cpp does not load the adapter {file}")
        return found

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode rows of (token, position, sequence, whether to compute logits)."""
        batch = self.batch
        drawn: list[int] = []
        for start in range(0, len(rows), MAX_STEP_TOKENS):
            part = rows[start : start + MAX_STEP_TOKENS]
            batch.n_tokens = len(part)
            for at, (token, place, sequence, wanted) in enumerate(part):
                batch.token[at] = token
                batch.pos[at] = place
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = sequence
                batch.logits[at] = wanted
            status = self.lib.llama_decode(self.context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            drawn += [
                int(self.numpy.argmax(self._logits(at))) for at, row in enumerate(part) if row[3]
            ]
        return drawn

    def _logits(self, at: int) -> Any:
        found = self.lib.llama_get_logits_ith(self.context, at)
        return self.numpy.ctypeslib.as_array(found, shape=(self.vocab_size,))


def open_engine(
    path: Path, option: str, threads: int, settings: Settings | None = None
) -> BatchEngine:
    """Load the GGUF file with ``option`` in its name."""
    return Context(path, threads, settings or Settings())
