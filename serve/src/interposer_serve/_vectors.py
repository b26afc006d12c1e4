"""Endpoint of an encoder model, which computes embeddings."""

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
from interposer_adapt import Encoder
from interposer_serve._errors import ApiError, check_model
from interposer_serve._limits import Limits
from interposer_serve._reading import BodyReader, PromptSizes
from interposer_serve._requests import Body, EmbeddingBody

_MAX_TEXTS = 2048  # limit of OpenAI's API


class VectorEndpoints:
    """The endpoint for embeddings, which runs the encoder for one request at a time."""

    def __init__(self, encoder: Encoder, name: str, limits: Limits) -> None:
        self.name, self.names = name, (name,)
        sizes = (encoder.pooling.max_tokens, encoder.tokenizer.model_max_length)
        self.context = min(size for size in sizes if size is not None)
        self._encoder = encoder
        self._limits = limits
        self._waiting = 0
        self._bodies = BodyReader(limits)
        self._sizes = PromptSizes(self.context, _MAX_TEXTS, encoder.tokenizer.get_vocab())
        self._thread = ThreadPoolExecutor(1, "interposer-encoder")

    bodies: Mapping[str, type[Body]] = {"/v1/embeddings": EmbeddingBody}

    @property
    def routes(self) -> list[Route]:
        """The HTTP route of the endpoint."""
        return [Route("/v1/embeddings", self.embed, methods=["POST"])]

    async def start(self) -> None:
        """Do nothing at the start: the encoder is loaded already."""

    @property
    def num_unfinished(self) -> int:
        """Number of requests that run or wait."""
        return self._waiting

    def end_answers(self) -> None:
        """Do nothing: computing embeddings is short, so all requests finish."""

    async def stop(self) -> None:
        """End the encoder's thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def trouble(self) -> str:
        """Reason why requests would fail: always "", because an encoder has no lasting failure."""
        return ""

    async def explanation(self) -> dict[str, Any]:
        """Return the explanation of the kernels that the encoder uses."""
        explanation = await asyncio.to_thread(interposer.explain, self._encoder.adapted)
        return explanation.to_dict()

    async def embed(self, request: Request) -> Response:
        """Compute embeddings: ``/v1/embeddings``."""
        content = await self._bodies.read_object(request)
        self._sizes.check(content)
        body = EmbeddingBody.read(content)
        check_model(body.model, self.names)
        texts = [body.input] if isinstance(body.input, str) else body.input
        # One of the unfinished requests runs, all others wait in the queue.
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
        # The thread finishes the computation even after a timeout: torch cannot be interrupted.
        except TimeoutError:
            message = f"The answer took longer than {self._limits.deadline_seconds:g} s"
            raise ApiError(504, message, code="deadline_exceeded") from None
        finally:
            self._waiting -= 1
        data = [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(_encode(vectors, body.encoding_format))
        ]
        request.state.num_prompt_tokens = num_tokens
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": usage})

    def _vectors(self, texts: list[str]) -> tuple[list[list[float]], int]:
        counts = [len(tokens) for tokens in self._encoder.tokenizer(texts)["input_ids"]]
        for index, count in enumerate(counts):
            # The encoder would silently truncate the text.
            if count > self.context:
                raise ApiError(
                    400,
                    f"input[{index}] has {count} tokens; allowed are {self.context}",
                    param="input",
                    code="context_length_exceeded",
                )
        return self._encoder.embed(texts).tolist(), sum(counts)


def _encode(vectors: list[list[float]], encoding: str) -> list[Any]:
    if encoding == "float":
        return vectors
    return [base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode() for row in vectors]
