"""Asyncio interface of a language model: one thread runs the requests of all event loops."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from interposer.errors import RequestError
from interposer_engine._chat import Message
from interposer_engine._constrained_decoding.constraints import Compiled
from interposer_engine._constrained_decoding.limits import ConstraintLimits
from interposer_engine._constrained_decoding.process import STACK_BYTES
from interposer_engine._embedded_input import EmbeddedInput
from interposer_engine._engine_thread import Generation, StepThread, stopped_error
from interposer_engine._language_model import (
    Completion,
    Delta,
    LanguageModel,
    Prompt,
    TokenPrompt,
    requests,
    token_ids_of,
)
from interposer_engine._media import Media
from interposer_engine._sampling import chosen_params
from interposer_engine._sampling_params import Constraint, SamplingParams
from interposer_engine._tokenizer import TextTokenizer
from interposer_engine._weight_transfer.receiver import Tensors, WeightsFrom

T = TypeVar("T")
# Time for the step thread to complete its present step when the model is closed.
_STOP_SECONDS = 10.0
# More stack than the child process has, so that what compiles there compiles here too.
_EXTRA_STACK_BYTES = 2**20
_MEDIA_THREADS = 4  # an encoder can compute the media of several requests together
_STACK_SIZE_LOCK = threading.Lock()  # threading.stack_size is a setting of the whole process


class AsyncLanguageModel:
    """A language model for coroutines of any number of event loops.

    One thread runs the steps of the engine. Others tokenize prompts, render chat templates, encode
    media, compile constraints and format answers, so that none of this work delays the others. You
    may call methods of ``model`` at the same time. Cancelling a coroutine, or leaving an
    ``async for``, cancels its request.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_waiting: int | None = None,
        constraint_limits: ConstraintLimits | None = None,
        template_seconds: float | None = None,
    ) -> None:
        """Start the step thread and the threads for tokenizers and constraints.

        Args:
            model: Model to run.
            max_waiting: Number of answers that may wait in the queue. Further requests raise
                ``QueueFullError``. None for no limit.
            constraint_limits: Limits on constraints of untrusted clients, which a child process
                then compiles first. None for no limits.
            template_seconds: Time to render a chat template, in seconds; None for no limit.
        Raises:
            RequestError: ``max_waiting`` is negative, or the model was closed.
            CheckpointError: The tokenizer is not valid.
        """
        if max_waiting is not None and max_waiting < 0:
            raise RequestError(f"max_waiting is {max_waiting}, must be None or at least 0")
        model.tokenizer.read()  # now, so that the first request need not wait for it
        self.model = model
        self._constraints = model.engine.constraints  # first: a closed model starts no thread
        self._steps = StepThread(model, max_waiting)
        if self._constraints is not None:
            self._constraints.limit(constraint_limits)
        self._prompt_executor = ThreadPoolExecutor(1, "interposer-texts")
        self._answer_executor = ThreadPoolExecutor(1, "interposer-answers")
        self._constraint_executor = _large_stack_executor("interposer-constraints")
        self._template_seconds = template_seconds
        self._template_calls = TimedCalls("interposer-chats", template_seconds)
        self._media_executor = ThreadPoolExecutor(_MEDIA_THREADS, "interposer-media")
        executors = (
            self._prompt_executor,
            self._answer_executor,
            self._constraint_executor,
            self._media_executor,
        )
        stops = [partial(ex.shutdown, wait=False, cancel_futures=True) for ex in executors]
        if self._constraints is not None:
            stops.append(partial(self._constraints.limit, None))
        self._stop = weakref.finalize(self, _stop, self._steps, stops)

    async def __aenter__(self) -> Self:
        """Return this model.

        Raises: RequestError: this model was closed.
        """
        if not self._steps.alive:
            raise stopped_error()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Call ``aclose``."""
        await self.aclose()

    def close(self) -> None:
        """Cancel unfinished requests, and end the threads after the present step.

        Unfinished and later requests raise RequestError where they are awaited. ``model`` stays
        open: close it with ``model.close()``.
        """
        self._stop()

    async def aclose(self) -> None:
        """Call ``close`` in a thread, so that the event loop does not wait."""
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        """Describe the model and the unfinished answers."""
        state = f"{self.num_unfinished} unfinished answers" if self._steps.alive else "closed"
        return f"<{type(self).__name__} of {self.model!r}: {state}>"

    @property
    def trouble(self) -> str:
        """Reason why requests would fail; "" if no reason is known."""
        if not self._steps.alive:
            return "the engine does not run"
        if trouble := self.model.engine.trouble:
            return trouble
        return "the last step of the engine failed" if self._steps.failed else ""

    @property
    def num_unfinished(self) -> int:
        """Number of answers that run or wait."""
        return self._steps.num_unfinished

    @property
    def capacity(self) -> int | None:
        """Number of answers that may run or wait; None for no limit."""
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
            RequestError: A prompt or parameter is unusable, or the model was closed.
            QueueFullError: The queue has no room for so many answers.
            Exception: An error of an engine step.
        """
        generation = await self._prepare(prompts, params, settings, n, streams=False)
        try:
            return await generation.completions()
        finally:
            generation.close()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: int = 1, **settings: Any
    ) -> AsyncGenerator[Delta, None]:
        """Yield the completion of ``prompt`` token by token; see ``LanguageModel.stream``.

        Tokens between the first and the last may be delayed by up to 40 ms, and then come together.

        Raises: as ``generate``, with the first token.
        """
        generation = await self._prepare([prompt], params, settings, n, streams=True)
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
        (merged,) = chosen_params(params, settings, 1)  # refuses n in settings
        prompt = await self.chat_prompt(
            messages,
            tools=tools,
            template=template,
            options=options,
            cache_salt=merged.cache_salt,
        )
        return (await self.generate([prompt], merged))[0]

    async def chat_prompt(
        self,
        messages: Iterable[Message],
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        cache_salt: str = "",
    ) -> list[int | EmbeddedInput]:
        """Return the prompt that ``chat`` uses; see ``LanguageModel.chat_prompt``.

        Raises: RequestError: a message is unusable, or there is no template.
        """
        read_messages, kinds = self.model.read_messages(messages), self.model.media_kinds
        chat = await self.render_chat(
            lambda tokenizer: tokenizer.chat.render(
                read_messages, tools, template, options or {}, kinds
            )
        )
        return await self.media_prompt(chat.token_ids, chat.media, cache_salt=cache_salt)

    async def media_prompt(
        self, prompt: str | Sequence[int], media: Sequence[Media], *, cache_salt: str = ""
    ) -> list[int | EmbeddedInput]:
        """Return a prompt with pictures or sounds; see ``LanguageModel.media_prompt``.

        Encoding delays neither the event loop nor the preparation of other prompts.

        Raises: RequestError: as ``LanguageModel.media_prompt``; or the model was closed.
        """
        if isinstance(prompt, str):
            token_ids: Sequence[int] = await self.tokenize(
                lambda tokenizer: tokenizer.encode(prompt)
            )
        else:
            token_ids = prompt
        if not media:
            return [*token_ids]
        return await self._run(
            self._media_executor,
            lambda: self.model.media_prompt(token_ids, media, cache_salt=cache_salt),
        )

    async def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function between two steps in the step thread, and return its result.

        Use this for functions that change or run the model, such as ``call(model.logits, ids)``.
        All requests wait until the function returns.

        Raises:
            RequestError: The model was closed.
            Exception: An error of the function.
        """
        return await asyncio.wrap_future(self._steps.call(lambda: function(*args, **options)))

    async def tokenize(self, function: Callable[[TextTokenizer], T]) -> T:
        """Call a function with a tokenizer in the thread that tokenizes prompts.

        A long text then delays neither the event loop nor the engine.

        Raises:
            RequestError: The model was closed.
            Exception: An error of the function.
        """
        return await self._run(self._prompt_executor, lambda: function(self._tokenizer))

    async def render_chat(self, function: Callable[[TextTokenizer], T]) -> T:
        """Call a function with a tokenizer in the thread that renders chat templates.

        A chat template is a program that can loop forever. A function that runs longer than
        ``template_seconds`` is interrupted.

        Raises:
            RequestError: The model was closed, or the function took too long.
            Exception: An error of the function.
        """
        self._steps.check_capacity(0)
        try:
            return await self._template_calls.run(lambda: function(self._chat_tokenizer))
        except TimeoutError:
            raise RequestError(
                "Rendering the chat template took longer than the allowed "
                f"{self._template_seconds:g} s. Try: fewer messages, or another template"
            ) from None

    async def load_chat_template(self) -> None:
        """Load the chat template now, so that the first chat need not wait for it.

        Raises: InterposerError: the model has no usable chat template.
        """
        await asyncio.gather(
            self._run(self._prompt_executor, lambda: self._chat_tokenizer.chat),
            self._run(self._answer_executor, lambda: self.model.tokenizer.chat),
        )

    async def format_answer(self, function: Callable[[TextTokenizer], T]) -> T:
        """Call a function with a tokenizer in the thread that formats answers.

        The function gets the model's own tokenizer and must only decode with it.

        Raises:
            RequestError: The model was closed.
            Exception: An error of the function.
        """
        return await self._run(self._answer_executor, lambda: function(self.model.tokenizer))

    async def compile_constraint(self, constraint: Constraint) -> Compiled:
        """Compile a constraint in a thread; it stays compiled while you keep the result.

        Raises: RequestError: the constraint cannot be compiled or exceeds ``constraint_limits``,
            or the model was closed.
        """
        constraints = self._constraints
        if constraints is None:
            raise RequestError("A constraint needs a tokenizer, and this engine has none")
        return await self._run(self._constraint_executor, lambda: constraints.compiled(constraint))

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter between two steps; see ``LanguageModel.load_adapter``."""
        await self.call(self.model.load_adapter, name, path)

    async def remove_adapter(self, name: str) -> None:
        """Remove an adapter between two steps; see ``LanguageModel.remove_adapter``."""
        await self.call(self.model.remove_adapter, name)

    async def update_weights(self, tensors: Tensors | WeightsFrom) -> tuple[str, ...]:
        """Update weights while no request is unfinished; see ``LanguageModel.update_weights``.

        Later requests wait for the end of the update, even if the trainer is late.
        """
        return await self.call(self.model.update_weights, tensors)

    def open(
        self,
        prompts: Sequence[tuple[TokenPrompt, SamplingParams]],
        n: int = 1,
        *,
        streams: bool,
        received: int | None = None,
        on_end: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Queue a request of the running event loop, and return the stream of its new tokens.

        This is for servers. ``generate`` and ``stream`` also take prompts that are texts.

        Args:
            prompts: Tokens of each prompt, with its sampling parameters.
            n: Number of answers to each prompt.
            streams: True delivers tokens soon after each step, False later and together.
            received: Time at which the request arrived, in nanoseconds since the epoch.
            on_end: Called with the generation when it ends, for any reason.
        Raises:
            RequestError: The model cannot take a prompt, or was closed.
            QueueFullError: The queue has no room for so many answers.
        """
        checked = [(self.model.check(tokens, params), params) for tokens, params in prompts]
        compiled: list[Compiled] = []
        if self._constraints is not None:
            # The caller may drop its compiled constraints before the engine takes them.
            constraints = {params.constraint for _, params in prompts if params.constraint}
            compiled = [self._constraints.compiled(constraint) for constraint in constraints]
        generation = self._steps.open(checked, n, streams=streams, received=received, on_end=on_end)
        generation.kept_alive = compiled
        return generation

    async def _prepare(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        settings: dict[str, Any],
        n: int,
        *,
        streams: bool,
    ) -> Generation:
        """Compile the constraints and tokenize the prompts of a request, then queue the request."""
        rows = requests(prompts, params, settings, n)
        self._steps.check_capacity(n * len(rows))  # refuse before preparing anything
        # These references keep the constraints compiled until the generation has its own.
        compiled = [
            await self.compile_constraint(row_params.constraint)
            for _, row_params in rows
            if row_params.constraint
        ]
        if any(isinstance(prompt, str) for prompt, _ in rows):
            checked = await self.tokenize(lambda tokenizer: self._checked(rows, tokenizer))
        else:
            checked = self._checked(rows, self.model.tokenizer)
        generation = self.open(checked, n, streams=streams)
        del compiled
        return generation

    async def _run(self, executor: Executor, function: Callable[[], T]) -> T:
        self._steps.check_capacity(0)
        return await asyncio.get_running_loop().run_in_executor(executor, function)

    def _checked(
        self, rows: Sequence[tuple[Prompt, SamplingParams]], tokenizer: TextTokenizer
    ) -> list[tuple[TokenPrompt, SamplingParams]]:
        return [
            (self.model.check(token_ids_of(prompt, tokenizer), params), params)
            for prompt, params in rows
        ]

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        """Tokenizer for the thread that tokenizes prompts; some tokenizers are not thread-safe."""
        return copy.deepcopy(self.model.tokenizer)

    @cached_property
    def _chat_tokenizer(self) -> TextTokenizer:
        """Tokenizer of the thread that renders chat templates."""
        return copy.deepcopy(self.model.tokenizer)


def _large_stack_executor(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread with a larger stack than the constraint process has."""
    executor = ThreadPoolExecutor(1, name)
    with _STACK_SIZE_LOCK:
        default_bytes = threading.stack_size(STACK_BYTES + _EXTRA_STACK_BYTES)
        try:
            executor.submit(int)  # starts the thread while the stack size is set
        finally:
            threading.stack_size(default_bytes)
    return executor


def _stop(steps: StepThread, stops: Sequence[Callable[[], None]]) -> None:
    steps.stop(_STOP_SECONDS)
    for stop in stops:
        stop()


class Expired(BaseException):
    """Exception in a running function after its time limit, or after its caller was cancelled."""


class TimedCalls:
    """Runs functions one after the other, each in a new thread and with a time limit.

    A function that exceeds the limit is interrupted by an exception, which Python raises between
    two bytecode instructions. A function inside a C call is interrupted after that call.
    """

    def __init__(self, name: str, seconds: float | None) -> None:
        """Set the name of the threads and the time limit.

        Args:
            name: Name of the threads.
            seconds: Wall time of one call, from the start of its function; None for no limit.
        """
        self._name = name
        self._seconds = seconds
        self._turn = threading.Lock()

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function after all earlier calls, and return its result.

        If the awaiting task is cancelled, the function is interrupted or does not start.

        Raises:
            TimeoutError: The function exceeded the time limit.
            Exception: An error of the function.
        """
        call = _Call(function, self._turn, asyncio.get_running_loop())
        threading.Thread(target=call.run, name=self._name, daemon=True).start()
        try:
            await asyncio.shield(call.started)
            # Shield the futures: cancelling the task must not cancel the future that the thread
            # sets.
            return await asyncio.wait_for(asyncio.shield(call.result), self._seconds)
        finally:
            call.end()


class _Call(Generic[T]):
    """A function that a thread runs for an event loop.

    Attributes:
        started: Done when the function starts.
        result: Result or error of the function.
    """

    def __init__(
        self, function: Callable[[], T], turn: threading.Lock, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.started: asyncio.Future[None] = loop.create_future()
        self.result: asyncio.Future[T] = loop.create_future()
        self._function = function
        self._turn = turn
        self._loop = loop
        self._lock = threading.Lock()
        self._thread: int | None = None  # identifier of the thread while the function runs
        self._ended = False

    def run(self) -> None:
        """Run the function in this thread, and send its result to the event loop."""
        try:
            with self._turn:
                self._call_in_loop(self.started.set_result, None)
                result = self._run_function()
        except BaseException as error:  # noqa: BLE001 - raised in the awaiting task
            self._call_in_loop(self.started.cancel)
            if not isinstance(error, Expired):
                self._call_in_loop(self._set_error, error)
        else:
            self._call_in_loop(self._set_result, result)

    def _run_function(self) -> T:
        with self._lock:
            if self._ended:
                raise Expired
            self._thread = threading.get_ident()
        try:
            return self._function()
        finally:
            with self._lock:
                self._thread = None

    def end(self) -> None:
        """Interrupt the function if running, or prevent its start if still queued."""
        with self._lock:
            self._ended = True
            if self._thread is not None:
                thread = ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Expired))

    def _call_in_loop(self, function: Callable[..., Any], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _set_result(self, result: T) -> None:
        if not self.result.done():
            self.result.set_result(result)

    def _set_error(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)
