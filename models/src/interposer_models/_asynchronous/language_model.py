"""The asynchronous front door: requests of any event loop, stepped by one thread."""

from __future__ import annotations

import asyncio
import copy
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from interposer.errors import RequestError
from interposer_models._asynchronous.generation import Generation
from interposer_models._asynchronous.step_thread import StepThread
from interposer_models._asynchronous.timed_calls import TimedCalls
from interposer_models._constraint import Constraint
from interposer_models._engine.constraint_limits import ConstraintLimits
from interposer_models._engine.constraint_process import STACK_BYTES
from interposer_models._engine.constraints import Compiled
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
_MORE_STACK = 2**20  # than the process has that compiled the same before
_STACK_SIZE = threading.Lock()


class AsyncLanguageModel:
    """A model for any number of coroutines, in one event loop or in those of several threads.

    One thread steps the engine; others read prompts, write chats as prompts, compile constraints
    and make texts of answers, so that none of these holds up another. Methods of ``model`` may be
    called meanwhile. A coroutine that is cancelled, and an ``async for`` that is left, cancel
    their request.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_waiting: int | None = None,
        constraint_limits: ConstraintLimits | None = None,
        template_seconds: float | None = None,
    ) -> None:
        """Start the threads.

        Args:
            max_waiting: answers that may wait besides those that run. Requests beyond are refused,
                with ``QueueFullError``; None takes all.
            constraint_limits: bounds on each constraint, where requests come from clients that
                nobody vouches for. A process of its own compiles it first.
            template_seconds: that writing a chat as a prompt may take; None bounds it not.
        Raises:
            RequestError: ``max_waiting`` is negative.
            CheckpointError: the tokenizer is not valid.
        """
        if max_waiting is not None and max_waiting < 0:
            raise RequestError(f"max_waiting is {max_waiting}, must be None or at least 0")
        model.tokenizer.read()  # no request is to wait for that
        self.model = model
        self._steps = StepThread(model, max_waiting)
        self._constraints = model.engine.constraints
        if self._constraints is not None:
            self._constraints.limit(constraint_limits)
        self._texts = ThreadPoolExecutor(1, "interposer-texts")
        self._answers = ThreadPoolExecutor(1, "interposer-answers")
        self._forms = _deep_executor("interposer-constraints")
        self._template_seconds = template_seconds
        self._chats = TimedCalls("interposer-chats", template_seconds)
        ends = [partial(each.shutdown, wait=False, cancel_futures=True) for each in self._executors]
        if self._constraints is not None:
            ends.append(partial(self._constraints.limit, None))
        self._end = weakref.finalize(self, _end, self._steps, ends)

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
        if trouble := self.model.engine.trouble:
            return trouble
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
        return await self.write_chat(
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
        return await self._run(self._texts, lambda: function(self._tokenizer))

    async def write_chat(self, function: Callable[[TextTokenizer], T]) -> T:
        """Return what a function makes of a tokenizer, in the thread that writes chats as prompts.

        A template is a program, which may take any time: beyond ``template_seconds`` it is ended.

        Raises: RequestError: the model was closed, or the time is over. And what the function
            raises.
        """
        self._steps.check_room(0)
        try:
            return await self._chats.run(lambda: function(self._chat_tokenizer))
        except TimeoutError:
            raise RequestError(
                "Writing the chat as a prompt took longer than the "
                f"{self._template_seconds:g} s that the chat template has. "
                "Try: fewer messages, or another template"
            ) from None

    async def prepare_chats(self) -> None:
        """Read what chats need, so that the first one need not wait for it.

        Raises: InterposerError: chats cannot be written.
        """
        await asyncio.gather(
            self._run(self._texts, lambda: self._chat_tokenizer.chat),
            self._run(self._answers, lambda: self.model.tokenizer.chat),
        )

    async def write_answer(self, function: Callable[[TextTokenizer], T]) -> T:
        """Return what a function makes of a tokenizer, in the thread that makes texts of answers.

        The tokenizer is that of the model, for decoding alone.

        Raises: RequestError: the model was closed. And what the function raises.
        """
        return await self._run(self._answers, lambda: function(self.model.tokenizer))

    async def compile(self, constraint: Constraint) -> Compiled:
        """Return a constraint that stays compiled for as long as somebody has what is returned.

        Raises: RequestError: it cannot be held, takes more than the limits allow, or the model was
            closed.
        """
        constraints = self._constraints
        if constraints is None:
            raise RequestError("A constraint is over texts, and this engine has no tokenizer")
        return await self._run(self._forms, lambda: constraints.compiled(constraint))

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
        generation = self._steps.open(checked, n, streams=streams, received=received, on_end=on_end)
        if self._constraints is not None:
            # Whoever compiled them lets them go now; the engine takes them a moment later.
            asked = {own.constraint for _, own in prompts if own.constraint is not None}
            generation.held = [self._constraints.compiled(each) for each in asked]
        return generation

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
        forms = [await self.compile(own.constraint) for _, own in asked if own.constraint]
        if any(isinstance(prompt, str) for prompt, _ in asked):
            checked = await self.tokenize(lambda tokenizer: self._checked(asked, tokenizer))
        else:
            checked = self._checked(asked, self.model.tokenizer)
        generation = self.open(checked, n, streams=streams)
        del forms  # which the generation has now
        return generation

    async def _run(self, executor: Executor, function: Callable[[], T]) -> T:
        self._steps.check_room(0)
        return await asyncio.get_running_loop().run_in_executor(executor, function)

    @property
    def _executors(self) -> tuple[ThreadPoolExecutor, ...]:
        return self._texts, self._answers, self._forms

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

    @cached_property
    def _chat_tokenizer(self) -> TextTokenizer:
        """The tokenizer of the thread of chats."""
        return copy.deepcopy(self.model.tokenizer)


def _deep_executor(name: str) -> ThreadPoolExecutor:
    """Return one with a thread whose stack is as large as where constraints are compiled first."""
    executor = ThreadPoolExecutor(1, name)
    with _STACK_SIZE:
        before = threading.stack_size(STACK_BYTES + _MORE_STACK)
        try:
            executor.submit(int)  # which starts the thread
        finally:
            threading.stack_size(before)
    return executor


def _end(steps: StepThread, ends: Sequence[Callable[[], None]]) -> None:
    steps.stop(_END_SECONDS)
    for end in ends:
        end()
