"""Computation of token bit masks in another thread, with a time limit for each mask."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

Compute = Callable[[], bytes]


class MaskThread:
    """Computes the token bit masks of one step, abandoning masks that exceed the time limit.

    Python cannot stop a thread inside llguidance. So when a mask exceeds the limit, its thread is
    abandoned: it ends after that mask, and a new thread computes the remaining masks. The limit is
    on processor time, so that a busy machine causes no abandoned masks.
    """

    def __init__(self, seconds: float) -> None:
        """Set the time limit. The thread starts with the first mask.

        Args:
            seconds: Processor time for one mask, in seconds.
        """
        self._seconds = seconds
        self._worker: _Worker | None = None

    def compute(self, functions: Sequence[Compute]) -> list[bytes | None]:
        """Call the functions in order, and return the masks; None for each abandoned mask.

        Raises: Exception: an error of a function.
        """
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
            # A mask may be completed between the check of its time and this line.
            results.extend(list(batch.results))
            if self._worker is None and len(results) < len(functions):
                results.append(None)
        return results

    def close(self) -> None:
        """Let the thread finish the current masks, then end."""
        if self._worker is not None:
            self._worker.batches.put(None)
            self._worker = None


class _Batch:
    """Token bit masks that a worker thread computes one after the other.

    Attributes:
        functions: Functions that compute the masks.
        results: Completed masks, in the order of the functions.
        error: Error of a function; None if there was none.
        started: Processor time of the worker when the current function started, in seconds.
        abandoned: Whether the caller no longer waits for the remaining masks.
        done: Set when all masks are completed or a function failed.
    """

    def __init__(self, functions: Sequence[Compute]) -> None:
        self.functions = functions
        self.results: list[bytes] = []
        self.error: Exception | None = None
        self.started: float | None = None
        self.abandoned = False
        self.done = threading.Event()


class _Worker:
    """A thread that computes batches of masks from a queue; None in the queue ends the thread."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="interposer-masks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (batch := self.batches.get()) is not None:
            try:
                for function in batch.functions:
                    batch.started = time.thread_time()
                    batch.results.append(function())
                    if batch.abandoned:
                        return
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits for the batch
                batch.error = error
            batch.done.set()

    def busy_seconds(self, batch: _Batch) -> float:
        """Return the processor time of the mask that is being computed, in seconds."""
        started = batch.started
        if started is None or self._thread.ident is None:
            return 0.0
        try:
            clock = time.pthread_getcpuclockid(self._thread.ident)
            return time.clock_gettime(clock) - started
        except (AttributeError, OSError):  # no such clock on this system: wall time counts
            return float("inf")
