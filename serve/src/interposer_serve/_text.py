"""Endpoints of a model that generates text, with the queue limit and event streams."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from interposer.errors import InterposerError, RequestError, install_command
from interposer.tooling import steady_time_ns
from interposer_engine import (
    AsyncLanguageModel,
    Compiled,
    Constraint,
    Delta,
    Generation,
    LanguageModel,
    SamplingParams,
    TextTokenizer,
)
from interposer_serve._errors import ApiError, Gone, api_error, check_model
from interposer_serve._formats import (
    ChatFormat,
    CompletionFormat,
    Echo,
    Format,
    compact_json,
    template_messages,
    usage,
    with_parts,
)
from interposer_serve._limits import Limits
from interposer_serve._reading import BodyReader, PromptSizes
from interposer_serve._requests import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SampledBody,
    TokenizeBody,
)
from interposer_serve._telemetry import Metrics, record_spans

_CLIENT_CLOSED_REQUEST = 499  # only for the metrics: the client has disconnected
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens
_DONE = b"data: [DONE]\n\n"
_log = logging.getLogger("interposer")
B = TypeVar("B", bound=Body)


class Admission:
    """Limit on queued answers, which refuses requests before tokenization."""

    def __init__(self, model: AsyncLanguageModel, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._capacity = model.capacity or 0
        self._num_preparing = 0
        self._mean_seconds = 1.0

    def check(self, num_answers: int, num_prepared: int = 0) -> None:
        """Raise ApiError unless the queue has places for ``num_answers`` more answers.

        Args:
            num_prepared: answers of other requests that are still being tokenized.
        Raises: ApiError: the queue is full now (429), or too small for this request (400).
        """
        num_taken = self._model.num_unfinished + num_prepared
        if num_answers > self._capacity:
            raise ApiError(
                400,
                f"The request asks for {num_answers} answers; allowed are {self._capacity}, which "
                "run or wait at once. Try: smaller n, or fewer prompts",
                param="n",
            )
        if num_taken + num_answers > self._capacity:
            raise ApiError(
                429,
                f"{num_taken} answers are running or waiting; allowed are {self._capacity}. "
                "Try again later",
                code="queue_full",
                headers={"retry-after": str(self._estimated_wait_seconds())},
            )

    @contextmanager
    def prepared(self, num_answers: int) -> Iterator[None]:
        """Reserve queue places for answers while prompts are prepared, within a ``with`` block.

        Raises: ApiError: see ``check``.
        """
        self.check(num_answers, self._num_preparing)
        self._num_preparing += num_answers
        try:
            yield
        finally:
            self._num_preparing -= num_answers

    def ended(self, generation: Generation) -> None:
        """Update the mean duration of answers, from which Retry-After is estimated."""
        if generation.error is None:
            stages = generation.stages
            seconds = (stages.ended - stages.received) / 1e9
            # Exponential moving average.
            self._mean_seconds += (seconds - self._mean_seconds) / 8

    def _estimated_wait_seconds(self) -> int:
        """Estimate the seconds until a running request ends."""
        # The capacity is the number of answers that run at once plus the queue.
        running = max(1, self._capacity - self._limits.queue)
        rounds = max(1.0, (self._model.num_unfinished - running) / running)
        return max(1, math.ceil(min(self._mean_seconds * rounds, self._limits.deadline_seconds)))


class TextEndpoints:
    """The endpoints of one generating model: chats, completions and tokenization."""

    def __init__(self, lm: LanguageModel, name: str, limits: Limits, metrics: Metrics) -> None:
        self.name = name
        self.context = lm.engine.model.config.max_position_embeddings
        self._lm = lm
        self._limits = limits
        self._metrics = metrics
        self._suggested = lm.suggested
        self._generations: set[Generation] = set()
        metrics.watch(lm.engine)
        self._bodies = BodyReader(limits)
        self._sizes: PromptSizes
        self._model: AsyncLanguageModel
        self._admission: Admission

    bodies: Mapping[str, type[Body]] = {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
    }

    @property
    def routes(self) -> list[Route]:
        """The HTTP routes of the endpoints."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def start(self) -> None:
        """Start the model's threads, and load everything that a first request would load."""
        limits = self._limits
        self._model = AsyncLanguageModel(
            self._lm,
            max_waiting=limits.queue,
            constraint_limits=limits.constraints,
            template_seconds=limits.template_seconds,
        )
        self._admission = Admission(self._model, limits)
        vocabulary = await self._model.tokenize(lambda tokenizer: tokenizer.vocabulary)
        # The prompt of an encoder-decoder model goes to the encoder, which may take longer inputs.
        sources = self._lm.engine.runner.encoder_inputs
        context = max(self.context, 0 if sources is None else sources.longest)
        num_tokens = min(context, limits.prompt_tokens or context)
        self._sizes = PromptSizes(num_tokens, self._model.capacity or 1, vocabulary)
        if not _has_constraints():
            _log.info(
                "Structured output is off: it needs the package llguidance. Try: %s",
                install_command("interposer-engine[constraints]"),
            )
        try:
            await self._model.load_chat_template()
        except InterposerError:
            return  # completions work without a chat template; each chat gets this error

    @property
    def num_unfinished(self) -> int:
        """Number of answers that run or wait."""
        return self._model.num_unfinished

    def end_answers(self) -> None:
        """End every unfinished answer with an error."""
        error = ApiError(
            503, "The server stopped before the answer was complete", code="server_ends"
        )
        # A copy, because a generation that ends leaves the set.
        for generation in [*self._generations]:
            generation.fail(error)

    async def stop(self) -> None:
        """End the model's threads."""
        await self._model.aclose()

    @property
    def trouble(self) -> str:
        """Reason why requests would fail; "" if no reason is known."""
        return self._model.trouble

    async def explanation(self) -> dict[str, Any]:
        """Return the explanation of the kernels that the model uses.

        With several ranks, the result is that of rank 0, with the field ``ranks`` for all of them.
        """
        explanations = await self._model.call(self._lm.explanations)
        first = explanations[0]
        return {**first, "ranks": explanations} if len(explanations) > 1 else first

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which the model and its adapters are served."""
        return self.name, *self._lm.adapters

    async def chat(self, request: Request) -> Response:
        """Answer a chat: ``/v1/chat/completions``."""
        body = await self._read(request, ChatBody)
        tools, required = body.offered, body.required
        async with self._preparing(request, body.n):
            prompt = await self._chat_prompt(body.messages, tools, body.chat_template_kwargs)
            constraint = body.constraint
            if required is not None:
                constraint = await self._call_constraint(required)
            field = body.constraint_field if required is None else "tools"
            compiled = await self._compiled(constraint, field)
            parse = None
            if tools is not None:
                chat = await self._model.format_answer(lambda tokenizer: tokenizer.chat)
                parse = partial(chat.parsed, prompt=prompt, tools=tools)
        formatter = ChatFormat(body.model, self._spell, body.logprobs, parse)
        return await self._answer(request, body, [prompt], self.context, formatter, compiled)

    async def complete(self, request: Request) -> Response:
        """Complete a prompt: ``/v1/completions``."""
        body = await self._read(request, CompletionBody)
        async with self._preparing(request, body.n * len(body.prompts)):
            prompts = [
                await self._encoded(prompt) if isinstance(prompt, str) else prompt
                for prompt in body.prompts
            ]
            compiled = await self._compiled(body.constraint, body.constraint_field)
            echoes: list[Echo] = []
            for prompt, token_ids in zip(body.prompts, prompts, strict=True):
                if body.echo:
                    echoes.append(await self._echo(prompt, token_ids))
        formatter = CompletionFormat(
            body.model,
            self._spell,
            body.logprobs,
            [echo for echo in echoes for _ in range(body.n)],
            body.prompt_logprobs is not None,
        )
        max_new_tokens = _DEFAULT_COMPLETION_TOKENS
        return await self._answer(request, body, prompts, max_new_tokens, formatter, compiled)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text, or of a chat's prompt: ``/tokenize``."""
        body = await self._read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "Give either prompt or messages", param="prompt")
        async with self._preparing(request, 1):
            if body.messages is not None:
                tokens = await self._chat_prompt(
                    body.messages, body.tools or None, body.chat_template_kwargs
                )
            else:
                tokens = await self._encoded(body.prompt or "")
        content = {"count": len(tokens), "max_model_len": self.context, "tokens": tokens}
        return JSONResponse(content)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids: ``/detokenize``."""
        body = await self._read(request, DetokenizeBody)
        tokens = self._lm.engine.checked_tokens(body.tokens)
        async with self._preparing(request, 1):
            text = await self._model.format_answer(lambda tokenizer: tokenizer.decode(tokens))
        return JSONResponse({"prompt": text})

    @asynccontextmanager
    async def _preparing(self, request: Request, num_answers: int) -> AsyncIterator[None]:
        """Reserve queue places while prompts are prepared, within the request's deadline.

        Raises: ApiError: the queue has no place for the answers, or the deadline has passed.
        """
        with self._admission.prepared(num_answers):
            try:
                async with asyncio.timeout(self._seconds_left(request)):
                    yield
            except TimeoutError:
                raise self._deadline_error from None

    def _seconds_left(self, request: Request) -> float:
        elapsed = (steady_time_ns() - int(request.state.received)) / 1e9
        return self._limits.deadline_seconds - elapsed

    @property
    def _deadline_error(self) -> ApiError:
        seconds = self._limits.deadline_seconds
        return ApiError(504, f"The answer took longer than {seconds:g} s", code="deadline_exceeded")

    async def _read(self, request: Request, body_type: type[B]) -> B:
        content = await self._bodies.read_object(request)
        self._sizes.check(content)
        body = body_type.read(content)
        if body.model:
            check_model(body.model, self.names)
        if isinstance(body, SampledBody):
            body.check()
        return body

    def _spell(self, token_id: int) -> str:
        return self._lm.tokenizer.decode([token_id])

    async def _encoded(self, text: str) -> list[int]:
        # Refuse an empty prompt later, even if the tokenizer would add a special token to it.
        return await self._model.tokenize(lambda tokenizer: tokenizer.encode(text) if text else [])

    async def _chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
    ) -> list[int]:
        def token_ids(tokenizer: TextTokenizer) -> list[int]:
            return tokenizer.chat.token_ids(
                template_messages(messages, tokenizer), tools, None, options
            )

        return await self._model.render_chat(token_ids)

    async def _echo(self, prompt: str | list[int], token_ids: list[int]) -> Echo:
        tokens = self._lm.engine.checked_tokens(token_ids)
        pieces = await self._model.format_answer(lambda tokenizer: tokenizer.pieces(tokens))
        return Echo(prompt if isinstance(prompt, str) else "".join(pieces), tokens, pieces)

    async def _call_constraint(self, tools: list[dict[str, Any]]) -> Constraint:
        try:
            return await self._model.format_answer(
                lambda tokenizer: tokenizer.chat.call_constraint(tools)
            )
        except RequestError as error:
            raise ApiError(400, str(error), param="tool_choice", code="not_honoured") from None

    async def _compiled(self, constraint: Constraint | None, param: str) -> Compiled | None:
        """Compile a request's constraint in a thread, so that the event loop does not wait.

        Raises: ApiError: the constraint is malformed, or exceeds a limit.
        """
        if constraint is None:
            return None
        if not _has_constraints():
            message = f"{param} asks for structured output, which is not available on this server"
            raise ApiError(400, message, param=param, code="not_available")
        try:
            return await self._model.compile_constraint(constraint)
        except RequestError as error:
            message = f"{param} has a constraint that cannot be used: {error}"
            raise ApiError(400, message, param=param, code="invalid_value") from None

    async def _answer(
        self,
        request: Request,
        body: SampledBody,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        formatter: Format,
        compiled: Compiled | None,
    ) -> Response:
        constraint = None if compiled is None else compiled.constraint
        # Keys and salts separate the prefix cache: with a shared cache, the time to the first token
        # would reveal whether another client has sent a prompt with the same prefix.
        salt = "\0".join((request.state.client, body.cache_salt))
        rows = [
            (prompt, self._params(body, prompt, max_new_tokens, constraint, salt))
            for prompt in prompts
        ]
        num_prompt_tokens = sum(map(len, prompts))
        # Check again, because the places that were reserved during preparation are free by now.
        self._admission.check(body.n * len(rows))

        def on_end(generation: Generation) -> None:
            deadline.cancel()
            self._generations.discard(generation)
            self._admission.ended(generation)
            self._metrics.ended(generation)
            request.state.num_new_tokens = generation.num_tokens
            record_spans(request, body.model, num_prompt_tokens, generation)

        received = request.state.received
        generation = self._model.open(
            rows, body.n, streams=body.stream, received=received, on_end=on_end
        )
        self._generations.add(generation)
        deadline = asyncio.get_running_loop().call_later(
            self._seconds_left(request), generation.fail, self._deadline_error
        )
        self._metrics.opened(num_prompt_tokens)
        request.state.num_prompt_tokens = num_prompt_tokens
        answers: list[list[Delta]] = [[] for _ in range(generation.num_answers)]
        if body.stream:
            events = self._stream(
                request, generation, formatter, answers, num_prompt_tokens, body.tells_usage
            )
            return _EventStream(events, generation)
        async with _watched(request, generation):
            try:
                async for deltas in generation:
                    for delta in deltas:
                        answers[delta.index].append(delta)
            except Gone:
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
            for index, answer in enumerate(answers):
                # Only the first of a prompt's n answers gets the prompt's log probabilities.
                shared = answers[index // body.n * body.n][0].prompt_logprobs
                answer[0] = replace(answer[0], prompt_logprobs=shared)
            # One choice at a time: the JSON encoder holds the GIL until a value is complete.
            choices = [await self._json(partial(formatter.choice, answer)) for answer in answers]
            parts = {"choices": "[" + ",".join(choices) + "]"}
            if isinstance(body, ChatBody) and body.prompt_logprobs is not None:
                parts["prompt_logprobs"] = await self._json(
                    partial(formatter.prompt_logprobs, answers[0])
                )
        response = formatter.response([], usage(num_prompt_tokens, generation.num_tokens))
        content = with_parts(response, parts)
        return Response(content.encode(), media_type="application/json")

    def _params(
        self,
        body: SampledBody,
        prompt: list[int],
        max_new_tokens: int,
        constraint: Constraint | None,
        salt: str,
    ) -> SamplingParams:
        allowed = self._limits.prompt_tokens
        if allowed is not None and len(prompt) > allowed:
            message = f"The prompt has {len(prompt)} tokens; allowed are {allowed}"
            raise ApiError(400, message, code="context_length_exceeded")
        context_left = self._lm.room(prompt)
        adapter = None if body.model == self.name else body.model
        suggested = {**self._suggested, "adapter": adapter, "cache_salt": salt}
        return body.params(suggested, max(1, min(max_new_tokens, context_left)), constraint)

    async def _json(self, make: Callable[[], Any]) -> str:
        return await self._model.format_answer(lambda _: compact_json(make()))

    async def _stream(
        self,
        request: Request,
        generation: Generation,
        formatter: Format,
        answers: Sequence[list[Delta]],
        num_prompt_tokens: int,
        tells_usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        async with _watched(request, generation):
            async for deltas in generation:
                parts = []
                for delta in deltas:
                    answer = answers[delta.index]
                    answer.append(delta)
                    parts.append(formatter.events(answer))
                if content := "".join(parts):
                    yield content.encode()
        num_tokens = usage(num_prompt_tokens, generation.num_tokens)
        yield (formatter.event([], num_tokens) if tells_usage else "").encode() + _DONE


@asynccontextmanager
async def _watched(request: Request, generation: Generation) -> AsyncIterator[None]:
    """Cancel a generation when the client disconnects, or at the end of a ``with`` block."""
    watch = asyncio.create_task(_cancel_on_disconnect(request, generation))
    try:
        yield
    finally:
        watch.cancel()
        generation.fail(Gone())


async def _cancel_on_disconnect(request: Request, generation: Generation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.fail(Gone())


class _EventStream(Response):
    """Response that streams server-sent events, and cancels the generation at the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], generation: Generation) -> None:
        # Without x-accel-buffering, nginx would hold events back.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # set by Starlette for the empty body
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events to the client; an error becomes the last event."""
        try:
            await self._send(send)
        finally:
            # The event generator does this too, but not if it never started.
            self._generation.fail(Gone())

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
                await send(
                    {"type": "http.response.body", "body": last_event.event(), "more_body": True}
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _has_constraints() -> bool:
    """Return whether the package that compiles constraints is installed."""
    return find_spec("llguidance") is not None
