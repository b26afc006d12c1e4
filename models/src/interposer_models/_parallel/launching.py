"""Starts the other ranks of a model as processes of this host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from interposer import Config
from interposer_models._language_model import LanguageModel
from interposer_models._loader import load
from interposer_models._parallel.joining import check_number


@contextmanager
def launched(
    tensor_parallel: int | None,
    config: Config | None = None,
    *,
    timeout_seconds: float = 60.0,
) -> Iterator[Callable[..., LanguageModel]]:
    """Start the other ranks of this host, and return a function that loads a model on all ranks.

    The other ranks run that one model in parallel to this process, and end with the ``with`` block.
    Each rank of a host's platform computes on an equal share of the cores.

    Args:
        tensor_parallel: number of ranks, including this process; None or 1 starts none.
        config: policy for the choice of the platform.
        timeout_seconds: time limit for each rank to reach a step.
    Returns: ``load``, without ``tensor_parallel``.
    Raises:
        ConfigError: the number is not positive, or this process is one of several already.
        RankError: another rank was lost. The main thread is interrupted first. If the block does
            not end within 10 s, the process prints the error and ends.
    """
    if tensor_parallel is None or check_number(tensor_parallel) == 1:
        yield load
        return
    from interposer_models._parallel.launcher import Launched

    with Launched(tensor_parallel, config, timeout_seconds) as ranks:
        yield ranks.load
