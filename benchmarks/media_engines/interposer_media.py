"""Adapter of interposer."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

from media_engines.contract import MAX_BATCH, MAX_TOKENS, RATE, Answer

__all__ = ["open_images", "open_speech"]

IMAGE = "<image>"


class Images:
    """Requests of one image each."""

    def __init__(self, path: Path, option: str, threads: int) -> None:
        self.engine: Any = importlib.import_module("interposer_engine")
        self.dtype = _use(threads, option)
        tokens = MAX_BATCH * MAX_TOKENS
        self.lm = self.engine.load(path, self.dtype, max_sequences=MAX_BATCH, cache_tokens=tokens)

    def encode(self, image: bytes) -> Any:
        (embedded,) = self._prompt(image, "")
        return embedded.embeddings.float().numpy()

    def answer(self, images: list[bytes], texts: list[str], new_tokens: int) -> Answer:
        start = time.perf_counter()
        settings: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": new_tokens}
        prompts = [self._prompt(*each) for each in zip(images, texts, strict=True)]
        if len(prompts) > 1:
            answers = self.lm.generate(prompts, **settings)
            return Answer([list(answer.token_ids) for answer in answers])
        deltas = iter(self.lm.stream(prompts[0], **settings))
        first = next(deltas).token_id
        first_s = time.perf_counter() - start
        return Answer([[first, *(delta.token_id for delta in deltas)]], first_s)

    def facts(self) -> dict[str, object]:
        return {"precision": self.dtype}

    def _prompt(self, image: bytes, text: str) -> Any:
        return self.lm.media_prompt(IMAGE + text, [self.engine.Media("image", image)])


class Speech:
    """Whisper."""

    def __init__(self, path: Path, option: str, threads: int) -> None:
        engine: Any = importlib.import_module("interposer_engine")
        self.dtype = _use(threads, option)
        self.lm = engine.load(path, self.dtype, cache_tokens=4096, max_sequences=2)
        self.settings: dict[str, Any] = {
            "language": "en",
            "timestamps": False,
            "temperature": 0.0,
            "compression_ratio_threshold": None,
            "logprob_threshold": None,
            "no_speech_threshold": None,
            "condition_on_previous": False,
        }

    def transcribe(self, samples: Any) -> list[int]:
        transcript = self.lm.transcribe(samples, sampling_rate=RATE, **self.settings)
        return [token for segment in transcript.segments for token in segment.token_ids]

    def facts(self) -> dict[str, object]:
        return {"precision": self.dtype}


def _use(threads: int, option: str) -> str:
    """Set the threads of torch and the plugins in use, and return the dtype of an option."""
    # The example plugin's kernels have a high score and would be selected if installed.
    if importlib.util.find_spec("interposer_example_norm") is not None:
        os.environ["INTERPOSER_DISABLE"] = "interposer-example-norm"
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(threads)
    return {"bf16": "bfloat16", "f32": "float32"}[option]


def open_images(path: Path, option: str, threads: int) -> Images:
    return Images(path, option, threads)


def open_speech(path: Path, option: str, threads: int) -> Speech:
    return Speech(path, option, threads)
