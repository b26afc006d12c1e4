"""The endpoint of a model that makes vectors of texts."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import interposer
from interposer_models import Encoder
from interposer_serve._errors import ApiError, check_model
from interposer_serve._limits import Limits
from interposer_serve._prompt_sizes import PromptSizes
from interposer_serve._reading import BodyReader
from interposer_serve._requests import Body, EmbeddingBody

_MOST_TEXTS = 2048  # as of OpenAI's interface


class VectorEndpoints:
    """Embeddings by one model, one call of it after the other."""

    def __init__(self, encoder: Encoder, name: str, limits: Limits) -> None:
        self.name, self.names = name, (name,)
        sizes = (encoder.pooling.max_tokens, encoder.tokenizer.model_max_length)
        self.context = min(size for size in sizes if size is not None)
        self._encoder = encoder
        self._limits = limits
        self._waiting = 0
        self._bodies = BodyReader(limits)
        self._sizes = PromptSizes(self.context, _MOST_TEXTS, encoder.tokenizer.get_vocab())
        self._thread = ThreadPoolExecutor(1, "interposer-encoder")

    bodies: Mapping[str, type[Body]] = {"/v1/embeddings": EmbeddingBody}

    @property
    def routes(self) -> list[Route]:
        """The endpoint."""
        return [Route("/v1/embeddings", self.embed, methods=["POST"])]

    async def start(self) -> None:
        """Do nothing; the model is loaded."""

    @property
    def num_unfinished(self) -> int:
        """The requests that wait for their vectors."""
        return self._waiting

    def end_answers(self) -> None:
        """Do nothing; vectors take no time that anybody would wait for."""

    async def stop(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def trouble(self) -> str:
        """The reason why requests would fail: there is none that would last."""
        return ""

    async def explanation(self) -> dict[str, Any]:
        """Return what the model runs on, and why."""
        found = await asyncio.to_thread(interposer.explain, self._encoder.adapted)
        return found.to_dict()

    async def embed(self, request: Request) -> Response:
        """``/v1/embeddings``."""
        content = await self._bodies.read_object(request)
        self._sizes.check(content)
        body = EmbeddingBody.read(content)
        check_model(body.model, self.names)
        texts = [body.input] if isinstance(body.input, str) else body.input
        if self._waiting > self._limits.queue:
            raise ApiError(
                429,
                f"{self._waiting} requests are waiting. Try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )
        self._waiting += 1
        try:
            vectors, num_tokens = await asyncio.wait_for(
                asyncio.get_running_loop().run_in_executor(self._thread, self._vectors, texts),
                self._limits.deadline_seconds,
            )
        except TimeoutError:
            message = f"The answer took longer than {self._limits.deadline_seconds:g} s"
            raise ApiError(504, message, code="deadline_exceeded") from None
        finally:
            self._waiting -= 1
        data = [
            {"object": "embedding", "index": index, "embedding": told}
            for index, told in enumerate(_told(vectors, body.encoding_format))
        ]
        spent = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": spent})

    def _vectors(self, texts: list[str]) -> tuple[list[list[float]], int]:
        counts = [len(tokens) for tokens in self._encoder.tokenizer(texts)["input_ids"]]
        for index, count in enumerate(counts):
            # The model would be given the beginning alone, and nobody told.
            if count > self.context:
                raise ApiError(
                    400,
                    f"input[{index}] has {count} tokens; allowed are {self.context}",
                    param="input",
                    code="context_length_exceeded",
                )
        return self._encoder.embed(texts).tolist(), sum(counts)


def _told(vectors: list[list[float]], encoding: str) -> list[Any]:
    if encoding == "float":
        return vectors
    return [base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode() for row in vectors]
