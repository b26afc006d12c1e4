"""The group of processes that load one model together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch.distributed as dist

from interposer import Config, Placement, Ranks, place
from interposer.errors import RankError
from interposer.tooling import gather_bytes
from interposer_models._engine.engine import Engine
from interposer_models._language_model import LanguageModel
from interposer_models._parallel.codec import decode, encode
from interposer_models._parallel.coordination import Coordinator, LocalCoordinator
from interposer_models._parallel.engine import RankedEngine
from interposer_models._parallel.language_model import RankedLanguageModel
from interposer_models._parallel.one_thread_lock import OneThreadLock
from interposer_ops.communicators import ordered_group

TIMEOUT_SECONDS = 60.0
# A rank may read its weights from a slower disk than the others.
_LOADING_SECONDS = 1800.0


class Group:
    """The ranks of one model. Every rank must call the same methods in the same order.

    Attributes:
        ranks: None until ``placement`` has exchanged the platforms.
        is_error_shared: the other ranks know of the last error.
    """

    ranks: Ranks | None = None
    is_error_shared = False

    def __init__(
        self,
        process_group: Any,
        coordinator_of: Callable[[Ranks], Coordinator],
        timeout_seconds: float = TIMEOUT_SECONDS,
        secret: bytes = b"",
    ) -> None:
        """Create a new process group for the ranks of ``process_group``.

        Args:
            process_group: a process group of torch.distributed.
            coordinator_of: creates the coordinator of the engine.
            timeout_seconds: time limit for each rank to reach a step.
            secret: secret of the launch, which signs messages between ranks; empty under torchrun.
        """
        members = dist.get_process_group_ranks(process_group)
        self.rank, self.size = dist.get_rank(process_group), len(members)
        self._coordinator_of = coordinator_of
        self._timeout_seconds = timeout_seconds
        self._secret = secret
        self._seed = 0
        with self._raise_rank_errors("make a process group"):
            self._group = ordered_group(members, "gloo", _LOADING_SECONDS)

    def placement(self, config: Config) -> Placement:
        """Select the device of this rank: ranks of one host use the devices in turn."""
        with self.together("the choice of a platform"):
            placement = place(config)
        with self._raise_rank_errors("tell of platforms"):
            ranks = Ranks.of(self._group, placement.platform, self._timeout_seconds, self._secret)
        self.ranks = ranks
        # All ranks must draw the same noise: rank 0 chooses the seed.
        self._seed = self._gathered(secrets.randbits(62))[0]
        devices = placement.platform.devices()
        kind = ranks.hosts[self.rank], ranks.platforms[self.rank]
        earlier_ranks = list(zip(ranks.hosts, ranks.platforms, strict=True))[: self.rank]
        return replace(placement, device=devices[earlier_ranks.count(kind) % len(devices)])

    @contextmanager
    def together(self, activity: str) -> Iterator[None]:
        """Raise an error of any rank on every rank, after a ``with`` block.

        Raises: RankError: another rank failed, and this one did not.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, after the others know of it
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        # Every rank takes part, even after a failure, or the others would wait forever.
        try:
            texts = self._gathered(text)
        except RankError:
            if failure is None:
                raise
            raise failure from None
        self.is_error_shared = any(texts)
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise RankError(self.rank, f"rank {rank} failed during {activity}: {text}", [rank])

    def agree(self, facts: Mapping[str, object]) -> None:
        """Raise RankError unless every rank has the same facts."""
        facts_by_rank = self._gathered({name: str(value) for name, value in facts.items()})
        for rank, rank_facts in enumerate(facts_by_rank):
            for name, value in rank_facts.items():
                if value != facts_by_rank[0].get(name):
                    self.is_error_shared = True
                    raise RankError(
                        self.rank,
                        f"rank {rank} has {name} {value}, and rank 0 {facts_by_rank[0].get(name)}. "
                        "Try: the same files, versions and options on every rank",
                        [rank],
                    )

    @property
    def alike(self) -> bool:
        """Say whether all ranks use the same platform."""
        return self.ranks is not None and len(set(self.ranks.platforms)) == 1

    def smallest(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        return cast(int, min(self._gathered(number)))

    def inner(self) -> Group:
        """Return the group for a draft model, which steps within the steps of another model."""
        # Without __init__, which would create another process group.
        inner_group = object.__new__(Group)
        inner_group.__dict__.update(self.__dict__)
        inner_group._coordinator_of = lambda _: LocalCoordinator()
        return inner_group

    def engine(self, *parts: Any, **facts: Any) -> RankedEngine:
        """Create the engine of this rank; followers execute no steps before ``model``."""
        return RankedEngine(*parts, **facts, shared_seed=self._seed)

    def model(self, engine: Engine, *parts: Any) -> LanguageModel:
        """Create the model of an engine, and coordinate steps with the other ranks."""
        assert self.ranks is not None
        assert isinstance(engine, RankedEngine)
        model = RankedLanguageModel(engine, *parts)
        engine.coordinator = self._coordinator_of(self.ranks)
        # Ranks of one program cannot order the calls of several threads.
        if engine.coordinator.is_one_program:
            engine.lock = OneThreadLock(lambda: engine.busy)
        return model

    def _gathered(self, value: Any) -> list[Any]:
        with self._raise_rank_errors("load the model"):
            messages = gather_bytes(encode(value), self._group, self._secret)
        return [decode(message) for message in messages]

    @contextmanager
    def _raise_rank_errors(self, activity: str) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:  # gloo raises this when a connection ends
            reason = str(error).strip().partition("\n")[0]
            raise RankError(
                self.rank,
                f"a rank left, or did not come to {activity}: {reason}. "
                "Try: read the end of what the lost rank printed",
            ) from error
