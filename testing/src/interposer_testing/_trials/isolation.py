"""Trials in processes of their own, so that a crash or hang is the fault of one trial.

Each process has its shard of the trials. It tells of each before it runs and after; a crash is a
fault of the trial that was running. Then another process goes on behind it, without the
candidate that crashed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from queue import SimpleQueue

import torch

from interposer import Device, Registry
from interposer.errors import ConfigError
from interposer_testing._trials.outcome import Outcome, Progress, Scope, outcomes
from interposer_testing._trials.shard import Shard, Told
from interposer_testing._trials.verification import declared

# A process takes seconds to start, and this many candidates take longer.
_ENOUGH_CANDIDATES = 24


def side_by_side(platform: str = "") -> Callable[..., Iterable[Outcome]]:
    """Return the runner of trials: as many processes as pay, or this one.

    On a CPU, these are one for so many candidates, and not more than there are cores; a process
    beside another on one accelerator would disturb its timing and take of its memory.
    """

    def run(
        registry: Registry, device: Device, scope: Scope, progress: Progress | None = None
    ) -> Iterable[Outcome]:
        jobs = 1
        if device.torch_device == "cpu" and not scope.op and _is_installed(registry, scope):
            num_candidates = sum(1 for _ in declared(registry, scope))
            jobs = min(torch.get_num_threads(), num_candidates // _ENOUGH_CANDIDATES)
        chosen = Isolation(platform, jobs) if jobs > 1 else outcomes
        return chosen(registry, device, scope, progress)

    return run


class Isolation:
    """Runs the trials of a verification in child processes.

    Only installed plugins are found there.
    """

    def __init__(self, platform: str = "", jobs: int = 1, limit_seconds: float = 600.0) -> None:
        """Set the platform and number of children, and the seconds after which a trial hangs.

        Raises: ConfigError: there are to be none.
        """
        if jobs < 1:
            raise ConfigError(f"{jobs} processes can run nothing. Try: --jobs 1, or more")
        self._platform = platform
        self._jobs = jobs
        self._limit_seconds = limit_seconds

    def __call__(
        self, registry: Registry, device: Device, scope: Scope, progress: Progress | None = None
    ) -> Iterator[Outcome]:
        """Yield what came of each trial; those after a crash of their candidate are not run.

        Raises: InterposerError: the plugin was given in code, or a child ended between trials.
        """
        if not _is_installed(registry, scope):
            raise ConfigError(
                f"{scope.distribution} is not installed, so another process cannot find it. "
                "Try: install it, or leave out --isolate and --jobs"
            )
        told = SimpleQueue[Told]()
        shards = [
            Shard({"scope": asdict(scope), "platform": self._platform}, part, self._jobs)
            for part in range(self._jobs)
        ]
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                for shard in shards:
                    pool.submit(shard.run, told.put, self._limit_seconds)
                yield from self._in_order(told, progress)
            finally:
                for shard in shards:
                    shard.stop()

    def _in_order(self, told: SimpleQueue[Told], progress: Progress | None) -> Iterator[Outcome]:
        """Yield the outcomes of all shards in the order of their numbers."""
        early, next_one, running = dict[int, Outcome](), 0, self._jobs
        while running:
            match told.get():
                case None:
                    running -= 1
                case BaseException() as error:
                    raise error
                case str() as name:
                    if progress is not None:
                        progress(next_one + len(early), name)
                case number, outcome:
                    early[number] = outcome
            while next_one in early:
                yield early.pop(next_one)
                next_one += 1


def _is_installed(registry: Registry, scope: Scope) -> bool:
    return any(
        plugin.source.installed is not None
        for plugin in registry.plugins.loaded
        if plugin.distribution == scope.distribution
    )
