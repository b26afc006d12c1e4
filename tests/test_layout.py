"""The repository keeps the layout that CONTRIBUTING.md describes."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# One worker parses the modules.
pytestmark = pytest.mark.xdist_group("layout")

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Distribution:
    folder: str
    project: dict[str, Any]

    @property
    def path(self) -> Path:
        return ROOT / self.folder

    @property
    def name(self) -> str:
        return str(self.project["name"])

    @property
    def package(self) -> str:
        return self.name.replace("-", "_")

    @property
    def requirements(self) -> list[Requirement]:
        optional = self.project.get("optional-dependencies", {}).values()
        groups = [self.project["dependencies"], *optional]
        return [Requirement(text) for group in groups for text in group]

    @property
    def modules(self) -> list[Path]:
        """All modules; Python files in a folder that is no package are data."""
        files = sorted((self.path / "src").rglob("*.py"))
        return [file for file in files if file.with_name("__init__.py").is_file()]

    @property
    def files(self) -> list[Path]:
        """All Python files of its folder, without those of distributions inside."""
        inner = [file.parent for file in self.path.glob("*/pyproject.toml")]
        return [
            file
            for file in sorted(self.path.rglob("*.py"))
            if not any(file.is_relative_to(folder) for folder in inner)
        ]

    @property
    def is_leaf(self) -> bool:
        return self.folder.startswith(("platforms/", "plugins/", "examples/"))


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def find_distributions() -> list[Distribution]:
    files = sorted([*ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")])
    return [
        Distribution(file.parent.relative_to(ROOT).as_posix(), read_toml(file)["project"])
        for file in files
    ]


TOOLS = read_toml(ROOT / "pyproject.toml")["tool"]
DISTRIBUTIONS = find_distributions()
MODULES = [module for dist in DISTRIBUTIONS for module in dist.modules]
# The distributions of the example device are installed by its test only, see
# tests/test_example_device.py: torch takes the device for the machine's accelerator.
DEVICE = "examples/example-device"
DEVICE_SOURCES = [f"{DEVICE}/backend/src", f"{DEVICE}/platform/src"]
each_distribution = pytest.mark.parametrize("dist", DISTRIBUTIONS, ids=lambda dist: dist.folder)


@cache
def import_statements(module: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Return the import statements of a module, which is parsed once for all tests."""
    waiting: list[ast.AST] = [ast.parse(module.read_text(encoding="utf-8"))]
    statements = list[ast.Import | ast.ImportFrom]()
    while waiting:
        node = waiting.pop()
        # Most nodes are expressions, which hold no statements.
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, ())
            waiting += inner if isinstance(inner, list) else ()
        if isinstance(node, ast.Import | ast.ImportFrom):
            statements.append(node)
    return tuple(statements)


def imports(module: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of everything that ``module`` imports."""
    for node in import_statements(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(module: Path) -> str:
    """Return the name that a module is imported by."""
    source = next(folder for folder in module.parents if folder.name == "src")
    return ".".join(module.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(module: Path, known: Set[str]) -> set[str]:
    """Return those of the known modules that ``module`` imports, or takes names from."""
    found = set()
    for node in import_statements(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & known or {node.module}
    return found & known


def place(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def test_every_house_has_a_distribution() -> None:
    folders = {dist.folder for dist in DISTRIBUTIONS}
    houses = {
        "core/sandbox",
        "core",
        "core/testing",
        "core/tools",
        "ops",
        "quantization",
        "models",
        "models/engine",
        "models/adapt",
        "platforms/cpu",
        "serve",
    }
    assert folders >= houses


def test_root_is_no_distribution() -> None:
    assert "project" not in read_toml(ROOT / "pyproject.toml")


def test_tools_list_every_distribution_and_no_other() -> None:
    folders = [dist.folder for dist in DISTRIBUTIONS]
    sources = [f"{folder}/src" for folder in folders]
    tests = [f"{folder}/tests" for folder in folders]
    mypy_path = [path.removeprefix("$MYPY_CONFIG_FILE_DIR/") for path in TOOLS["mypy"]["mypy_path"]]
    scripts = ["benchmarks", "docs", "examples"]
    assert set(TOOLS["importlinter"]["root_packages"]) == {dist.package for dist in DISTRIBUTIONS}
    programs = ["conftest.py", "models/conftest.py", "platforms/wheels.py"]
    # The distributions in examples/ are listed like all others.
    checked = ["benchmarks", "docs", "examples/*.py", *DEVICE_SOURCES, f"{DEVICE}/tests"]
    assert set(TOOLS["mypy"]["files"]) == {*sources, *tests, "tests", *programs, *checked}
    # Scripts name their neighbours, as the writer of golden vectors does.
    neighbours = [*scripts, "platforms/cpu/tests/golden"]
    assert set(mypy_path) == {"$MYPY_CONFIG_FILE_DIR", *sources, *DEVICE_SOURCES, *neighbours}
    assert set(TOOLS["pytest"]["ini_options"]["testpaths"]) == {*tests, "tests"}


def test_import_contracts_cover_every_distribution() -> None:
    contracts = {contract["id"]: contract for contract in TOOLS["importlinter"]["contracts"]}
    leaves = {dist.package for dist in DISTRIBUTIONS if dist.is_leaf}
    platforms = {dist.package for dist in DISTRIBUTIONS if dist.folder.startswith("platforms/")}
    *engines, top = contracts["layers"]["layers"][:4]
    below = contracts["layers"]["layers"][4:]
    assert engines == ["interposer_serve", "interposer_adapt", "interposer_engine"]
    assert set(top.split(" | ")) == {"interposer_models", *leaves}
    assert below == [
        "interposer_quantization",
        "interposer_ops | interposer_tools",
        "interposer_testing",
        "interposer",
        "interposer_sandbox",
    ]
    assert set(contracts["platforms"]["source_modules"]) == platforms
    assert set(contracts["engine"]["source_modules"]) == leaves
    without_commands = {"interposer_quantization", "interposer_models", *leaves}
    assert set(contracts["tools"]["source_modules"]) == without_commands


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count too."""
    names = {dotted(module): module for module in MODULES}
    graph = {
        name: imported_modules(module, names.keys()) - {name} for name, module in names.items()
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


@each_distribution
def test_distribution_is_complete(dist: Distribution) -> None:
    assert (dist.path / "README.md").read_text(encoding="utf-8").startswith(f"# {dist.name}\n")
    assert (dist.path / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (dist.path / "src" / dist.package / "py.typed").is_file()
    assert (dist.path / "src" / dist.package / "__init__.py").is_file()
    assert [entry.name for entry in (dist.path / "src").iterdir()] == [dist.package]
    assert list((dist.path / "tests").glob("test_*.py")), "no test file"
    assert dist.project["readme"] == "README.md"
    assert dist.project["license"] == "Apache-2.0"
    assert dist.project["requires-python"] == ">=3.11"


@each_distribution
def test_distribution_fits_its_neighbours(dist: Distribution) -> None:
    versions = {other.name: other.project["version"] for other in DISTRIBUTIONS}
    for requirement in dist.requirements:
        if requirement.name in versions:
            operators = {specifier.operator for specifier in requirement.specifier}
            assert requirement.specifier.contains(versions[requirement.name])
            assert operators == {">=", "<"}, f"{requirement} must name a range"


@cache
def providers() -> dict[str, list[str]]:
    """Return the distributions that install each top-level package."""
    ours = {other.package: [other.name] for other in DISTRIBUTIONS}
    return {**packages_distributions(), **ours}


@each_distribution
def test_imports_are_declared(dist: Distribution) -> None:
    declared = {canonicalize_name(requirement.name) for requirement in dist.requirements}
    undeclared = []
    for module in dist.modules:
        for line, name in imports(module):
            top = name.partition(".")[0]
            if top == dist.package or top in sys.stdlib_module_names:
                continue
            if declared.isdisjoint(map(canonicalize_name, providers().get(top, [top]))):
                undeclared.append(f"{place(module, line)}: {top}")
    assert not undeclared


def test_core_depends_on_little() -> None:
    core = next(dist for dist in DISTRIBUTIONS if dist.folder == "core")
    names = {Requirement(text).name for text in core.project["dependencies"]}
    assert names == {
        "importlib-metadata",
        "interposer-sandbox",
        "packaging",
        "platformdirs",
        "pluggy",
        "pydantic",
        "torch",
    }


def test_the_sandbox_depends_on_nothing() -> None:
    sandbox = next(dist for dist in DISTRIBUTIONS if dist.folder == "core/sandbox")
    assert sandbox.requirements == []


@pytest.mark.parametrize(
    "dist", [dist for dist in DISTRIBUTIONS if dist.folder.startswith("platforms/")]
)
def test_a_platform_brings_all_that_runs_a_model(dist: Distribution) -> None:
    ours = {other.name: other for other in DISTRIBUTIONS}
    found, extras, waiting = set[str](), set[str](), [dist]
    while waiting:
        project = waiting.pop().project
        for text in project["dependencies"]:
            name = Requirement(text).name
            if name in ours and name not in found:
                found.add(name)
                waiting.append(ours[name])
        for text in project.get("optional-dependencies", {}).get("cli", ()):
            extras.add(Requirement(text).name)
    parts = ("models", "engine", "adapt", "ops", "quantization")
    assert found >= {"interposer", *(f"interposer-{part}" for part in parts)}
    assert "interposer-tools" in extras - found


def test_private_modules_stay_at_home() -> None:
    """Only names without a leading underscore cross a distribution, in tests and examples too."""
    packages = {dist.package for dist in DISTRIBUTIONS}
    files = [(dist.package, file) for dist in DISTRIBUTIONS for file in dist.files]
    files += [("", file) for file in (ROOT / "tests").rglob("*.py")]
    files += [("", file) for file in (ROOT / "examples").glob("*.py")]
    # cpu_kernels.py, say, measures what is the distribution's own.
    for file in (ROOT / "benchmarks").rglob("*.py"):
        files.append((f"interposer_{file.stem.partition('_')[0]}", file))
    strays = []
    for home, file in files:
        for line, name in imports(file):
            top, *rest = name.split(".")
            private = any(re.match(r"_(?!_)", part) for part in rest)
            if top in packages - {home} and private:
                strays.append(f"{place(file, line)}: {name}")
    assert not strays


def test_modules_are_named_for_their_content() -> None:
    empty = {"base", "common", "helper", "helpers", "manager", "util", "utils"}
    names = {
        name
        for module in MODULES
        for name in module.relative_to(ROOT).with_suffix("").parts
        if not empty.isdisjoint(name.split("_"))
    }
    assert not names


@pytest.mark.parametrize("folder", ["core", "models", "models/engine", "models/adapt"])
def test_no_vendor_is_named(folder: str) -> None:
    # An underscore ends a word too: is_cuda names a vendor.
    vendor = re.compile(
        r"(?<![a-z])(cuda|rocm|hip|xpu|nvidia|aiter|amd|intel)(?![a-z])", re.IGNORECASE
    )
    named = [
        f"{place(file, number)}: {line.strip()}"
        for file in sorted((ROOT / folder / "src").rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if vendor.search(line)
    ]
    assert not named


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def environment_uses(module: Path) -> Iterator[tuple[int, str]]:
    source = module.read_text(encoding="utf-8")
    if not any(name in source for name in ENVIRONMENT):
        return  # parsing every module would take seconds
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in ENVIRONMENT:
                yield node.lineno, name
            case ast.ImportFrom(module="os", names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)


def test_the_configuration_alone_touches_the_environment() -> None:
    reader = ROOT / "core/src/interposer/_config/config.py"
    uses = [
        f"{place(module, line)}: os.{name}"
        for module in MODULES
        if module != reader
        for line, name in environment_uses(module)
        if name in ENVIRONMENT
    ]
    assert not uses
    assert list(environment_uses(reader)), "it reads nothing: was it moved?"
