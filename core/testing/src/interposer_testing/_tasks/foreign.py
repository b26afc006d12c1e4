"""Execution of the trusted Python code of a foreign task, and the op that it defines."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from interposer import Case, CustomOp, Tolerance
from interposer.errors import ConfigError, described, foreign_errors
from interposer_testing._tasks.expected import Run


def execute(source: str, place: str) -> dict[str, Any]:
    """Execute the Python code of a task and return the names that the code defines.

    Args:
        place: file and field of the code, for errors and tracebacks.
    Raises: ConfigError: the code fails.
    """
    # Triton and tracebacks read the source of a function by its file's name.
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    names: dict[str, Any] = {"__name__": "interposer_task", "__file__": place}
    try:
        exec(compile(source, place, "exec"), names)  # the definition is the operator's own file
    except foreign_errors() as error:
        raise ConfigError(
            f"{place}: the code fails with {described(error)}. Correct the code, or install the "
            "packages that it imports."
        ) from error
    return names


def foreign_op(name: str, parameters: Mapping[str, type], run: Run) -> CustomOp[..., Any]:
    """Create an unregistered op that returns a list of tensors.

    Args:
        parameters: type of each argument by name, in order: a tensor or a plain number.
        run: the reference.
    """

    def reference(*args: Any, **kwargs: Any) -> list[Tensor]:
        return list(run(signature.bind(*args, **kwargs).arguments, False))

    signature = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in parameters.items()
        ],
        return_annotation=list[Tensor],
    )
    reference.__signature__ = signature  # type: ignore[attr-defined]
    reference.__annotations__ = {**parameters, "return": list[Tensor]}
    reference.__doc__ = f"Compute the task {name!r}."
    return CustomOp(reference, name, (), (), _no_cases, Tolerance())


def _no_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield nothing, because the inputs of a foreign op are the workloads of the op's task."""
    return iter(())


def named_results(result: Any, outputs: Sequence[str]) -> list[Tensor]:
    """Return the tensors of a reference's result in the order of ``outputs``; scalars as 0-D."""
    if isinstance(result, Mapping) and outputs:
        result = [result[name] for name in outputs]
    return [
        leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)
        for leaf in _pytree.tree_leaves(result)
        if leaf is not None
    ]


def seeded(function: Callable[[], Any], generator: torch.Generator) -> Any:
    """Call a function that draws from torch's global generator, seeded from ``generator``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        return function()
