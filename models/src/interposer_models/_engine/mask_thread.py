"""Bit masks computed in a thread of their own, so that one that takes too long is given up."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

Compute = Callable[[], bytes]


class MaskThread:
    """Computes the bit masks of a step.

    A mask that takes longer than its time is left to the thread that computes it, which ends
    after it, and the others get a new one. The time is that of the processor, so that a busy
    machine gives nothing up.
    """

    def __init__(self, seconds: float) -> None:
        """Start nothing yet.

        Args:
            seconds: of processor time for one mask.
        """
        self._seconds = seconds
        self._worker: _Worker | None = None

    def compute(self, functions: Sequence[Compute]) -> list[bytes | None]:
        """Return what each function returns, in order; None for one that was given up."""
        results: list[bytes | None] = []
        while len(results) < len(functions):
            if self._worker is None:
                self._worker = _Worker()
            batch = _Batch(functions[len(results) :])
            self._worker.batches.put(batch)
            while not batch.done.wait(self._seconds):
                if self._worker.busy_seconds(batch) > self._seconds:
                    batch.abandoned = True
                    self._worker.batches.put(None)
                    self._worker = None
                    break
            if batch.error is not None:
                raise batch.error
            # One that was given up may have come to its end since.
            results.extend(list(batch.results))
            if self._worker is None and len(results) < len(functions):
                results.append(None)
        return results

    def close(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._worker.batches.put(None)
            self._worker = None


class _Batch:
    """Masks to be computed one after the other.

    Attributes:
        results: those that are there.
        error: that computing one raised.
        begun: the worker's processor time at which the present one was begun.
        abandoned: whether nobody waits for the rest.
    """

    def __init__(self, functions: Sequence[Compute]) -> None:
        self.functions = functions
        self.results: list[bytes] = []
        self.error: Exception | None = None
        self.begun: float | None = None
        self.abandoned = False
        self.done = threading.Event()


class _Worker:
    """A thread with its queue."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="interposer-masks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (batch := self.batches.get()) is not None:
            try:
                for function in batch.functions:
                    batch.begun = time.thread_time()
                    batch.results.append(function())
                    if batch.abandoned:
                        return
            except Exception as error:  # noqa: BLE001 - raised where the batch is waited for
                batch.error = error
            batch.done.set()

    def busy_seconds(self, batch: _Batch) -> float:
        """Return the processor time that the present mask of a batch has taken."""
        begun = batch.begun
        if begun is None or self._thread.ident is None:
            return 0.0
        try:
            clock = time.pthread_getcpuclockid(self._thread.ident)
            return time.clock_gettime(clock) - begun
        except (AttributeError, OSError):  # no such clock here: it has had all of the time
            return float("inf")
