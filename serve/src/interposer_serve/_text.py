"""The endpoints of a model that writes text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from interposer.errors import InterposerError, RequestError
from interposer.tooling import steady_time_ns
from interposer_models import (
    AsyncLanguageModel,
    Compiled,
    Constraint,
    Generation,
    LanguageModel,
    SamplingParams,
    TextTokenizer,
)
from interposer_serve._chat_format import ChatFormat
from interposer_serve._completion_format import CompletionFormat, Echo
from interposer_serve._errors import ApiError, Gone, check_model
from interposer_serve._formats import Answer, Format, compact_json, usage, with_parts
from interposer_serve._limits import Limits
from interposer_serve._messages import written
from interposer_serve._metrics import Metrics
from interposer_serve._prompt_sizes import PromptSizes
from interposer_serve._reading import Bodies
from interposer_serve._requests import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SampledBody,
    TokenizeBody,
)
from interposer_serve._room import Room
from interposer_serve._streams import DONE, EventStream, watched
from interposer_serve._tracing import record

_LEFT = 499  # nobody reads it
_SHORT = 16  # OpenAI's default for completions
B = TypeVar("B", bound=Body)


class TextEndpoints:
    """Chats, completions and tokens of one model."""

    def __init__(self, lm: LanguageModel, name: str, limits: Limits, metrics: Metrics) -> None:
        self.name = name
        self.context = lm.engine.model.config.max_position_embeddings
        self._lm = lm
        self._limits = limits
        self._metrics = metrics
        self._suggested = lm.suggested
        self._generations: set[Generation] = set()
        metrics.watch(lm.engine)
        self._bodies = Bodies(limits)
        self._sizes: PromptSizes
        self._model: AsyncLanguageModel
        self._room: Room

    bodies: Mapping[str, type[Body]] = {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
    }

    @property
    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def start(self) -> None:
        """Prepare for the first request, which would wait for what is loaded on first use."""
        limits = self._limits
        self._model = AsyncLanguageModel(
            self._lm,
            max_waiting=limits.queue,
            constraint_limits=limits.constraints,
            template_seconds=limits.template_seconds,
        )
        self._room = Room(self._model, limits)
        vocabulary = await self._model.tokenize(lambda tokenizer: tokenizer.vocabulary)
        sources = self._lm.engine.runner.sources
        context = max(self.context, 0 if sources is None else sources.longest)
        num_tokens = min(context, limits.prompt_tokens or context)
        self._sizes = PromptSizes(num_tokens, self._model.capacity or 1, vocabulary)
        try:
            await self._model.prepare_chats()
        except InterposerError:
            return  # prompts can be token ids, and whoever sends messages is told

    @property
    def num_unfinished(self) -> int:
        """The answers that run or wait."""
        return self._model.num_unfinished

    def end_answers(self) -> None:
        """End every answer with an error that says that the server ends."""
        error = ApiError(503, "The server ends before the answer does", code="server_ends")
        for generation in [*self._generations]:
            generation.fail(error)

    async def stop(self) -> None:
        """End the threads of the model."""
        await self._model.aclose()

    @property
    def trouble(self) -> str:
        """The reason why requests would fail; empty where they would not."""
        return self._model.trouble

    async def explanation(self) -> dict[str, Any]:
        """Return what the model was built from, and why.

        Where several processes compute it, that is of the first one, with ``ranks`` of them all.
        """
        found = await self._model.call(self._lm.explanations)
        return {**found[0], "ranks": found} if len(found) > 1 else found[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests can have for the model, with each of its adapters."""
        return self.name, *self._lm.adapters

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        body = await self._read(request, ChatBody)
        tools, required = body.offered, body.required
        async with self._preparing(request, body.n):
            prompt = await self._chat_prompt(body.messages, tools, body.chat_template_kwargs)
            constraint = body.constraint
            if required is not None:
                constraint = await self._call_constraint(required)
            field = body.form_field if required is None else "tools"
            form = await self._compiled(constraint, field)
            parse = None
            if tools is not None:
                chat = await self._model.write_answer(lambda tokenizer: tokenizer.chat)
                parse = partial(chat.parsed, prompt=prompt, tools=tools)
        told = ChatFormat(body.model, self._spell, body.logprobs, parse)
        return await self._answer(request, body, [prompt], self.context, told, form)

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``."""
        body = await self._read(request, CompletionBody)
        async with self._preparing(request, body.n * len(body.prompts)):
            prompts = [
                await self._encoded(prompt) if isinstance(prompt, str) else prompt
                for prompt in body.prompts
            ]
            form = await self._compiled(body.constraint, body.form_field)
            echoes: list[Echo] = []
            for prompt, token_ids in zip(body.prompts, prompts, strict=True):
                if body.echo:
                    echoes.append(await self._echo(prompt, token_ids))
        told = CompletionFormat(
            body.model,
            self._spell,
            body.logprobs,
            [echo for echo in echoes for _ in range(body.n)],
            body.prompt_logprobs is not None,
        )
        return await self._answer(request, body, prompts, _SHORT, told, form)

    async def tokenize(self, request: Request) -> Response:
        """``/tokenize``: the token ids of a text, or of the prompt of a chat."""
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
        told = {"count": len(tokens), "max_model_len": self.context, "tokens": tokens}
        return JSONResponse(told)

    async def detokenize(self, request: Request) -> Response:
        """``/detokenize``: the text of token ids."""
        body = await self._read(request, DetokenizeBody)
        tokens = self._lm.engine.checked_tokens(body.tokens)
        async with self._preparing(request, 1):
            text = await self._model.write_answer(lambda tokenizer: tokenizer.decode(tokens))
        return JSONResponse({"prompt": text})

    @asynccontextmanager
    async def _preparing(self, request: Request, num_answers: int) -> AsyncIterator[None]:
        """Count answers whose prompts are prepared, within the deadline of their request.

        Raises: ApiError: there is no room for them, or the deadline is over.
        """
        with self._room.prepared(num_answers):
            try:
                async with asyncio.timeout(self._seconds_left(request)):
                    yield
            except TimeoutError:
                raise self._late from None

    def _seconds_left(self, request: Request) -> float:
        spent = (steady_time_ns() - int(request.state.received)) / 1e9
        return self._limits.deadline_seconds - spent

    @property
    def _late(self) -> ApiError:
        seconds = self._limits.deadline_seconds
        return ApiError(504, f"The answer took longer than {seconds:g} s", code="deadline_exceeded")

    async def _read(self, request: Request, kind: type[B]) -> B:
        content = await self._bodies.read_object(request)
        self._sizes.check(content)
        body = kind.read(content)
        if body.model:
            check_model(body.model, self.names)
        if isinstance(body, SampledBody):
            body.check()
        return body

    def _spell(self, token_id: int) -> str:
        return self._lm.tokenizer.decode([token_id])

    async def _encoded(self, text: str) -> list[int]:
        # An empty text is no prompt, though a tokenizer may put a special token in front.
        return await self._model.tokenize(lambda own: own.encode(text) if text else [])

    async def _chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
    ) -> list[int]:
        def token_ids(tokenizer: TextTokenizer) -> list[int]:
            return tokenizer.chat.token_ids(written(messages, tokenizer), tools, None, options)

        return await self._model.write_chat(token_ids)

    async def _echo(self, prompt: str | list[int], token_ids: list[int]) -> Echo:
        tokens = self._lm.engine.checked_tokens(token_ids)
        pieces = await self._model.write_answer(lambda tokenizer: tokenizer.pieces(tokens))
        return Echo(prompt if isinstance(prompt, str) else "".join(pieces), tokens, pieces)

    async def _call_constraint(self, tools: list[dict[str, Any]]) -> Constraint:
        try:
            return await self._model.write_answer(lambda own: own.chat.call_constraint(tools))
        except RequestError as error:
            raise ApiError(400, str(error), param="tool_choice", code="not_honoured") from None

    async def _compiled(self, constraint: Constraint | None, param: str) -> Compiled | None:
        """Return what a field asks for, compiled, which takes longer than the event loop may wait.

        Raises: ApiError: it is malformed, or takes more than the limits allow.
        """
        if constraint is None:
            return None
        try:
            return await self._model.compile(constraint)
        except RequestError as error:
            message = f"{param} asks for a form that cannot be held: {error}"
            raise ApiError(400, message, param=param, code="invalid_value") from None

    async def _answer(
        self,
        request: Request,
        body: SampledBody,
        prompts: Sequence[list[int]],
        most_new_tokens: int,
        told: Format,
        form: Compiled | None,
    ) -> Response:
        constraint = None if form is None else form.constraint
        salt = "\0".join((request.state.client, body.cache_salt))
        rows = [
            (prompt, self._params(body, prompt, most_new_tokens, constraint, salt))
            for prompt in prompts
        ]
        num_prompt_tokens = sum(map(len, prompts))
        self._room.check(body.n * len(rows))

        def on_end(generation: Generation) -> None:
            deadline.cancel()
            self._generations.discard(generation)
            self._room.ended(generation)
            self._metrics.ended(generation)
            record(request, body.model, num_prompt_tokens, generation)

        received = request.state.received
        generation = self._model.open(
            rows, body.n, streams=body.stream, received=received, on_end=on_end
        )
        self._generations.add(generation)
        left = self._seconds_left(request)
        deadline = asyncio.get_running_loop().call_later(left, generation.fail, self._late)
        self._metrics.opened(num_prompt_tokens)
        answers = [Answer(index) for index in range(generation.num_answers)]
        if body.stream:
            events = self._stream(
                request, generation, told, answers, num_prompt_tokens, body.tells_usage
            )
            return EventStream(events, generation)
        async with watched(request, generation):
            try:
                async for deltas in generation:
                    for delta in deltas:
                        answers[delta.index].add(delta)
            except Gone:
                return Response(status_code=_LEFT)
            for answer in answers:
                # The first answer to a prompt alone is told of it.
                answer.prompt_logprobs = answers[answer.index // body.n * body.n].prompt_logprobs
            # Each choice by itself: no other thread runs while one value is made to JSON.
            choices = [await self._json(partial(told.choice, answer)) for answer in answers]
            parts = {"choices": "[" + ",".join(choices) + "]"}
            if isinstance(body, ChatBody) and body.prompt_logprobs is not None:
                parts["prompt_logprobs"] = await self._json(
                    partial(told.prompt_logprobs, answers[0])
                )
        response = told.response([], usage(num_prompt_tokens, generation.num_tokens))
        content = with_parts(response, parts)
        return Response(content.encode(), media_type="application/json")

    def _params(
        self,
        body: SampledBody,
        prompt: list[int],
        most_new_tokens: int,
        constraint: Constraint | None,
        salt: str,
    ) -> SamplingParams:
        allowed = self._limits.prompt_tokens
        if allowed is not None and len(prompt) > allowed:
            message = f"The prompt has {len(prompt)} tokens; allowed are {allowed}"
            raise ApiError(400, message, code="context_length_exceeded")
        room = self._lm.room(prompt)
        adapter = None if body.model == self.name else body.model
        suggested = {**self._suggested, "adapter": adapter, "cache_salt": salt}
        return body.params(suggested, max(1, min(most_new_tokens, room)), constraint)

    async def _json(self, make: Callable[[], Any]) -> str:
        return await self._model.write_answer(lambda _: compact_json(make()))

    async def _stream(
        self,
        request: Request,
        generation: Generation,
        told: Format,
        answers: Sequence[Answer],
        num_prompt_tokens: int,
        tells_usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        async with watched(request, generation):
            async for deltas in generation:
                parts = []
                for delta in deltas:
                    answer = answers[delta.index]
                    answer.add(delta)
                    parts.append(told.events(answer))
                if content := "".join(parts):
                    yield content.encode()
        spent = usage(num_prompt_tokens, generation.num_tokens)
        yield (told.event([], spent) if tells_usage else "").encode() + DONE
