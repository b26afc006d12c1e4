"""The processes that load one model together: what each has to tell the others."""

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
from interposer_models._parallel.engine import RankedEngine
from interposer_models._parallel.language_model import RankedLanguageModel
from interposer_models._parallel.lead import Lead, Silent
from interposer_models._parallel.one_thread_lock import OneThreadLock
from interposer_ops.communicators import ordered_group

TIMEOUT_SECONDS = 60.0
# A rank may read its weights from a slower disk than the others.
_LOADING_SECONDS = 1800.0


class Group:
    """The ranks of one model; every one of them calls the same methods in the same order.

    Attributes:
        ranks: None until ``placement`` has told the others of the platform.
        lead: of the engine, once the model is loaded.
        told: the other ranks know of the last error.
    """

    ranks: Ranks | None = None
    told = False

    def __init__(
        self,
        process_group: Any,
        lead: Callable[[Ranks], Lead],
        timeout_seconds: float = TIMEOUT_SECONDS,
        secret: bytes = b"",
    ) -> None:
        """Create a separate process group.

        Args:
            process_group: of torch.distributed, whose ranks these are.
            lead: returns what the ranks follow.
            timeout_seconds: within which each rank comes to a step.
            secret: of the launch, which signs what ranks tell each other; empty under torchrun.
        """
        members = dist.get_process_group_ranks(process_group)
        self.rank, self.size = dist.get_rank(process_group), len(members)
        self._lead = lead
        self._timeout_seconds = timeout_seconds
        self._secret = secret
        self._seed = 0
        with self._lost("make a process group"):
            self._group = ordered_group(members, "gloo", _LOADING_SECONDS)

    def placement(self, config: Config) -> Placement:
        """Return where this rank computes: ranks of one host take the devices in turn."""
        with self.together("the choice of a platform"):
            placement = place(config)
        with self._lost("tell of platforms"):
            ranks = Ranks.of(self._group, placement.platform, self._timeout_seconds, self._secret)
        self.ranks = ranks
        self._seed = self._gathered(secrets.randbits(62))[0]
        devices = placement.platform.devices()
        kind = ranks.hosts[self.rank], ranks.platforms[self.rank]
        others = list(zip(ranks.hosts, ranks.platforms, strict=True))[: self.rank]
        return replace(placement, device=devices[others.count(kind) % len(devices)])

    @contextmanager
    def together(self, activity: str) -> Iterator[None]:
        """Raise on every rank what any of them raises within a ``with`` block.

        Raises: RankError: another rank failed, and this one did not.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is raised below, once others know of it
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            texts = self._gathered(text)
        except RankError:
            if failure is None:
                raise
            raise failure from None
        self.told = any(texts)
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
                    self.told = True
                    raise RankError(
                        self.rank,
                        f"rank {rank} has {name} {value}, and rank 0 {facts_by_rank[0].get(name)}. "
                        "Try: the same files, versions and options on every rank",
                        [rank],
                    )

    @property
    def alike(self) -> bool:
        """Say whether all ranks are of one platform."""
        return self.ranks is not None and len(set(self.ranks.platforms)) == 1

    def smallest(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        return cast(int, min(self._gathered(number)))

    def inner(self) -> Group:
        """Return the group for a model that steps within the steps of another one."""
        copy = object.__new__(Group)
        copy.__dict__.update(self.__dict__)
        copy._lead = lambda _: Silent()
        return copy

    def engine(self, *parts: Any, **facts: Any) -> RankedEngine:
        """Return an engine made of these parts; no follower rank executes its steps yet."""
        return RankedEngine(*parts, **facts, shared_seed=self._seed)

    def model(self, engine: Engine, *parts: Any) -> LanguageModel:
        """Return the model of an engine and other parts, whose steps are those of all ranks."""
        assert self.ranks is not None
        assert isinstance(engine, RankedEngine)
        found = RankedLanguageModel(engine, *parts)
        engine.lead = self._lead(self.ranks)
        if engine.lead.is_one_program:
            engine.lock = OneThreadLock(lambda: engine.busy)
        return found

    def _gathered(self, value: Any) -> list[Any]:
        with self._lost("load the model"):
            messages = gather_bytes(encode(value), self._group, self._secret)
        return [decode(message) for message in messages]

    @contextmanager
    def _lost(self, activity: str) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:  # of gloo, where a connection ends
            reason = str(error).strip().partition("\n")[0]
            raise RankError(
                self.rank,
                f"a rank left, or did not come to {activity}: {reason}. "
                "Try: read the end of what the lost rank printed",
            ) from error
