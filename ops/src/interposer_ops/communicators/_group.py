"""A communicator's own torch.distributed process group, and reports of lost ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from inspect import signature
from typing import Any

import torch.distributed as dist

from interposer import Ranks
from interposer.errors import RankError

_GRACE_SECONDS = 1.0  # time in which surviving ranks report to each other after a failure
_PAUSE_SECONDS = 0.01


def ordered_group(members: Sequence[int], backend: str, timeout_seconds: float) -> Any:
    """Create a torch.distributed process group with its ranks in the order of ``members``.

    All members must call this function at the same time; other ranks need not.

    Args:
        members: ranks in the default group. Before torch 2.12 they must be in ascending order, as
            any group's ranks are.
    """
    # torch 2.12 and newer sort the ranks by default; older versions have no such option.
    order: dict[str, Any] = {}
    if "sort_ranks" in signature(dist.new_group).parameters:
        order["sort_ranks"] = False
    return dist.new_group(
        list(members),
        timeout=timedelta(seconds=timeout_seconds),
        backend=backend,
        use_local_synchronization=True,
        **order,
    )


class RankGroup:
    """A process group over ``ranks``, with the backend and the time limit of ``ranks``.

    The group is separate from the group of ``ranks``, which stays usable if a lost rank breaks this
    one.

    Attributes:
        group: the process group, for functions of torch.distributed.

    Raises: RankError: a rank did not join in time.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create the process group together with the other ranks.

        Args:
            clock: returns seconds, for the time in which ranks report after a failure.
            sleep: sleeps for the given seconds between two reads of these reports.
        """
        self._ranks = ranks
        self._clock, self._sleep = clock, sleep
        self._store = ranks.group.get_group_store()
        self._failure: RankError | None = None
        self.group: Any = None
        with self.guarded("the start of a communicator"):
            self.group = ordered_group(
                dist.get_process_group_ranks(ranks.group), ranks.backend, ranks.timeout_seconds
            )

    @contextmanager
    def guarded(self, collective: str) -> Iterator[None]:
        """Turn an error of torch.distributed within a ``with`` block into a ``RankError``.

        Every later block raises the same error, as the ranks no longer agree on the next
        collective.
        """
        if self._failure is not None:
            raise RankError(self._ranks.rank, self._failure.reason, self._failure.lost)
        try:
            yield
        # Gloo raises RuntimeError; DistError is a subclass.
        except RuntimeError as error:
            self._failure = self._report_failure(collective, error)
            raise self._failure from error

    def close(self) -> None:
        """Destroy the process group; closing twice is harmless."""
        group, self.group = self.group, None
        if self._failure is None:
            self._failure = RankError(self._ranks.rank, "the communicator is closed")
        if group is not None and dist.is_initialized():
            # Other ranks, or the default group, may be gone already.
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)

    def _report_failure(self, collective: str, error: RuntimeError) -> RankError:
        """Report the failure to the other ranks; return an error that lists the silent ranks."""
        rank, size = self._ranks.rank, self._ranks.size
        if self.group is not None:
            with suppress(RuntimeError):
                self.group.abort()  # ends the waiting of other ranks
        message = str(error).strip().partition("\n")[0]
        key = f"interposer/lost/{self.group.group_name if self.group else collective}"
        missing = set(range(size))
        try:
            self._store.set(f"{key}/{rank}", message)
            end = self._clock() + _GRACE_SECONDS
            while missing and self._clock() < end:
                missing -= {peer for peer in missing if self._store.check([f"{key}/{peer}"])}
                self._sleep(_PAUSE_SECONDS)
        except RuntimeError:  # the lost rank hosted the store
            missing = set()
        loss = f"ranks {sorted(missing)} did not come" if missing else "a rank is lost"
        limit = f"{self._ranks.timeout_seconds:g} s"
        return RankError(
            rank,
            f"{loss} to {collective}, or left it; the limit is {limit}. torch.distributed says: "
            f"{message}. Try: read the end of what the lost rank printed, and start all ranks anew",
            sorted(missing),
        )
