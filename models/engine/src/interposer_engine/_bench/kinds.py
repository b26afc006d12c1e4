"""The rows of a benchmark: each row's requests, and the minimum work that these require.

Each row is a ``Kind``, which runs its requests in a ``Session`` and counts its steps.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from interposer.errors import ConfigError
from interposer_engine._bench.roofline import ModelWork
from interposer_engine._language_model import LanguageModel
from interposer_engine._sampling_params import SamplingParams
from interposer_engine._sequence import TokenSequence


@dataclass
class Sample:
    """The measurements of one run of a benchmark row.

    Attributes:
        tokens: that count for the rate.
        model_s: seconds within the model; None if not profiled, or if steps are captured graphs.
        gaps: seconds between the tokens of running requests, if measured.
    """

    seconds: float
    tokens: int
    model_s: float | None = None
    gaps: list[float] = field(default_factory=list)


class Session:
    """Runs requests of random tokens in a model's engine, without any other requests."""

    def __init__(self, lm: LanguageModel, seed: int = 0) -> None:
        self.lm = lm
        self._calls: list[float] = []
        self._random = random.Random(seed)
        self._vocab_size = lm.engine.model.config.vocab_size
        self._running: list[TokenSequence] = []

    def tokens(self, count: int) -> list[int]:
        """Draw random token ids, so that the prefix cache holds no prefix of the prompt."""
        return self._random.choices(range(self._vocab_size), k=count)

    def repeating(self, count: int, period: int = 16) -> list[int]:
        """Draw random token ids that repeat with a period."""
        repeated = self.tokens(period)
        return (repeated * (count // period + 1))[:count]

    def add(
        self, prompts: list[list[int]], new_tokens: int, adapter: str | None = None
    ) -> list[TokenSequence]:
        """Queue requests that ignore end tokens and stop after ``new_tokens`` tokens."""
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, adapter=adapter)
        requests = [self.lm.engine.add(prompt, params) for prompt in prompts]
        self._running += requests
        return requests

    def add_decoding(
        self, prompts: list[list[int]], new_tokens: int, adapter: str | None = None
    ) -> list[TokenSequence]:
        """Queue requests, and step until each has a first token.

        Prompts that were computed in an earlier step produce more tokens until then, so every
        request gets a margin of new tokens.
        """
        step_tokens = self.lm.engine.scheduler.max_step_tokens
        margin_tokens = sum(map(len, prompts)) // step_tokens + 2
        requests = self.add(prompts, new_tokens + margin_tokens, adapter)
        self.first_tokens(requests)
        return requests

    def until(self, is_done: Callable[[], bool]) -> None:
        """Step until ``is_done()`` is true.

        Raises: ConfigError: the engine has nothing left to compute.
        """
        while not is_done():
            if not self.lm.engine.busy:
                raise ConfigError("The benchmark's requests ended early. Try: another model")
            self.lm.engine.step()

    def first_tokens(self, requests: list[TokenSequence]) -> None:
        """Step until each of the requests has a token."""
        self.until(lambda: all(sequence.output for sequence in requests))

    def decode(self, requests: list[TokenSequence], count: int) -> int:
        """Step until each request has ``count`` more tokens; return the total of new tokens."""
        old_counts = [len(sequence.output) for sequence in requests]

        def new_counts() -> list[int]:
            return [len(s.output) - old for s, old in zip(requests, old_counts, strict=True)]

        self.until(lambda: min(new_counts()) >= count)
        return sum(new_counts())

    def timed(self, call: Callable[[], int]) -> Sample:
        """Measure the time of a call that returns a token count, and of all queued device work."""
        self.settle()
        self._calls.clear()
        start = time.perf_counter()
        tokens = call()
        self.settle()
        seconds = time.perf_counter() - start
        # Captured graphs bypass the model's forward hooks.
        return Sample(seconds, tokens, sum(self._calls) if self._calls else None)

    def settle(self) -> None:
        """Wait until the device is idle."""
        placement = self.lm.placement
        placement.platform.synchronize(placement.device.torch_device)

    def end(self) -> None:
        """Cancel all requests that still run."""
        for sequence in self._running:
            self.lm.engine.cancel(sequence)
        self._running.clear()

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Measure the model's calls within a ``with`` block, waiting for the device after each."""
        started = 0.0

        def begin(*_: Any) -> None:
            nonlocal started
            self.settle()
            started = time.perf_counter()

        def finish(*_: Any) -> None:
            self.settle()
            self._calls.append(time.perf_counter() - started)

        # Waiting for the device before and after attributes its time to the model.
        model = self.lm.engine.model
        handles = model.register_forward_pre_hook(begin), model.register_forward_hook(finish)
        try:
            yield
        finally:
            self._calls.clear()
            for handle in handles:
                handle.remove()

    @contextmanager
    def without_speculation(self) -> Iterator[None]:
        """Disable speculative decoding within a ``with`` block."""
        engine = self.lm.engine
        speculation, engine.speculation = engine.speculation, None
        try:
            yield
        finally:
            engine.speculation = speculation

    @contextmanager
    def with_adapter(self, name: str, folder: str) -> Iterator[None]:
        """Load a LoRA adapter for a ``with`` block, and remove the adapter at the end."""
        self.lm.load_adapter(name, folder)
        try:
            yield
        finally:
            self.end()
            self.lm.remove_adapter(name)


RUNNING = 4
END_TOKENS = 20


@dataclass(frozen=True)
class Sizes:
    """Numbers of prompt tokens, new tokens and concurrent requests in the rows of a benchmark.

    Attributes:
        prompt: tokens of a prompt.
        cached_prefix: cached tokens before the prompt of the extension row; also the limit of a
            step.
        contexts: tokens before the decoded ones.
        new: decoded tokens.
        batch: requests that decode together.
        batch_context: context of such requests: the shortest context, or less if the model's
            context would not hold the extra tokens of requests that started earlier.
        num_joining: prompts that join running requests, one in every 8 steps.
        shared: tokens of the prefix that prompts share; 0 omits the rows.
        notes: sentences about sizes that were reduced.
    """

    prompt: int
    cached_prefix: int
    contexts: tuple[int, ...]
    new: int
    batch: int
    batch_context: int
    num_joining: int
    shared: int = 0
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def within(
        cls,
        context: int,
        prompt: int,
        contexts: Sequence[int],
        new: int,
        batch: int,
        shared: int = 0,
    ) -> Sizes:
        """Choose sizes that fit a model with a context of ``context`` tokens.

        Raises: ConfigError: a size is below 1, or the context does not fit a prompt and a new
        token.
        """
        values_by_option = {"--prompt": prompt, "--new-tokens": new, "--batch": batch}
        values_by_option |= {"--contexts": min(contexts, default=0)}
        for name, value in values_by_option.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be an integer of at least 1")
        if shared < 0:
            raise ConfigError(f"--shared-prefix is {shared}, must be an integer of at least 0")
        if context < new + 16:
            raise ConfigError(
                f"--new-tokens is {new}, and the model's context is {context} tokens. "
                f"Try: --new-tokens {max(context // 4, 1)}"
            )
        notes: list[str] = []

        def cut(label: str, size: int, limit: int) -> int:
            if size > limit:
                notes.append(f"{label} is cut from {size} to {limit}: the context is {context}")
            return min(size, limit)

        max_context = context - new - 1
        prompt = cut("the prompt", prompt, max_context // 2)
        cached_prefix = cut(
            "the cached prefix of the extension row", 2 * prompt, max_context - prompt
        )
        usable_contexts: dict[int, None] = {}
        for size in sorted(contexts):
            usable_contexts[cut("a context", size, max_context)] = None
        shortest_context = min(usable_contexts)
        # Tokens that the first request decodes while the prompts of the others are computed.
        margin_tokens = max(batch, RUNNING) * shortest_context // cached_prefix + 2
        batch_context = max(min(shortest_context, max_context - margin_tokens), 1)
        if shared:
            shared = cut("the common prefix", shared, context - END_TOKENS - 2)
        # One prompt joins in every eighth step.
        num_joining = -(-new // 8)
        return cls(
            prompt,
            cached_prefix,
            tuple(usable_contexts),
            new,
            batch,
            batch_context,
            num_joining,
            shared,
            tuple(notes),
        )

    @property
    def max_sequences(self) -> int:
        """The number of requests that the largest batch runs at once."""
        return max(self.batch, RUNNING + 1)

    def cache_tokens(self, page_tokens: int = 64) -> int:
        """Return the KV-cache size that any row needs, with draft tokens and partial pages.

        Args:
            page_tokens: margin of a sequence for partial pages and draft tokens.
        """
        longest = max(*self.contexts, self.cached_prefix + self.prompt, self.shared + END_TOKENS)
        rows = (
            longest + self.new,
            self.batch * (self.batch_context + self.new),
            RUNNING * (self.batch_context + self.new) + self.num_joining * (self.prompt + 1),
        )
        # The prefix cache keeps one round's shared prefix until the next round needs the pages.
        return max(rows) + self.shared + 2 * page_tokens * self.max_sequences


def parsed_contexts(text: str) -> list[int]:
    """Parse a comma-separated list of context lengths.

    Raises: ConfigError: the text is no such list.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--contexts is {text!r}, must be numbers of tokens. Try: --contexts 128,1024"
        ) from None


ADAPTER = "bench"


class Step(NamedTuple):
    """The minimum work of a step: bytes to read, operations, and tokens that count for the rate.

    Attributes:
        times: number of such steps in a run.
    """

    num_bytes: float
    operations: float
    tokens: int
    times: int = 1


@dataclass(frozen=True)
class Kind(ABC):
    """One row of the benchmark: a kind of workload, such as prefill or decoding.

    Attributes:
        name: identifies the row in results; never changes.
        what: a description for people.
        test: the name of the row in llama-bench; None if llama-bench has no such row.
        beside: the name of the row that this row is compared with, run by run; None without one.
    """

    name: str
    what: str
    test: str | None = None
    beside: str | None = None

    @abstractmethod
    def run(self, session: Session) -> Sample:
        """Run the requests once and measure the time."""

    def least_work(self, work: ModelWork) -> list[Step]:
        """List the steps of a run, each with the minimum work; empty if the work is unknown."""
        return []


@dataclass(frozen=True)
class Prefill(Kind):
    """Benchmark row: the prefill of a prompt, up to the first token."""

    tokens: int = 0

    def run(self, session: Session) -> Sample:
        prompt = session.tokens(self.tokens)

        def prefill() -> int:
            session.first_tokens(session.add([prompt], 1))
            return self.tokens

        return session.timed(prefill)

    def least_work(self, work: ModelWork) -> list[Step]:
        """Return one step that reads all weights, as the minimum work of a prefill."""
        return [Step(work.weight_bytes(self.tokens), work.operations(self.tokens), self.tokens)]


@dataclass(frozen=True)
class Decode(Kind):
    """Benchmark row: greedy decoding after a context, for one request or a batch.

    Attributes:
        repeats: prompts are periodic, so that n-gram drafts are accepted.
        plain: runs without speculative decoding.
    """

    context: int = 0
    new: int = 0
    batch: int = 1
    adapter: str | None = None
    repeats: bool = False
    plain: bool = True

    def run(self, session: Session) -> Sample:
        draw = session.repeating if self.repeats else session.tokens
        prompts = [draw(self.context) for _ in range(self.batch)]
        requests = session.add_decoding(prompts, self.new, self.adapter)
        return session.timed(lambda: session.decode(requests, self.new))

    def least_work(self, work: ModelWork) -> list[Step]:
        """Return steps that read weights and caches; an empty list with speculative decoding."""
        if not self.plain:
            return []
        mean_context = self.context + self.new // 2
        return [_decode(work, self.batch, mean_context)._replace(times=self.new)]


@dataclass(frozen=True)
class Extend(Kind):
    """Benchmark row: the prefill of a prompt with a cached prefix."""

    tokens: int = 0
    cached_prefix: int = 0

    def run(self, session: Session) -> Sample:
        """Prefill the prefix in a first step, then measure the prefill of the remaining tokens."""
        (sequence,) = session.add([session.tokens(self.cached_prefix + self.tokens)], 1)
        session.until(lambda: sequence.num_computed >= self.cached_prefix)

        def prefill() -> int:
            session.first_tokens([sequence])
            return self.tokens

        return session.timed(prefill)

    def least_work(self, work: ModelWork) -> list[Step]:
        """Return one step that reads all weights and the cached prefix."""
        num_bytes = work.weight_bytes(self.tokens) + work.context_bytes(self.cached_prefix)
        return [Step(num_bytes, work.operations(self.tokens, self.cached_prefix), self.tokens)]


@dataclass(frozen=True)
class Mixed(Kind):
    """Benchmark row: decoding while prompts join, with new tokens and gaps between tokens."""

    context: int = 0
    new: int = 0
    prompt: int = 0
    num_joining: int = 0

    def run(self, session: Session) -> Sample:
        """Decode and measure; a prompt joins every eighth step."""
        prompts = [session.tokens(self.context) for _ in range(RUNNING)]
        running = session.add_decoding(prompts, self.new)
        joining = iter([session.tokens(self.prompt) for _ in range(self.num_joining)])
        gaps: list[float] = []

        def decode() -> int:
            tokens = 0
            for number in range(self.new):
                if number % 8 == 0:
                    session.add([next(joining)], 1)
                start = time.perf_counter()
                tokens += session.decode(running, 1)
                # A gap ends when the device has computed the token, not when the step is queued.
                session.settle()
                gaps.append(time.perf_counter() - start)
            return tokens

        sample = session.timed(decode)
        sample.gaps = gaps
        return sample

    def least_work(self, work: ModelWork) -> list[Step]:
        """Return the minimum work of the steps with a joining prompt and of those without one."""
        decode_step = _decode(work, RUNNING, self.context + self.new // 2)
        mixed_step = Step(
            decode_step.num_bytes
            # Weights are read once for all tokens of the step.
            - work.weight_bytes(RUNNING)
            + work.weight_bytes(RUNNING + self.prompt),
            decode_step.operations + work.operations(self.prompt),
            RUNNING,
            self.num_joining,
        )
        return [mixed_step, decode_step._replace(times=self.new - self.num_joining)]


@dataclass(frozen=True)
class SharedPrefix(Kind):
    """Benchmark row: the time to the first token of a prompt, with or without a cached prefix.

    Each run draws a new prefix, so that the prefix cache has none from earlier runs.
    """

    common: int = 0
    is_known: bool = False

    def run(self, session: Session) -> Sample:
        """Run the prompt; with ``is_known``, another prompt computes the prefix first."""
        common = session.tokens(self.common)
        if self.is_known:
            session.first_tokens(session.add([common + session.tokens(END_TOKENS)], 1))
        prompt = common + session.tokens(END_TOKENS)

        def prefill() -> int:
            session.first_tokens(session.add([prompt], 1))
            return len(prompt)

        return session.timed(prefill)

    def least_work(self, work: ModelWork) -> list[Step]:
        """Return one step for the prompt tokens that are not in the prefix cache."""
        cached_tokens = self.common if self.is_known else 0
        tokens = self.common + END_TOKENS - cached_tokens
        num_bytes = work.weight_bytes(tokens) + work.context_bytes(cached_tokens)
        return [Step(num_bytes, work.operations(tokens, cached_tokens), self.common + END_TOKENS)]


def kinds_of(
    sizes: Sizes, *, adapter: bool = False, speculates: bool = False, whole_prompts: bool = False
) -> Iterator[Kind]:
    """Yield the benchmark rows for the given sizes and options.

    Args:
        whole_prompts: a prompt must be computed in one step, so there is no row for extension.
    """
    options: dict[str, Any]
    new, first, batch = sizes.new, sizes.contexts[0], sizes.batch
    batch_context = sizes.batch_context
    pp, tg = f"pp{sizes.prompt}", f"tg{new}"
    yield Prefill("prefill", f"prefill of {sizes.prompt}", pp, tokens=sizes.prompt)
    for context in sizes.contexts:
        test = tg if context == 1 else f"{tg} @ d{context}"
        what = f"decode, context {context}"
        yield Decode(f"decode_{context}", what, test, context=context, new=new)
    if batch > 1:
        what = f"batch of {batch}, context {batch_context}"
        yield Decode(f"batch_{batch}", what, context=batch_context, new=new, batch=batch)
    if not whole_prompts:
        what = f"prefill of {sizes.prompt} after {sizes.cached_prefix}"
        test = f"{pp} @ d{sizes.cached_prefix}"
        yield Extend("extend", what, test, tokens=sizes.prompt, cached_prefix=sizes.cached_prefix)
    what = f"decode of {RUNNING}, prompts of {sizes.prompt} join"
    yield Mixed(
        "mixed",
        what,
        context=batch_context,
        new=new,
        prompt=sizes.prompt,
        num_joining=sizes.num_joining,
    )
    if sizes.shared:
        what = f"first token after {sizes.shared} + {END_TOKENS}"
        yield SharedPrefix("prefix_new", what, common=sizes.shared)
        what = f"the same, {sizes.shared} in the cache"
        options = {"common": sizes.shared, "is_known": True}
        yield SharedPrefix("prefix_known", what, beside="prefix_new", **options)
    if adapter:
        what, beside = f"decode, context {first}, adapter", f"decode_{first}"
        options = {
            "beside": beside,
            "context": first,
            "new": new,
            "adapter": ADAPTER,
        }
        yield Decode(f"{beside}_adapter", what, **options)
    if adapter and batch > 1:
        what, beside = f"batch of {batch}, context {batch_context}, adapter", f"batch_{batch}"
        options |= {"beside": beside, "context": batch_context, "batch": batch}
        yield Decode(f"{beside}_adapter", what, **options)
    if speculates:
        what = f"decode of a repeating prompt, context {first}"
        yield Decode("repeats", what, context=first, new=new, repeats=True)
        options = {"context": first, "new": new, "repeats": True, "plain": False}
        yield Decode("repeats_guessed", "the same, with draft tokens", beside="repeats", **options)


@contextmanager
def prepared(kind: Kind, session: Session, adapter: str | None) -> Iterator[None]:
    """Enable or disable speculation and the adapter for a row, within a ``with`` block."""
    with ExitStack() as stack:
        # Only Decode has these fields; all other kinds run without speculation and adapter.
        if getattr(kind, "plain", True):
            stack.enter_context(session.without_speculation())
        if getattr(kind, "adapter", None) is not None and adapter is not None:
            stack.enter_context(session.with_adapter(ADAPTER, adapter))
        yield


def _decode(work: ModelWork, batch: int, context: int) -> Step:
    num_bytes = work.weight_bytes(batch) + batch * work.context_bytes(context)
    return Step(num_bytes, work.operations(1, context, batch), batch)
