"""Adapter of transformers."""

from __future__ import annotations

import importlib
import io
import time
from pathlib import Path
from typing import Any

from media_engines.contract import RATE, Answer

__all__ = ["open_images", "open_speech"]

IMAGE = "<image>"
# The prompt of Whisper and its last token, which some versions return with the text.
_SPECIAL_TOKENS = 50257
# As many tokens as whisper.cpp writes for a window: half of the context less four.
_NEW_TOKENS = 220


class FirstToken:
    """Streamer that notes the time of the first new token."""

    def __init__(self) -> None:
        self.calls = 0
        self.time = 0.0

    def put(self, _: object) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call has the prompt
            self.time = time.perf_counter()

    def end(self) -> None:
        """Do nothing: the caller sees the end."""


class Images:
    """Requests of one image each."""

    def __init__(self, path: Path, option: str, threads: int) -> None:
        self.library, self.torch, self.dtype = _libraries(threads, option)
        self.open: Any = importlib.import_module("PIL.Image").open
        load = self.library.LlavaForConditionalGeneration.from_pretrained
        self.model = load(path, dtype=self.dtype).eval()
        self.processor = self.library.AutoProcessor.from_pretrained(path)

    def encode(self, image: bytes) -> Any:
        with self.torch.inference_mode():
            pixels = self.processor.image_processor(self._read(image), return_tensors="pt")
            found = self.model.get_image_features(pixels["pixel_values"].to(self.dtype))
            vectors = getattr(found, "pooler_output", found)[0]
            return vectors.float().numpy()

    def answer(self, images: list[bytes], texts: list[str], new_tokens: int) -> Answer:
        start = time.perf_counter()
        inputs = self.processor(
            images=[[self._read(image)] for image in images],
            text=[IMAGE + text for text in texts],
            return_tensors="pt",
        )
        inputs["pixel_values"] = inputs["pixel_values"].to(self.dtype)
        first = FirstToken() if len(images) == 1 else None
        with self.torch.inference_mode():
            out = self.model.generate(
                **inputs, max_new_tokens=new_tokens, do_sample=False, streamer=first
            )
        tokens = out[:, inputs["input_ids"].shape[1] :].tolist()
        return Answer(tokens, first.time - start if first is not None else 0.0)

    def facts(self) -> dict[str, object]:
        return {"version": self.library.__version__, "precision": str(self.dtype)[6:]}

    def _read(self, image: bytes) -> Any:
        return self.open(io.BytesIO(image)).convert("RGB")


class Speech:
    """Whisper."""

    def __init__(self, path: Path, option: str, threads: int) -> None:
        self.library, self.torch, self.dtype = _libraries(threads, option)
        load = self.library.WhisperForConditionalGeneration.from_pretrained
        self.model = load(path, dtype=self.dtype).eval()
        self.extract = self.library.WhisperFeatureExtractor.from_pretrained(path)

    def transcribe(self, samples: Any) -> list[int]:
        features = self.extract(samples, sampling_rate=RATE, return_tensors="pt").input_features
        with self.torch.inference_mode():
            tokens = self.model.generate(
                features.to(self.dtype),
                language="en",
                task="transcribe",
                do_sample=False,
                max_new_tokens=_NEW_TOKENS,
            )[0].tolist()
        return [token for token in tokens if token < _SPECIAL_TOKENS]

    def facts(self) -> dict[str, object]:
        return {"version": self.library.__version__, "precision": str(self.dtype)[6:]}


def _libraries(threads: int, option: str) -> tuple[Any, Any, Any]:
    """Return transformers, torch and the dtype of an option."""
    library: Any = importlib.import_module("transformers")
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(threads)
    library.logging.set_verbosity_error()
    return library, torch, {"bf16": torch.bfloat16, "f32": torch.float32}[option]


def open_images(path: Path, option: str, threads: int) -> Images:
    return Images(path, option, threads)


def open_speech(path: Path, option: str, threads: int) -> Speech:
    return Speech(path, option, threads)
