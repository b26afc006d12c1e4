"""A process group of torch.distributed of one communicator's own, and the loss of its ranks."""

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

_GRACE_SECONDS = 1.0  # in which the ranks that are left tell each other that they are
_PAUSE_SECONDS = 0.01


def ordered_group(members: Sequence[int], backend: str, timeout_seconds: float) -> Any:
    """Return a new process group of torch.distributed, with its ranks in the order of ``members``.

    Only its members call this, at the same time.

    Args:
        members: ranks in the default group. Until torch 2.12 they are in ascending order, as those
            of any group are.
    """
    # Torch 2.12 and newer sort them, unless it is told otherwise.
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
    """A process group over ``ranks`` with the backend of their devices, and its time limit.

    The group of ``ranks`` itself stays as it is: what a lost rank breaks is this one.

    Attributes:
        group: to be given to functions of torch.distributed.

    Raises: RankError: a rank did not come to make it.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Make the group, together with the other ranks.

        Args:
            clock: returns seconds, for the time in which ranks report after a failure.
            sleep: waits for so many seconds between two looks at these reports.
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
        """Turn what torch.distributed raises within a ``with`` block into a ``RankError``.

        Each later block raises the same, as the ranks no longer agree on what comes next.
        """
        if self._failure is not None:
            raise RankError(self._ranks.rank, self._failure.reason, self._failure.lost)
        try:
            yield
        # Gloo raises RuntimeError; a DistError is one, too.
        except RuntimeError as error:
            self._failure = self._told(collective, error)
            raise self._failure from error

    def close(self) -> None:
        """Give back the group; doing so twice does nothing."""
        group, self.group = self.group, None
        if self._failure is None:
            self._failure = RankError(self._ranks.rank, "the communicator is closed")
        if group is not None and dist.is_initialized():
            # Another end of it may be gone, and the default group before it.
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)

    def _told(self, collective: str, error: RuntimeError) -> RankError:
        """Tell the others that this rank has failed, and return who does not tell the same."""
        rank, size = self._ranks.rank, self._ranks.size
        if self.group is not None:
            with suppress(RuntimeError):
                self.group.abort()  # so that who waits for this rank waits no longer
        said = str(error).strip().partition("\n")[0]
        key = f"interposer/lost/{self.group.group_name if self.group else collective}"
        missing = set(range(size))
        try:
            self._store.set(f"{key}/{rank}", said)
            end = self._clock() + _GRACE_SECONDS
            while missing and self._clock() < end:
                missing -= {other for other in missing if self._store.check([f"{key}/{other}"])}
                self._sleep(_PAUSE_SECONDS)
        except RuntimeError:  # the store was a rank's that is lost
            missing = set()
        who = f"ranks {sorted(missing)} did not come" if missing else "a rank is lost"
        limit = f"{self._ranks.timeout_seconds:g} s"
        return RankError(
            rank,
            f"{who} to {collective}, or left it; the limit is {limit}. torch.distributed says: "
            f"{said}. Try: read the end of what the lost rank printed, and start all ranks anew",
            sorted(missing),
        )
