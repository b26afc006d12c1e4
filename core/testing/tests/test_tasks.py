"""Tasks and solutions in public formats are read, and unusable files are named."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interposer import Case, OpEntry, Registry, custom_op
from interposer.errors import ConfigError, UnknownNameError
from interposer_testing._judge.task import Expected, Task
from interposer_testing._tasks import read_solution, read_task
from interposer_testing._tasks.sol_execbench import read_sol_execbench

SCALE_REFERENCE = """\
import torch

def run(x, weight, factor):
    rows = x.to(torch.float32) * weight.to(torch.float32)
    return {"total": rows.sum(-1), "y": (rows * factor).to(x.dtype)}
"""
DEFINITION: dict[str, Any] = {
    "name": "scale_h64",
    "op_type": "scale",
    "axes": {"rows": {"type": "var"}, "hidden": {"type": "const", "value": 64}},
    "inputs": {
        "x": {"shape": ["rows", "hidden"], "dtype": "bfloat16"},
        "weight": {"shape": ["hidden"], "dtype": "bfloat16"},
        "factor": {"shape": None, "dtype": "float32"},
    },
    "outputs": {
        "y": {"shape": ["rows", "hidden"], "dtype": "bfloat16"},
        "total": {"shape": ["rows"], "dtype": "float32"},
    },
    "reference": SCALE_REFERENCE,
}
WORKLOAD: dict[str, Any] = {
    "uuid": "w-1",
    "axes": {"rows": 3},
    "inputs": {
        "x": {"type": "random"},
        "weight": {"type": "random"},
        "factor": {"type": "scalar", "value": 0.5},
    },
}
SOLUTION: dict[str, Any] = {
    "name": "fast_scale",
    "definition": "scale_h64",
    "author": "somebody",
    "spec": {
        "language": "triton",
        "target_hardware": ["cpu"],
        "entry_point": "main.py::scale",
        "destination_passing_style": True,
    },
    "sources": [{"path": "main.py", "content": "raise SystemExit\n"}],
}
LINEAR = """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, size, options):
        super().__init__()
        self.inner = nn.Linear(size, 2)
        self.register_buffer("shift", torch.rand(2))

    def forward(self, x, bias):
        return self.inner(x) + self.shift * bias

def get_inputs():
    return [torch.rand(5, 8), 2.0]

def get_init_inputs():
    return [8, {"a": [1, "b"]}]
"""


def changed(document: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Copy a JSON document with the value at a dotted path replaced."""
    copied: dict[str, Any] = json.loads(json.dumps(document))
    *parents, last = path.split(".")
    part = copied
    for name in parents:
        part = part[name]
    part[last] = value
    return copied


def toy_cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    for rows in (1, 4):
        yield Case(f"{rows} rows", {"x": torch.randn(rows, 8, generator=generator).to(dtype)})


def toy_sample(dtype: torch.dtype, dims: Any, num_tokens: int, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    return Case("sample", {"x": torch.randn(num_tokens, 32, generator=generator).to(dtype)})


@custom_op("toy_double", cases=toy_cases, sample=toy_sample)
def toy_double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture
def registry(registered: Callable[..., Registry]) -> Registry:
    return registered(OpEntry("toy_double", f"{__name__}:toy_double"))


ReadTrace = Callable[..., Task]


@pytest.fixture
def read_trace(tmp_path: Path, registry: Registry) -> ReadTrace:
    """Return a function that writes the two files of FlashInfer-Trace and reads the task."""

    def read(definition: Any = DEFINITION, *workloads: Any) -> Task:
        path = tmp_path / "definitions" / "scale" / "scale_h64.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(definition if isinstance(definition, str) else json.dumps(definition))
        lines = tmp_path / "workloads" / "scale" / "scale_h64.jsonl"
        lines.parent.mkdir(parents=True, exist_ok=True)
        lines.write_text("\n".join(map(json.dumps, workloads or [WORKLOAD])) + "\n\n")
        return read_task(str(path), registry)

    return read


def drawn(task: Task, seed: int = 0, index: int = 0) -> Case:
    return task.workloads[index].case(torch.Generator().manual_seed(seed))


def passes(expected: Expected, results: Mapping[str, torch.Tensor]) -> bool:
    """Return whether every element is within its bound."""
    return all(
        bool(((results[name].double() - value).abs() <= expected.bounds[name]).all())
        for name, value in expected.values.items()
    )


def test_definition_gives_signature_outputs_and_fresh_inputs(read_trace: ReadTrace) -> None:
    task = read_trace()
    assert (task.name, task.source, task.outputs) == (
        "scale_h64",
        "flashinfer-trace",
        ("y", "total"),
    )
    assert list(task.op.signature.parameters) == ["x", "weight", "factor"]
    case = drawn(task)
    assert case.arguments["x"].shape == (3, 64)
    assert case.arguments["x"].dtype == torch.bfloat16
    assert case.arguments["factor"] == 0.5
    assert task.workloads[0].free == {"x", "weight"}
    assert torch.equal(drawn(task).arguments["x"], case.arguments["x"])
    assert not torch.equal(drawn(task, seed=1).arguments["x"], case.arguments["x"])


def test_lines_may_wrap_the_workload_in_a_trace(read_trace: ReadTrace) -> None:
    wrapped = {"definition": "scale_h64", "solution": None, "workload": WORKLOAD}
    other = {"definition": "other", "workload": changed(WORKLOAD, "uuid", "w-2")}
    task = read_trace(DEFINITION, wrapped, other)
    assert [workload.label for workload in task.workloads] == ["rows=3 (w-1)"]


def test_float64_reference_bounds_rounded_results(read_trace: ReadTrace) -> None:
    task = read_trace()
    case = drawn(task)
    expected = task.expect(case)
    assert expected.precision == "float64"
    assert [value.dtype for value in expected.values.values()] == [torch.float64] * 2
    assert [form.dtype for form in expected.forms.values()] == [torch.bfloat16, torch.float32]
    own = dict(zip(task.outputs, task.op(**case.arguments), strict=True))
    assert passes(expected, own)
    # The sum is of float32, so a sum of numbers rounded to bfloat16 is wrong.
    rounded = (case.arguments["x"] * case.arguments["weight"]).float().sum(-1)
    assert not passes(expected, {**own, "total": rounded})
    assert not passes(expected, {**own, "y": own["y"] * 1.02})


def test_a_sum_of_float32_in_another_order_passes(read_trace: ReadTrace) -> None:
    size = 4096
    definition = changed(DEFINITION, "axes.hidden.value", size)
    for name in ("x", "weight"):
        definition["inputs"][name]["dtype"] = "float32"
    definition["outputs"]["y"]["dtype"] = "float32"
    task = read_trace(definition)
    case = drawn(task)
    products = (case.arguments["x"] * case.arguments["weight"]).unbind(-1)
    total = torch.zeros(3)
    for product in products:
        total += product
    expected = task.expect(case)
    y = case.arguments["x"] * case.arguments["weight"] * 0.5
    assert passes(expected, {"y": y, "total": total})
    coarse = (case.arguments["x"].bfloat16() * case.arguments["weight"].bfloat16()).float()
    assert not passes(expected, {"y": y, "total": coarse.sum(-1)})


def test_a_reference_that_demands_its_dtype_is_run_in_float64_inside(
    read_trace: ReadTrace,
) -> None:
    demanding = SCALE_REFERENCE.replace(
        "    rows", "    assert x.dtype == torch.bfloat16\n    rows", 1
    )
    expected = read_trace(changed(DEFINITION, "reference", demanding)).expect(drawn(read_trace()))
    assert expected.precision == "float64"


def test_a_reference_that_leaves_torch_is_run_in_its_own_dtype(read_trace: ReadTrace) -> None:
    leaving = SCALE_REFERENCE.replace("def run", "def other").replace("import torch", "") + (
        "import torch\n"
        "def run(x, weight, factor):\n"
        "    assert torch.get_default_dtype() == torch.float32\n"
        "    return (x * weight * factor), (x * weight).float().sum(-1)\n"
    )
    task = read_trace(changed(DEFINITION, "reference", leaving))
    case = drawn(task)
    expected = task.expect(case)
    assert expected.precision == "own dtype"
    assert passes(expected, dict(zip(task.outputs, task.op(**case.arguments), strict=True)))


def test_variable_axes_get_other_sizes_if_no_input_depends_on_them(read_trace: ReadTrace) -> None:
    (workload,) = read_trace().workloads
    draw = workload.of_other_size
    assert draw is not None
    cases = [draw(torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert {case.arguments["x"].shape for case in cases} == {(1, 64), (2, 64), (3, 64)}
    constrained = changed(DEFINITION, "axes.parts", {"type": "expr", "expression": "rows * 2"})
    (workload,) = read_trace(constrained).workloads
    assert workload.of_other_size is None


def test_a_random_reference_is_refused(read_trace: ReadTrace) -> None:
    random = SCALE_REFERENCE.replace("* factor", "* torch.rand(())")
    task = read_trace(changed(DEFINITION, "reference", random))
    with pytest.raises(ConfigError, match="draws random numbers"):
        task.expect(drawn(task))


def test_a_float8_output_may_be_rounded_to_the_other_neighbour(read_trace: ReadTrace) -> None:
    definition = changed(DEFINITION, "outputs.y.dtype", "float8_e4m3fn")
    definition["reference"] = SCALE_REFERENCE.replace("x.dtype", "torch.float8_e4m3fn")
    task = read_trace(definition)
    case = drawn(task)
    expected = task.expect(case)
    own = dict(zip(task.outputs, task.op(**case.arguments), strict=True))
    codes = own["y"].view(torch.uint8)
    is_normal = (codes & 0x78 != 0) & (codes & 0x7F < 0x7E)
    for step, accepted in ((1, True), (3, False)):
        moved = torch.where(is_normal, codes + step, codes).view(torch.float8_e4m3fn)
        assert passes(expected, {**own, "y": moved}) is accepted


def test_arguments_survive_a_reference_that_overwrites_them(read_trace: ReadTrace) -> None:
    writing = SCALE_REFERENCE.replace("    rows", "    x.zero_()\n    rows", 1)
    task = read_trace(changed(DEFINITION, "reference", writing))
    case = drawn(task)
    task.expect(case)
    assert case.arguments["x"].any()


def test_integer_outputs_may_differ_only_where_float64_and_the_reference_do(
    read_trace: ReadTrace,
) -> None:
    reference = "def run(x, weight, factor):\n    return x, x.float().argmax(-1)\n"
    definition = changed(DEFINITION, "reference", reference)
    definition["outputs"]["total"]["dtype"] = "int64"
    expected = read_trace(definition).expect(drawn(read_trace(definition)))
    assert not expected.bounds["total"].any()
    assert expected.values["total"].dtype == torch.int64


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("axes.hidden.value", -1, "axes.hidden.const.value = -1"),
        ("axes.hidden.type", "fixed", "axes.hidden"),
        ("inputs.x.dtype", "float33", "'float32'"),
        ("inputs.x.shape", ["row", "hidden"], "the axis 'row' of 'x' is unknown"),
        ("inputs.x y", {"shape": None, "dtype": "int32"}, "no identifier"),
        ("outputs.x", {"shape": None, "dtype": "int32"}, "both an input and an output"),
        ("outputs", {}, "outputs"),
        ("reference", "def walk(): pass", "defines no function 'run'"),
        ("reference", "def run(:", "no valid Python in line 1"),
        ("reference", "import interposer_nowhere\ndef run(): pass", "interposer_nowhere"),
        ("constraints", ["rows == hidden"], "break the constraint"),
        ("name", None, "name"),
    ],
)
def test_unusable_definitions_are_refused_by_field(
    read_trace: ReadTrace, path: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_trace(changed(DEFINITION, path, value))
    assert words in str(raised.value)
    assert "scale_h64.json" in str(raised.value)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("axes", {}, "'rows' has no size"),
        ("axes.hidden", 64, "'hidden' is no variable axis"),
        ("axes.rows", 1.5, "axes.rows = 1.5"),
        ("inputs.x", {"type": "custom"}, "custom"),
        ("inputs.x", {"type": "scalar", "value": 1}, "asks for a tensor"),
        ("inputs.factor", {"type": "random"}, "asks for a number"),
        ("inputs.factor", {"type": "scalar", "value": True}, "asks for float32"),
        ("inputs.bias", {"type": "random"}, "'bias' is no input"),
        ("inputs", {}, "'x' has no source"),
        ("inputs.x", {"type": "safetensors", "path": "no.safetensors", "tensor_key": "x"}, "x"),
    ],
)
def test_unusable_workloads_are_refused_by_line(
    read_trace: ReadTrace, path: str, value: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_trace(DEFINITION, WORKLOAD, changed(WORKLOAD, path, value))
    assert words in str(raised.value)
    assert "scale_h64.jsonl:2" in str(raised.value)


def test_outputs_that_differ_from_the_definition_are_refused(read_trace: ReadTrace) -> None:
    task = read_trace(changed(DEFINITION, "outputs.total.dtype", "float16"))
    with pytest.raises(ConfigError, match=r"outputs\.total\.dtype"):
        task.expect(drawn(task))
    task = read_trace(changed(DEFINITION, "reference", "def run(x, weight, factor):\n return x"))
    with pytest.raises(ConfigError, match="returned 1 outputs"):
        task.expect(drawn(task))


def test_stored_inputs_are_checked_and_never_overwritten(
    read_trace: ReadTrace, tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    stored = torch.arange(64).bfloat16()
    safetensors.save_file({"w": stored, "short": stored[:3].clone()}, tmp_path / "a.safetensors")
    source = {"type": "safetensors", "path": "a.safetensors", "tensor_key": "w"}
    task = read_trace(DEFINITION, changed(WORKLOAD, "inputs.weight", source))
    drawn(task).arguments["weight"].zero_()
    assert torch.equal(drawn(task).arguments["weight"], stored)
    assert task.workloads[0].free == {"x"}
    for key, words in (("short", r"\[3\]"), ("v", "nearest: .*'w'")):
        source["tensor_key"] = key
        with pytest.raises(ConfigError, match=words):
            read_trace(DEFINITION, changed(WORKLOAD, "inputs.weight", source))


def test_every_dtype_of_the_format_is_drawn(read_trace: ReadTrace) -> None:
    for dtype in ("float64", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "int8", "bool"):
        value = drawn(read_trace(changed(DEFINITION, "inputs.x.dtype", dtype))).arguments["x"]
        assert str(value.dtype) == f"torch.{dtype}"
        assert len(value.double().unique()) > 1


# SOL-ExecBench: the same parts in a folder, with computed axes.


def test_a_folder_of_sol_execbench_may_compute_axes(tmp_path: Path, registry: Registry) -> None:
    definition = changed(
        DEFINITION, "axes.hidden", {"type": "expr", "expression": "rows * (4 + 1) // 2"}
    )
    definition["custom_inputs_entrypoint"] = None
    (tmp_path / "definition.json").write_text(json.dumps(definition))
    (tmp_path / "workload.jsonl").write_text(json.dumps(WORKLOAD))
    task = read_task(str(tmp_path), registry)
    assert task.source == "sol-execbench"
    assert drawn(task).arguments["weight"].shape == (7,)
    assert read_task(str(tmp_path / "definition.json"), registry).digest == task.digest
    for expression in ("rows * columns", "rows - 4", "rows / 2"):
        definition["axes"]["hidden"]["expression"] = expression
        (tmp_path / "definition.json").write_text(json.dumps(definition))
        with pytest.raises(ConfigError, match=r"axes\.hidden"):
            read_task(str(tmp_path), registry)


# KernelBench


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "level1" / "19_Linear.py"
    path.parent.mkdir()
    path.write_text(LINEAR)
    return path


def test_a_problem_gives_its_weights_as_data(problem: Path, registry: Registry) -> None:
    task = read_task(str(problem), registry, seed=5)
    assert (task.name, task.source) == ("level1/19_Linear", "kernelbench")
    assert task.module is not None
    assert task.module.arguments == (8, {"a": [1, "b"]})
    assert set(task.module.tensors) == {"inner.weight", "inner.bias", "shift"}
    assert list(task.op.signature.parameters) == ["x", "bias"]
    state = torch.random.get_rng_state()
    case = drawn(task)
    expected = task.expect(case)
    assert torch.equal(torch.random.get_rng_state(), state)
    tensors = task.module.tensors
    result = case.arguments["x"] @ tensors["inner.weight"].T + tensors["inner.bias"]
    assert passes(expected, {"output 0": result + tensors["shift"] * 2})
    assert not passes(expected, {"output 0": result + tensors["shift"] * 1.99})


def test_weights_and_inputs_depend_on_separate_seeds(problem: Path, registry: Registry) -> None:
    first, again, other = (read_task(str(problem), registry, seed=seed) for seed in (1, 1, 2))
    assert first.module is not None
    assert again.module is not None
    assert other.module is not None
    assert first.module.seed == again.module.seed != other.module.seed
    weights = [task.module.tensors["shift"] for task in (first, again, other) if task.module]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(drawn(first, 1).arguments["x"], drawn(first, 2).arguments["x"])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("class Model", "class Module", "does not define Model"),
        ("return [8,", "return [torch.zeros(2),", "not a list of plain values"),
        ("return [8,", "return ['8',", "Model fails with TypeError"),
        ("return [torch.rand(5, 8), 2.0]", "return torch.rand(5, 8)", "returned Tensor"),
        ("2.0]", "object()]", "returned object"),
        ("torch.rand(5, 8)", "torch.rand(1 << 20, 1 << 20)", "get_inputs() returns 4096.0 GiB"),
        ("self.shift * bias", "self.shift.new_zeros(1 << 39, 1, 2)", "Model returns 20480.0 GiB"),
        ("import torch", "import torch (", "no valid Python in line 1"),
    ],
)
def test_unusable_problems_are_refused(
    problem: Path, registry: Registry, old: str, new: str, words: str
) -> None:
    problem.write_text(LINEAR.replace(old, new, 1))
    with pytest.raises(ConfigError) as raised:
        read_task(str(problem), registry)
    assert words in str(raised.value)
    assert "19_Linear.py" in str(raised.value)


def test_a_problem_is_found_by_its_number_below_a_folder(problem: Path, registry: Registry) -> None:
    folder = problem.parent.parent
    (problem.parent / "helper.py").write_text("x = 1")
    for name in ("19", "19_Linear", "level1/19_Linear", "level1/19"):
        assert read_task(f"{folder}:{name}", registry).name == "level1/19_Linear"
    with pytest.raises(UnknownNameError, match="'level1/19_Linear'"):
        read_task(f"{folder}:18", registry)
    second = folder / "level2" / "19_Other.py"
    second.parent.mkdir()
    second.write_text(LINEAR)
    with pytest.raises(ConfigError, match="2 problems"):
        read_task(f"{folder}:19", registry)


# Ops


def test_an_op_has_cases_to_check_and_samples_to_time(registry: Registry) -> None:
    task = read_task("toy_double", registry)
    assert (task.name, task.source, task.op) == ("toy_double", "op", toy_double)
    labels = [workload.label for workload in task.workloads]
    assert labels[:2] == ["float32: 1 rows", "float32: 4 rows"]
    assert len(set(labels)) == len(labels)
    timed = [workload for workload in task.workloads if workload.timed]
    assert [workload.label for workload in timed] == [
        "bfloat16: sample of 1 tokens",
        "bfloat16: sample of 128 tokens",
    ]
    for index in (0, -1):
        case = drawn(task, 1, index)
        assert not torch.equal(case.arguments["x"], drawn(task, 2, index).arguments["x"])
        expected = task.expect(case)
        assert passes(expected, {"output 0": case.arguments["x"] * 2})
        assert not passes(expected, {"output 0": case.arguments["x"] * 2.1})
    assert timed[0].of_other_size is not None
    sizes = {
        tuple(timed[0].of_other_size(torch.Generator().manual_seed(seed)).arguments["x"].shape)
        for seed in range(4)
    }
    assert len(sizes) > 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("toy_duoble", "'toy_double'"),
        ("nowhere/definition.json", "cannot be read"),
        ("nowhere/problem.py", "cannot be read"),
        ("nowhere:19", "The folder 'nowhere' does not exist"),
        ("nowhere/task.yaml", "does not exist"),
    ],
)
def test_unknown_tasks_are_refused_with_the_formats(
    registry: Registry, text: str, words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_task(text, registry)
    assert words in str(raised.value)


# Solutions: the files below would fail if they were executed.


@pytest.fixture
def task(registry: Registry) -> Task:
    return read_task("toy_double", registry)


@pytest.mark.parametrize(
    ("code", "suffix", "entry", "uses_triton"),
    [
        ("1 / 0\ndef toy_double(x): ...\ndef run(x): ...", "", "toy_double", False),
        ("1 / 0\nimport triton.language as tl\ndef run(x): ...", "", "run", True),
        ("1 / 0\nkernel = lambda x: x", "", "kernel", False),
        ("1 / 0\ndef mine(x): ...\ndef run(x): ...", ":mine", "mine", False),
    ],
)
def test_the_entry_of_a_python_file_is_found_without_executing_it(
    tmp_path: Path, task: Task, code: str, suffix: str, entry: str, uses_triton: bool
) -> None:
    path = tmp_path / "candidate.py"
    path.write_text(code)
    solution = read_solution(f"{path}{suffix}", task)
    assert (solution.entry, solution.language, solution.file) == (entry, "python", "candidate.py")
    assert solution.uses_triton == uses_triton
    assert solution.sources == {"candidate.py": code.encode()}
    assert solution.style == "returns"


def test_classes_solve_problems(tmp_path: Path, problem: Path, registry: Registry) -> None:
    path = tmp_path / "candidate.py"
    path.write_text("class ModelNew: ...\ndef run(): ...")
    assert read_solution(str(path), read_task(str(problem), registry)).entry == "ModelNew"


def test_other_files_are_passed_on_as_bytes(tmp_path: Path, task: Task) -> None:
    (tmp_path / "a.cpp").write_text("int x;")
    solution = read_solution(f"{tmp_path / 'a.cpp'}:fast", task)
    assert (solution.language, solution.entry) == ("cpp", "fast")


@pytest.mark.parametrize(
    ("code", "uses_triton"),
    [("1 / 0", False), ("from triton import jit", True), ("def f():\n    import triton", True)],
)
def test_wheels_are_searched_for_triton(
    tmp_path: Path, task: Task, code: str, uses_triton: bool
) -> None:
    path = tmp_path / "a-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("a/__init__.py", "")
        wheel.writestr("a/kernels.py", code)
    solution = read_solution(str(path), task)
    assert (solution.language, solution.entry) == ("wheel", "toy_double")
    assert (list(solution.sources), solution.uses_triton) == ([path.name], uses_triton)


def test_damaged_wheels_are_refused(tmp_path: Path, task: Task) -> None:
    path = tmp_path / "a-1.0-py3-none-any.whl"
    path.write_bytes(b"PK")
    with pytest.raises(ConfigError, match="is no wheel: File is not a zip file"):
        read_solution(str(path), task)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("a.py", "import triton, (")
    with pytest.raises(ConfigError, match="no valid Python in line 1"):
        read_solution(str(path), task)


BUILD = {
    "__init__.py": "1 / 0\nfrom .functions import toy_double, other\n",
    "functions.py": "import triton\ndef toy_double(x): ...\n",
    "metadata.json": '{"id": "_toys_cpu_123"}',
}


def write_builds(folder: Path, *names: str, inside: str = "") -> Path:
    for build in names:
        for name, content in BUILD.items():
            file = folder / "build" / build / inside / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
    return folder


def test_hub_kernels_are_packages_under_the_name_that_their_library_gives(
    tmp_path: Path, task: Task
) -> None:
    folder = write_builds(tmp_path / "toys", "torch-cpu", "torch-cuda")
    (folder / "build" / "torch-cpu" / "__pycache__").mkdir()
    (folder / "build" / "torch-cpu" / "__pycache__" / "a.pyc").write_bytes(b"")
    solution = read_solution(str(folder), task)
    assert (solution.name, solution.entry) == ("toys", "toy_double")
    assert solution.file == "_toys_cpu_123/__init__.py"
    assert solution.sources == {f"_toys_cpu_123/{n}": c.encode() for n, c in BUILD.items()}
    other = read_solution(f"{folder / 'build' / 'torch-cuda'}:other", task)
    assert (other.entry, other.sources) == ("other", solution.sources)


@pytest.mark.parametrize(
    ("builds", "device", "chosen", "uses_triton"),
    [
        (("torch-cpu", "torch-cuda", "torch-universal"), "cpu", "torch-cpu", False),
        (("torch-cuda", "torch-universal"), "cpu", "torch-universal", True),
        (("torch-cuda", "torch11-cxx11-cpu-x86_64-linux"), "cpu", "torch-cuda", True),
        (("torch-cpu", "torch-cuda"), "cuda", "torch-cuda", True),
    ],
)
def test_the_build_of_hub_kernels_fits_the_device(
    tmp_path: Path, task: Task, builds: Sequence[str], device: str, chosen: str, uses_triton: bool
) -> None:
    folder = write_builds(tmp_path, *builds)
    (folder / "build" / chosen / "chosen").write_text("")
    solution = read_solution(str(folder), task, device)
    assert "_toys_cpu_123/chosen" in solution.sources
    assert solution.uses_triton == uses_triton


def test_hub_kernels_may_lie_in_a_folder_of_their_build(tmp_path: Path, task: Task) -> None:
    folder = write_builds(tmp_path, "torch-universal", inside="toys")
    solution = read_solution(str(folder), task)
    assert solution.file == "toys/__init__.py"
    assert set(solution.sources) == {f"toys/{name}" for name in BUILD}


def test_folders_without_a_fitting_build_are_refused(tmp_path: Path, task: Task) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"it has no __init__\.py"):
        read_solution(str(tmp_path / "empty"), task)
    folder = write_builds(tmp_path, "torch-metal")
    with pytest.raises(ConfigError, match=r"no build for the device 'cpu'.*it has torch-metal"):
        read_solution(str(folder), task)
    with pytest.raises(ConfigError, match="defines no 'absent'; it defines 'toy_double'"):
        read_solution(f"{folder / 'build' / 'torch-metal'}:absent", task)


def test_json_solutions_keep_only_their_sources(tmp_path: Path, read_trace: ReadTrace) -> None:
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(SOLUTION))
    solution = read_solution(str(path), read_trace())
    assert (solution.name, solution.entry, solution.file) == ("fast_scale", "scale", "main.py")
    assert (solution.language, solution.style) == ("python", "writes outputs")
    assert solution.uses_triton
    assert solution.sources == {"main.py": b"raise SystemExit\n"}
    several = changed(SOLUTION, "spec.languages", ["pytorch", "triton"])
    del several["spec"]["language"]
    path.write_text(json.dumps(changed(several, "spec.destination_passing_style", False)))
    solution = read_solution(str(path), read_trace())
    assert (solution.uses_triton, solution.style) == (True, "returns")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("definition", "other", "the task is 'scale_h64'"),
        ("spec.language", "cuda", "'cuda' cannot be judged"),
        ("spec.language", "cpp", "use 'torch'"),
        ("spec.language", "", "neither"),
        ("spec.entry_point", "main.py:scale", "FILE::FUNCTION"),
        ("spec.entry_point", "other.py::scale", "'other.py'"),
        ("sources", [], "sources"),
        ("sources", [SOLUTION["sources"][0]] * 2, "repeated"),
        ("sources", [{"path": "../a.py", "content": ""}], "relative"),
        ("sources", [{"path": "/a.py", "content": ""}], "relative"),
    ],
)
def test_unusable_json_solutions_are_refused_by_field(
    tmp_path: Path, read_trace: ReadTrace, path: str, value: Any, words: str
) -> None:
    file = tmp_path / "solution.json"
    file.write_text(json.dumps(changed(SOLUTION, path, value)))
    with pytest.raises(ConfigError) as raised:
        read_solution(str(file), read_trace())
    assert words in str(raised.value)
    assert "solution.json" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.py", b"def other(x): ...", "it defines 'other'"),
        ("a.py", b"def toy_double(", "no valid Python in line 1"),
        ("a.py", b"\xff", "Correct the file"),
        ("a.py", b"\0", "Correct the file"),
        ("a.whl", b"no zip", "no wheel"),
        ("a.json", b"{", "the file"),
        ("a.so", b"", "unknown format"),
    ],
)
def test_unusable_solutions_are_refused(
    tmp_path: Path, task: Task, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_solution(str(tmp_path / name), task)
    assert words in str(raised.value)
    with pytest.raises(ConfigError):
        read_solution(str(tmp_path / f"absent_{name}"), task)


# Any JSON in any place either gives a task that draws inputs, or a ConfigError.

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=6), children, max_size=3)
    ),
    max_leaves=6,
)


def paths_of(document: Any, prefix: str = "") -> list[str]:
    """Return the dotted paths of all fields of nested dicts."""
    if not isinstance(document, dict):
        return []
    return [
        path
        for name, value in document.items()
        for path in (f"{prefix}{name}", *paths_of(value, f"{prefix}{name}."))
    ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_malformed_files_raise_only_config_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("task")
    documents = {
        "definition.json": DEFINITION,
        "workload.jsonl": WORKLOAD,
        "solution.json": SOLUTION,
    }
    for name, document in documents.items():
        path = data.draw(st.sampled_from(["", *paths_of(document)]))
        value = data.draw(JSON_VALUES)
        # The code of the definition is the operator's, so other text is no malformed code.
        mutated = changed(document, path, value) if path and path != "reference" else document
        (folder / name).write_text(json.dumps(mutated))
    with contextlib.suppress(ConfigError):
        task = read_sol_execbench(folder)
        drawn(task)
        read_solution(str(folder / "solution.json"), task)
