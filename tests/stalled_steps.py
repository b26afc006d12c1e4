"""Steps of an engine that leave every request unfinished until the test lets them go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from interposer_engine import LanguageModel

__all__ = ["StalledSteps", "stalled_steps"]


class StalledSteps:
    """Steps that compute the first token of each request and nothing after it.

    So requests hold their pages and stay unfinished, however long the other threads take.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self._scheduler = lm.engine.scheduler
        self._step = lm.engine.step
        self._released = threading.Event()

    def __call__(self) -> Any:
        scheduler = self._scheduler
        can_start = scheduler.waiting and len(scheduler.running) < scheduler.max_sequences
        lacks_first_token = any(not sequence.output for sequence in scheduler.running)
        if can_start or lacks_first_token or self._released.is_set():
            return self._step()
        time.sleep(0)  # lets another thread run
        return []

    def release(self) -> None:
        """Let all later steps compute."""
        self._released.set()


@contextmanager
def stalled_steps(lm: LanguageModel) -> Iterator[StalledSteps]:
    """Let the engine of a model take ``StalledSteps`` within a ``with`` block."""
    steps = StalledSteps(lm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.engine, "step", steps)
        yield steps
