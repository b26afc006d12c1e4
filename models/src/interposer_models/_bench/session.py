"""Requests of a benchmark, run step by step, and the time of their steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from interposer.errors import ConfigError
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.sequence import Sequence
from interposer_models._language_model import LanguageModel


@dataclass
class Sample:
    """One run of a row.

    Attributes:
        tokens: that count for its rate.
        model_s: seconds of these within the model, where it is watched and no graph.
        gaps: seconds between the tokens of running requests, where these are asked for.
    """

    seconds: float
    tokens: int
    model_s: float | None = None
    gaps: list[float] = field(default_factory=list)


class Session:
    """Runs requests of random tokens in the engine of a model, where nothing else runs."""

    def __init__(self, lm: LanguageModel, seed: int = 0) -> None:
        self.lm = lm
        self._calls: list[float] = []
        self._random = random.Random(seed)
        self._vocab_size = lm.engine.model.config.vocab_size
        self._running: list[Sequence] = []

    def tokens(self, count: int) -> list[int]:
        """Return new token ids, drawn anew, so that no cache of prefixes has them."""
        return self._random.choices(range(self._vocab_size), k=count)

    def repeating(self, count: int, period: int = 16) -> list[int]:
        """Return token ids that repeat themselves."""
        some = self.tokens(period)
        return (some * (count // period + 1))[:count]

    def add(
        self, prompts: list[list[int]], new_tokens: int, adapter: str | None = None
    ) -> list[Sequence]:
        """Queue requests that end after so many tokens, whatever they are."""
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, adapter=adapter)
        added = [self.lm.engine.add(prompt, params) for prompt in prompts]
        self._running += added
        return added

    def add_decoding(
        self, prompts: list[list[int]], new_tokens: int, adapter: str | None = None
    ) -> list[Sequence]:
        """Queue requests, and step until each has a first token.

        Those whose prompts were computed in an earlier step are ahead of others by then, so that
        they may have as many more.
        """
        step = self.lm.engine.scheduler.max_step_tokens
        ahead = sum(map(len, prompts)) // step + 2
        added = self.add(prompts, new_tokens + ahead, adapter)
        self.first_tokens(added)
        return added

    def until(self, done: Callable[[], bool]) -> None:
        """Step until something holds.

        Raises: ConfigError: nothing is left to compute before.
        """
        while not done():
            if not self.lm.engine.busy:
                raise ConfigError("The benchmark's requests ended early. Try: another model")
            self.lm.engine.step()

    def first_tokens(self, added: list[Sequence]) -> None:
        """Step until each of some requests has a token."""
        self.until(lambda: all(sequence.output for sequence in added))

    def decode(self, added: list[Sequence], count: int) -> int:
        """Step until each of some requests has ``count`` tokens more; return all that came."""
        before = [len(sequence.output) for sequence in added]

        def grown() -> list[int]:
            return [len(s.output) - b for s, b in zip(added, before, strict=True)]

        self.until(lambda: min(grown()) >= count)
        return sum(grown())

    def timed(self, call: Callable[[], int]) -> Sample:
        """Return the seconds of a call, which returns tokens, with all that it queued."""
        self.settle()
        self._calls.clear()
        start = time.perf_counter()
        tokens = call()
        self.settle()
        seconds = time.perf_counter() - start
        # Where steps are graphs, nobody calls the model.
        return Sample(seconds, tokens, sum(self._calls) if self._calls else None)

    def settle(self) -> None:
        """Wait until the device has done its work."""
        placement = self.lm.placement
        placement.platform.synchronize(placement.device.torch_device)

    def end(self) -> None:
        """Cancel what still runs."""
        for sequence in self._running:
            self.lm.engine.cancel(sequence)
        self._running.clear()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time the calls of the model within a ``with`` block; the device is waited for."""
        started = 0.0

        def begin(*_: Any) -> None:
            nonlocal started
            self.settle()
            started = time.perf_counter()

        def finish(*_: Any) -> None:
            self.settle()
            self._calls.append(time.perf_counter() - started)

        model = self.lm.engine.model
        handles = model.register_forward_pre_hook(begin), model.register_forward_hook(finish)
        try:
            yield
        finally:
            self._calls.clear()
            for handle in handles:
                handle.remove()

    @contextmanager
    def unspeculated(self) -> Iterator[None]:
        """Decode without guesses within a ``with`` block."""
        engine = self.lm.engine
        kept, engine.speculation = engine.speculation, None
        try:
            yield
        finally:
            engine.speculation = kept

    @contextmanager
    def adapted(self, name: str, folder: str) -> Iterator[None]:
        """Have an adapter within a ``with`` block; layers are as without any outside of it."""
        self.lm.load_adapter(name, folder)
        try:
            yield
        finally:
            self.end()
            self.lm.remove_adapter(name)
