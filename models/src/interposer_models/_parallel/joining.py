"""Resolves the option ``tensor_parallel`` to a group of ranks."""

from __future__ import annotations

import atexit
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interposer import Ranks
from interposer.errors import ConfigError
from interposer_models._parallel.single_process import SingleProcess
from interposer_ops.layers.expert_placement import ExpertParallel

if TYPE_CHECKING:
    from interposer_models._parallel.group import Group


def joined(tensor_parallel: Any) -> SingleProcess | Group:
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
    from interposer_models._parallel.coordination import PeerCoordinator
    from interposer_models._parallel.group import Group

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


def described_ranks(
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
            "Try: tensor_parallel=2, or more, besides"
        )
    return replace(ranks, experts=experts)


def check_number(tensor_parallel: object) -> int:
    """Return the number of ranks.

    Raises: ConfigError: the value is not a positive integer.
    """
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int):
        raise ConfigError(f"tensor_parallel is {tensor_parallel!r}, must be a number of processes")
    if tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel is {tensor_parallel}, must be at least 1")
    return tensor_parallel


def _world(size: int) -> Any:
    """Return the group of all processes, after creating one under torchrun."""
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
    """Destroy the process group at exit, unless the program did.

    A thread of gloo frees the tensors of the last collective. If Python exits meanwhile, that
    thread aborts the process.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
