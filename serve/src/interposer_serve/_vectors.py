"""Endpoints of an encoder model: embeddings, pooling, scores, reranking and classification."""

from __future__ import annotations

import asyncio
import base64
import json
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

import interposer
from interposer_adapt import Encoder
from interposer_serve._details import model_details
from interposer_serve._endpoints import Answer, Endpoints
from interposer_serve._errors import ApiError, shown
from interposer_serve._limits import Limits
from interposer_serve._reading import PromptSizes
from interposer_serve._requests import Body
from interposer_serve._threads import in_daemon_thread
from interposer_serve._vector_requests import (
    ClassifyBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)

_STOP_SECONDS = 10.0  # for a computation whose request exceeded the deadline
_MAX_TEXTS = 2048  # limit of OpenAI's API
# Numbers in one response with a vector for each token, which would otherwise fill the memory.
_MAX_TOKEN_VALUES = 2**23
_PATHS = {
    "pooling": ("/pooling",),
    "embedding": ("/v1/embeddings",),
    "classification": ("/v1/classify", "/classify"),
    "score": ("/v1/score", "/score"),
    "rerank": ("/v1/rerank", "/v2/rerank", "/rerank"),
}
B = TypeVar("B", bound=Body)
# Content of a response, and the number of tokens that the encoder read.
_Content = tuple[dict[str, Any], int]


class VectorEndpoints(Endpoints):
    """The endpoints of one encoder, which runs one request at a time."""

    def __init__(self, encoder: Encoder, name: str, limits: Limits) -> None:
        self.name = name
        self.context = _context(encoder)
        self._encoder = encoder
        self._limits = limits
        self._waiting = 0
        self._max_tokens = min(self.context, limits.prompt_tokens or self.context)
        self._sizes = PromptSizes(self._max_tokens, _MAX_TEXTS, encoder.tokenizer.get_vocab())
        self._thread = ThreadPoolExecutor(1, "interposer-encoder")
        is_classifier, is_cross_encoder = bool(encoder.labels), len(encoder.labels) == 1
        self._tasks = ("classify",) if is_classifier else ("embed", "token_embed")
        self.capabilities = ["classification" if is_classifier else "embedding"]
        if is_cross_encoder or not is_classifier:
            self.capabilities += ["score", "rerank"]
        self._available = frozenset(
            path for capability in (*self.capabilities, "pooling") for path in _PATHS[capability]
        )

    @property
    def available(self) -> Collection[str]:
        """The paths of the encoder's tasks."""
        return self._available

    @property
    def names(self) -> Collection[str]:
        """The name of the encoder, which has no adapters."""
        return (self.name,)

    @property
    def details(self) -> Mapping[str, Any]:
        """Dtype and quantization of the encoder."""
        return model_details(self._encoder)

    async def start(self) -> None:
        """Do nothing at the start: the encoder is loaded already."""

    @property
    def num_unfinished(self) -> int:
        """Number of requests that run or wait."""
        return self._waiting

    def end_answers(self) -> None:
        """Do nothing: the encoder's computations are short, so all requests finish."""

    async def stop(self) -> None:
        """End the encoder's thread, which refers to the encoder until then."""
        with suppress(TimeoutError):  # torch cannot be interrupted
            async with asyncio.timeout(_STOP_SECONDS):
                await in_daemon_thread(partial(self._thread.shutdown, cancel_futures=True))

    @property
    def trouble(self) -> str:
        """Reason why requests would fail: always "", because an encoder has no lasting failure."""
        return ""

    async def explanation(self) -> dict[str, Any]:
        """Return the explanation of the kernels that the encoder uses."""
        explanation = await asyncio.to_thread(interposer.explain, self._encoder.adapted)
        return explanation.to_dict()

    async def embed(self, request: Request, content: dict[str, Any]) -> Response:
        """Compute embeddings: ``/v1/embeddings``."""
        body = self._read(content, EmbeddingBody)
        if body.dimensions is not None:
            self._check_dimensions(body.dimensions)

        def embeddings() -> _Content:
            num_tokens = self._check_inputs(body.texts)
            vectors = self._encoder.embed(body.texts)[:, : body.dimensions]
            if body.dimensions is not None and self._encoder.pooling.unit:
                vectors = normalize(vectors, dim=1)
            data = [
                {"object": "embedding", "index": index, "embedding": row}
                for index, row in enumerate(_encode(vectors, body.encoding_format))
            ]
            return {"object": "list", "data": data}, num_tokens

        return await self._answer(request, embeddings)

    async def pool(self, request: Request, content: dict[str, Any]) -> Response:
        """Compute vectors of texts, vectors of their tokens, or classes: ``/pooling``."""
        body = self._read(content, PoolingBody)
        task = body.task or self._tasks[0]
        if task not in self._tasks:
            allowed = " or ".join(map(repr, self._tasks))
            message = f"task is {task!r}, which this model cannot do; allowed is {allowed}"
            raise ApiError(400, message, param="task", code="not_honoured")

        def pooled() -> _Content:
            num_tokens = self._check_inputs(body.texts)
            results: Iterable[Tensor]
            if task == "token_embed":
                self._check_num_values(num_tokens)
                results = self._encoder.embed_tokens(body.texts)
            elif task == "embed":
                results = self._encoder.embed(body.texts)
            else:
                results = map(_probabilities, self._encoder.classify(body.texts))
            data = [
                {"object": "pooling", "index": index, "data": row}
                for index, row in enumerate(_encode(results, body.encoding_format))
            ]
            return {**_head("pool"), "data": data}, num_tokens

        return await self._answer(request, pooled)

    async def classify(self, request: Request, content: dict[str, Any]) -> Response:
        """Compute the most likely label of each text: ``/v1/classify``."""
        body = self._read(content, ClassifyBody)

        def classified() -> _Content:
            num_tokens = self._check_inputs(body.texts)
            data = [
                {
                    "index": index,
                    "label": max(probabilities, key=probabilities.__getitem__),
                    "probs": [*probabilities.values()],
                    "num_classes": len(probabilities),
                }
                for index, probabilities in enumerate(self._encoder.classify(body.texts))
            ]
            return {**_head("classify"), "data": data}, num_tokens

        return await self._answer(request, classified)

    async def score(self, request: Request, content: dict[str, Any]) -> Response:
        """Score the similarity of pairs of texts: ``/v1/score``."""
        body = self._read(content, ScoreBody)
        try:
            pairs = body.pairs
        except ValueError as error:
            raise ApiError(400, str(error), param="text_1") from None

        def scored() -> _Content:
            scores, num_tokens = self._scores(pairs, "text_2")
            data = [
                {"object": "score", "index": index, "score": score}
                for index, score in enumerate(scores)
            ]
            return {**_head("score"), "data": data}, num_tokens

        return await self._answer(request, scored)

    async def rerank(self, request: Request, content: dict[str, Any]) -> Response:
        """Sort documents by their relevance for a query: ``/v1/rerank``."""
        body = self._read(content, RerankBody)

        def reranked() -> _Content:
            texts = body.texts
            scores, num_tokens = self._scores([(body.query, text) for text in texts], "documents")
            order = sorted(range(len(texts)), key=scores.__getitem__, reverse=True)
            results: list[dict[str, Any]] = []
            for index in order[: body.top_n or None]:
                result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
                if body.return_documents:
                    result["document"] = {"text": texts[index]}
                results.append(result)
            return {"id": _new_id("rerank"), "results": results}, num_tokens

        return await self._answer(request, reranked)

    paths: ClassVar[Mapping[str, tuple[Answer, type[Body]]]] = {
        **dict.fromkeys(_PATHS["pooling"], (pool, PoolingBody)),
        **dict.fromkeys(_PATHS["embedding"], (embed, EmbeddingBody)),
        **dict.fromkeys(_PATHS["classification"], (classify, ClassifyBody)),
        **dict.fromkeys(_PATHS["score"], (score, ScoreBody)),
        **dict.fromkeys(_PATHS["rerank"], (rerank, RerankBody)),
    }

    def _read(self, content: dict[str, Any], body_type: type[B]) -> B:
        self._sizes.check(content)
        return body_type.read(content)

    async def _answer(self, request: Request, compute: Callable[[], _Content]) -> Response:
        """Run a computation in the encoder's thread, and return its result as a response.

        Raises: ApiError: the queue is full, or the deadline has passed.
        """

        def content_and_count() -> tuple[bytes, int]:
            content, num_tokens = compute()
            usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
            pieces = _json_pieces({**content, "model": self.name, "usage": usage})
            return "".join(pieces).encode(), num_tokens

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
            content, num_tokens = await asyncio.wait_for(
                asyncio.get_running_loop().run_in_executor(self._thread, content_and_count),
                self._limits.deadline_seconds,
            )
        # The thread finishes the computation even after a timeout: torch cannot be interrupted.
        except TimeoutError:
            message = f"The answer took longer than {self._limits.deadline_seconds:g} s"
            raise ApiError(504, message, code="deadline_exceeded") from None
        finally:
            self._waiting -= 1
        request.state.num_prompt_tokens = num_tokens
        return Response(content, media_type="application/json")

    def _scores(self, pairs: Sequence[tuple[str, str]], param: str) -> tuple[list[float], int]:
        """Return the score of each pair, and the number of tokens that the encoder read.

        Raises: ApiError: a pair, or a text of an embedding model, is longer than the context.
        """
        texts = [*dict.fromkeys(chain.from_iterable(pairs))]
        counts = self._encoder.count_tokens(texts)
        for text, count in zip(texts, counts, strict=True):
            self._check_count(f"The text {shown(text[:40])} has", count, param)
        if self._encoder.labels:
            counts = self._encoder.count_tokens(pairs)
            for index, count in enumerate(counts):
                self._check_count(f"{param}[{index}] and its pair have", count, param)
            return self._encoder.score(pairs), sum(counts)
        vectors = self._encoder.embed(texts)
        rows = {text: row for row, text in enumerate(texts)}
        first, second = (
            vectors[[rows[text] for text in column]] for column in zip(*pairs, strict=True)
        )
        scores: list[float] = cosine_similarity(first, second).tolist()
        return scores, sum(counts)

    def _check_inputs(self, texts: Sequence[Any]) -> int:
        """Return the number of tokens of the inputs.

        Raises: ApiError: an input is empty, or longer than the context.
        """
        # The encoder refuses empty lists of token ids, with a message for Python programs.
        empty = next((index for index, text in enumerate(texts) if text == []), None)
        if empty is not None:
            self._check_count(f"input[{empty}] has", 0, "input")
        counts = self._encoder.count_tokens(texts)
        for index, count in enumerate(counts):
            self._check_count(f"input[{index}] has", count, "input")
        return sum(counts)

    def _check_count(self, subject: str, count: int, param: str) -> None:
        if not count:
            raise ApiError(400, f"{subject} no tokens", param=param, code="invalid_value")
        # The encoder would silently truncate the text.
        if count > self._max_tokens:
            raise ApiError(
                400,
                f"{subject} {count} tokens; allowed are {self._max_tokens}",
                param=param,
                code="context_length_exceeded",
            )

    def _check_num_values(self, num_tokens: int) -> None:
        size = self._encoder.adapted.model.config.get_text_config().hidden_size
        if num_tokens * size > _MAX_TOKEN_VALUES:
            allowed = _MAX_TOKEN_VALUES // size
            raise ApiError(
                400,
                f"input has {num_tokens} tokens; allowed are {allowed} in one request for the "
                "task 'token_embed'. Try: fewer texts",
                param="input",
                code="too_many_items",
            )

    def _check_dimensions(self, dimensions: int) -> None:
        """Check that the checkpoint's vectors may be truncated to some dimensions.

        The configurations of models with Matryoshka representations state that, as for vLLM.

        Raises: ApiError: the checkpoint does not state that.
        """
        config = self._encoder.adapted.model.config
        stored_sizes = getattr(config, "matryoshka_dimensions", None)
        if stored_sizes:
            is_allowed, allowed = dimensions in stored_sizes, f"one of {shown(stored_sizes)}"
        elif getattr(config, "is_matryoshka", False):
            size = config.get_text_config().hidden_size * len(self._encoder.pooling.modes)
            is_allowed, allowed = dimensions <= size, f"an integer from 1 to {size}"
        else:
            is_allowed = False
            allowed = "None. Try: leave it out, or truncate the vectors of a model trained for that"
        if not is_allowed:
            message = (
                f"dimensions is {dimensions}, which is not honoured here; allowed is {allowed}"
            )
            raise ApiError(400, message, param="dimensions", code="not_honoured")


def _context(encoder: Encoder) -> int:
    """Return the number of tokens of the longest text that the encoder does not truncate."""
    model = encoder.adapted.model
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # RoBERTa's positions start after the index of the padding token.
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            positions = module.num_embeddings
            if module.padding_idx is not None:
                positions -= module.padding_idx + 1
    sizes = (encoder.pooling.max_tokens, encoder.tokenizer.model_max_length, positions)
    return int(min(size for size in sizes if size is not None and size > 0))


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def _head(kind: str) -> dict[str, Any]:
    return {"id": _new_id(kind), "object": "list", "created": int(time.time())}


def _probabilities(by_label: Mapping[str, float]) -> Tensor:
    return Tensor([*by_label.values()])


def _encode(results: Iterable[Tensor], encoding: str) -> list[Any]:
    """Return each tensor as nested lists, or as base64 of its little-endian float32 values."""
    if encoding == "float":
        return [result.tolist() for result in results]
    return [
        base64.b64encode(result.float().numpy().astype("<f4").tobytes()).decode()
        for result in results
    ]


def _json_pieces(value: Any) -> Iterator[str]:
    """Yield a value as JSON in pieces, of which the largest is the list of one vector.

    The JSON encoder holds the GIL until a piece is complete.
    """
    if isinstance(value, dict):
        for index, (name, item) in enumerate(value.items()):
            yield f"{',' if index else '{'}{_compact(name)}:"
            yield from _json_pieces(item)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        for index, item in enumerate(value):
            yield "," if index else "["
            yield from _json_pieces(item)
        yield "]"
    else:
        yield _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
