"""The checks of a communicator as one rank of several runs them.

The ranks run the same checks in the same order. After each call they tell each other, over a group
of the kit's own, whether it went well. After a wrong result they go on with the next collective,
and where the call raised in one of them they all leave the stage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interposer import Communicator, Platform, Ranks
from interposer.errors import RankError, described, foreign_errors
from interposer_testing._checks.collective import FUSED, CollectiveCase
from interposer_testing._checks.fault import Fault

Make = Callable[[Ranks, str], Communicator]
Cases = dict[str, list[CollectiveCase]]
"""The cases by collective."""

REPEATED = 1000
_PATIENCE_SECONDS = 20.0  # of a communicator whose ranks are all there
LIMIT_SECONDS = 2.0  # of one that loses a rank
_SLACK_SECONDS = 6.0  # in which a rank whose machine is busy raises
_SHARED = Path("/dev/shm")
_ALIKE = ("all_reduce", FUSED, "all_gather", "broadcast")  # of which every rank gets the same
_MAPS = Path("/proc/self/maps")


class StageLeft(Exception):
    """A call raised in some rank, so all leave the stage."""


class Rehearsal:
    """One rank's part in the checks of a communicator.

    Attributes:
        faults: those of this rank, by the label of what is checked; what is not in it was not.
        shared: files of shared memory that this process had in use.
    """

    def __init__(
        self, make: Make, ranks: Ranks, device: str, platform: Platform, properties: set[str]
    ) -> None:
        self._make = make
        self._ranks = replace(ranks, timeout_seconds=_PATIENCE_SECONDS)
        self._device = device
        self._platform = platform
        self._properties = properties
        self.faults: dict[str, list[Fault]] = {}
        self.shared: set[str] = set()
        self._here: list[Fault] = []

    def run(self, cases: Cases) -> None:
        """Check all collectives, together, and what the record promises; then close."""
        on = f"on {self._ranks.size} ranks"
        before = _children()
        with suppress(StageLeft), self._label(f"all collectives {on}"):
            communicator = self._made(self._ranks)
            try:
                for collective, some in cases.items():
                    with self._label(f"{collective} {on}"):
                        all(self._check(communicator, case) is not None for case in some)
                self._check_together(communicator, cases)
                self._check_promises(communicator, cases, on)
            finally:
                self._close(communicator)
            if extra := _children() - before:
                self._here.append(Fault("ranks", "close", f"processes {sorted(extra)} are left"))

    def lose(self, case: CollectiveCase, *, leaves: bool, tell: Callable[[], None]) -> None:
        """Check that the last rank, which hangs or leaves, is missed by all others in time.

        Args:
            leaves: it ends its process, and tells before.
            tell: sends what was found to whoever started the processes.
        """
        ranks = replace(self._ranks, timeout_seconds=LIMIT_SECONDS)
        label = "a rank that exits" if leaves else "a rank that hangs"
        with suppress(StageLeft), self._label(label):
            communicator = self._made(ranks)
            try:
                self._check(communicator, case)
                if ranks.rank == ranks.size - 1:
                    if leaves:
                        tell()
                        os._exit(0)
                else:
                    for again in ("", "again, "):
                        self._check_missed(communicator, case, again)
            finally:
                if leaves:
                    self._close(communicator)
                else:
                    dist.monitored_barrier(ranks.group, timedelta(seconds=60))
                    self._close(communicator)

    def _check_missed(self, communicator: Communicator, case: CollectiveCase, again: str) -> None:
        rank, start = self._ranks.rank, time.monotonic()
        reason = "returned, though a rank did not come"
        try:
            case.call(communicator, rank, case.fresh(rank, self._device))
            self._platform.synchronize(self._device)
        except RankError:
            reason = ""
        except foreign_errors() as error:
            reason = f"raised {described(error)}, not RankError"
        seconds = time.monotonic() - start
        if not reason and seconds > LIMIT_SECONDS + _SLACK_SECONDS:
            reason = f"raised after {seconds:.1f} s, though the limit is {LIMIT_SECONDS:g} s"
        if reason:
            self._here.append(Fault("ranks", f"{again}{case.collective}", reason))

    def _made(self, ranks: Ranks) -> Communicator:
        return self._agreed("construction", lambda: self._make(ranks, self._device))  # type: ignore[no-any-return]

    def _close(self, communicator: Communicator) -> None:
        self.shared |= _shared_files()
        for which in ("close", "close again"):
            try:
                communicator.close()
            except foreign_errors() as error:
                self._here.append(Fault.raised("ranks", which, error))

    def _check(self, communicator: Communicator, case: CollectiveCase) -> Tensor | None:
        """Check one call, and that all ranks have the same bits where they must.

        Returns: what this rank got; None where a rank got something wrong.
        """
        rank = self._ranks.rank
        x = case.fresh(rank, self._device)
        if case.collective == "broadcast" and rank != case.source:
            x.fill_(-1)
        before, faults, found, raised = x.clone(), list[Fault](), None, False
        try:
            found = case.call(communicator, rank, x)
            self._platform.synchronize(self._device)
        except foreign_errors() as error:
            faults, raised = [Fault.raised("call", str(case), error)], True
        else:
            faults = list(_departures(communicator, case, rank, found, x, before))
        digest = (0, 0) if faults or found is None else _digest(found)
        everyone = self._tell(raised, bool(faults), *digest)
        bits = {(first, second) for _, wrong, first, second in everyone if not wrong}
        if differ := case.collective in _ALIKE and len(bits) > 1:
            faults.append(Fault("determinism", str(case), "the ranks got different bits"))
        self._here += faults
        if any(raised for raised, *_ in everyone):
            raise StageLeft
        return None if differ or any(wrong for _, wrong, *_ in everyone) else found

    def _check_together(self, communicator: Communicator, cases: Cases) -> None:
        """Check many small calls, and collectives in turns; results stay as they were."""
        rank = self._ranks.rank
        firsts = [some[min(2, len(some) - 1)] for some in cases.values()]
        results = [(case, self._check(communicator, case)) for case in firsts]
        kept = [(case, found, found.clone()) for case, found in results if found is not None]
        inputs = [case.fresh(rank, self._device) for case in firsts]

        def repeat() -> list[Fault]:
            faults = list[Fault]()
            for count in range(REPEATED // len(firsts) // 2 * 2):
                for case, x in zip(firsts, inputs, strict=True):
                    x.zero_()
                    if count % 2 == 0:
                        x.copy_(case.given[rank])
                    found = case.call(communicator, rank, x)
                    if count % 2 == 0 and len(faults) < 3:
                        faults += case.faults(rank, found)
                    elif count % 2 and case.collective != FUSED and bool(found.count_nonzero()):
                        faults.append(Fault("value", str(case), "zeros gave something else"))
            return faults[:3]

        faults = self._agreed("repeated calls", repeat)
        for case, found, copy in kept:
            if not torch.equal(found, copy):
                reason = "a result that was kept was overwritten by later calls"
                faults.append(Fault("mutation", str(case), reason))
        self._here += [replace(fault, where=f"repeated: {fault.where}") for fault in faults]

    def _check_promises(self, communicator: Communicator, cases: Cases, on: str) -> None:
        sums = [case for case in cases.get("all_reduce", ()) if not (case.exact or case.strided)]
        for case in sums:
            rows = range(0, case.sizes[0], max(1, case.sizes[0] // 3))
            if "deterministic" in self._properties:
                with self._label(f"repeated sums {on}"):
                    self._compare(communicator, case, slice(None))
            if "batch_invariant" in self._properties:
                with self._label(f"sums of parts {on}"):
                    for begin in rows:
                        self._compare(communicator, case, slice(begin, begin + rows.step - 1))
        if "graph_safe" in self._properties and self._platform.provides("capture_graph"):
            for some in cases.values():
                with self._label(f"replays {on}"):
                    self._check_replay(communicator, some[-2])

    def _compare(self, communicator: Communicator, case: CollectiveCase, part: slice) -> None:
        rank = self._ranks.rank

        def twice() -> list[Fault]:
            whole, some = case.fresh(rank, self._device), case.fresh(rank, self._device)[part]
            expected = communicator.all_reduce(whole)[part].clone()
            if torch.equal(communicator.all_reduce(some.clone()), expected):
                return []
            check = "determinism" if part == slice(None) else "batch"
            return [Fault(check, str(case), "the same elements were added up to other bits")]  # type: ignore[arg-type]

        self._here += self._agreed(str(case), twice)

    def _check_replay(self, communicator: Communicator, case: CollectiveCase) -> None:
        rank, results = self._ranks.rank, list[Tensor]()

        def replayed() -> list[Fault]:
            x = case.fresh(rank, self._device).zero_()

            def step() -> Tensor:
                results[:] = [case.call(communicator, rank, x)]
                return results[0]

            replay = self._platform.capture_graph(step)
            faults = list[Fault]()
            for _ in range(3):
                x.copy_(case.given[rank])
                replay()
                self._platform.synchronize(self._device)
                faults += case.faults(rank, results[0])
            return [replace(fault, check="graph") for fault in faults]

        self._here += self._agreed(f"replay of {case}", replayed)

    def _agreed(self, where: str, call: Callable[[], Any]) -> Any:
        """Return what ``call`` does; all ranks leave if it raises in one of them."""
        result, raised = None, False
        try:
            result = call()
            self._platform.synchronize(self._device)
        except foreign_errors() as error:
            raised = True
            self._here.append(Fault.raised("call", where, error))
        if any(raised for (raised,) in self._tell(raised)):
            raise StageLeft
        return result

    def _tell(self, *numbers: int) -> list[list[int]]:
        """Return the numbers of all ranks."""
        own = torch.tensor(numbers, dtype=torch.int64)
        everyone = [torch.empty_like(own) for _ in range(self._ranks.size)]
        dist.all_gather(everyone, own, group=self._ranks.group)
        return [numbers.tolist() for numbers in everyone]

    @contextmanager
    def _label(self, label: str) -> Iterator[None]:
        """Put the faults of a ``with`` block under ``label``."""
        outer, self._here = self._here, self.faults.setdefault(label, [])
        try:
            yield
        finally:
            self._here = outer


def _departures(
    communicator: Communicator,
    case: CollectiveCase,
    rank: int,
    found: Any,
    x: Tensor,
    before: Tensor,
) -> Iterator[Fault]:
    """Yield what is wrong with a result, and with what was done to ``x``."""
    yield from case.faults(rank, found)
    declared = case.collective == "all_reduce" and communicator.in_place
    if (declared or case.collective == "broadcast") and found is not x:
        yield Fault("alias", str(case), "another tensor than x was returned")
    if case.collective not in ("all_reduce", FUSED, "broadcast") and not torch.equal(x, before):
        yield Fault("mutation", str(case), "x was written")


def _digest(x: Tensor) -> tuple[int, int]:
    """Return numbers that differ where bits do."""
    flat = x.detach().cpu().contiguous().view(-1).view(torch.uint8).to(torch.int64)
    places = torch.arange(1, len(flat) + 1)
    return int(flat.sum()), int((flat * places).sum())


def _children() -> set[str]:
    """Return the processes that this one has started, where the system says so."""
    found = Path("/proc/self/task").glob("*/children")
    return {pid for path in found for pid in path.read_text().split()}


def _shared_files() -> set[str]:
    if not _MAPS.exists():
        return set()
    lines = [line.split(maxsplit=5) for line in _MAPS.read_text().splitlines()]
    paths = {parts[5] for parts in lines if len(parts) == 6}
    return {path for path in paths if path.startswith(f"{_SHARED}/") and "(deleted)" not in path}
