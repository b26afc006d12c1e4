"""``interposer hub-kernels`` writes what the package ``kernels`` loads, and transformers runs."""

from __future__ import annotations

import ast
import inspect
import json
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, Qwen3Config
from transformers.activations import GELUActivation
from transformers.models.qwen3 import modeling_qwen3

from interposer_ops import norms
from interposer_testing import Budget, judge, read_solution, read_task

FUNCTIONS = Path(__file__).with_name("hub_functions.py")
USE_KERNELS = Path(__file__).with_name("hub_use_kernels.py")
IDS = torch.tensor([[5, 3, 8, 61, 0, 12, 2, 2]])
# The newest that takes the version of ``kernels`` which is declared.
TRANSFORMERS = "transformers==5.22.0"
BLOCK = """
import sys


class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("interposer"):
            raise ImportError(f"{name} is imported from outside of the repository")


sys.meta_path.insert(0, Block())
"""
Write = Callable[..., tuple[int, str, str]]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Write:
    """Return the command, which returns its exit code and what it printed."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["interposer", "hub-kernels", *map(str, arguments)])
        code: Any = 0
        try:
            runpy.run_module("interposer_tools", run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        return (code, *capsys.readouterr())

    return command


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository as the command writes it by default."""
    folder = tmp_path_factory.mktemp("hub") / "interposer-kernels"
    command = [sys.executable, "-m", "interposer_tools", "hub-kernels", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.startswith(f"{folder}: 25 functions, 4 builds")
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)


def python(*arguments: object, **variables: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_functions_equal_the_references_of_their_ops(repository: Path) -> None:
    found = json.loads(python(FUNCTIONS, repository, 6))
    assert found["faults"] == {}
    assert len(found["counts"]) == 25
    assert min(found["counts"].values()) >= 6


@pytest.mark.slow
def test_so_do_their_triton_kernels_when_interpreted(repository: Path) -> None:
    pytest.importorskip("triton", reason="needs the package triton")
    build = repository / "build" / "torch-cuda"
    found = json.loads(python(FUNCTIONS, build, 2, TRITON_INTERPRET="1"))
    assert found["faults"] == {}
    assert len(found["counts"]) == 25


@pytest.mark.slow
@pytest.mark.process
def test_it_needs_nothing_of_interposer(repository: Path) -> None:
    code = f"""{BLOCK}
from importlib import import_module
from pathlib import Path
import torch
from kernels import get_local_kernel
for folder in (Path({str(repository)!r}), Path({str(repository)!r}) / "build/torch-rocm"):
    module = get_local_kernel(folder)
    x = torch.arange(1.0, 9.0)
    y = module.rms_norm(x, torch.ones(8), 0.0)
    torch.testing.assert_close(y, x / x.square().mean().sqrt())
    for path, name in module.functions._COMPILED.values():
        assert callable(getattr(import_module(path, module.__name__), name))
assert not [name for name in sys.modules if name.startswith("interposer")]
"""
    python("-W", "error::RuntimeWarning", "-c", code)


@pytest.mark.process
def test_builds_are_as_the_package_wants_them(repository: Path) -> None:
    """Its own parsers read the recipe and the facts of every build."""
    from kernels._rust import Build

    builds = sorted(path.name for path in (repository / "build").iterdir())
    assert builds == ["torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu"]
    ids = set()
    for name in builds:
        facts = kernels.Metadata.read_from_file(repository / "build" / name / "metadata.json")
        backend = str(facts.backend.backend_type).lower()
        assert f"torch-{backend}" == name
        assert (str(facts.name), facts.version, facts.license) == (
            "interposer-kernels",
            1,
            "Apache-2.0",
        )
        assert facts.python_depends == []
        ids.add(facts.id)
    assert len(ids) == len(builds)
    recipe = Build.open(repository)
    backends = {str(backend).lower() for backend in recipe.general.backends}
    assert backends == {name.removeprefix("torch-") for name in builds}
    text = tomllib.loads((repository / "build.toml").read_text())
    assert text["general"]["name"] == "interposer-kernels"
    # What kernel-builder would take is what the builds hold.
    source = repository / "torch-ext" / "interposer_kernels"
    for name in builds:
        build = repository / "build" / name
        found = {p.relative_to(build) for p in build.rglob("*") if p.is_file()}
        of_python = {p for p in found if "__pycache__" not in p.parts}
        expected = {p.relative_to(source) for p in source.rglob("*") if p.is_file()}
        assert of_python - {Path("metadata.json")} == expected
        assert all((build / p).read_bytes() == (source / p).read_bytes() for p in expected)


@pytest.mark.process
def test_code_is_that_of_the_ops(repository: Path) -> None:
    """Every function, class and constant stands in a module of the ops, letter by letter."""
    source = repository / "torch-ext" / "interposer_kernels"
    module = source / "interposer_ops" / "norms" / "_norms.py"
    lines = inspect.getsource(norms.rms_norm.reference).splitlines()
    original = "\n".join(lines[1:])  # without the decorator
    assert original.startswith("def rms_norm(")
    assert original in module.read_text()
    packages = Path(str(inspect.getfile(norms))).parents[2]
    copied = 0
    for path in sorted(source.glob("interposer_ops/**/*.py")):
        whole = (packages / path.relative_to(source)).read_text() if path.stat().st_size else ""
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
                segment = ast.get_source_segment(path.read_text(), node) or "missing"
                assert segment in whole, (path, segment[:80])
                copied += 1
    assert copied > 150


@pytest.mark.process
def test_its_functions_are_judged(repository: Path) -> None:
    task = read_task("rms_norm")
    # As much time as a busy machine needs for all workloads.
    budget = Budget(600.0, timing_seconds=0.5, rerun_seconds=2.0, rerun_calls=2000)
    verdict = judge(task, read_solution(str(repository), task), quick=True, budget=budget)
    assert verdict.state == "accepted", str(verdict)
    assert (verdict.solution["name"], verdict.notes) == ("interposer-kernels", ())


@pytest.mark.process
def test_layers_are_stateless_and_take_the_arguments_of_the_replaced_layer(
    repository: Path,
) -> None:
    layers = kernels.get_local_kernel(repository).layers
    values = vars(layers).items()
    known = {name for name, v in values if isinstance(v, type) and issubclass(v, nn.Module)}
    assert known == {
        *("RMSNorm", "RMSNormZeroCentered", "rotary_pos_emb"),
        *("GeLU", "GeluTanh", "NewGELU", "FastGELU", "QuickGELU"),
    }
    for name in known:
        layer = getattr(layers, name)
        assert layer.__init__ is nn.Module.__init__
        assert (layer.has_backward, layer.can_torch_compile) == (False, False)


def kernelized(model: nn.Module, repository: Path, **classes: type[nn.Module]) -> nn.Module:
    """Mark classes by hand, as the decorators of transformers do where they take the package."""
    mapping = {}
    for name, cls in classes.items():
        kernels.replace_kernel_forward_from_hub(cls, name)
        mapping[name] = {"cpu": kernels.LocalLayerRepository(repository, layer_name=name)}
    with kernels.use_kernel_mapping(mapping):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu", use_fallback=False)
    return model


@pytest.mark.process
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_of_transformers_runs_layers(repository: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=64, **sizes
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        expected = model(IDS).logits
        kernelized(model, repository, RMSNorm=modeling_qwen3.Qwen3RMSNorm)
        bound = [m for m in model.modules() if isinstance(m, modeling_qwen3.Qwen3RMSNorm)]
        calls: list[str] = []
        functions = kernels.get_local_kernel(repository).functions
        original = functions._kernel

        def chosen(op: str, operand: torch.Tensor) -> Any:
            calls.append(op)
            return original(op, operand)

        functions._kernel = chosen
        try:
            found = model(IDS).logits
        finally:
            functions._kernel = original
    assert calls == ["rms_norm"] * len(bound)
    # A rounding of the dtype in each of the norms, some of which cancel.
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.process
def test_an_encoder_runs_activations(repository: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModel.from_config(BertConfig(**sizes, intermediate_size=96, vocab_size=64)).eval()
    with torch.no_grad():
        expected = model(IDS).last_hidden_state
        kernelized(model, repository, GeLU=GELUActivation)
        found = model(IDS).last_hidden_state
    activation = model.encoder.layer[0].intermediate.intermediate_act_fn
    assert activation.forward.__func__.__module__.startswith("_interposer_kernels_cpu_")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.process
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("half", [False, True])
def test_the_rotary_layer_turns_as_transformers_does(
    repository: Path, unsqueeze_dim: int, half: bool
) -> None:
    layer = kernels.get_local_kernel(repository).layers.rotary_pos_emb()
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 16, generator=generator) for heads in (4, 2))
    angles = torch.randn(1, 5, 8, generator=generator)
    both = torch.cat((angles, angles), -1)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    expected = modeling_qwen3.apply_rotary_pos_emb(q, k, both.cos(), both.sin(), unsqueeze_dim)
    table = angles if half else both
    found = layer(q, k, table.cos(), table.sin(), unsqueeze_dim)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="cos has 3 angles, must be 8 or 16"):
        layer(q, k, table[..., :3], table[..., :3])
    with pytest.raises(ValueError, match="unsqueeze_dim is 3"):
        layer(q, k, table, table, 3)


def test_a_part_is_written_and_written_again(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "part"
    arguments = folder, "--op", "relu2", "--op", "gelu", "--name", "my-kernels"
    assert write(*arguments)[0] == 0
    first = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    (folder / "build" / "stale").mkdir()
    code, out, _ = write(*arguments)
    assert (code, out.splitlines()[0]) == (0, f"{folder}: 2 functions, 4 builds")
    assert {
        p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    } == first
    module = kernels.get_local_kernel(folder)
    assert module.__all__ == ["gelu", "layers", "relu2"]
    assert not hasattr(module.layers, "RMSNorm")
    assert hasattr(module.layers, "GeLU")
    torch.testing.assert_close(module.relu2(torch.tensor([-1.0, 3.0])), torch.tensor([0.0, 9.0]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--op", "rms_nrm"], "Unknown op 'rms_nrm' among those that interposer-ops has a Triton"),
        (
            ["--op", "int8_linear"],
            "int8_linear_triton cannot be called with any arguments of its op, as a function of",
        ),
        (["--name", "My kernels"], "'My kernels' is no name of a repository"),
        (["--from", "interposer-otel"], "Unknown distribution with ops 'interposer-otel'"),
    ],
)
def test_unwritable_packages_are_refused_with_a_reason(
    write: Write, tmp_path: Path, arguments: list[str], text: str
) -> None:
    code, _, err = write(tmp_path / "new", *arguments)
    assert code == 2
    assert text in err
    assert not (tmp_path / "new").exists()


def test_a_folder_of_something_else_stays(write: Write, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("three years of work")
    code, _, err = write(tmp_path)
    assert code == 2
    assert "thesis.txt, which is no repository of kernels. Try: an empty folder" in err
    assert (tmp_path / "thesis.txt").read_text() == "three years of work"


@pytest.mark.versions
def test_use_kernels_of_a_transformers_that_takes_the_package(
    repository: Path, tmp_path: Path
) -> None:
    """The whole way: ``use_kernels=True`` maps layers and functions of a model by itself."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), TRANSFORMERS], check=True)
    found = json.loads(python(USE_KERNELS, repository, PYTHONPATH=str(tmp_path / "site")))
    assert found["transformers"] == TRANSFORMERS.rpartition("=")[2]
    assert found["norms"] == found["all norms"] > 0
    assert {"rms_norm", "rotary_embedding"} <= set(found["called"])
    assert found["relative error"] < 1e-5
    shutil.rmtree(tmp_path / "site")
