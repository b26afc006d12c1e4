"""Adapter of whisper.cpp through pywhispercpp."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from typing import Any

__all__ = ["open_speech"]

# The first token that is no text.
_SPECIAL_TOKENS = 50257


class Speech:
    """Whisper, with every check of the text off, which could decode a window again."""

    def __init__(self, path: Path, option: str, threads: int) -> None:
        del option  # there is one file, in float16
        self.library: Any = importlib.import_module("_pywhispercpp")
        model: Any = importlib.import_module("pywhispercpp.model")
        self.model = model.Model(
            str(path),
            redirect_whispercpp_logs_to=None,
            context_params={"use_gpu": False, "flash_attn": True},
            n_threads=threads,
            language="en",
            no_timestamps=True,
            no_context=True,
            single_segment=True,
            suppress_blank=False,
            temperature=0.0,
            temperature_inc=0.0,
            entropy_thold=-1e9,
            logprob_thold=-1e9,
            no_speech_thold=2.0,
            greedy={"best_of": 1},
            print_progress=False,
            print_timestamps=False,
        )

    def transcribe(self, samples: Any) -> list[int]:
        self.model.transcribe(samples)
        context = self.model._ctx  # the Python class gives texts only
        tokens = [
            self.library.whisper_full_get_token_id(context, segment, at)
            for segment in range(self.library.whisper_full_n_segments(context))
            for at in range(self.library.whisper_full_n_tokens(context, segment))
        ]
        return [token for token in tokens if token < _SPECIAL_TOKENS]

    def facts(self) -> dict[str, object]:
        version = importlib.metadata.version("pywhispercpp")
        return {"version": f"pywhispercpp {version}", "precision": "float16 weights"}


def open_speech(path: Path, option: str, threads: int) -> Speech:
    return Speech(path, option, threads)
