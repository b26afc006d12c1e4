"""The group of processes that load one model together."""

from __future__ import annotations

import atexit
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from typing import Any, cast

import torch
import torch.distributed as dist

from interposer import Config, Placement, Ranks, place
from interposer.errors import ConfigError, RankError
from interposer.tooling import gather_bytes
from interposer_engine._checkpoint.files import DESCRIPTION, Checkpoint, sampled_digest
from interposer_engine._distributed.codec import decode, encode
from interposer_engine._distributed.engine import RankedEngine, RankedLanguageModel
from interposer_engine._distributed.protocol import Coordinator, LocalCoordinator
from interposer_engine._engine import Engine
from interposer_engine._language_model import LanguageModel
from interposer_engine._locks import OneThreadLock
from interposer_engine._plan import Plan
from interposer_ops.communicators import ordered_group
from interposer_ops.layers.moe.placement import ExpertParallel

TIMEOUT_SECONDS = 60.0
# A rank may read its weights from a slower disk than the others.
_LOADING_SECONDS = 1800.0


class Group:
    """The ranks of one model, all of which must call the same methods in the same order.

    Attributes:
        ranks: None until ``placement`` has exchanged the platforms.
        is_error_shared: the last error was raised on every rank.
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
        with self.raise_together("the choice of a platform"):
            placement = place(config)
        with self._raise_rank_errors("tell of platforms"):
            ranks = Ranks.of(self._group, placement.platform, self._timeout_seconds, self._secret)
        self.ranks = ranks
        # All ranks must draw the same noise: rank 0 chooses the seed.
        self._seed = self._gather(secrets.randbits(62))[0]
        devices = placement.platform.devices()
        kind = ranks.hosts[self.rank], ranks.platforms[self.rank]
        earlier_ranks = list(zip(ranks.hosts, ranks.platforms, strict=True))[: self.rank]
        return replace(placement, device=devices[earlier_ranks.count(kind) % len(devices)])

    @contextmanager
    def raise_together(self, activity: str) -> Iterator[None]:
        """Raise an error that occurs on any rank on every rank, at the end of a ``with`` block.

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
            texts = self._gather(text)
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
        """Raise RankError unless the facts that affect the result are equal on every rank."""
        facts_by_rank = self._gather({name: str(value) for name, value in facts.items()})
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
    def is_one_platform(self) -> bool:
        """Say whether all ranks use the same platform."""
        return self.ranks is not None and len(set(self.ranks.platforms)) == 1

    def smallest(self, number: int) -> int:
        """Return the minimum of ``number`` over all ranks."""
        return cast(int, min(self._gather(number)))

    def draft_group(self) -> Group:
        """Return the group for a draft model, whose steps run within the target model's steps."""
        # Without __init__, which would create another process group.
        inner_group = object.__new__(Group)
        inner_group.__dict__.update(self.__dict__)
        inner_group._coordinator_of = lambda _: LocalCoordinator()
        return inner_group

    def engine(self, *parts: Any, **facts: Any) -> RankedEngine:
        """Create this rank's engine; followers execute no steps before ``model`` is called."""
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

    def _gather(self, value: Any) -> list[Any]:
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
                f"a rank ended, or did not reach {activity}: {reason}. "
                "Try: read the last output of the lost rank",
            ) from error


class SingleProcess:
    """Implements the methods of ``Group`` that ``load`` calls, for a single process."""

    ranks: Ranks | None = None
    is_one_platform = True

    def placement(self, config: Config) -> Placement | None:
        """Return None: a single process lets the plan select the device."""
        return None

    def raise_together(self, activity: str) -> AbstractContextManager[None]:
        """Return a context manager that does nothing: a single process shares no errors."""
        return nullcontext()

    def agree(self, facts: Mapping[str, object]) -> None:
        """Do nothing: a single process has no other ranks to compare facts with."""

    def smallest(self, number: int) -> int:
        """Return ``number``, the minimum over a single process."""
        return number

    def draft_group(self) -> Any:
        """Return None: a draft model of a single process is loaded without a group."""
        return None

    def engine(self, *parts: Any, **facts: Any) -> Engine:
        """Create the engine of a single process."""
        return Engine(*parts, **facts)

    def model(self, engine: Engine, *parts: Any) -> LanguageModel:
        """Create the language model of a single process's engine."""
        return LanguageModel(engine, *parts)


_DISTRIBUTIONS = ("interposer", "interposer-ops", "interposer-models", "interposer-engine")


def facts_of(planned: Plan, **options: object) -> dict[str, object]:
    """Return the facts that ranks compare before they read weights, by name.

    Args:
        options: options of ``load``, as the user passed them.
    """
    config = json.dumps(planned.checkpoint.config, sort_keys=True, default=str)
    facts: dict[str, object] = {name: version(name) for name in _DISTRIBUTIONS}
    facts |= {
        "torch": torch.__version__,
        "a checkpoint with the digest": _digest(config),
        "weights with the digest": _digest(_weights(planned)),
        "a tokenizer and defaults with the digest": _digest(_descriptions(planned)),
        "dtype": str(planned.dtype).removeprefix("torch."),
        "page size": planned.page_size,
        "seed": planned.resolver.config.seed,
        **{name.replace("_", " "): value for name, value in options.items()},
    }
    return facts


def _weights(planned: Plan) -> list[tuple[str, int, str]]:
    """Return names, sizes and sampled digests of the weight files that are on disk."""
    path = planned.path
    # Pickled files are not read, but also show that the folders of two ranks differ.
    if isinstance(planned.checkpoint, Checkpoint):
        files = sorted(path.glob("*.safetensors")) + sorted(path.glob("*.bin"))
    else:
        files = [path]
    return [(file.name, file.stat().st_size, sampled_digest(file)) for file in files]


def _descriptions(planned: Plan) -> list[tuple[str, str]]:
    """Return names and digests of the tokenizer and generation-config files."""
    if not isinstance(planned.checkpoint, Checkpoint):
        return []
    files = {file for pattern in DESCRIPTION for file in planned.path.glob(pattern)}
    return [(file.name, sha256(file.read_bytes()).hexdigest()) for file in sorted(files)]


def _digest(value: object) -> str:
    return sha256(str(value).encode()).hexdigest()[:12]


def join_ranks(tensor_parallel: Any) -> SingleProcess | Group:
    """Return the ranks that load a model together.

    Args:
        tensor_parallel: see ``load``.
    Raises: ConfigError: the processes do not exist, or the number differs.
    """
    if tensor_parallel is None:
        return SingleProcess()
    if isinstance(tensor_parallel, int):
        check_number(tensor_parallel)
        if tensor_parallel == 1:
            return SingleProcess()
    import torch.distributed as dist

    # Imported here: a single process does not need these modules.
    from interposer_engine._distributed.protocol import PeerCoordinator

    if isinstance(tensor_parallel, Group):
        return tensor_parallel
    if isinstance(tensor_parallel, int):
        return Group(_world(tensor_parallel), PeerCoordinator)
    if not isinstance(tensor_parallel, dist.ProcessGroup):
        raise ConfigError(
            f"tensor_parallel is of the type {type(tensor_parallel).__name__}. "
            "Try: a number of processes, or a process group of torch.distributed"
        )
    return Group(tensor_parallel, PeerCoordinator)


def planned_ranks(
    tensor_parallel: int | Ranks | None, platform: str, expert_parallel: Any = None
) -> Ranks | None:
    """Return the ranks to plan for: given ranks, or a number of ranks on one host.

    Args:
        platform: platform name of all ranks.
        expert_parallel: see ``load``.
    Raises: ConfigError: the number is not a positive integer, or expert parallelism is requested
        for one process.
    """
    experts = ExpertParallel.of(expert_parallel)
    ranks = tensor_parallel
    if isinstance(ranks, int):
        size = check_number(ranks)
        ranks = Ranks(0, size, (0,) * size, (platform,) * size) if size > 1 else None
    elif ranks is not None and not isinstance(ranks, Ranks):
        check_number(ranks)
    if experts is None:
        return ranks
    if ranks is None:
        raise ConfigError(
            f"expert_parallel is {expert_parallel!r}, and one process holds all experts. "
            "Try: tensor_parallel=2, or more, in addition"
        )
    return replace(ranks, experts=experts)


def check_number(tensor_parallel: object) -> int:
    """Return the option ``tensor_parallel`` if it is a number of processes.

    Raises: ConfigError: the option is not a positive integer.
    """
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int):
        raise ConfigError(f"tensor_parallel is {tensor_parallel!r}, must be a number of processes")
    if tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel is {tensor_parallel}, must be at least 1")
    return tensor_parallel


def _world(size: int) -> Any:
    """Return the default process group, after creating it under torchrun."""
    import torch.distributed as dist

    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            raise ConfigError(
                f"tensor_parallel is {size}, and this process is alone. "
                f"Try: torchrun --nproc-per-node {size} PROGRAM; or, on the command line, "
                f"interposer run MODEL --tensor-parallel {size}"
            )
        dist.init_process_group("gloo")
        atexit.register(_leave)
    num_processes = dist.get_world_size()
    if num_processes != size:
        raise ConfigError(
            f"tensor_parallel is {size}, and there are {num_processes} processes. "
            f"Try: torchrun --nproc-per-node {size}, or a process group of {size} of them: "
            "load(..., tensor_parallel=torch.distributed.new_group([...]))"
        )
    return dist.group.WORLD


def _leave() -> None:
    """Destroy the process group at exit, unless the program has destroyed the group.

    A thread of gloo frees the tensors of the last collective. If Python exits meanwhile, that
    thread aborts the process.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
