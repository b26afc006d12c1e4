"""Run the requests of a benchmark step by step, and measure the time of the steps."""

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
        tokens: that count for the rate.
        model_s: seconds within the model; None if not profiled, or if steps are captured graphs.
        gaps: seconds between the tokens of running requests, if measured.
    """

    seconds: float
    tokens: int
    model_s: float | None = None
    gaps: list[float] = field(default_factory=list)


class Session:
    """Runs requests of random tokens in a model's engine, with no other requests."""

    def __init__(self, lm: LanguageModel, seed: int = 0) -> None:
        self.lm = lm
        self._calls: list[float] = []
        self._random = random.Random(seed)
        self._vocab_size = lm.engine.model.config.vocab_size
        self._running: list[Sequence] = []

    def tokens(self, count: int) -> list[int]:
        """Draw random token ids, which no prefix cache contains."""
        return self._random.choices(range(self._vocab_size), k=count)

    def repeating(self, count: int, period: int = 16) -> list[int]:
        """Draw token ids that repeat with a period."""
        repeated = self.tokens(period)
        return (repeated * (count // period + 1))[:count]

    def add(
        self, prompts: list[list[int]], new_tokens: int, adapter: str | None = None
    ) -> list[Sequence]:
        """Queue requests that end after ``new_tokens`` tokens, with end tokens ignored."""
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, adapter=adapter)
        added = [self.lm.engine.add(prompt, params) for prompt in prompts]
        self._running += added
        return added

    def add_decoding(
        self, prompts: list[list[int]], new_tokens: int, adapter: str | None = None
    ) -> list[Sequence]:
        """Queue requests, and step until each has a first token.

        Prompts that were computed in an earlier step produce more tokens until then, so every
        request gets a margin of new tokens.
        """
        step_tokens = self.lm.engine.scheduler.max_step_tokens
        margin_tokens = sum(map(len, prompts)) // step_tokens + 2
        added = self.add(prompts, new_tokens + margin_tokens, adapter)
        self.first_tokens(added)
        return added

    def until(self, is_done: Callable[[], bool]) -> None:
        """Step until ``is_done()`` is true.

        Raises: ConfigError: the engine has nothing left to compute.
        """
        while not is_done():
            if not self.lm.engine.busy:
                raise ConfigError("The benchmark's requests ended early. Try: another model")
            self.lm.engine.step()

    def first_tokens(self, added: list[Sequence]) -> None:
        """Step until each of the requests has a token."""
        self.until(lambda: all(sequence.output for sequence in added))

    def decode(self, added: list[Sequence], count: int) -> int:
        """Step until each request has ``count`` more tokens; return the number of new tokens."""
        old_counts = [len(sequence.output) for sequence in added]

        def new_counts() -> list[int]:
            return [len(s.output) - old for s, old in zip(added, old_counts, strict=True)]

        self.until(lambda: min(new_counts()) >= count)
        return sum(new_counts())

    def timed(self, call: Callable[[], int]) -> Sample:
        """Measure the seconds of a call, which returns a token count, and of all queued work."""
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
        """Load a LoRA adapter within a ``with`` block, and remove the adapter after."""
        self.lm.load_adapter(name, folder)
        try:
            yield
        finally:
            self.end()
            self.lm.remove_adapter(name)
