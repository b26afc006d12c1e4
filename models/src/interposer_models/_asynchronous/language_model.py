"""The asynchronous front door: requests of any event loop, stepped by one thread."""

from __future__ import annotations

import asyncio
import copy
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from interposer.errors import RequestError
from interposer_models._asynchronous.generation import Generation
from interposer_models._asynchronous.step_thread import StepThread
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._language_model import LanguageModel
from interposer_models._messages import Message
from interposer_models._requests import Prompt, requests, token_ids_of
from interposer_models._stream import Completion, Delta
from interposer_models._tokenizer import TextTokenizer
from interposer_models._transfer.receiver import WeightsFrom

T = TypeVar("T")
# A thread that the program never ended computes at most one step more when it exits.
_END_SECONDS = 10.0


class AsyncLanguageModel:
    """A model for any number of coroutines, in one event loop or in those of several threads.

    One thread steps the engine, another reads prompts. Methods of ``model`` may be called
    meanwhile. A coroutine that is cancelled, and an ``async for`` that is left, cancel their
    request.
    """

    def __init__(self, model: LanguageModel, *, max_waiting: int | None = None) -> None:
        """Start the threads.

        Args:
            max_waiting: answers that may wait besides those that run. Requests beyond are refused,
                with ``QueueFullError``; None takes all.
        Raises:
            RequestError: ``max_waiting`` is negative.
            CheckpointError: the tokenizer is not valid.
        """
        if max_waiting is not None and max_waiting < 0:
            raise RequestError(f"max_waiting is {max_waiting}, must be None or at least 0")
        model.tokenizer.read()  # no request is to wait for that
        self.model = model
        self._steps = StepThread(model, max_waiting)
        self._texts = ThreadPoolExecutor(1, "interposer-texts")
        self._end = weakref.finalize(self, _end, self._steps, self._texts)

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do as ``aclose``."""
        await self.aclose()

    def close(self) -> None:
        """Cancel what is unfinished and end the threads, after the step that runs.

        Unfinished requests raise RequestError where they are awaited, and so do later ones.
        """
        self._end()

    async def aclose(self) -> None:
        """Do as ``close`` without holding up the event loop."""
        await asyncio.to_thread(self.close)

    @property
    def trouble(self) -> str:
        """The reason why requests would fail; empty where none is known."""
        if not self._steps.alive:
            return "the engine does not run"
        return "the last step of the engine failed" if self._steps.failed else ""

    @property
    def num_unfinished(self) -> int:
        """The answers that run or wait."""
        return self._steps.num_unfinished

    @property
    def capacity(self) -> int | None:
        """The answers that may run or wait; None where they are not bounded."""
        return self._steps.capacity

    async def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        **settings: Any,
    ) -> list[Completion]:
        """Return the completion of each prompt, in order; see ``LanguageModel.generate``.

        Raises:
            RequestError: a prompt or parameter is unusable, or the model was closed.
            QueueFullError: there is no room for so many answers.
            Exception: that a step of the engine raised.
        """
        generation = await self._opened(prompts, params, settings, n, streams=False)
        try:
            return await generation.completions()
        finally:
            generation.close()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: int = 1, **settings: Any
    ) -> AsyncGenerator[Delta, None]:
        """Yield the completion of ``prompt`` token by token; see ``LanguageModel.stream``.

        Tokens between the first one and the last one may wait for up to 40 ms, and come together.

        Raises: as ``generate``, with the first token.
        """
        generation = await self._opened([prompt], params, settings, n, streams=True)
        try:
            async for deltas in generation:
                for delta in deltas:
                    yield delta
        finally:
            generation.close()

    async def chat(
        self,
        messages: Iterable[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Completion:
        """Return the next message of the assistant; see ``LanguageModel.chat``.

        Raises: as ``generate``.
        """
        prompt = await self.chat_prompt(messages, tools=tools, template=template, options=options)
        ((_, own),) = requests([prompt], params, settings, 1)  # settings cannot hold n
        return (await self.generate([prompt], own))[0]

    async def chat_prompt(
        self,
        messages: Iterable[Message],
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids by which ``chat`` asks for the next message, for ``stream`` too.

        Raises: RequestError: a message is unusable, or there is no template.
        """
        return await self.tokenize(
            lambda tokenizer: tokenizer.chat.token_ids(messages, tools, template, options or {})
        )

    async def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function between two steps in the step thread, and return its result.

        For what changes the model, or runs it by itself, such as ``call(model.logits, ids)``.
        Requests wait meanwhile.

        Raises: RequestError: the model was closed. And what the function raises.
        """
        return await asyncio.wrap_future(self._steps.call(lambda: function(*args, **options)))

    async def tokenize(self, function: Callable[[TextTokenizer], T]) -> T:
        """Return what a function makes of a tokenizer, in the thread that reads prompts.

        A long text then holds up neither the event loop nor the engine.

        Raises: RequestError: the model was closed. And what the function raises.
        """
        self._steps.check_room(0)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._texts, lambda: function(self._tokenizer))

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter between two steps; see ``LanguageModel.load_adapter``."""
        await self.call(self.model.load_adapter, name, path)

    async def remove_adapter(self, name: str) -> None:
        """Forget an adapter between two steps; see ``LanguageModel.remove_adapter``."""
        await self.call(self.model.remove_adapter, name)

    async def update_weights(
        self, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | WeightsFrom
    ) -> tuple[str, ...]:
        """Exchange weights while no request is unfinished; see ``LanguageModel.update_weights``.

        Later requests wait until the exchange has ended, also for a trainer that is late.
        """
        return await self.call(self.model.update_weights, tensors)

    def open(
        self,
        prompts: Sequence[tuple[Sequence[int], SamplingParams]],
        n: int = 1,
        *,
        streams: bool,
        received: int | None = None,
        on_end: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Queue a request of the event loop that runs, and return what its tokens come from.

        For servers: ``generate`` and ``stream`` do the same with prompts that may be texts.

        Args:
            prompts: token ids, each with its parameters.
            n: answers to each.
            streams: whether tokens are to come when they are there, or later and together.
            received: when the request was, in nanoseconds since the epoch.
            on_end: called with the generation when it has ended, for whatever reason.
        Raises:
            RequestError: the model cannot take a prompt, or was closed.
            QueueFullError: there is no room for so many answers.
        """
        checked = [(self.model.check(tokens, params), params) for tokens, params in prompts]
        return self._steps.open(checked, n, streams=streams, received=received, on_end=on_end)

    async def _opened(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        settings: dict[str, Any],
        n: int,
        *,
        streams: bool,
    ) -> Generation:
        asked = requests(prompts, params, settings, n)
        self._steps.check_room(n * len(asked))  # before anything is prepared in vain
        # Constraints are compiled when they are checked, which may take as long as a text.
        if any(isinstance(prompt, str) or own.constraint is not None for prompt, own in asked):
            checked = await self.tokenize(lambda tokenizer: self._checked(asked, tokenizer))
        else:
            checked = self._checked(asked, self.model.tokenizer)
        return self._steps.open(checked, n, streams=streams)

    def _checked(
        self, asked: Sequence[tuple[Prompt, SamplingParams]], tokenizer: TextTokenizer
    ) -> list[tuple[list[int], SamplingParams]]:
        return [
            (self.model.check(token_ids_of(prompt, tokenizer), params), params)
            for prompt, params in asked
        ]

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        """The tokenizer of the thread of prompts: some may be used by one thread at a time."""
        return copy.deepcopy(self.model.tokenizer)


def _end(steps: StepThread, texts: ThreadPoolExecutor) -> None:
    steps.stop(_END_SECONDS)
    texts.shutdown(wait=False, cancel_futures=True)
