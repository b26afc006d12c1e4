"""Adapter of OpenVINO GenAI: VLMPipeline, its continuous batching, and the image encoder alone."""

from __future__ import annotations

import importlib
import io
import json
import time
from pathlib import Path
from typing import Any

from media_engines.contract import MAX_BATCH, MAX_TOKENS, Answer

__all__ = ["open_images"]

IMAGE = "<image>"
_ENCODER = "openvino_vision_embeddings_model.xml"


class Images:
    """Requests of one image each, in one continuous-batching pipeline."""

    def __init__(self, path: Path, option: str, threads: int) -> None:
        precision = {"f16": "bf16", "f32": "f32"}[option]
        self.genai: Any = importlib.import_module("openvino_genai")
        self.openvino: Any = importlib.import_module("openvino")
        self.numpy: Any = importlib.import_module("numpy")
        self.open: Any = importlib.import_module("PIL.Image").open
        scheduler = self.genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = MAX_BATCH * MAX_TOKENS
        scheduler.max_num_seqs = MAX_BATCH
        scheduler.enable_prefix_caching = False
        # Arithmetic and KV cache have the precision of the other engines.
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
        }
        self.pipeline = self.genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", settings)
        core = self.openvino.Core()
        encoder = {name: settings[name] for name in settings if name != "KV_CACHE_PRECISION"}
        self.encoder = core.compile_model(str(path / _ENCODER), "CPU", encoder)
        means = json.loads((path / "preprocessor_config.json").read_text(encoding="utf-8"))
        self.mean, self.deviation = (
            self.numpy.array(means[name], dtype="float32") for name in ("image_mean", "image_std")
        )

    def encode(self, image: bytes) -> Any:
        # GenAI has no function for the vectors alone. Its pipeline calls this compiled model.
        pixels = self.numpy.asarray(self.open(io.BytesIO(image)).convert("RGB"), dtype="float32")
        scaled = (pixels / 255 - self.mean) / self.deviation
        batch = self.numpy.ascontiguousarray(scaled.transpose(2, 0, 1)[None])
        return self.encoder(batch)[0][0]

    def answer(self, images: list[bytes], texts: list[str], new_tokens: int) -> Answer:
        start = time.perf_counter()
        config = self.genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.set_eos_token_id(0)  # it refuses a model without one
        config.do_sample = False
        config.apply_chat_template = False
        handles = [
            self.pipeline.add_request(number, IMAGE + text, [self._tensor(image)], config)
            for number, (image, text) in enumerate(zip(images, texts, strict=True))
        ]
        tokens: list[list[int]] = [[] for _ in handles]
        first_s = 0.0
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for handle, row in zip(handles, tokens, strict=True):
                if handle.can_read():
                    for output in handle.read().values():
                        row += output.generated_ids
            if not first_s and len(images) == 1 and tokens[0]:
                first_s = time.perf_counter() - start
        return Answer(tokens, first_s)

    def facts(self) -> dict[str, object]:
        found = self.encoder.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return {
            "version": self.genai.__version__,
            "precision": f"float16 weights, arithmetic and KV cache in {found}",
        }

    def _tensor(self, image: bytes) -> Any:
        pixels = self.numpy.asarray(self.open(io.BytesIO(image)).convert("RGB"))
        return self.openvino.Tensor(self.numpy.ascontiguousarray(pixels[None]))


def open_images(path: Path, option: str, threads: int) -> Images:
    return Images(path, option, threads)
