"""Tasks of FlashInfer-Trace: a definition (JSON) with its workloads (JSON Lines).

The data set has the files ``definitions/TYPE/NAME.json``, ``workloads/TYPE/NAME.jsonl`` and
``solutions/.../NAME.json``. SOL-ExecBench has the same three parts in other files, with a few more
kinds of axes and inputs.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, field_validator, model_validator
from torch import Tensor

from interposer import Case
from interposer.errors import ConfigError, near_names
from interposer_testing._judge.task import Expected, Task, Workload
from interposer_testing._tasks.expected import measured
from interposer_testing._tasks.files import Part, parse, read_bytes
from interposer_testing._tasks.foreign import execute, foreign_op, named_results
from interposer_testing._tasks.python_source import top_level_names

DTypeName = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "bool",
]  # fmt: skip

_MAX_FP8 = 2.0
_MAX_INTEGER = 1024


class ConstAxis(Part):
    type: Literal["const"]
    value: NonNegativeInt


class VarAxis(Part):
    type: Literal["var"]


class ExprAxis(Part):
    """Axis whose size is computed from other axes, only in SOL-ExecBench."""

    type: Literal["expr"]
    expression: str


class TensorSpec(Part):
    """Shape of a tensor by names of axes, or None for a plain number."""

    shape: tuple[str, ...] | None
    dtype: DTypeName

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def kind(self) -> type:
        if self.shape is not None:
            return Tensor
        if self.dtype == "bool":
            return bool
        return float if self.torch_dtype.is_floating_point else int


class Definition(Part):
    """Specification of a task: axes, inputs, outputs and a reference ``run`` in Python."""

    name: Annotated[str, Field(min_length=1)]
    axes: dict[str, Annotated[ConstAxis | VarAxis | ExprAxis, Field(discriminator="type")]]
    inputs: dict[str, TensorSpec]
    outputs: Annotated[dict[str, TensorSpec], Field(min_length=1)]
    reference: str
    constraints: tuple[str, ...] | None = None

    @field_validator("inputs", "outputs")
    @classmethod
    def _check_names(cls, specs: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
        for name in specs:
            if not name.isidentifier() or iskeyword(name):
                raise ValueError(f"{name!r} is no identifier of Python")
        return specs

    @field_validator("reference")
    @classmethod
    def _check_reference(cls, source: str) -> str:
        if "run" not in top_level_names(source):
            raise ValueError("the code defines no function 'run'")
        return source

    @model_validator(mode="after")
    def _check_axes(self) -> Definition:
        for name, spec in (*self.inputs.items(), *self.outputs.items()):
            for axis in spec.shape or ():
                if axis not in self.axes:
                    raise ValueError(
                        f"the axis {axis!r} of {name!r} is unknown; known, nearest first: "
                        f"{near_names(axis, self.axes)}"
                    )
        if repeated := self.inputs.keys() & self.outputs.keys():
            raise ValueError(f"{min(repeated)!r} is both an input and an output")
        return self

    def sizes(self, axis_sizes: Mapping[str, int], place: str) -> dict[str, int]:
        """Return the sizes of the constant, variable and computed axes by name.

        Args:
            axis_sizes: sizes of the variable axes.
        Raises: ConfigError: ``axis_sizes`` has other axes, or breaks a constraint.
        """
        variable = [name for name, axis in self.axes.items() if isinstance(axis, VarAxis)]
        for name in [*variable, *axis_sizes]:
            if name not in axis_sizes or name not in variable:
                state = "has no size" if name in variable else "is no variable axis"
                raise ConfigError(
                    f"{place}: axes: {name!r} {state}; the variable axes of {self.name!r} are "
                    f"{', '.join(variable) or '(none)'}. Correct the workload."
                )
        sizes = {n: axis.value for n, axis in self.axes.items() if isinstance(axis, ConstAxis)}
        sizes |= axis_sizes
        # In the order of the file, because expressions can contain axes before them.
        for name, axis in self.axes.items():
            if isinstance(axis, ExprAxis):
                size = _evaluated(axis.expression, sizes, f"{place}: axes.{name}")
                if not isinstance(size, int | float) or size < 0 or size != size // 1:
                    raise ConfigError(
                        f"{place}: axes.{name} = {axis.expression!r} is {size!r:.40}, no size. "
                        "Correct the definition or the workload."
                    )
                sizes[name] = int(size)
        for constraint in self.constraints or ():
            # Other constraints speak of the values of inputs, and are meant for readers.
            if _names_of(constraint) <= sizes.keys() and not _evaluated(constraint, sizes, place):
                raise ConfigError(
                    f"{place}: the sizes {dict(axis_sizes)} break the constraint {constraint!r} of "
                    f"{self.name!r}. Correct the workload."
                )
        return sizes


class RandomInput(Part):
    type: Literal["random"]


class ScalarInput(Part):
    type: Literal["scalar"]
    value: bool | int | float


class SafetensorsInput(Part):
    type: Literal["safetensors"]
    path: str
    tensor_key: str


class CustomInput(Part):
    """Input that a function of the definition draws, only in SOL-ExecBench."""

    type: Literal["custom"]


Input = Annotated[
    RandomInput | ScalarInput | SafetensorsInput | CustomInput, Field(discriminator="type")
]


class WorkloadEntry(Part):
    """Sizes of the variable axes, and the source of each input."""

    uuid: Annotated[str, Field(min_length=1)]
    axes: dict[str, NonNegativeInt]
    inputs: dict[str, Input]


class TraceLine(Part):
    """A line of FlashInfer-Trace's workload files, which wraps the workload."""

    definition: str
    workload: WorkloadEntry


@dataclass(frozen=True)
class DefinedTask:
    """A definition with the places of its files, from which cases are drawn."""

    definition: Definition
    root: Path

    def workload(self, entry: WorkloadEntry, place: str) -> Workload:
        """Create a workload; raise ConfigError if an input does not match the definition."""
        inputs = self.definition.inputs
        sizes = self.definition.sizes(entry.axes, place)
        for name in [*inputs, *entry.inputs]:
            if name not in entry.inputs or name not in inputs:
                state = "has no source" if name in inputs else "is no input"
                raise ConfigError(
                    f"{place}: inputs: {name!r} {state}; {self.definition.name!r} has the inputs "
                    f"{', '.join(inputs)}. Correct the workload."
                )
        draws = self._draws(entry, sizes, place)
        axes = ", ".join(f"{name}={size}" for name, size in entry.axes.items())
        label = f"{axes} ({entry.uuid})" if axes else entry.uuid

        def case(generator: torch.Generator) -> Case:
            return Case(label, {name: draw(generator) for name, draw in draws.items()})

        # Stored tensors and integers may follow rules that random factors would break.
        free = frozenset(
            name
            for name, source in entry.inputs.items()
            if isinstance(source, RandomInput) and inputs[name].torch_dtype.is_floating_point
        )
        if not self._has_any_size(entry):
            return Workload(label, case, free)

        def of_other_size(generator: torch.Generator) -> Case:
            smaller = {
                axis: int(torch.randint(1, size + 1, (), generator=generator))
                for axis, size in entry.axes.items()
            }
            draws = self._draws(entry, self.definition.sizes(smaller, place), place)
            return Case(label, {name: draw(generator) for name, draw in draws.items()})

        return Workload(label, case, free, of_other_size=of_other_size)

    def _draws(
        self, entry: WorkloadEntry, sizes: Mapping[str, int], place: str
    ) -> dict[str, Callable[[torch.Generator], Any]]:
        return {
            name: self._draw(spec, entry.inputs[name], sizes, f"{place}: inputs.{name}")
            for name, spec in self.definition.inputs.items()
        }

    def _has_any_size(self, entry: WorkloadEntry) -> bool:
        """Tell whether the inputs are valid for any sizes of the variable axes.

        The values of integers, such as indices, often depend on the sizes.
        """
        return (
            bool(entry.axes)
            and not self.definition.constraints
            and not any(isinstance(axis, ExprAxis) for axis in self.definition.axes.values())
            and all(
                isinstance(source, ScalarInput)
                or (
                    isinstance(source, RandomInput)
                    and self.definition.inputs[name].torch_dtype.is_floating_point
                )
                for name, source in entry.inputs.items()
            )
        )

    def _draw(
        self, spec: TensorSpec, source: Input, sizes: Mapping[str, int], place: str
    ) -> Callable[[torch.Generator], Any]:
        """Return a function that draws one input from a random generator."""
        if isinstance(source, CustomInput):
            raise ConfigError(
                f"{place}: type = 'custom': the input's generator belongs to the definition, whose "
                "inputs are known to solutions. Use random, scalar or safetensors."
            )
        if isinstance(source, ScalarInput) != (spec.shape is None):
            expected = "a number, of type scalar" if spec.shape is None else "a tensor"
            raise ConfigError(
                f"{place}: type = {source.type!r}: the definition asks for {expected}. "
                "Correct the workload."
            )
        if isinstance(source, ScalarInput):
            if isinstance(source.value, bool) != (spec.kind is bool) or (
                spec.kind is int and not isinstance(source.value, int)
            ):
                raise ConfigError(
                    f"{place}: value = {source.value!r}: the definition asks for {spec.dtype}. "
                    "Correct the workload."
                )
            value = spec.kind(source.value)
            return lambda generator: value
        shape = tuple(sizes[axis] for axis in spec.shape or ())
        if isinstance(source, RandomInput):
            return lambda generator: random_tensor(shape, spec.torch_dtype, generator)
        tensor = _stored(self.root, source, place)
        if tensor.shape != shape or tensor.dtype != spec.torch_dtype:
            raise ConfigError(
                f"{place}: {source.tensor_key!r} of {source.path} is {tensor.dtype} "
                f"{list(tensor.shape)}; the definition asks for {spec.dtype} {list(shape)}."
                " Correct the workload."
            )
        return lambda generator: tensor.clone()  # a kernel may write to its arguments


def read_flashinfer_trace(definition_path: Path) -> Task:
    """Read a definition, and its workloads from the folder ``workloads`` of the data set.

    Raises: ConfigError: a file is missing or invalid.
    """
    parts = definition_path.resolve().parts
    if "definitions" not in parts[:-1]:
        raise ConfigError(
            f"{definition_path} is in no folder 'definitions', so its workloads are unknown. Move "
            "it to definitions/TYPE/NAME.json, next to workloads/TYPE/NAME.jsonl."
        )
    # The last folder of this name: the data set itself may lie in one.
    index = len(parts) - 1 - parts[::-1].index("definitions")
    root = Path(*parts[:index])
    relative = Path(*parts[index + 1 :]).with_suffix(".jsonl")
    return read_definition(definition_path, root / "workloads" / relative, root, "flashinfer-trace")


def read_definition(
    definition_path: Path,
    workloads_path: Path,
    root: Path,
    source: Literal["flashinfer-trace", "sol-execbench"],
) -> Task:
    """Read a definition and its workloads as a task.

    Args:
        root: folder to which the paths of safetensors files are relative.
    Raises: ConfigError: a file is missing or invalid.
    """
    content, lines = read_bytes(definition_path), read_bytes(workloads_path)
    definition = parse(Definition, content, str(definition_path))
    function = execute(definition.reference, f"{definition_path}: reference")["run"]
    outputs = tuple(definition.outputs)

    def run(arguments: Mapping[str, Any], wide: bool) -> list[Tensor]:
        return named_results(function(*(arguments[name] for name in definition.inputs)), outputs)

    def expect(case: Case) -> Expected:
        expected = measured(definition.name, run, outputs, case)
        for name, form in expected.forms.items():
            if str(form.dtype) != f"torch.{definition.outputs[name].dtype}":
                raise ConfigError(
                    f"{definition_path}: outputs.{name}.dtype = "
                    f"{definition.outputs[name].dtype!r}: the reference returns {form.dtype}. "
                    "Correct the definition."
                )
        return expected

    task = DefinedTask(definition, root)
    workloads = {
        entry.uuid: task.workload(entry, place)
        for entry, place in _entries(lines, workloads_path, definition.name)
    }
    if not workloads:
        raise ConfigError(f"{workloads_path} has no workload of {definition.name!r}. Add one.")
    return Task(
        name=definition.name,
        source=source,
        # Workloads are part of the digest: results for other inputs are not comparable.
        digest=hashlib.sha256(content + lines).hexdigest(),
        op=foreign_op(definition.name, {n: s.kind for n, s in definition.inputs.items()}, run),
        workloads=tuple(workloads.values()),
        expect=expect,
        outputs=outputs,
    )


def _entries(lines: bytes, path: Path, definition: str) -> Iterator[tuple[WorkloadEntry, str]]:
    """Yield each workload in a file with its position; skip lines of other definitions."""
    for number, line in enumerate(lines.splitlines(), 1):
        place = f"{path}:{number}"
        # FlashInfer-Trace wraps each workload, SOL-ExecBench does not.
        if b'"workload"' in line:
            trace = parse(TraceLine, line, place)
            if trace.definition == definition:
                yield trace.workload, place
        elif line.strip():
            yield parse(WorkloadEntry, line, place), place


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw normal floats, integers between -1024 and 1023, or booleans."""
    if dtype.is_floating_point:
        values = torch.randn(
            shape,
            generator=generator,
            dtype=torch.promote_types(dtype, torch.float32)
            if dtype.itemsize > 1
            else torch.float32,
        )
        return (values.clamp(-_MAX_FP8, _MAX_FP8) if dtype.itemsize == 1 else values).to(dtype)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    limit = min(_MAX_INTEGER, torch.iinfo(dtype).max + 1)
    return torch.randint(-limit, limit, shape, generator=generator).to(dtype)


def _stored(root: Path, source: SafetensorsInput, place: str) -> Tensor:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(
            f"{place}: type = 'safetensors' needs the package safetensors. "
            "Try: pip install safetensors"
        ) from error
    path = root / source.path
    try:
        with safe_open(path, framework="pt") as tensors:
            keys = list(tensors.keys())
            if source.tensor_key not in keys:
                raise ConfigError(
                    f"{place}: tensor_key = {source.tensor_key!r} is not in {path}; nearest: "
                    f"{near_names(source.tensor_key, keys)}. Correct the workload."
                )
            tensor: Tensor = tensors.get_tensor(source.tensor_key)
            return tensor
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{place}: {path} cannot be read: {error}. Download the file of the data set."
        ) from error


def _names_of(expression: str) -> set[str]:
    """Return the names in a Python expression, or an unknown name for any other text."""
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        return {""}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _evaluated(expression: str, sizes: Mapping[str, int], place: str) -> Any:
    """Evaluate a Python expression over sizes; the file is as trusted as its reference."""
    try:
        return eval(expression, {"__builtins__": {}}, dict(sizes))
    except Exception as error:
        raise ConfigError(
            f"{place}: {expression!r} cannot be evaluated: {error}. Correct the definition."
        ) from error
