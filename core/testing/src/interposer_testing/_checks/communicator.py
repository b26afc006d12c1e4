"""The checks of a communicator, run on one of several ranks.

All ranks run the same checks in the same order. After each call, the ranks exchange outcomes
over a process group of the kit. After a wrong result, all ranks continue with the next collective.
If the call raised on any rank, all ranks stop.
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
"""Test cases by name of the collective."""

REPEATED = 1000
_TIMEOUT_SECONDS = 20.0  # of the communicator while all ranks are alive
LIMIT_SECONDS = 2.0  # of the communicator that loses a rank
_SLACK_SECONDS = 6.0  # more time for the timeout, because the machine may be busy
_SHARED = Path("/dev/shm")
# Collectives whose result is the same on every rank.
_SAME_RESULT = ("all_reduce", FUSED, "all_gather", "broadcast")
_MAPS = Path("/proc/self/maps")


class RanksStopped(Exception):
    """A call raised on at least one rank, so all ranks stop."""


class CommunicatorChecks:
    """The checks of a communicator on one rank.

    Attributes:
        faults: the faults of this rank by label of the check; a check without entry did not run.
        shared: files of shared memory that this process had mapped.
    """

    def __init__(
        self, make: Make, ranks: Ranks, device: str, platform: Platform, properties: set[str]
    ) -> None:
        self._make = make
        self._ranks = replace(ranks, timeout_seconds=_TIMEOUT_SECONDS)
        self._device = device
        self._platform = platform
        self._properties = properties
        self.faults: dict[str, list[Fault]] = {}
        self.shared: set[str] = set()
        self._current_faults: list[Fault] = []

    def run(self, cases: Cases) -> None:
        """Check each collective alone, all alternately, and properties; close the communicator."""
        suffix = f"on {self._ranks.size} ranks"
        before = _children()
        with suppress(RanksStopped), self._label(f"all collectives {suffix}"):
            communicator = self._create(self._ranks)
            try:
                for collective, cases_of_collective in cases.items():
                    with self._label(f"{collective} {suffix}"):
                        # ``all`` stops at the first wrong result.
                        all(
                            self._check(communicator, case) is not None
                            for case in cases_of_collective
                        )
                self._check_together(communicator, cases)
                self._check_properties(communicator, cases, suffix)
            finally:
                self._close(communicator)
            if extra := _children() - before:
                self._current_faults.append(
                    Fault("ranks", "close", f"processes {sorted(extra)} still run")
                )

    def lose(self, case: CollectiveCase, *, leaves: bool, report: Callable[[], None]) -> None:
        """Check that all other ranks raise in time when the last rank hangs or exits.

        Args:
            leaves: the last rank exits; otherwise it hangs.
            report: sends the results of this rank to the parent process, before the exit.
        """
        ranks = replace(self._ranks, timeout_seconds=LIMIT_SECONDS)
        label = "a rank that exits" if leaves else "a rank that hangs"
        with suppress(RanksStopped), self._label(label):
            communicator = self._create(ranks)
            try:
                self._check(communicator, case)
                if ranks.rank == ranks.size - 1:
                    if leaves:
                        report()
                        os._exit(0)
                else:
                    # The second call must raise too: a lost rank does not come back.
                    for prefix in ("", "again, "):
                        self._check_rank_error(communicator, case, prefix)
            finally:
                if leaves:
                    self._close(communicator)
                else:
                    # Wait until all ranks have timed out, so that the last rank only "hangs" here.
                    dist.monitored_barrier(ranks.group, timedelta(seconds=60))
                    self._close(communicator)

    def _check_rank_error(
        self, communicator: Communicator, case: CollectiveCase, prefix: str
    ) -> None:
        rank, start = self._ranks.rank, time.monotonic()
        reason = "returned, although one rank did not take part"
        try:
            case.call(communicator, rank, case.fresh(rank, self._device))
            self._platform.synchronize(self._device)
        except RankError:
            reason = ""
        except foreign_errors() as error:
            reason = f"raised {described(error)}, not RankError"
        seconds = time.monotonic() - start
        if not reason and seconds > LIMIT_SECONDS + _SLACK_SECONDS:
            reason = f"raised after {seconds:.1f} s, although the limit is {LIMIT_SECONDS:g} s"
        if reason:
            self._current_faults.append(Fault("ranks", f"{prefix}{case.collective}", reason))

    def _create(self, ranks: Ranks) -> Communicator:
        return self._call_together("construction", lambda: self._make(ranks, self._device))  # type: ignore[no-any-return]

    def _close(self, communicator: Communicator) -> None:
        self.shared |= _shared_files()
        for where in ("close", "close again"):
            try:
                communicator.close()
            except foreign_errors() as error:
                self._current_faults.append(Fault.raised("ranks", where, error))

    def _check(self, communicator: Communicator, case: CollectiveCase) -> Tensor | None:
        """Check one call; for collectives with one common result, also that ranks get equal bits.

        Returns: the result on this rank; None if the result of any rank is wrong.
        """
        rank = self._ranks.rank
        x = case.fresh(rank, self._device)
        if case.collective == "broadcast" and rank != case.source:
            x.fill_(-1)  # the source's values must replace these
        before, faults, result, has_raised = x.clone(), list[Fault](), None, False
        try:
            result = case.call(communicator, rank, x)
            self._platform.synchronize(self._device)
        except foreign_errors() as error:
            faults, has_raised = [Fault.raised("call", str(case), error)], True
        else:
            faults = list(_faults_of_call(communicator, case, rank, result, x, before))
        # Ranks compare checksums, because results may be large and differ in shape.
        digest = (0, 0) if faults or result is None else _digest(result)
        outcomes = self._exchange(has_raised, bool(faults), *digest)
        digests = {(first, second) for _, is_wrong, first, second in outcomes if not is_wrong}
        if ranks_differ := case.collective in _SAME_RESULT and len(digests) > 1:
            faults.append(Fault("determinism", str(case), "the ranks got different bits"))
        self._current_faults += faults
        if any(has_raised for has_raised, *_ in outcomes):
            raise RanksStopped
        return None if ranks_differ or any(is_wrong for _, is_wrong, *_ in outcomes) else result

    def _check_together(self, communicator: Communicator, cases: Cases) -> None:
        """Call collectives alternately many times, and check that earlier results stay equal."""
        rank = self._ranks.rank
        small_cases = [listed[min(2, len(listed) - 1)] for listed in cases.values()]
        results = [(case, self._check(communicator, case)) for case in small_cases]
        copies = [(case, result, result.clone()) for case, result in results if result is not None]
        inputs = [case.fresh(rank, self._device) for case in small_cases]

        def repeat() -> list[Fault]:
            faults = list[Fault]()
            # Every second call has zeros as input: values that an earlier call left in a buffer
            # then show in the result.
            for count in range(REPEATED // len(small_cases) // 2 * 2):
                for case, x in zip(small_cases, inputs, strict=True):
                    x.zero_()
                    if count % 2 == 0:
                        x.copy_(case.inputs[rank])
                    result = case.call(communicator, rank, x)
                    if count % 2 == 0 and len(faults) < 3:
                        faults += case.faults(rank, result)
                    elif count % 2 and case.collective != FUSED and bool(result.count_nonzero()):
                        faults.append(Fault("value", str(case), "zeros gave something else"))
            return faults[:3]

        faults = self._call_together("repeated calls", repeat)
        for case, result, copy in copies:
            if not torch.equal(result, copy):
                reason = "later calls overwrote an earlier result"
                faults.append(Fault("mutation", str(case), reason))
        self._current_faults += [
            replace(fault, where=f"repeated: {fault.where}") for fault in faults
        ]

    def _check_properties(self, communicator: Communicator, cases: Cases, suffix: str) -> None:
        # Only sums that are rounded can differ from call to call.
        sums = [case for case in cases.get("all_reduce", ()) if not (case.exact or case.strided)]
        for case in sums:
            rows = range(0, case.sizes[0], max(1, case.sizes[0] // 3))
            if "deterministic" in self._properties:
                with self._label(f"repeated sums {suffix}"):
                    self._compare(communicator, case, slice(None))
            if "batch_invariant" in self._properties:
                with self._label(f"sums of parts {suffix}"):
                    # A sum of some elements must equal the same elements of the full sum.
                    for begin in rows:
                        self._compare(communicator, case, slice(begin, begin + rows.step - 1))
        if "graph_safe" in self._properties and self._platform.provides("capture_graph"):
            for listed in cases.values():
                with self._label(f"replays {suffix}"):
                    self._check_replay(communicator, listed[-2])

    def _compare(self, communicator: Communicator, case: CollectiveCase, part: slice) -> None:
        rank = self._ranks.rank

        def sum_twice() -> list[Fault]:
            x, x_part = case.fresh(rank, self._device), case.fresh(rank, self._device)[part]
            expected = communicator.all_reduce(x)[part].clone()
            if torch.equal(communicator.all_reduce(x_part.clone()), expected):
                return []
            check = "determinism" if part == slice(None) else "batch"
            return [Fault(check, str(case), "two sums of the same elements have different bits")]  # type: ignore[arg-type]

        self._current_faults += self._call_together(str(case), sum_twice)

    def _check_replay(self, communicator: Communicator, case: CollectiveCase) -> None:
        # A list, because ``step`` must replace the result that the code below it reads.
        rank, results = self._ranks.rank, list[Tensor]()

        def capture_and_replay() -> list[Fault]:
            x = case.fresh(rank, self._device).zero_()

            def step() -> Tensor:
                results[:] = [case.call(communicator, rank, x)]
                return results[0]

            replay = self._platform.capture_graph(step)
            faults = list[Fault]()
            for _ in range(3):
                x.copy_(case.inputs[rank])
                replay()
                self._platform.synchronize(self._device)
                faults += case.faults(rank, results[0])
            return [replace(fault, check="graph") for fault in faults]

        self._current_faults += self._call_together(f"replay of {case}", capture_and_replay)

    def _call_together(self, where: str, call: Callable[[], Any]) -> Any:
        """Run ``call`` on all ranks and return the result; all ranks stop if one rank raises."""
        result, has_raised = None, False
        try:
            result = call()
            self._platform.synchronize(self._device)
        except foreign_errors() as error:
            has_raised = True
            self._current_faults.append(Fault.raised("call", where, error))
        if any(has_raised for (has_raised,) in self._exchange(has_raised)):
            raise RanksStopped
        return result

    def _exchange(self, *numbers: int) -> list[list[int]]:
        """Send ``numbers`` to all ranks and return the numbers of all ranks."""
        sent = torch.tensor(numbers, dtype=torch.int64)
        received = [torch.empty_like(sent) for _ in range(self._ranks.size)]
        dist.all_gather(received, sent, group=self._ranks.group)
        return [tensor.tolist() for tensor in received]

    @contextmanager
    def _label(self, label: str) -> Iterator[None]:
        """Record the faults of a ``with`` block under ``label``."""
        outer, self._current_faults = self._current_faults, self.faults.setdefault(label, [])
        try:
            yield
        finally:
            self._current_faults = outer


def _faults_of_call(
    communicator: Communicator,
    case: CollectiveCase,
    rank: int,
    result: Any,
    x: Tensor,
    before: Tensor,
) -> Iterator[Fault]:
    """Check the result of a call, and that only in-place collectives wrote to the input ``x``."""
    yield from case.faults(rank, result)
    is_in_place = case.collective == "all_reduce" and communicator.in_place
    if (is_in_place or case.collective == "broadcast") and result is not x:
        yield Fault("alias", str(case), "the result must be the tensor x, but is another one")
    if case.collective not in ("all_reduce", FUSED, "broadcast") and not torch.equal(x, before):
        yield Fault("mutation", str(case), "x was written")


def _digest(x: Tensor) -> tuple[int, int]:
    """Return two checksums of the bytes of ``x``; the second one depends on the order of bytes."""
    flat = x.detach().cpu().contiguous().view(-1).view(torch.uint8).to(torch.int64)
    weights = torch.arange(1, len(flat) + 1)
    return int(flat.sum()), int((flat * weights).sum())


def _children() -> set[str]:
    """Return the ids of child processes; empty on systems without /proc."""
    paths = Path("/proc/self/task").glob("*/children")
    return {pid for path in paths for pid in path.read_text().split()}


def _shared_files() -> set[str]:
    if not _MAPS.exists():
        return set()
    lines = [line.split(maxsplit=5) for line in _MAPS.read_text().splitlines()]
    paths = {parts[5] for parts in lines if len(parts) == 6}
    return {path for path in paths if path.startswith(f"{_SHARED}/") and "(deleted)" not in path}
