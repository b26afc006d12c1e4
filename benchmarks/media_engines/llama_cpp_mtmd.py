"""Adapter of llama.cpp's mtmd through the C API of llama-cpp-python.

mtmd encodes images of a Llava one after the other; its batches are for other projectors. Requests
are then decoded together, one token of each in a step.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from pathlib import Path
from typing import Any

from media_engines.contract import MAX_BATCH, MAX_TOKENS, Answer

__all__ = ["open_images"]

# Tokens of a batch and of its part that is computed at once: an image with its text.
_STEP_TOKENS = MAX_TOKENS


class Images:
    """A context with one sequence for each request."""

    def __init__(self, path: Path, option: str, threads: int) -> None:
        self.lib: Any = importlib.import_module("llama_cpp")
        self.mtmd: Any = importlib.import_module("llama_cpp.mtmd_cpp")
        self.numpy: Any = importlib.import_module("numpy")
        self.option = option
        self._log = self.lib.llama_log_callback(lambda *_: None)
        self.lib.llama_log_set(self._log, None)
        self.mtmd.mtmd_helper_log_set(self._log, None)
        self.lib.llama_backend_init()
        text, projector = (str(path / f"{part}.gguf").encode() for part in ("text", "mmproj"))
        self.model = self.lib.llama_model_load_from_file(
            text, self.lib.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {text.decode()}")
        self.vocab_size = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.hidden_size = self.lib.llama_model_n_embd(self.model)
        params = self.lib.llama_context_default_params()
        params.n_ctx = MAX_BATCH * MAX_TOKENS
        params.n_batch = params.n_ubatch = _STEP_TOKENS
        params.n_seq_max = MAX_BATCH
        params.n_threads = params.n_threads_batch = threads
        self.context = self.lib.llama_init_from_model(self.model, params)
        settings = self.mtmd.mtmd_context_params_default()
        settings.use_gpu, settings.n_threads, settings.print_timings = False, threads, False
        self.media = self.mtmd.mtmd_init_from_file(projector, self.model, settings)
        if not self.context or not self.media:
            raise RuntimeError(f"llama.cpp makes no context for {path}")
        self.batch = self.lib.llama_batch_init(MAX_BATCH, 0, 1)

    def encode(self, image: bytes) -> Any:
        chunks = self._chunks(image, "")
        (chunk,) = (
            self.mtmd.mtmd_input_chunks_get(chunks, at)
            for at in range(self.mtmd.mtmd_input_chunks_size(chunks))
        )
        if self.mtmd.mtmd_encode_chunk(self.media, chunk):
            raise RuntimeError("mtmd_encode_chunk failed")
        shape = (self.mtmd.mtmd_input_chunk_get_n_tokens(chunk), self.hidden_size)
        found = self.mtmd.mtmd_get_output_embd(self.media)
        vectors = self.numpy.ctypeslib.as_array(found, shape=shape).copy()
        self.mtmd.mtmd_input_chunks_free(chunks)
        return vectors

    def answer(self, images: list[bytes], texts: list[str], new_tokens: int) -> Answer:
        start = time.perf_counter()
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), False)
        first = [
            self._prefill(number, *each)
            for number, each in enumerate(zip(images, texts, strict=True))
        ]
        first_s = time.perf_counter() - start if len(images) == 1 else 0.0
        tokens = [[token] for token, _ in first]
        for step in range(new_tokens - 1):
            self.batch.n_tokens = len(tokens)
            for number, (_, place) in enumerate(first):
                self.batch.token[number] = tokens[number][-1]
                self.batch.pos[number] = place + step
                self.batch.n_seq_id[number] = 1
                self.batch.seq_id[number][0] = number
                self.batch.logits[number] = True
            if self.lib.llama_decode(self.context, self.batch):
                raise RuntimeError("llama_decode failed")
            for number, row in enumerate(tokens):
                row.append(self._likeliest(number))
        return Answer(tokens, first_s)

    def facts(self) -> dict[str, object]:
        weights = {"bf16": "bfloat16", "f16": "float16"}[self.option]
        return {"version": self.lib.__version__, "precision": f"{weights} weights"}

    def _chunks(self, image: bytes, text: str) -> Any:
        """Decode an image, and split a prompt into the image and the text after it."""
        data = (ctypes.c_uint8 * len(image)).from_buffer_copy(image)
        bitmap = self.mtmd.mtmd_helper_bitmap_init_from_buf(self.media, data, len(image), False)
        prompt = self.mtmd.mtmd_default_marker() + text.encode()
        given = self.mtmd.mtmd_input_text(prompt, len(prompt), False, False)
        chunks = self.mtmd.mtmd_input_chunks_init()
        bitmaps = (self.mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        status = self.mtmd.mtmd_tokenize(self.media, chunks, ctypes.byref(given), bitmaps, 1)
        self.mtmd.mtmd_bitmap_free(bitmap)
        if status:
            raise RuntimeError(f"mtmd_tokenize returned {status}")
        return chunks

    def _prefill(self, sequence: int, image: bytes, text: str) -> tuple[int, int]:
        """Compute a prompt; return its first new token and the position of that token."""
        chunks = self._chunks(image, text)
        end = self.lib.llama_pos(0)
        status = self.mtmd.mtmd_helper_eval_chunks(
            self.media, self.context, chunks, 0, sequence, _STEP_TOKENS, True, ctypes.byref(end)
        )
        self.mtmd.mtmd_input_chunks_free(chunks)
        if status:
            raise RuntimeError(f"mtmd_helper_eval_chunks returned {status}")
        return self._likeliest(-1), end.value

    def _likeliest(self, at: int) -> int:
        found = self.lib.llama_get_logits_ith(self.context, at)
        logits = self.numpy.ctypeslib.as_array(found, shape=(self.vocab_size,))
        return int(self.numpy.argmax(logits))


def open_images(path: Path, option: str, threads: int) -> Images:
    return Images(path, option, threads)
