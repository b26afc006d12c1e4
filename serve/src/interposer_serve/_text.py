"""The endpoints of a model that writes text."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import interposer
from interposer.errors import InterposerError, RequestError
from interposer_models import Constraint, LanguageModel, SamplingParams
from interposer_serve._engine_thread import EngineThread
from interposer_serve._errors import ApiError, check_model
from interposer_serve._formats import Answer, ChatFormat, CompletionFormat, Format, usage
from interposer_serve._generation import Generation, Gone
from interposer_serve._limits import Limits
from interposer_serve._messages import written
from interposer_serve._metrics import Metrics
from interposer_serve._reading import read_object
from interposer_serve._requests import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SampledBody,
    TokenizeBody,
)
from interposer_serve._streams import DONE, EventStream, watched
from interposer_serve._tracing import record

_LEFT = 499  # nobody reads it
_SHORT = 16  # OpenAI's default for completions
T = TypeVar("T")
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
        self._thread = EngineThread(lm, limits)
        metrics.watch(lm.engine)
        # One thread prepares prompts, so that long ones hold up neither streams nor the engine; it
        # has a tokenizer of its own, because those of transformers may be used by one at a time.
        self._num_prepared = 0
        self._prompts = ThreadPoolExecutor(1, "interposer-prompts")
        self._tokenizer = copy.deepcopy(lm.tokenizer)

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
        self._thread.start()
        try:
            await self._prepared(lambda: self._tokenizer.chat)
        except InterposerError:
            return  # prompts can be token ids, and whoever sends messages is told

    async def stop(self) -> None:
        """End the engine's thread and the one of prompts."""
        await self._thread.stop()
        self._prompts.shutdown(wait=False, cancel_futures=True)

    @property
    def trouble(self) -> str:
        """The reason why requests would fail; empty where they would not."""
        if not self._thread.alive:
            return "the engine does not run"
        return "the last step of the engine failed" if self._thread.failed else ""

    def explanation(self) -> dict[str, Any]:
        """Return what the model was built from, and why."""
        return interposer.explain(self._lm).to_dict()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests can have for the model, with each of its adapters."""
        return self.name, *self._lm.adapters

    async def chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        body = await self._read(request, ChatBody)
        tools, required = body.offered, body.required
        with self._waiting(body.n):
            prompt = await self._chat_prompt(body.messages, tools, body.chat_template_kwargs)
            constraint = body.constraint
            if required is not None:
                constraint = await self._call_constraint(required)
            await self._compile(constraint, body.form_field if required is None else "tools")
        parse = None
        if tools is not None:
            chat = self._tokenizer.chat
            parse = partial(chat.parsed, prompt=prompt, tools=tools)
        told = ChatFormat(body.model, body.logprobs, parse)
        return await self._answer(request, body, [prompt], self.context, told, constraint)

    async def complete(self, request: Request) -> Response:
        """``/v1/completions``."""
        body = await self._read(request, CompletionBody)
        with self._waiting(body.n * len(body.prompts)):
            prompts = [
                await self._encoded(prompt) if isinstance(prompt, str) else prompt
                for prompt in body.prompts
            ]
            await self._compile(body.constraint, body.form_field)
            echoed = [await self._echoed(prompt) for prompt in body.prompts] if body.echo else []
        fronts = [front for front in echoed for _ in range(body.n)]
        told = CompletionFormat(body.model, body.logprobs is not None, fronts)
        return await self._answer(request, body, prompts, _SHORT, told, body.constraint)

    async def tokenize(self, request: Request) -> Response:
        """``/tokenize``: the token ids of a text, or of the prompt of a chat."""
        body = await self._read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "Give either prompt or messages", param="prompt")
        with self._waiting(1):
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
        text = await self._prepared(lambda: self._tokenizer.decode(tokens))
        return JSONResponse({"prompt": text})

    async def _read(self, request: Request, kind: type[B]) -> B:
        body = kind.read(await read_object(request, self._limits.body_bytes))
        if body.model:
            check_model(body.model, self.names)
        if isinstance(body, SampledBody):
            body.check()
        return body

    @contextmanager
    def _waiting(self, num_answers: int) -> Iterator[None]:
        """Count answers whose prompts are prepared.

        Raises: ApiError: there is no room for them, so that nothing need be prepared.
        """
        self._thread.check_room(num_answers, self._num_prepared)
        self._num_prepared += num_answers
        try:
            yield
        finally:
            self._num_prepared -= num_answers

    async def _prepared(self, prepare: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._prompts, prepare)

    async def _encoded(self, text: str) -> list[int]:
        # An empty text is no prompt, though a tokenizer may put a special token in front.
        return await self._prepared(lambda: self._tokenizer.encode(text) if text else [])

    async def _chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
    ) -> list[int]:
        told = written(messages)
        return await self._prepared(
            lambda: self._tokenizer.chat.token_ids(told, tools, None, options)
        )

    async def _echoed(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        tokens = self._lm.engine.checked_tokens(prompt)
        return await self._prepared(lambda: self._tokenizer.decode(tokens))

    async def _call_constraint(self, tools: list[dict[str, Any]]) -> Constraint:
        try:
            return await self._prepared(lambda: self._tokenizer.chat.call_constraint(tools))
        except RequestError as error:
            raise ApiError(400, str(error), param="tool_choice", code="not_honoured") from None

    async def _compile(self, constraint: Constraint | None, param: str) -> None:
        """Compile what a field asks for, which takes longer than the event loop may wait.

        Raises: ApiError: it is malformed.
        """
        compiler = self._lm.engine.constraints
        if constraint is None or compiler is None:
            return
        try:
            await self._prepared(lambda: compiler.matcher(constraint, frozenset()))
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
        constraint: Constraint | None,
    ) -> Response:
        rows = [
            (prompt, params)
            for prompt in prompts
            for params in self._params(body, prompt, most_new_tokens, constraint)
        ]
        num_prompt_tokens = sum(map(len, prompts))

        def on_end(generation: Generation) -> None:
            self._metrics.ended(generation)
            record(request, body.model, num_prompt_tokens, generation)

        generation = self._thread.open(
            rows,
            request.state.received,
            on_end,
            streams=body.stream,
            tells_tokens=told.tells_logprobs,
        )
        self._metrics.opened(num_prompt_tokens)
        if body.stream:
            events = self._stream(request, generation, told, num_prompt_tokens, body.tells_usage)
            return EventStream(events, generation)
        answers = [Answer(row.index) for row in generation.rows]
        async with watched(request, generation):
            try:
                async for pieces in generation:
                    for piece in pieces:
                        answers[piece.index].add(piece)
            except Gone:
                return Response(status_code=_LEFT)
            choices = [await self._choice(told, answer) for answer in answers]
        spent = usage(num_prompt_tokens, generation.num_tokens)
        return JSONResponse(told.response(choices, spent))

    def _params(
        self,
        body: SampledBody,
        prompt: list[int],
        most_new_tokens: int,
        constraint: Constraint | None,
    ) -> list[SamplingParams]:
        allowed = self._limits.prompt_tokens
        if allowed is not None and len(prompt) > allowed:
            message = f"The prompt has {len(prompt)} tokens; allowed are {allowed}"
            raise ApiError(400, message, code="context_length_exceeded")
        room = self._lm.room(prompt)
        adapter = None if body.model == self.name else body.model
        suggested = {**self._suggested, "adapter": adapter}
        return body.params(suggested, max(1, min(most_new_tokens, room)), constraint)

    async def _choice(self, told: Format, answer: Answer) -> dict[str, Any]:
        return await self._prepared(lambda: told.choice(answer))

    async def _stream(
        self,
        request: Request,
        generation: Generation,
        told: Format,
        num_prompt_tokens: int,
        tells_usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        answers = [Answer(row.index) for row in generation.rows]
        async with watched(request, generation):
            async for pieces in generation:
                parts = []
                for piece in pieces:
                    answer = answers[piece.index]
                    answer.add(piece)
                    parts.append(told.events(answer))
                if content := "".join(parts):
                    yield content.encode()
        spent = usage(num_prompt_tokens, generation.num_tokens)
        yield (told.event([], spent) if tells_usage else "").encode() + DONE
