"""Serve an adapted model through the server of transformers, with its endpoints and streaming.

pip install "transformers[serving]"
python examples/serve_adapted.py examples/models/stdlib-lm --port 8000
"""

from __future__ import annotations

import argparse
import threading
from typing import Any

import uvicorn
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

import interposer
from interposer_adapt import adapt


class AdaptedModels(ModelManager):
    """Models of transformers, each of which is adapted when it was loaded."""

    def __init__(self, path: str, **settings: Any) -> None:
        self._adapting = threading.Lock()
        self.handles: dict[int, Any] = {}
        super().__init__(force_model=path, **settings)

    def load_model_and_processor(self, *args: Any, **named: Any) -> tuple[Any, Any]:
        """Return a model and its processor; requests come from several threads."""
        model, processor = super().load_model_and_processor(*args, **named)
        with self._adapting:
            if id(model) not in self.handles:
                self.handles[id(model)] = adapt(model.eval())
        return model, processor


def build(path: str, dtype: str) -> tuple[AdaptedModels, Any]:
    """Return the models and the application, as `transformers serve` builds it."""
    models = AdaptedModels(path, device="cpu", dtype=dtype)
    state = GenerationState()
    app = build_server(
        models,
        ChatCompletionHandler(models, state),
        completion_handler=CompletionHandler(models, state),
        response_handler=ResponseHandler(models, state),
        transcription_handler=TranscriptionHandler(models, state),
        systemone_handler=SystemOneHandler(models, state),
        generation_state=state,
    )
    return models, app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a directory or the name of a repository")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    models, app = build(asked.model, asked.dtype)
    for handle in models.handles.values():
        bound = sum(place.is_bound for place in handle.places)
        print(f"{type(handle.model).__name__}: {bound} of {len(handle.places)} modules are bound")
        print(*interposer.explain(handle).notes, sep="\n")
    uvicorn.run(app, host=asked.host, port=asked.port, log_level="warning")


if __name__ == "__main__":
    main()
