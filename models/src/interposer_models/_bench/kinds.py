"""The kinds of batch that a benchmark runs, each with the least work that any engine must do.

A kind is one row of the table: requests, and the steps that compute them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from interposer_models._bench.session import Sample, Session
from interposer_models._bench.sizes import END_TOKENS, RUNNING, Sizes
from interposer_models._bench.work import ModelWork

ADAPTER = "bench"


class Step(NamedTuple):
    """The least work of a step: bytes to read, operations, and tokens that count for the rate.

    Attributes:
        times: number of such steps in a run.
    """

    num_bytes: float
    operations: float
    tokens: int
    times: int = 1


@dataclass(frozen=True)
class Kind(ABC):
    """One row of the benchmark.

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
        """List the steps of a run with the least work of each; empty if unknown."""
        return []


@dataclass(frozen=True)
class Prefill(Kind):
    """The prefill of a prompt, up to the first token."""

    tokens: int = 0

    def run(self, session: Session) -> Sample:
        prompt = session.tokens(self.tokens)

        def prefill() -> int:
            session.first_tokens(session.add([prompt], 1))
            return self.tokens

        return session.timed(prefill)

    def least_work(self, work: ModelWork) -> list[Step]:
        """Return one step that reads the weights."""
        return [Step(work.weight_bytes(self.tokens), work.operations(self.tokens), self.tokens)]


@dataclass(frozen=True)
class Decode(Kind):
    """Greedy decoding after a context, for one request or a batch.

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
        added = session.add_decoding(prompts, self.new, self.adapter)
        return session.timed(lambda: session.decode(added, self.new))

    def least_work(self, work: ModelWork) -> list[Step]:
        """Return steps that read weights and caches; none with speculative decoding."""
        if not self.plain:
            return []
        # The average context of the decoded tokens.
        middle = self.context + self.new // 2
        return [_decode(work, self.batch, middle)._replace(times=self.new)]


@dataclass(frozen=True)
class Extend(Kind):
    """The prefill of a prompt with a cached prefix."""

    tokens: int = 0
    behind: int = 0

    def run(self, session: Session) -> Sample:
        """Run the prefill; a step takes at most ``behind`` tokens, so step one fills the cache."""
        (sequence,) = session.add([session.tokens(self.behind + self.tokens)], 1)
        session.until(lambda: sequence.num_computed >= self.behind)

        def prefill() -> int:
            session.first_tokens([sequence])
            return self.tokens

        return session.timed(prefill)

    def least_work(self, work: ModelWork) -> list[Step]:
        """Return one step that reads the weights and the cache."""
        num_bytes = work.weight_bytes(self.tokens) + work.context_bytes(self.behind)
        return [Step(num_bytes, work.operations(self.tokens, self.behind), self.tokens)]


@dataclass(frozen=True)
class Mixed(Kind):
    """Decoding requests while prompts join: measures new tokens and the gaps between tokens."""

    context: int = 0
    new: int = 0
    prompt: int = 0
    joins: int = 0

    def run(self, session: Session) -> Sample:
        """Decode and measure; a prompt joins every eighth step."""
        prompts = [session.tokens(self.context) for _ in range(RUNNING)]
        running = session.add_decoding(prompts, self.new)
        joining = iter([session.tokens(self.prompt) for _ in range(self.joins)])
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
        """Return the steps with a prompt and without one."""
        decode_step = _decode(work, RUNNING, self.context + self.new // 2)
        mixed_step = Step(
            decode_step.num_bytes
            # Weights are read once for all tokens of the step.
            - work.weight_bytes(RUNNING)
            + work.weight_bytes(RUNNING + self.prompt),
            decode_step.operations + work.operations(self.prompt),
            RUNNING,
            self.joins,
        )
        return [mixed_step, decode_step._replace(times=self.new - self.joins)]


@dataclass(frozen=True)
class SharedPrefix(Kind):
    """The first token of a prompt, with or without a prefix cached from an earlier prompt.

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
        """Return one step for the tokens that are not in the cache."""
        cached_tokens = self.common if self.is_known else 0
        tokens = self.common + END_TOKENS - cached_tokens
        num_bytes = work.weight_bytes(tokens) + work.context_bytes(cached_tokens)
        return [Step(num_bytes, work.operations(tokens, cached_tokens), self.common + END_TOKENS)]


def kinds_of(
    sizes: Sizes, *, adapter: bool = False, speculates: bool = False, whole_prompts: bool = False
) -> Iterator[Kind]:
    """Yield the rows for the given sizes and options.

    Args:
        whole_prompts: a prompt must be computed in one step, so there is no row for extension.
    """
    options: dict[str, Any]
    new, first, batch = sizes.new, sizes.contexts[0], sizes.batch
    together = sizes.together
    pp, tg = f"pp{sizes.prompt}", f"tg{new}"
    yield Prefill("prefill", f"prefill of {sizes.prompt}", pp, tokens=sizes.prompt)
    for context in sizes.contexts:
        test = tg if context == 1 else f"{tg} @ d{context}"
        what = f"decode, context {context}"
        yield Decode(f"decode_{context}", what, test, context=context, new=new)
    if batch > 1:
        what = f"batch of {batch}, context {together}"
        yield Decode(f"batch_{batch}", what, context=together, new=new, batch=batch)
    if not whole_prompts:
        what = f"prefill of {sizes.prompt} behind {sizes.behind}"
        test = f"{pp} @ d{sizes.behind}"
        yield Extend("extend", what, test, tokens=sizes.prompt, behind=sizes.behind)
    what = f"decode of {RUNNING}, prompts of {sizes.prompt} join"
    yield Mixed("mixed", what, context=together, new=new, prompt=sizes.prompt, joins=sizes.joins)
    if sizes.shared:
        what = f"first token behind {sizes.shared} + {END_TOKENS}"
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
        what, beside = f"batch of {batch}, context {together}, adapter", f"batch_{batch}"
        options |= {"beside": beside, "context": together, "batch": batch}
        yield Decode(f"{beside}_adapter", what, **options)
    if speculates:
        what = f"decode of a repeating prompt, context {first}"
        yield Decode("repeats", what, context=first, new=new, repeats=True)
        options = {"context": first, "new": new, "repeats": True, "plain": False}
        yield Decode("repeats_guessed", "the same, with draft tokens", beside="repeats", **options)


@contextmanager
def prepared(kind: Kind, session: Session, adapter: str | None) -> Iterator[None]:
    """Switch speculation and the adapter on or off for a kind, within a ``with`` block."""
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
