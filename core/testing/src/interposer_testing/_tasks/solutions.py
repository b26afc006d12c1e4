"""Readers of solutions: files are read as bytes, and never imported or executed."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, field_validator, model_validator

from interposer.errors import ConfigError, near_names
from interposer_testing._judge.task import Solution, Task
from interposer_testing._tasks.files import Part, parse, read_bytes
from interposer_testing._tasks.python_source import imported_packages, top_level_names

Language = Literal["python", "cpp", "wheel"]

_SUFFIXES = ".py, .cpp, .json (FlashInfer-Trace, SOL-ExecBench), .whl, or a folder of hub kernels"
# Languages that FlashInfer-Trace and SOL-ExecBench name, and how their files are loaded.
_LANGUAGES: dict[str, Language] = {
    "python": "python",
    "triton": "python",
    "cpp": "cpp",
    "pytorch": "python",
}


class SourceFile(Part):
    path: str
    content: str

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
            raise ValueError("the path must be relative and stay in the solution's folder")
        return path


class Build(Part):
    """How to build and call a solution; SOL-ExecBench lists several languages."""

    language: str = ""
    languages: tuple[str, ...] = ()
    entry_point: str
    destination_passing_style: bool = True
    binding: str | None = None

    @field_validator("entry_point")
    @classmethod
    def _check_entry_point(cls, entry_point: str) -> str:
        file, separator, function = entry_point.partition("::")
        if not file or not separator or not function.isidentifier():
            raise ValueError("must be FILE::FUNCTION")
        return entry_point

    @model_validator(mode="after")
    def _check_languages(self) -> Build:
        for language in self.named_languages:
            if language not in _LANGUAGES:
                raise ValueError(
                    f"the language {language!r} cannot be judged; nearest: "
                    f"{near_names(language, _LANGUAGES)}"
                )
        if not self.named_languages:
            raise ValueError("it has neither 'language' nor 'languages'")
        if self.loaded_as == "cpp" and self.binding != "torch":
            raise ValueError(f"binding = {self.binding!r} cannot be judged; use 'torch' for C++")
        return self

    @property
    def loaded_as(self) -> Language:
        """The loader for the solution: "cpp" if any named language is C++, otherwise "python"."""
        return "cpp" if "cpp" in self.named_languages else "python"

    @property
    def named_languages(self) -> list[str]:
        """All languages that the file names."""
        return [name for name in (self.language, *self.languages) if name]


class SolutionFile(Part):
    """The JSON file of a solution in the format of FlashInfer-Trace or SOL-ExecBench."""

    name: Annotated[str, Field(min_length=1)]
    definition: str
    spec: Build
    sources: Annotated[tuple[SourceFile, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_sources(self) -> SolutionFile:
        paths = [source.path for source in self.sources]
        if len(set(paths)) != len(paths):
            raise ValueError(f"a path of 'sources' is repeated: {', '.join(sorted(paths))}")
        file = self.spec.entry_point.partition("::")[0]
        if file not in paths:
            raise ValueError(
                f"the file {file!r} of spec.entry_point is not in 'sources'; nearest: "
                f"{near_names(file, paths)}"
            )
        return self


class Entry(NamedTuple):
    """The path of a solution, and the function or class that the user named, or ""."""

    path: Path
    name: str


def read_solution(text: str, task: Task, device: str = "cpu") -> Solution:
    """Read a solution without executing it.

    Args:
        text: ``FILE.py[:NAME]``, ``FILE.cpp[:NAME]``, ``FILE.whl[:NAME]``, ``FILE.json`` of
            FlashInfer-Trace or SOL-ExecBench, or ``FOLDER[:NAME]``, a repository or a build of the
            package ``kernels``. NAME is a function or class.
        device: "cpu" or "cuda", for which a build of a repository is chosen.

    The default NAME is the task's, else ``run``, ``kernel`` or ``ModelNew``.

    Raises: ConfigError: the file is missing, invalid or of another task.
    """
    entry = _entry(text)
    if entry.path.is_dir():
        return _hub_solution(entry, task, device)
    match entry.path.suffix:
        case ".py":
            return _python_solution(entry, task)
        case ".cpp":
            # C++ is not parsed, so a missing function shows only when the module is loaded.
            name = entry.name or _default_names(task)[0]
            sources = {entry.path.name: read_bytes(entry.path)}
            stem, file = entry.path.stem, entry.path.name
            return Solution(stem, entry.path, file, name, "cpp", sources)
        case ".whl":
            return _wheel_solution(entry, task)
        case ".json":
            return _json_solution(entry, task)
    raise ConfigError(f"The solution {text!r} has an unknown format. Name one of {_SUFFIXES}.")


def _entry(text: str) -> Entry:
    """Split ``FILE:NAME``; a colon in the path of a file that exists belongs to the path."""
    # From the right, because paths can contain colons and names cannot.
    path, separator, name = text.rpartition(":")
    if separator and name.isidentifier() and not Path(text).exists():
        return Entry(Path(path), name)
    return Entry(Path(text), "")


def _default_names(task: Task) -> list[str]:
    task_name = task.name.rpartition("/")[2]
    usual_names = ["ModelNew"] if task.module else ["run", "kernel"]
    return [*([task_name] if task_name.isidentifier() else []), *usual_names]


def _python_solution(entry: Entry, task: Task) -> Solution:
    content = read_bytes(entry.path)
    try:
        source = content.decode()
        names, packages = top_level_names(source), imported_packages(source)
    except ValueError as error:
        raise ConfigError(f"{entry.path}: {error}. Correct the file.") from error
    name = _chosen_name(entry, task, names)
    stem, file, uses_triton = entry.path.stem, entry.path.name, "triton" in packages
    return Solution(
        stem, entry.path, file, name, "python", {file: content}, uses_triton=uses_triton
    )


def _chosen_name(entry: Entry, task: Task, names: list[str]) -> str:
    """Return the entry's name, or the task's default name, if the solution defines that name."""
    entry_names = [entry.name] if entry.name else _default_names(task)
    for name in entry_names:
        if name in names:
            return name
    raise ConfigError(
        f"{entry.path} defines no {' or '.join(map(repr, entry_names))}; it defines "
        f"{near_names(entry_names[0], names)}. Name the entry: {entry.path}:NAME."
    )


def _hub_solution(entry: Entry, task: Task, device: str) -> Solution:
    """Read a solution from a build of a Python package in the layout of the package ``kernels``.

    Source: ``kernels`` 0.17, ``variants.py`` (names of builds) and ``importer.py``.
    """
    build = _build_of(entry.path, device)
    files = [p for p in build.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    sources = {path.relative_to(build).as_posix(): read_bytes(path) for path in files}
    package = _package_of(build, sources)
    if "__init__.py" in sources:  # the build itself is the package
        sources = {f"{package}/{path}": content for path, content in sources.items()}
    file = f"{package}/__init__.py"
    try:
        names = top_level_names(sources[file].decode(), with_imports=True)
        imports_triton = _imports_triton(sources)
    except ValueError as error:
        raise ConfigError(f"{build}: {error}. Correct the file.") from error
    # A build for CPUs has Triton kernels for other devices only.
    uses_triton = imports_triton and (device != "cpu" or "-cpu" not in build.name)
    name, entry_name = entry.path.resolve().name, _chosen_name(entry, task, names)
    return Solution(name, entry.path, file, entry_name, "python", sources, uses_triton=uses_triton)


def _imports_triton(sources: Mapping[str, bytes]) -> bool:
    """Tell whether a Python file among the sources imports Triton.

    Raises: ValueError: a file has a syntax error.
    """
    code = [content.decode() for path, content in sources.items() if path.endswith(".py")]
    return any("triton" in imported_packages(source) for source in code)


def _build_of(folder: Path, device: str) -> Path:
    """Find the build for a device in a repository of hub kernels.

    A folder without a subfolder ``build`` is a build itself.
    """
    if not (folder / "build").is_dir():
        return folder
    major, minor = torch.__version__.split(".")[:2]
    backend = "cpu" if device == "cpu" else r"cu\d+"
    system = f"{backend}-{platform.machine()}-linux"
    builds = sorted(path for path in (folder / "build").iterdir() if path.is_dir())
    preferred = [
        rf"torch{major}{minor}(-cxx11)?-{system}",
        rf"torch-stable-abi\d+-{system}",
        f"torch-{device}",
        "torch-universal",
        # On a CPU, Triton's interpreter runs the kernels of a build for GPUs.
        *(["torch-(cuda|rocm|xpu)"] if device == "cpu" else []),
    ]
    for pattern in preferred:
        for build in builds:
            if re.fullmatch(pattern, build.name):
                return build
    raise ConfigError(
        f"{folder / 'build'} has no build for the device {device!r} and torch {major}.{minor}; it "
        f"has {', '.join(path.name for path in builds[:3]) or 'none'}. Name a folder with a build."
    )


def _package_of(build: Path, sources: Mapping[str, bytes]) -> str:
    """Return the name under which ``kernels`` imports a build.

    Raises: ConfigError: the folder has no package.
    """
    packages = [p.partition("/")[0] for p in sources if re.fullmatch(r"\w+/__init__\.py", p)]
    if "__init__.py" in sources:
        with contextlib.suppress(KeyError, ValueError, TypeError):
            name = json.loads(sources["metadata.json"])["id"]
            if name.isidentifier():
                return str(name)
        return re.sub(r"\W", "_", f"_{build.resolve().name}")
    if len(packages) != 1:
        raise ConfigError(
            f"{build} is no build of hub kernels: it has no __init__.py. Name a Python file, or a "
            "folder that `interposer hub-kernels` or kernel-builder wrote."
        )
    return packages[0]


def _wheel_solution(entry: Entry, task: Task) -> Solution:
    content = read_bytes(entry.path)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as wheel:
            files = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".py")}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise ConfigError(f"{entry.path} is no wheel: {error}. Build it again.") from error
    try:
        uses_triton = _imports_triton(files)
    except ValueError as error:
        raise ConfigError(
            f"{entry.path}: {error}. Correct the file, and build it again."
        ) from error
    stem, name, file = entry.path.stem, entry.name or _default_names(task)[0], entry.path.name
    sources = {file: content}
    return Solution(stem, entry.path, file, name, "wheel", sources, uses_triton=uses_triton)


def _json_solution(entry: Entry, task: Task) -> Solution:
    if entry.name:
        raise ConfigError(
            f"{entry.path}:{entry.name}: the file's spec.entry_point names the entry. "
            f"Try: {entry.path}"
        )
    solution = parse(SolutionFile, read_bytes(entry.path), str(entry.path))
    if solution.definition != task.name:
        raise ConfigError(
            f"{entry.path}: definition = {solution.definition!r}: the task is {task.name!r}. "
            "Name a solution of this task."
        )
    file, _, name = solution.spec.entry_point.partition("::")
    return Solution(
        name=solution.name,
        path=entry.path,
        file=file,
        entry=name,
        language=solution.spec.loaded_as,
        sources={source.path: source.content.encode() for source in solution.sources},
        uses_triton="triton" in solution.spec.named_languages,
        style="writes outputs" if solution.spec.destination_passing_style else "returns",
    )
