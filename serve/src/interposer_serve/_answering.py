"""Runs requests on the engine, and sends their answers whole or as streams of events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from interposer.tooling import steady_time_ns
from interposer_engine import (
    AsyncLanguageModel,
    Compiled,
    Constraint,
    EmbeddedInput,
    Generation,
    LanguageModel,
    SamplingParams,
)
from interposer_engine.answers import AnswerReader
from interposer_engine.parts import num_tokens
from interposer_serve._admission import Admission
from interposer_serve._answer import Answer, Usage
from interposer_serve._errors import ApiError, Gone, api_error
from interposer_serve._format import Format, compact_json, with_parts
from interposer_serve._limits import Limits
from interposer_serve._requests import SampledBody
from interposer_serve._telemetry import ModelMetrics, record_spans

CLIENT_CLOSED_REQUEST = 499  # only for the metrics: the client has disconnected
_log = logging.getLogger("interposer")


class Answering:
    """Answers requests whose prompts are tokenized, whatever the API.

    Attributes:
        model: The model, which runs in threads of its own.
        admission: Limit on running and waiting answers.
    """

    def __init__(
        self,
        model: AsyncLanguageModel,
        lm: LanguageModel,
        name: str,
        limits: Limits,
        metrics: ModelMetrics,
    ) -> None:
        self.model = model
        self.admission = Admission(model, limits)
        self._lm = lm
        self._name = name
        self._limits = limits
        self._metrics = metrics
        self._suggested = lm.suggested
        self._generations: set[Generation] = set()
        self._num_vector_bytes = 0

    @asynccontextmanager
    async def preparing(self, request: Request, num_answers: int) -> AsyncIterator[None]:
        """Reserve queue places while prompts are prepared, within the request's deadline.

        Raises: ApiError: the queue has no place for the answers, or the deadline has passed.
        """
        with self.admission.prepared(num_answers):
            try:
                async with asyncio.timeout(self._seconds_left(request)):
                    yield
            except TimeoutError:
                raise self._deadline_error from None

    def end(self) -> None:
        """End every unfinished answer with an error."""
        error = ApiError(
            503, "The server stopped before the answer was complete", code="server_ends"
        )
        # A copy, because a generation that ends leaves the set.
        for generation in [*self._generations]:
            generation.fail(error)

    def _seconds_left(self, request: Request) -> float:
        elapsed = (steady_time_ns() - int(request.state.received)) / 1e9
        return self._limits.deadline_seconds - elapsed

    @property
    def _deadline_error(self) -> ApiError:
        seconds = self._limits.deadline_seconds
        return ApiError(504, f"The answer took longer than {seconds:g} s", code="deadline_exceeded")

    async def respond(
        self,
        request: Request,
        body: SampledBody,
        prompts: Sequence[list[int | EmbeddedInput]],
        formatter: Format,
        new_reader: Callable[[], AnswerReader],
        *,
        max_new_tokens: int,
        compiled: Compiled | None,
    ) -> Response:
        """Return the response with the answers to all prompts, whole or as a stream.

        Args:
            formatter: Writes the response.
            new_reader: Creates the reader of one answer.
            max_new_tokens: Limit on new tokens if the request has none.
            compiled: Constraint on the answers.
        Raises: ApiError: a prompt is too long, or the queue is full.
        """
        constraint = None if compiled is None else compiled.constraint
        salt = cache_salt(request, body.cache_salt)
        rows = [
            (prompt, self._params(body, prompt, max_new_tokens, constraint, salt))
            for prompt in prompts
        ]
        num_prompt_tokens = sum(map(num_tokens, prompts))
        # Check again, because the places that were reserved during preparation are free by now.
        self.admission.check(body.n * len(rows))
        vector_bytes = sum(map(_vector_bytes, prompts))
        if vector_bytes and self._num_vector_bytes + vector_bytes > self._limits.total_vector_bytes:
            raise ApiError(
                503,
                "The pictures and sounds of other requests take all memory for their vectors. "
                "Try: again later",
                code="media_full",
                headers={"retry-after": "1"},
            )

        def on_end(generation: Generation) -> None:
            deadline.cancel()
            self._num_vector_bytes -= vector_bytes
            self._generations.discard(generation)
            self.admission.ended(generation)
            self._metrics.ended(generation)
            request.state.num_new_tokens = generation.num_tokens
            record_spans(request, body.model, num_prompt_tokens, generation)

        received = request.state.received
        generation = self.model.open(
            rows, body.n, streams=body.stream, received=received, on_end=on_end
        )
        self._num_vector_bytes += vector_bytes
        self._generations.add(generation)
        deadline = asyncio.get_running_loop().call_later(
            self._seconds_left(request), generation.fail, self._deadline_error
        )
        self._metrics.opened(num_prompt_tokens)
        request.state.num_prompt_tokens = num_prompt_tokens
        answers = [Answer(new_reader()) for _ in range(generation.num_answers)]
        if body.stream:
            events = _stream(request, generation, formatter, answers, num_prompt_tokens)
            return EventStream(events, partial(generation.fail, Gone()), formatter.error_event)
        async with _watched(request, generation):
            try:
                async for deltas in generation:
                    for delta in deltas:
                        answers[delta.index].push(delta)
            except Gone:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            for index, answer in enumerate(answers):
                # The engine reports the prompt's log probabilities with the first of the n answers.
                first = answers[index // body.n * body.n].deltas[0]
                answer.deltas[0] = replace(answer.deltas[0], prompt_logprobs=first.prompt_logprobs)
            # One item at a time, so that other threads run in between: the JSON encoder holds the
            # GIL until a value is complete.
            parts = {
                name: f"[{','.join([await self._json(item) for item in items])}]"
                for name, items in formatter.large_fields(answers).items()
            }
            usage = Usage.of(generation, answers)
            content = await self.model.format_answer(
                lambda _: with_parts(formatter.response(answers, usage), parts)
            )
        # Arguments of a call may hold half of a surrogate pair, which has no bytes.
        return Response(content.encode(errors="replace"), media_type="application/json")

    def _params(
        self,
        body: SampledBody,
        prompt: list[int | EmbeddedInput],
        max_new_tokens: int,
        constraint: Constraint | None,
        salt: str,
    ) -> SamplingParams:
        allowed = self._limits.prompt_tokens
        if allowed is not None and num_tokens(prompt) > allowed:
            message = f"The prompt has {num_tokens(prompt)} tokens; allowed are {allowed}"
            raise ApiError(400, message, code="context_length_exceeded")
        context_left = self._lm.room(prompt)
        adapter = None if body.model == self._name else body.model
        suggested = {**self._suggested, "adapter": adapter, "cache_salt": salt}
        return body.params(suggested, max(1, min(max_new_tokens, context_left)), constraint)

    async def _json(self, make: Callable[[], Any]) -> str:
        return await self.model.format_answer(lambda _: compact_json(make()))


def cache_salt(request: Request, body_salt: str) -> str:
    """Return the salt that separates the caches of clients, and those of the salts of a client.

    With a shared cache, the time to the first token would reveal whether another client has sent a
    prompt with the same prefix or picture.
    """
    return "\0".join((request.state.client, body_salt))


def _vector_bytes(prompt: Sequence[int | EmbeddedInput]) -> int:
    """Return the size of the vectors in a prompt, in bytes."""
    runs = [part for part in prompt if isinstance(part, EmbeddedInput)]
    tensors = [tensor for run in runs for tensor in (run.embeddings, run.layer_embeddings)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


async def _stream(
    request: Request,
    generation: Generation,
    formatter: Format,
    answers: Sequence[Answer],
    num_prompt_tokens: int,
) -> AsyncGenerator[bytes, None]:
    first_events = formatter.first_events(num_prompt_tokens)
    async with _watched(request, generation):
        async for deltas in generation:
            parts = [first_events]
            first_events = ""
            for delta in deltas:
                answer = answers[delta.index]
                parts.append(formatter.events(answer, answer.push(delta)))
            if content := "".join(parts):
                yield content.encode()
    yield formatter.last_events(answers, Usage.of(generation, answers)).encode()


@asynccontextmanager
async def _watched(request: Request, generation: Generation) -> AsyncIterator[None]:
    """Cancel a generation when the client disconnects, or at the end of a ``with`` block."""
    watch = asyncio.create_task(_cancel_on_disconnect(request, generation))
    try:
        yield
    finally:
        watch.cancel()
        generation.fail(Gone())


async def disconnected(request: Request) -> None:
    """Wait until the client disconnects; the body must be read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel_on_disconnect(request: Request, generation: Generation) -> None:
    await disconnected(request)
    generation.fail(Gone())


class EventStream(Response):
    """Response that streams server-sent events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: Callable[[], None],
        error_event: Callable[[ApiError], bytes],
    ) -> None:
        """Create a response that sends events.

        Args:
            end: Cancels the work that the events come from; called at the end in any case.
            error_event: Returns the last event of a stream that fails.
        """
        # Without x-accel-buffering, nginx would hold events back.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # set by Starlette for the empty body
        self._events = events
        self._end = end
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events to the client; an error becomes the last event."""
        try:
            await self._send(send)
        finally:
            # The event generator does this too, but not if it never started.
            self._end()

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        async with aclosing(self._events) as events:
            try:
                async for part in events:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except Gone:
                return
            except Exception as error:  # noqa: BLE001 - the status was sent already, so send an event
                last_event = api_error(error)
                if last_event.status == 500:
                    _log.error("a stream failed", exc_info=error)
                event = self._error_event(last_event)
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
