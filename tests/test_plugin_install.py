"""Plugins come and go with pip: wheels are built, installed and uninstalled for real.

Each test has a virtual environment that links to everything in this one but the example plugin.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest
from tests.forks import Forks

from interposer.hookspecs import GROUP

EXAMPLE = Path(__file__).parents[1] / "examples" / "example-norm"

# What model code does: it names the standard layer and no plugin.
MODEL = """
import json, sys
import torch
from interposer import Capability, Device, Resolver, Site, current_registry, effective_config
from interposer import explain
from interposer_ops.layers.norm import RMSNorm

device = Device("bare", "cpu", "a device without kernels of its own", Capability("any"))
site = Site(Resolver(current_registry(), device, effective_config()), "norm", torch.float32)
layer = RMSNorm(site, 8, 1e-5)
layer.weight.fill_(1)
assert torch.allclose(layer(torch.full((2, 8), 3.0)), torch.ones(2, 8))
choices = explain(site).to_dict()["choices"]
print(json.dumps({"class": type(layer).__name__, "choices": choices}))
"""

PLUGIN = """
from interposer.hookspecs import hookimpl
from interposer.records import Kernel

INTERPOSER_API = ">=1.0,<2"


@hookimpl
def interposer_records():
    return [Kernel("rms_norm", "rms_norm_{name}", "{package}.kernels:rms_norm")]
"""
RAISES_ON_IMPORT = "raise OSError('no such library')\n"
LEAVES_ON_IMPORT = "raise SystemExit('another version is needed')\n"
RAISES_IN_HOOK = PLUGIN.replace("return [", "raise OSError('no such library')\n    return [")

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0"

[project.entry-points."interposer.plugins"]
{plugin} = "{package}.plugin"
"""
KERNELS = "from interposer_ops.norms._norms import rms_norm as op\n\nrms_norm = op.reference\n"


def execute(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run([*map(str, command)], **options)


def build(project: Path, wheels: Path) -> Path:
    """Return the wheel of the project, built by its own build system into an empty folder."""
    options = ("--target", "wheel", "--directory", wheels)
    done = execute(sys.executable, "-m", "hatchling", "build", *options, cwd=project)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("*.whl")
    return wheel


def link_packages(folder: Path, *omitted: str) -> None:
    """Link this environment's packages into another, except files with an ``omitted`` name."""
    inside = {"base": str(folder), "platbase": str(folder)}
    for kind in ("purelib", "platlib"):
        packages = Path(sysconfig.get_path(kind, vars=inside))
        packages.mkdir(parents=True, exist_ok=True)
        for entry in Path(sysconfig.get_path(kind)).iterdir():
            link = packages / entry.name
            if not (any(name in entry.name for name in omitted) or link.exists()):
                link.symlink_to(entry)


class Environment:
    """A virtual environment of its own, with this one's packages except the example plugin.

    Its programs run as forks, each of which finds what is installed by then.
    """

    def __init__(self, folder: Path) -> None:
        done = execute(sys.executable, "-m", "venv", "--without-pip", folder)
        assert done.returncode == 0, done.stderr
        self.python = folder / "bin" / "python"
        link_packages(folder, "interposer_example_norm")
        self._forks = Forks(self.python)

    def close(self) -> None:
        self._forks.close()

    def pip(self, *arguments: str | Path) -> None:
        done = execute(sys.executable, "-m", "pip", "--python", self.python, *arguments)
        assert done.returncode == 0, done.stderr

    def install(self, *wheels: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", *wheels)

    def uninstall(self, *names: str) -> None:
        self.pip("uninstall", "--yes", *names)

    def run(self, *arguments: str, disable: str = "") -> subprocess.CompletedProcess[str]:
        """Run Python; of the plugins of this environment only ``ops`` and ``cpu`` take part."""
        points = importlib_metadata.entry_points(group=GROUP)
        others = sorted({point.name for point in points} - {"cpu", "ops", "example-norm"})
        variables = {"INTERPOSER_DISABLE": ",".join([*others, disable]), "PYTHONWARNINGS": ""}
        return self._forks.run(*arguments, env={**os.environ, **variables})

    def model(self, disable: str = "") -> dict[str, Any]:
        """Return the class and the choices that model code gets."""
        done = self.run("-c", MODEL, disable=disable)
        assert done.returncode == 0, done.stderr
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts

    def plugins(self, disable: str = "") -> tuple[int, dict[str, Any]]:
        """Return exit code and facts of ``interposer doctor``."""
        done = self.run("-m", "interposer_tools", "doctor", "--json", disable=disable)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    with contextlib.closing(Environment(tmp_path / "environment")) as made:
        yield made


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of wheels: a distribution, its plugin's name and its plugin module."""

    def make(name: str, plugin: str, source: str = PLUGIN) -> Path:
        package = name.replace("-", "_")
        project = tmp_path / name
        (project / package).mkdir(parents=True)
        (project / "pyproject.toml").write_text(
            PROJECT.format(name=name, plugin=plugin, package=package)
        )
        (project / package / "__init__.py").touch()
        (project / package / "kernels.py").write_text(KERNELS)
        (project / package / "plugin.py").write_text(source.format(name=plugin, package=package))
        return build(project, project / "dist")

    return make


def chosen(facts: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {
        (choice["kind"], choice["name"]): f"{choice['provider']}/{choice['chosen']}"
        for choice in facts["choices"]
    }


STANDARD = {
    ("layer", "rms_norm"): "interposer-ops/standard",
    ("kernel", "rms_norm"): "interposer-ops/rms_norm_vector_norm",
    ("kernel", "fused_add_rms_norm"): "interposer-ops/fused_add_rms_norm_vector_norm",
}


@pytest.mark.process
def test_the_example_comes_with_pip_install_and_goes_with_uninstall(
    environment: Environment, tmp_path: Path
) -> None:
    before = environment.model()
    assert before["class"] == "RMSNorm"
    assert chosen(before) == STANDARD
    assert "example" not in json.dumps(before)

    environment.install(build(EXAMPLE, tmp_path / "dist"))
    code, listed = environment.plugins()
    assert code == 0
    assert {
        "name": "example-norm",
        "distribution": "interposer-example-norm",
        "version": "0.1.0",
        "records": {"Kernel": 2, "LayerEntry": 1},
        "hooks": [],
    } in listed["plugins"]
    with_example = environment.model()
    assert with_example["class"] == "ExampleNorm"
    assert chosen(with_example) == {
        ("layer", "rms_norm"): "interposer-example-norm/example_norm",
        ("kernel", "rms_norm"): "interposer-example-norm/rms_norm_example",
        ("kernel", "fused_add_rms_norm"): "interposer-example-norm/fused_add_rms_norm_example",
    }
    assert environment.model(disable="example-norm") == before

    environment.uninstall("interposer-example-norm")
    code, listed = environment.plugins()
    assert code == 0
    assert "example" not in json.dumps(listed["plugins"])
    assert environment.model() == before


@pytest.mark.slow
def test_one_plugin_name_from_two_distributions_is_a_conflict_that_stops_neither_rest(
    environment: Environment, make_wheel: Callable[..., Path]
) -> None:
    environment.install(
        make_wheel("acme-norms", "norms"),
        make_wheel("zeta-norms", "norms"),
        make_wheel("fine-norms", "fine"),
    )
    code, listed = environment.plugins()
    assert code == 1
    assert [plugin["name"] for plugin in listed["plugins"]] == ["cpu", "fine", "ops"]
    assert [problem["subject"] for problem in listed["problems"]] == [
        "plugin 'norms' of acme-norms 1.0",
        "plugin 'norms' of zeta-norms 1.0",
    ]
    for name, problem in zip(("acme-norms", "zeta-norms"), listed["problems"], strict=True):
        assert "claimed by acme-norms 1.0, zeta-norms 1.0" in problem["reason"]
        assert f"INTERPOSER_DISABLE={name}" in problem["mend"]
    assert chosen(environment.model())["kernel", "rms_norm"] == "fine-norms/rms_norm_fine"

    code, listed = environment.plugins(disable="acme-norms")
    assert (code, listed["problems"]) == (0, [])
    environment.uninstall("zeta-norms", "fine-norms")
    code, listed = environment.plugins()
    assert (code, listed["problems"]) == (0, [])
    assert chosen(environment.model())["kernel", "rms_norm"] == "acme-norms/rms_norm_norms"


@pytest.mark.slow
def test_a_plugin_that_breaks_is_recorded_and_a_healthy_one_beside_it_works(
    environment: Environment, make_wheel: Callable[..., Path]
) -> None:
    environment.install(
        make_wheel("acme-raising", "raising", RAISES_ON_IMPORT),
        make_wheel("acme-leaving", "leaving", LEAVES_ON_IMPORT),
        make_wheel("acme-hook", "hook", RAISES_IN_HOOK),
        make_wheel("fine-norms", "fine"),
    )
    code, listed = environment.plugins()
    assert code == 1
    assert [plugin["name"] for plugin in listed["plugins"]] == ["cpu", "fine", "ops"]
    reasons = {problem["subject"].split("'")[1]: problem for problem in listed["problems"]}
    for name, stage, error in (
        ("raising", "importing acme_raising.plugin", "OSError('no such library')"),
        ("leaving", "importing acme_leaving.plugin", "SystemExit('another version is needed')"),
        ("hook", "calling interposer_records", "OSError('no such library')"),
    ):
        assert reasons[name]["reason"] == f"{stage} raised {error}"
        assert f"acme_{name}/plugin.py" in reasons[name]["traceback"]
    assert chosen(environment.model())["kernel", "rms_norm"] == "fine-norms/rms_norm_fine"
    done = environment.run("-m", "interposer_tools", "doctor")
    assert done.returncode == 1
    assert "plugin 'hook' of acme-hook" in done.stdout


@pytest.mark.slow
def test_the_printed_installation_of_a_new_plugin_works_with_the_pip_of_a_new_environment(
    tmp_path: Path,
) -> None:
    options = ("--kind", "kernel", "--into", tmp_path)
    done = execute(sys.executable, "-m", "interposer_tools", "new", "plugin", "acme-silu", *options)
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[1].removeprefix("Try: ")
    environment = tmp_path / "environment"
    # The pip comes with Python, so that it may be years old.
    assert execute(sys.executable, "-m", "venv", environment).returncode == 0
    python = environment / "bin" / "python"
    # The setuptools next to it is too old for torch.
    assert execute(python, "-m", "pip", "uninstall", "--yes", "setuptools").returncode == 0
    link_packages(environment, "pip-")
    variables = {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # the build system is linked, and there is no index
    }
    done = execute("bash", "-c", command, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    program = "from importlib.metadata import version; print(version('acme-silu'))"
    done = execute(python, "-c", program)
    assert done.stdout == "0.1.0\n", done.stderr
