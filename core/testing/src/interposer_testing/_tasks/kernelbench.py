"""Tasks of KernelBench: a Python file with ``Model``, ``get_inputs`` and ``get_init_inputs``."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from interposer import Case
from interposer.errors import ConfigError, described, foreign_errors
from interposer_testing._judge.task import ModuleState, Task, Workload
from interposer_testing._tasks.expected import measured
from interposer_testing._tasks.files import read_bytes
from interposer_testing._tasks.foreign import execute, foreign_op, named_results, seeded
from interposer_testing._tasks.python_source import top_level_names

_REQUIRED = ("Model", "get_inputs", "get_init_inputs")
_KINDS = (Tensor, bool, int, float, str)
# Own and float64 copies of the reference and the bounds, two calls of a batch, and their results.
_INPUT_COPIES = 8
# Results in float64, their bounds, and temporary copies of the comparison are twice as wide.
_OUTPUT_COPIES = 24
# At least two calls must fit into the memory that the judge shares with the kernel.
_MAX_INPUT_BYTES = 8 << 30


def is_kernelbench(path: Path) -> bool:
    """Return whether a Python file defines the three names of a problem."""
    try:
        return set(top_level_names(read_bytes(path).decode())).issuperset(_REQUIRED)
    except ValueError:
        return False


def read_kernelbench(path: Path, seed: int) -> Task:
    """Read a problem of KernelBench; the model stays in training mode, as KernelBench runs it.

    Args:
        seed: of the weights.
    Raises: ConfigError: the file is missing or invalid, or its model cannot be built.
    """
    content = read_bytes(path)
    try:
        source = content.decode()
        defined = top_level_names(source)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}. Correct the file.") from error
    missing = [name for name in _REQUIRED if name not in defined]
    if missing:
        raise ConfigError(
            f"{path} does not define {', '.join(missing)}, so it is no problem of KernelBench. "
            f"Define {', '.join(_REQUIRED)}."
        )
    names = execute(source, str(path))
    # A digest, so that a solution cannot compute the seeds of the inputs from this one.
    inputs = _inputs_on_meta(path, names["get_inputs"])
    weights_seed = int.from_bytes(hashlib.sha256(f"weights {seed}".encode()).digest()[:7])
    init_arguments = _init_arguments(path, names["get_init_inputs"], weights_seed)
    model = _built(path, names["Model"], weights_seed, init_arguments)
    # Copies, because a model in training mode updates its buffers.
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    _check_outputs(path, model, inputs)
    wide_model = copy.deepcopy(model).double()
    parameters = _parameters(path, model, inputs)

    def run(arguments: Mapping[str, Any], wide: bool) -> list[Tensor]:
        function = wide_model if wide else model
        return named_results(function(*(arguments[name] for name in parameters)), ())

    def case(generator: torch.Generator) -> Case:
        inputs = seeded(names["get_inputs"], generator)
        return Case(path.stem, dict(zip(parameters, inputs, strict=True)))

    name = f"{path.resolve().parent.name}/{path.stem}"
    return Task(
        name=name,
        source="kernelbench",
        digest=hashlib.sha256(content).hexdigest(),
        op=foreign_op(name, parameters, run),
        workloads=(Workload(path.stem, case),),
        expect=lambda case: measured(name, run, (), case),
        module=ModuleState(weights_seed, init_arguments, weights),
    )


def _init_arguments(path: Path, get_init_inputs: Callable[[], Any], seed: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    arguments = _attempt(path, "get_init_inputs", lambda: seeded(get_init_inputs, generator))
    if not isinstance(arguments, list | tuple) or not all(map(_is_plain, arguments)):
        raise ConfigError(
            f"{path}: get_init_inputs() returned {arguments!r:.80}, not a list of plain values. "
            "Return numbers, texts, or lists, tuples and dicts of these."
        )
    return tuple(arguments)


def _built(
    path: Path, module_class: Callable[..., nn.Module], seed: int, arguments: tuple[Any, ...]
) -> nn.Module:
    """Build the reference model with weights drawn from ``seed``."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return module_class(*copy.deepcopy(arguments))

    module: nn.Module = _attempt(path, "Model", build)
    return module


def _inputs_on_meta(path: Path, get_inputs: Callable[[], Any]) -> Sequence[Any]:
    """Call ``get_inputs`` on the meta device, and check that real inputs would fit into memory.

    Raises: ConfigError: they would not fit into the memory, or ``get_inputs`` fails.
    """

    def on_meta() -> Any:
        with torch.device("meta"):
            return get_inputs()

    inputs = _attempt(path, "get_inputs", on_meta)
    if not isinstance(inputs, list | tuple):
        raise ConfigError(
            f"{path}: get_inputs() returned {type(inputs).__name__}, not a list. Return a list."
        )
    most_bytes = min(_MAX_INPUT_BYTES, _available_bytes() // _INPUT_COPIES)
    _check_bytes(path, "get_inputs() returns", _num_bytes(inputs), most_bytes)
    return inputs


def _check_outputs(path: Path, model: nn.Module, inputs: Sequence[Any]) -> None:
    """Run the model on the meta device, and check that real outputs would fit into memory.

    Raises: ConfigError: the outputs would not fit into the memory.
    """
    try:
        outputs = copy.deepcopy(model).to("meta")(*inputs)
    except foreign_errors():
        return  # a model that reads values has outputs of unknown size
    most_bytes = _available_bytes() // _OUTPUT_COPIES
    _check_bytes(path, "Model returns", _num_bytes(_pytree.tree_leaves(outputs)), most_bytes)


def _check_bytes(path: Path, source: str, num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise ConfigError(
            f"{path}: {source} {num_bytes / 2**30:.1f} GiB, and at most "
            f"{most_bytes / 2**30:.1f} GiB can be judged here, because the judge and the kernel "
            "hold several copies. Try: a copy of the problem with smaller sizes"
        )


def _num_bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.itemsize for value in values if isinstance(value, Tensor))


def _available_bytes() -> int:
    """Return the memory of this machine that programs can still allocate."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _parameters(path: Path, model: nn.Module, inputs: Sequence[Any]) -> dict[str, type]:
    """Return, by name, the type of each argument of ``forward`` that ``get_inputs`` provides."""
    names = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names += [f"input_{number}" for number in range(len(names), len(inputs))]
    return {name: _kind(path, value) for name, value in zip(names, inputs, strict=False)}


def _kind(path: Path, value: Any) -> type:
    for kind in _KINDS:
        if isinstance(value, kind):
            return kind
    raise ConfigError(
        f"{path}: get_inputs() returned {type(value).__name__}. Return tensors, numbers and texts."
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _attempt(path: Path, name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except foreign_errors() as error:
        raise ConfigError(
            f"{path}: {name} fails with {described(error)}. Correct the problem, or install the "
            "packages that it imports."
        ) from error
