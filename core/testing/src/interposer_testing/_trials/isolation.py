"""Trials in child processes, so that a crash or hang is the fault of one trial only.

Each process runs its shard of the trials and reports the start and the outcome of every trial.
After a crash, the running trial fails, and a new process continues without the candidate that
crashed. On a CPU, the trials that only call a kernel run first, and call it in yet another process,
which has no checks. Only the trials after them import kernels into the process that judges.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from queue import SimpleQueue

import torch

from interposer import Device, Registry
from interposer.errors import ConfigError
from interposer_testing._trials.outcome import Outcome, Progress, Scope, outcomes
from interposer_testing._trials.shard import Message, Shard
from interposer_testing._trials.verification import declared

# Fewer candidates take less time than the start of a process, which takes seconds.
_MIN_CANDIDATES_PER_PROCESS = 24


def side_by_side(platform: str = "") -> Callable[..., Iterable[Outcome]]:
    """Return a function that runs trials in child processes.

    On a CPU, the number of processes grows with the number of candidates, up to the number of
    cores. On an accelerator, one process runs all trials: several would share the device memory
    and disturb each other. A plugin that is registered in code runs in this process.
    """

    def run(
        registry: Registry, device: Device, scope: Scope, progress: Progress | None = None
    ) -> Iterable[Outcome]:
        jobs, is_installed = 1, _is_installed(registry, scope)
        if device.torch_device == "cpu" and not scope.op and is_installed:
            num_candidates = sum(1 for _ in declared(registry, scope))
            jobs = min(torch.get_num_threads(), num_candidates // _MIN_CANDIDATES_PER_PROCESS)
        runner = Isolation(platform, max(1, jobs)) if is_installed else outcomes
        return runner(registry, device, scope, progress)

    return run


class Isolation:
    """Runs the trials of a verification in child processes, which find only installed plugins."""

    def __init__(self, platform: str = "", jobs: int = 1, limit_seconds: float = 600.0) -> None:
        """Create a runner of trials in child processes.

        Args:
            platform: platform to run on; empty for the configured one.
            jobs: number of child processes.
            limit_seconds: time limit of one trial.
        Raises: ConfigError: ``jobs`` is less than 1.
        """
        if jobs < 1:
            raise ConfigError(f"{jobs} processes can run nothing. Try: --jobs 1, or more")
        self._platform = platform
        self._jobs = jobs
        self._limit_seconds = limit_seconds

    def __call__(
        self, registry: Registry, device: Device, scope: Scope, progress: Progress | None = None
    ) -> Iterator[Outcome]:
        """Run the trials and yield the outcomes; a candidate that crashed is not run again.

        Raises: InterposerError: the plugin is not installed, or a child ended between two trials.
        """
        if not _is_installed(registry, scope):
            raise ConfigError(
                f"{scope.distribution} is not installed, so another process cannot find it. "
                "Try: install it, or leave out --jobs"
            )
        messages = SimpleQueue[Message]()
        # A kernel on an accelerator returns memory of the device, which no other process can read.
        is_separate = device.torch_device == "cpu" and sys.platform == "linux" and not scope.host
        request = {
            "scope": asdict(scope),
            "platform": self._platform,
            "is_separate": is_separate,
        }
        shards = [Shard(request, part, self._jobs) for part in range(self._jobs)]
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                for shard in shards:
                    pool.submit(shard.run, messages.put, self._limit_seconds)
                yield from self._in_order(messages, len(shards), progress)
            finally:
                for shard in shards:
                    shard.stop()

    def _in_order(
        self, messages: SimpleQueue[Message], num_shards: int, progress: Progress | None
    ) -> Iterator[Outcome]:
        """Yield the outcomes of all shards, sorted by number."""
        # An outcome waits in ``early`` until all earlier trials have finished.
        early, next_number, num_running = dict[int, Outcome](), 0, num_shards
        while num_running:
            match messages.get():
                case None:
                    num_running -= 1
                case BaseException() as error:
                    raise error
                case str() as name:
                    if progress is not None:
                        progress(next_number + len(early), name)
                case number, outcome:
                    early[number] = outcome
            while next_number in early:
                yield early.pop(next_number)
                next_number += 1


def _is_installed(registry: Registry, scope: Scope) -> bool:
    return any(
        plugin.source.installed is not None
        for plugin in registry.plugins.loaded
        if plugin.distribution == scope.distribution
    )
