"""Readers of tasks and solutions in the formats of public benchmarks."""

from __future__ import annotations

import secrets
from pathlib import Path

from interposer import Registry, current_registry
from interposer.errors import ConfigError, UnknownNameError, near_names
from interposer_testing._judge.task import Task
from interposer_testing._tasks.flashinfer_trace import read_flashinfer_trace
from interposer_testing._tasks.kernelbench import is_kernelbench, read_kernelbench
from interposer_testing._tasks.ops import read_op
from interposer_testing._tasks.sol_execbench import DEFINITION, read_sol_execbench
from interposer_testing._tasks.solutions import read_solution

__all__ = ["read_solution", "read_task"]

_FORMATS = (
    "A task is the name of an op, a definition (.json) of FlashInfer-Trace, a folder of "
    "SOL-ExecBench, a problem (.py) of KernelBench, or FOLDER:NAME of one of these."
)


def read_task(text: str, registry: Registry | None = None, seed: int | None = None) -> Task:
    """Read a task: an op, or a problem of KernelBench, FlashInfer-Trace or SOL-ExecBench.

    Args:
        text: name of an op; path of a definition, of a problem, or of a folder with
            ``definition.json``; or ``FOLDER:NAME`` of one of these anywhere below a folder. NAME
            may be the beginning of a file's name before "_", such as "19" for ``19_ReLU.py``.
        registry: registry with the ops; the default has those of all installed plugins.
        seed: of the weights of tasks with a module, a secret one by default.

    Raises:
        UnknownNameError: there is no such op or problem.
        ConfigError: a file is missing or invalid.
    """
    registry = registry or current_registry()
    seed = secrets.randbits(48) if seed is None else seed
    if text in registry.ops:
        return read_op(registry, text)
    path = Path(text)
    folder, separator, problem = text.rpartition(":")
    if separator and not path.exists():
        path = _problem(Path(folder), problem)
    elif not path.exists() and not path.suffix and len(path.parts) == 1:
        raise UnknownNameError("op", text, registry.ops, _FORMATS)
    if path.is_dir() and (path / DEFINITION).exists():
        return read_sol_execbench(path)
    if path.name == DEFINITION:
        return read_sol_execbench(path.parent)
    if path.suffix == ".json":
        return read_flashinfer_trace(path)
    if path.suffix == ".py":
        return read_kernelbench(path, seed)
    state = "is no task" if path.exists() else "does not exist"
    raise ConfigError(f"The path {text!r} {state}. {_FORMATS}")


def _problem(folder: Path, name: str) -> Path:
    """Return the only problem below ``folder`` with this name."""
    if not folder.is_dir():
        raise ConfigError(f"The folder {str(folder)!r} does not exist. {_FORMATS}")
    problems = {
        path.parent if path.name == DEFINITION else path
        for path in (*folder.rglob("*.json"), *folder.rglob("*.py"))
        if path.name == DEFINITION or "definitions" in path.parts or _is_problem(path)
    }
    names = {path: path.relative_to(folder).with_suffix("").as_posix() for path in problems}
    exact = [path for path in problems if name in (path.stem, names[path])]
    matching = exact or [
        path
        for path, problem in names.items()
        if problem.startswith(f"{name}_") or path.stem.startswith(f"{name}_")
    ]
    if len(matching) == 1:
        return matching[0]
    if matching:
        candidates = near_names(name, [names[path] for path in matching])
        raise ConfigError(
            f"{len(matching)} problems in {str(folder)!r} are named {name!r}: {candidates}. "
            "Use the name with its folder."
        )
    raise UnknownNameError("problem", name, names.values(), _FORMATS, f"in {str(folder)!r}")


def _is_problem(path: Path) -> bool:
    return path.suffix == ".py" and is_kernelbench(path)
