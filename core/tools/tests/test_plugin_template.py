"""``interposer new plugin`` writes packages that work at once, or nothing at all."""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from typing import Any

import importlib_metadata
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, is_normalized_name
from tests.forks import forks

from interposer import API_VERSION, Capability, Config, Device, Resolver, Site, current_registry
from interposer.errors import ConfigError, InterposerError, StorageError, UnknownNameError
from interposer.hookspecs import GROUP
from interposer_tools._cli import main
from interposer_tools._plugin_template import License, NewPlugin, PluginKind

TOOLS = Path(__file__).parents[1]
CORE = TOOLS.parent
SETTINGS = TOOLS.parents[1] / "pyproject.toml"
# A kernel that is compiled is a kind of its own here.
NATIVE = "native"
KINDS = (*PluginKind, NATIVE)
MODULES = {
    PluginKind.KERNEL: ("kernels.py",),
    PluginKind.ATTENTION: ("backend.py",),
    PluginKind.QUANTIZATION: ("ops.py", "scheme.py"),
    PluginKind.LAYER: ("layers.py",),
    PluginKind.MODEL: ("family.py",),
    PluginKind.PLATFORM: ("platform.py",),
    NATIVE: ("kernels.py",),
}
SOURCES = ("CMakeLists.txt", "level.c", "level.h", "library.c")
LONGEST = "a" * 50

pytestmark = pytest.mark.process

Command = Callable[..., tuple[int, str, str]]

# A landing writes a compiled kernel and a model family, which have the most parts.
LANDING_KINDS = (NATIVE, PluginKind.MODEL)
each_kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in LANDING_KINDS else [pytest.mark.slow])
        for kind in KINDS
    ],
)


def new(name: str, kind: str) -> NewPlugin:
    if kind == NATIVE:
        return NewPlugin(name, PluginKind.KERNEL, native=True)
    return NewPlugin(name, PluginKind(kind))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs the command and returns its exit code, output and errors."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command sets its own

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["interposer", "new", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a package of each kind; nothing may be written into them."""
    folder = tmp_path_factory.mktemp("written")
    return {kind: new(f"acme-{kind}", kind).write(folder) for kind in KINDS}


def execute(*arguments: str | Path, **options: Any) -> str:
    """Return the output of Python, which must end with 0."""
    options = {"capture_output": True, "text": True, "timeout": 500, **options}
    return succeed(subprocess.run([sys.executable, *map(str, arguments)], **options))


def succeed(process: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a program, which must have ended with 0."""
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}


@each_kind
def test_a_new_package_has_all_files(kind: str, command: Command, tmp_path: Path) -> None:
    options = ("kernel", "--native") if kind == NATIVE else (kind,)
    code, out, err = command("plugin", "acme-things", "--kind", *options)
    assert (code, err) == (0, "")
    assert names(tmp_path) == ["acme-things"]
    folder = tmp_path / "acme-things"
    title = {PluginKind.ATTENTION: "an attention", NATIVE: "a native kernel"}.get(kind, f"a {kind}")
    assert out.startswith(f"acme-things: {title} plugin, {len(files(folder))} files\n")
    native = {"tests/test_levels.py", *(f"native/{source}" for source in SOURCES)}
    assert files(folder) == {
        ".github/workflows/ci.yml",
        ".gitignore",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "src/acme_things/__init__.py",
        "src/acme_things/plugin.py",
        "src/acme_things/py.typed",
        *(f"src/acme_things/{module}" for module in MODULES[kind]),
        "tests/test_conformance.py",
        *(native if kind == NATIVE else ()),
    }
    for file in files(folder):
        text = (folder / file).read_text(encoding="utf-8")
        assert not re.search(r"\{%|%\}|(?<!\$)\{\{", text), file
        assert text.endswith("\n") != file.endswith("py.typed"), file
        assert not text.endswith("\n\n"), file


@pytest.mark.landing(1)
@each_kind
def test_requirements_match_the_installed_versions(kind: str, written: dict[str, Path]) -> None:
    facts = tomllib.loads((written[kind] / "pyproject.toml").read_text(encoding="utf-8"))
    project = facts["project"]
    package = f"acme_{kind}"
    assert project["entry-points"] == {GROUP: {f"acme-{kind}": f"{package}.plugin"}}
    assert SpecifierSet(project["requires-python"]).contains("3.11")
    requirements = {r.name: r for r in map(Requirement, project["dependencies"])}
    assert requirements.keys() >= {"interposer", "torch"}
    for name, requirement in requirements.items():
        assert requirement.specifier.contains(importlib_metadata.version(name)), requirement
        if name.startswith("interposer"):
            assert {part.operator for part in requirement.specifier} == {">=", "<"}
    plugin = (written[kind] / "src" / package / "plugin.py").read_text(encoding="utf-8")
    (api_range,) = re.findall(r'^INTERPOSER_API = "(.+)"$', plugin, re.MULTILINE)
    assert SpecifierSet(api_range).contains(API_VERSION)
    major = int(API_VERSION.partition(".")[0])
    assert not SpecifierSet(api_range).contains(f"{major + 1}.0")


@each_kind
def test_ci_runs_the_tests_and_the_verification(kind: str, written: dict[str, Path]) -> None:
    workflow = yaml.safe_load((written[kind] / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["test"]
    steps = [step["run"] for step in job["steps"] if "run" in step]
    assert "python -m pytest" in steps
    assert any(step.startswith(f"interposer verify acme-{kind}") for step in steps)
    assert job["strategy"]["matrix"]["python"][0] == "3.11"
    versions = [step["with"]["python-version"] for step in job["steps"] if "with" in step]
    assert versions == ["${{ matrix.python }}"]
    readme = (written[kind] / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(f"# acme-{kind}\n")
    for step in steps[1:]:  # what is to be run by hand is what CI runs, but for the installation
        assert step in readme


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    "name", ["a", pytest.param("acme-things", marks=pytest.mark.slow), LONGEST]
)
@each_kind
def test_a_new_package_passes_ruff(kind: str, name: str, tmp_path: Path) -> None:
    folder = new(name, kind).write(tmp_path)
    options = ("--no-cache", "--config", "src = ['src']")
    for settings in (folder / "pyproject.toml", SETTINGS):
        for check in (("check",), ("format", "--check")):
            execute(
                *("-m", "ruff", *check, *options, "--config", settings, "src", "tests"),
                cwd=folder,
            )


@pytest.mark.slow
def test_a_new_package_passes_mypy(written: dict[str, Path], tmp_path: Path) -> None:
    for folder in written.values():
        settings = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["mypy"]
        assert settings["strict"] is True
        out = execute("-m", "mypy", "--cache-dir", tmp_path / "cache", cwd=folder)
        count = sum(1 for _ in folder.rglob("*.py"))
        assert f"no issues found in {count} source files" in out


def build(folder: Path, *projects: Path) -> list[Path]:
    """Return the wheels of projects, made as their user would, but without a network."""
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation")
    execute("-m", "pip", "wheel", *options, "--wheel-dir", folder, *projects)
    return sorted(folder.glob("*.whl"))


Installed = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def wheels(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the wheel of each kind."""
    paths = build(tmp_path_factory.mktemp("wheels"), *written.values())
    return {wheel.name.split("-")[0].removeprefix("acme_"): wheel for wheel in paths}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return a function that returns the environment in which the plugin of one kind is used."""
    site = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-index", "--no-deps", "--target", site)
    execute("-m", "pip", "install", *options, *wheels.values())

    def environment(kind: str) -> dict[str, str]:
        plugins = f"acme-{kind},interposer-cpu"
        return {**os.environ, "PYTHONPATH": str(site), "INTERPOSER_PLUGINS": plugins}

    return environment


@pytest.mark.landing(1)
@each_kind
def test_wheel_holds_the_package_and_its_license(kind: str, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[kind]) as wheel:
        names_in_wheel = set(wheel.namelist())
        (place,) = (name for name in names_in_wheel if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(place).decode())
    modules = ("__init__.py", "plugin.py", "py.typed", *MODULES[kind])
    assert names_in_wheel >= {f"acme_{kind}/{module}" for module in modules}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names_in_wheel)
    assert metadata["Name"] == f"acme-{kind}"
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == NATIVE else [pytest.mark.slow]) for kind in KINDS],
)
def test_installed_package_passes_its_own_tests(
    kind: str, written: dict[str, Path], installed: Installed
) -> None:
    environment = installed(kind)
    options = ("-p", "no:cacheprovider", "-p", "no:xdist")
    out = succeed(forks().run("-m", "pytest", *options, cwd=written[kind], env=environment))
    assert re.search(r"\b[1-9]\d* passed", out), out
    assert "failed" not in out


def verified(name: str, folder: Path, *options: str, env: dict[str, str]) -> dict[str, Any]:
    """Return the report of ``interposer verify``."""
    report = folder / "report.json"
    command = ("-m", "interposer_tools", "verify", name, *options, f"--json={report}")
    succeed(forks().run(*command, env=env))
    facts: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return facts


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(PluginKind.KERNEL, [], marks=pytest.mark.slow),
        pytest.param(PluginKind.ATTENTION, [], marks=pytest.mark.slow),
        pytest.param(PluginKind.QUANTIZATION, [], marks=pytest.mark.slow),
        pytest.param(PluginKind.LAYER, [], marks=pytest.mark.slow),
        pytest.param(PluginKind.MODEL, [], marks=pytest.mark.slow),
        pytest.param(PluginKind.PLATFORM, [], marks=pytest.mark.slow),
        pytest.param(PluginKind.PLATFORM, ["--platform", "acme-platform"], marks=pytest.mark.slow),
        (NATIVE, ["--quick"]),
        pytest.param(NATIVE, [], marks=pytest.mark.slow),
    ],
)
def test_installed_package_is_verified_to_be_correct(
    kind: str, options: list[str], installed: Installed, tmp_path: Path
) -> None:
    environment = installed(kind)
    report = verified(f"acme-{kind}", tmp_path, *options, env=environment)
    assert report["state"] == "correct"
    candidates_by_key = {
        (candidate["kind"], candidate["subject"], candidate["name"]): candidate
        for candidate in report["candidates"]
    }
    subject, name, aspect = {
        PluginKind.KERNEL: ("silu_and_mul", "silu_and_mul_acme_kernel", "numerics"),
        PluginKind.ATTENTION: ("", "side_by_side_acme_attention", "numerics"),
        PluginKind.QUANTIZATION: ("acme_quantization", "squares", "scheme"),
        PluginKind.LAYER: ("activation", "sliced_acme_layer", "layer"),
        PluginKind.MODEL: ("SeedOssForCausalLM", "acme_model", "model"),
        PluginKind.PLATFORM: ("", "acme-platform", "records"),
        NATIVE: ("silu_and_mul", "silu_and_mul_acme_native", "numerics"),
    }[kind]
    word = {PluginKind.QUANTIZATION: "scheme", NATIVE: "kernel"}.get(kind, str(kind))
    candidates = [(candidates_by_key[word, subject, name], aspect)]
    candidates += [(candidates_by_key["module", "", f"acme_{kind}.plugin"], "wheel")]
    if kind == PluginKind.QUANTIZATION:  # the scheme, and the op that it applies
        candidates += [
            (candidates_by_key["kernel", "acme_quantization_linear", "reference"], "numerics")
        ]
    for candidate, tried in candidates:
        assert candidate["state"] == "correct"
        (tally,) = (tally for tally in candidate["tallies"] if tally["aspect"] == tried)
        assert tally["passed"] > 0


@pytest.mark.slow
def test_ops_are_correct_on_the_new_platform(installed: Installed, tmp_path: Path) -> None:
    environment = installed(PluginKind.PLATFORM)
    options = ("--platform", "acme-platform", "--op", "rms_norm", "--quick")
    report = verified("interposer-ops", tmp_path, *options, env=environment)
    assert report["state"] == "correct"
    assert report["ground"]["platform"] == "acme-platform"


def module(file: Path) -> ModuleType:
    """Return a module of a package, without installing that."""
    spec = importlib.util.spec_from_file_location(f"written_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_native_wheel_serves_every_python_of_one_platform(wheels: dict[str, Path]) -> None:
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", wheels[NATIVE].name)
    with zipfile.ZipFile(wheels[NATIVE]) as wheel:
        (library,) = (name for name in wheel.namelist() if name.endswith(".so"))
        assert library == "acme_native/libacme_native.so"
        assert not [
            name for name in wheel.namelist() if name.endswith((".c", ".h", "CMakeLists.txt"))
        ]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs the levels of x86")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump of binutils")
def test_native_levels_have_the_registers_of_their_names(
    written: dict[str, Path], tmp_path: Path
) -> None:
    """So the lowest runs on any processor, whatever one builds it."""
    project, built = written[NATIVE] / "native", tmp_path / "built"
    for step in (("-S", project, "-B", built), ("--build", built)):
        succeed(subprocess.run(["cmake", *map(str, step)], capture_output=True, text=True))
    registers = {}
    for level in ("portable", "avx2", "avx512"):
        (compiled,) = (built / "CMakeFiles" / f"level_{level}.dir").glob("level.c.o")
        command = ["objdump", "--disassemble", str(compiled)]
        code = succeed(subprocess.run(command, capture_output=True, text=True))
        registers[level] = set(re.findall(r"%([xyz]mm)", code))
    assert registers == {
        "portable": {"xmm"},
        "avx2": {"xmm", "ymm"},
        "avx512": {"xmm", "ymm", "zmm"},
    }


def test_native_is_only_for_kernels(command: Command, tmp_path: Path) -> None:
    code, out, err = command("plugin", "acme-things", "--kind", "layer", "--native")
    assert (code, out) == (2, "")
    assert err == (
        "error: Only kernels can be compiled, and a plugin of the kind layer has none.\n"
        "Try: --kind kernel --native, or --kind layer alone\n"
    )
    assert not names(tmp_path)


@pytest.mark.parametrize("shape", [(16,), (3, 16), (33, 16), (5, 8, 16), (0, 16), (64, 16)])
def test_written_layer_computes_any_number_of_rows(
    shape: tuple[int, ...], written: dict[str, Path]
) -> None:
    layers = module(written[PluginKind.LAYER] / "src" / "acme_layer" / "layers.py")
    config = Config(plugins="none", kernels={"*": "reference"})
    device = Device("bare", "cpu", "a device without kernels of its own", Capability("any"))
    site = Site(Resolver(current_registry(config), device, config), "mlp", torch.float32)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = layers.SlicedActivation(site, "silu", 8)(x)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(result, torch.nn.functional.silu(gate) * up)


def test_written_scheme_refuses_unknown_settings(
    written: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(written[PluginKind.QUANTIZATION] / "src")
    scheme = importlib.import_module("acme_quantization.scheme").SquaresScheme
    for name in ("acme_quantization", "acme_quantization.ops", "acme_quantization.scheme"):
        del sys.modules[name]  # so that the name is free again
    prefix = "model.layers.0.self_attn"
    parts = ("q_proj", "k_proj")
    with pytest.raises(UnknownNameError, match="'bits' of acme_quantization"):
        scheme.parse({"quant_method": "acme_quantization", "bits": 4})
    for skip in ("lm_head", [1], None):
        with pytest.raises(ConfigError, match="must be a list of names"):
            scheme.parse({"quant_method": "acme_quantization", "skip": skip})
    some = scheme.parse({"quant_method": "acme_quantization", "skip": [f"{prefix}.q_proj"]})
    with pytest.raises(ConfigError, match="q_proj, k_proj, of which only some are skipped"):
        some.linear_method(f"{prefix}.qk_proj", parts)
    everything = scheme.parse({"skip": [f"{prefix}.{part}" for part in parts]})
    assert everything.linear_method(f"{prefix}.qk_proj", parts) is None
    assert some.linear_method("lm_head", ("lm_head",)) is None
    assert some.linear_method(f"{prefix}.o_proj", ("o_proj",)) is not None


@pytest.mark.slow
def test_template_is_in_the_wheel_of_the_tools(tmp_path: Path) -> None:
    (built,) = build(tmp_path / "wheels", TOOLS)
    with zipfile.ZipFile(built) as wheel:
        wheel.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    where = execute(
        "-c", "import interposer_tools; print(interposer_tools.__file__)", env=environment
    )
    assert where.startswith(str(tmp_path))
    arguments = ("plugin", "acme-kernel", "--kind", "kernel")
    execute("-m", "interposer_tools", "new", *arguments, cwd=tmp_path, env=environment)
    from_source = NewPlugin("acme-kernel", PluginKind.KERNEL).write(tmp_path / "wheels")
    assert files(tmp_path / "acme-kernel") == files(from_source)
    for file in files(from_source):
        assert (tmp_path / "acme-kernel" / file).read_bytes() == (from_source / file).read_bytes()


@pytest.mark.landing(8)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "names consist of A-Z, a-z, 0-9"),
        ("-acme", "names consist of A-Z, a-z, 0-9"),
        ("acme norms", "names consist of A-Z, a-z, 0-9"),
        ("../acme", "names consist of A-Z, a-z, 0-9"),
        ("acmé", "names consist of A-Z, a-z, 0-9"),
        ("acme\n", "names consist of A-Z, a-z, 0-9"),
        ("a" * 51, "it has 51 characters, at most 50 fit"),
        ("3d-norms", "Python cannot import a package '3d_norms'"),
        ("class", "Python cannot import a package 'class'"),
        ("json", "'json' is a module of Python itself"),
        ("Interposer.Models", "it is a part of the SDK"),
        ("interposer-cpu", "a distribution of this name is installed, version 0."),
        ("INTERPOSER__CPU", "a distribution of this name is installed, version 0."),
        ("yaml", "there is a package 'yaml' already, /"),
        ("example.norm", "the installed interposer-example-norm has a plugin of this name"),
    ],
)
def test_invalid_name_is_refused_with_a_proposal(
    name: str, reason: str, command: Command, tmp_path: Path
) -> None:
    code, out, err = command("plugin", "--kind", "layer", "--", name)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {name!r} cannot be the name of a new plugin: {reason}")
    assert re.search(r"^Try: \S", err, re.MULTILINE)
    assert not names(tmp_path)


@pytest.mark.parametrize(
    "name", ["", "acme norms", "3d-norms", "class", "json", "interposer-cpu", "yaml", "a" * 51]
)
def test_proposed_name_can_be_used(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        NewPlugin(name, PluginKind.KERNEL)
    proposed = str(refused.value).rpartition("Try: ")[2]
    assert NewPlugin(proposed, PluginKind.KERNEL).name == proposed


def test_proposed_name_is_near_the_refused_name() -> None:
    for name, proposed in [
        ("acme norm!", "acme-norm"),
        ("", "acme-kernels"),
        ("yaml", "acme-yaml"),
        ("interposer-cpu", "acme-interposer-cpu"),
    ]:
        with pytest.raises(ConfigError, match=f"\nTry: {proposed}$"):
            NewPlugin(name, PluginKind.KERNEL)


@given(st.text(alphabet="abzAZ019-_.", min_size=1, max_size=12).map(lambda end: f"named{end}9"))
def test_names_are_normalised(name: str) -> None:
    plugin = NewPlugin(name, PluginKind.KERNEL)
    assert plugin.name == canonicalize_name(name)
    assert is_normalized_name(plugin.name)
    assert plugin.package.isidentifier()


@given(st.text(max_size=60))
def test_any_name_is_normalised_or_refused(name: str) -> None:
    with contextlib.suppress(ConfigError):
        plugin = NewPlugin(name, PluginKind.KERNEL)
        assert is_normalized_name(plugin.name)
        assert plugin.package.isidentifier()


def test_a_module_without_a_spec_takes_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("acme_runtime")  # as Cython puts its own into sys.modules
    assert module.__spec__ is None
    monkeypatch.setitem(sys.modules, "acme_runtime", module)
    with pytest.raises(ConfigError, match="this process has a module 'acme_runtime' already"):
        NewPlugin("acme-runtime", PluginKind.KERNEL)


def _file(path: Path) -> None:
    path.write_text("mine")


def _dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def facts(path: Path) -> tuple[int, ...]:
    """Return the properties of a file that change when it is written, but not when it is read."""
    status = path.lstat()
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns


@pytest.mark.parametrize("make", [Path.mkdir, _file, _dangling_link])
def test_existing_target_is_not_changed(
    make: Callable[[Path], None], command: Command, tmp_path: Path
) -> None:
    target = tmp_path / "acme-norms"
    make(target)
    before = facts(target)
    code, out, err = command("plugin", "acme_norms", "--kind", "kernel", "--into", tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {target}: exists already\nTry: another name, ")
    assert names(tmp_path) == ["acme-norms"]
    assert facts(target) == before


def test_folder_to_write_into_must_exist(command: Command, tmp_path: Path) -> None:
    code, out, err = command("plugin", "acme", "--kind", "kernel", "--into", tmp_path / "a" / "b")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {tmp_path / 'a' / 'b'}: is not a directory\nTry: make it")
    assert not names(tmp_path)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_no_partial_package_remains_after_a_failure(
    raised: BaseException,
    expected: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copy(_template: str, target: Path, *_answers: Any, **_options: Any) -> None:
        target.mkdir()
        (target / "README.md").write_text("# half")
        raise raised

    monkeypatch.setattr("copier.run_copy", copy)
    with pytest.raises(expected) as ended:
        NewPlugin("acme-norms", PluginKind.KERNEL).write(tmp_path)
    assert not names(tmp_path)
    if expected is StorageError:
        assert str(tmp_path / "acme-norms") in str(ended.value)
        assert "cannot be written: " in str(ended.value)
        assert "No space left on device" in str(ended.value)


def test_without_copier_the_extra_is_named(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "copier", None)
    code, out, err = command("plugin", "acme-norms", "--kind", "kernel")
    assert (code, out) == (1, "")
    assert err.startswith("error: New plugins need the package copier, which cannot be imported: ")
    assert "Try: pip install --find-links dist 'interposer-tools[new]'" in err
    assert not names(tmp_path)
    with pytest.raises(InterposerError, match="copier"):
        NewPlugin("acme-norms", PluginKind.KERNEL).write(tmp_path)


def test_extra_brings_copier() -> None:
    requirements = map(Requirement, importlib_metadata.requires("interposer-tools") or ())
    extra = [r for r in requirements if r.name == "copier"]
    tools = tomllib.loads((TOOLS / "pyproject.toml").read_text())["project"]
    assert [Requirement(text).name for text in tools["optional-dependencies"]["new"]] == ["copier"]
    assert not any(Requirement(text).name == "copier" for text in tools["dependencies"])
    for requirement in extra:
        assert str(requirement.marker) == 'extra == "new"'


def test_copier_settings_of_the_user_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.yml").write_text("defaults: [not, a, mapping\n")
    monkeypatch.setenv("COPIER_SETTINGS_PATH", str(tmp_path / "settings.yml"))
    assert NewPlugin("acme-norms", PluginKind.KERNEL).write(tmp_path).is_dir()


@pytest.mark.landing(2)
@pytest.mark.parametrize("license_", License)
def test_license_is_the_requested_one(license_: License, command: Command, tmp_path: Path) -> None:
    author = 'Ada "the countess" Lövelace \\ 1'
    arguments = ("--kind", "layer", "--license", license_, "--author", author)
    assert command("plugin", "acme-norms", *arguments)[0] == 0
    folder = tmp_path / "acme-norms"
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["authors"] == [{"name": author}]
    if license_ is License.NONE:
        assert project["license"] == "LicenseRef-Proprietary"
        assert "Private :: Do Not Upload" in project["classifiers"]
        assert "LICENSE" not in files(folder)
        return
    assert project["license"] == license_
    text = (folder / "LICENSE").read_text(encoding="utf-8")
    if license_ is License.APACHE:
        assert text == (CORE / "LICENSE").read_text(encoding="utf-8")
    else:
        assert f" {author}\n" in text
        assert license_.partition("-")[0] in text


def test_author_is_one_line() -> None:
    with pytest.raises(ConfigError, match="one line of printable text"):
        NewPlugin("acme-norms", PluginKind.KERNEL, author="Ada\nLovelace")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("plugin", "acme", "--kind", "norm"),
            "'kernel', 'attention', 'quantization', 'layer', 'model', 'platform'",
        ),
        (("plugin", "acme"), "--kind"),
        (("plugin", "--kind", "layer"), "NAME"),
        (("kernel", "acme", "--kind", "layer"), "plugin"),
        (("plugin", "acme", "--kind", "layer", "--license", "GPL"), "Apache-2.0"),
    ],
)
def test_wrong_usage_ends_with_2(
    arguments: tuple[str, ...], message: str, command: Command, tmp_path: Path
) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(re.sub("[^!-~]", " ", err).split())  # wrapped lines in a frame
    assert not names(tmp_path)
