"""A repository for the kernel hub: one function per op, layers, and a build for every backend.

Source: ``kernels`` 0.17, ``variants.py`` (names of builds), ``importer.py`` (import of a build),
``_rust.pyi`` (``metadata.json`` and ``build.toml``), ``layer/layer.py`` (allowed members of a
layer). Versions 0.16 to 0.18 have the same layout.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import metadata
from pathlib import Path, PurePosixPath

from interposer import Registry
from interposer.errors import ConfigError, UnknownNameError
from interposer.records import Kernel, OpEntry
from interposer_tools._hub.source_module import source_module
from interposer_tools._hub.source_tree import Definition, SourceTree

BACKENDS = ("cpu", "cuda", "rocm", "xpu")
"""The backends of a repository. Their builds contain the same files, because every call selects the
kernel by the device of an argument."""

_TEMPLATES = Path(__file__).parents[1] / "templates" / "hub-kernels"
_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
_CORE = "interposer"
# Packages that sources of ops may import. Users of the repository do not have them: copy them.
_COPIED_PACKAGES = (_CORE, "interposer_sandbox", "interposer_testing")


@dataclass(frozen=True, slots=True)
class HubFunction:
    """One function of the repository, with the signature of an op.

    Attributes:
        op: name of the op.
        reference: the reference of the op.
        on_cpu: the torch implementation, which runs on CPUs.
        compiled: the Triton kernel, which runs on all other devices.
    """

    op: str
    reference: Definition
    on_cpu: Definition
    compiled: Definition

    def text(self) -> str:
        """Return the source of the function, which dispatches on the device of the first tensor."""
        module, name = self.reference
        node = source_module(module).bindings[name]
        assert isinstance(node, ast.FunctionDef)
        arguments = [part.arg for part in (*node.args.args, *node.args.kwonlyargs)]
        first = next(
            part.arg
            for part in node.args.args
            if part.annotation and ast.unparse(part.annotation) in ("Tensor", "torch.Tensor")
        )
        document = inspect.cleandoc(ast.get_docstring(node) or "").replace("\n", "\n    ")
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return (
            f"def {self.op}({ast.unparse(node.args)}){returns}:\n"
            f'    """{document}\n    """\n'
            f'    return _kernel("{self.op}", {first})({", ".join(arguments)})\n'
        )


class HubRepository:
    """Kernels of one distribution in the layout of the kernel hub."""

    def __init__(self, registry: Registry, provider: str, ops: Sequence[str], name: str) -> None:
        """Select the kernel of each op and collect the necessary source.

        Args:
            provider: the distribution that provides the ops and Triton kernels.
            ops: names of the ops to export.
            name: name of the repository.
        Raises:
            UnknownNameError: the distribution has no ops, or no Triton kernel for one of ``ops``.
            ConfigError: ``name`` is invalid, or a kernel cannot be called with the op's arguments.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name of a repository: use lowercase letters, digits and hyphens, "
                "starting with a letter. Try: --name my-kernels"
            )
        self.name = name
        self.license = metadata(provider)["License-Expression"] or "other"
        self.package = name.replace("-", "_")
        providers = {plugin.distribution for plugin, _ in registry.records(OpEntry)}
        if provider not in providers:
            raise UnknownNameError("distribution with ops", provider, sorted(providers))
        entries = {e.name: e for p, e in registry.records(OpEntry) if p.distribution == provider}
        kernels = [k for p, k in registry.records(Kernel) if p.distribution == provider]
        triton = [k for k in kernels if k.requires.features == {"triton"}]
        # The last kernel of an op wins, so sort those last that can be called without preparation.
        compiled = {k.op: k for k in sorted(triton, key=lambda k: not _restriction(k))}
        package = next((e.target.partition(".")[0] for e in entries.values()), _CORE)
        self._tree = SourceTree({*_COPIED_PACKAGES, package})
        self.functions = []
        for op in ops:
            exportable = sorted(compiled.keys() & entries.keys())
            if op not in exportable:
                raise UnknownNameError(
                    "op",
                    op,
                    exportable,
                    where=f"among those that {provider} has a Triton kernel for",
                )
            self.functions.append(self._function(entries[op], compiled[op], kernels))

    def _function(self, entry: OpEntry, kernel: Kernel, kernels: list[Kernel]) -> HubFunction:
        if _restriction(kernel):
            raise ConfigError(
                f"{kernel.name} cannot be called with any arguments of its op, as a function of "
                f"the hub is: {_restriction(kernel)}. Try: leave the op out"
            )
        # Torch implementations that run anywhere and accept every call of the op.
        general = [
            k
            for k in kernels
            if k.op == entry.name
            and not (k.platform or k.requires.features or k.requires.dims or k.prepare)
            and not k.predicate
        ]
        reference = self._tree.add(*_split(entry.target))
        best = max(general, key=lambda k: k.score, default=None)
        on_cpu = self._tree.add(*_split(best.target)) if best else reference
        return HubFunction(entry.name, reference, on_cpu, self._tree.add(*_split(kernel.target)))

    def write(self, folder: Path) -> list[Path]:
        """Write the repository into ``folder``, and replace an earlier version in the folder.

        Returns: the folders of the builds.
        Raises: ConfigError: the folder contains anything else.
        """
        # Never delete files of a folder that an earlier call did not write.
        parts = {"README.md", "build.toml", "build", "torch-ext"}
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
        if present and not {"build.toml", "torch-ext"} <= present <= parts | {".git"}:
            raise ConfigError(
                f"{folder} holds {', '.join(sorted(present - parts)[:3]) or 'something else'}, "
                "which is no repository of kernels. Try: an empty folder"
            )
        # Remove files of an earlier version of the repository, but keep its .git folder.
        for name in parts & present:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        files = self._files()
        _write(folder / "torch-ext" / self.package, files)
        _write(
            folder,
            {PurePosixPath("build.toml"): self._recipe(), PurePosixPath("README.md"): self._card()},
        )
        builds = []
        for backend in BACKENDS:
            build = folder / "build" / f"torch-{backend}"
            _write(build, {**files, PurePosixPath("metadata.json"): self._metadata(backend, files)})
            builds.append(build)
        return builds

    def _files(self) -> dict[PurePosixPath, str]:
        sources = self._tree.files()
        ops = {function.op for function in self.functions}
        layers, exported = _layers(ops)
        names = sorted(ops | ({"layers"} if exported else set()))
        generated = {
            PurePosixPath("__init__.py"): self._entry(names),
            PurePosixPath("functions.py"): self._functions(),
        }
        if exported:
            generated[PurePosixPath("layers.py")] = layers
        return {**generated, **sources}

    def _entry(self, names: list[str]) -> str:
        functions = "\n".join(f"    {function.op}," for function in self.functions)
        layers = "from . import layers\n" if "layers" in names else ""
        listed = "\n".join(f'    "{name}",' for name in names)
        return (
            f'"""Functions of ops, and layers made of them: in Triton, and in torch on CPUs."""\n\n'
            f"{layers}from .functions import (\n{functions}\n)\n\n__all__ = [\n{listed}\n]\n"
        )

    def _functions(self) -> str:
        on_cpu, compiled = [], []
        for function in self.functions:
            module, name = function.on_cpu
            on_cpu.append(f'    "{function.op}": (".{module}", "{name}"),')
            module, name = function.compiled
            compiled.append(f'    "{function.op}": (".{module}", "{name}"),')
        template = (_TEMPLATES / "functions.txt").read_text(encoding="utf-8")
        texts = "\n\n".join(function.text() for function in self.functions)
        return (
            template.replace("# ON_CPU\n", "\n".join(on_cpu) + "\n")
            .replace("# COMPILED\n", "\n".join(compiled) + "\n")
            .replace("# FUNCTIONS\n", texts)
        )

    def _recipe(self) -> str:
        listed = ", ".join(f'"{backend}"' for backend in BACKENDS)
        return (
            "# Settings of kernel-builder. `interposer hub-kernels` wrote the builds already.\n"
            f'[general]\nname = "{self.name}"\nversion = 1\nedition = 5\n'
            f'license = "{self.license}"\nbackends = [{listed}]\n\n[torch-noarch]\n'
        )

    def _metadata(self, backend: str, files: dict[PurePosixPath, str]) -> str:
        # The id is the module name. Two versions in one process must not share a module.
        digest = hashlib.sha256()
        for path in sorted(files):
            digest.update(f"{path}\0{files[path]}\0".encode())
        facts = {
            "id": f"_{self.package}_{backend}_{digest.hexdigest()[:12]}",
            "name": self.name,
            "version": 1,
            "license": self.license,
            "python-depends": [],
            "backend": {"type": backend},
        }
        return json.dumps(facts, indent=2) + "\n"

    def _card(self) -> str:
        rows = "\n".join(
            f"| `{function.op}` | {_first_line(function.reference)} |"
            for function in self.functions
        )
        template = (_TEMPLATES / "README.txt").read_text(encoding="utf-8")
        return (
            template.replace("NAME", self.name)
            .replace("LICENSE", self.license.lower())
            .replace("ROWS", rows)
        )


def _layers(ops: set[str]) -> tuple[str, list[str]]:
    """Return the source and the names of the layer classes whose ops are all in ``ops``."""
    text = (_TEMPLATES / "layers.txt").read_text(encoding="utf-8")
    lines, names, omitted = text.splitlines(), [], set[int]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            called_ops = {
                part.attr
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "functions"
            }
            if called_ops <= ops:
                names.append(node.name)
            else:
                # Also omit the two blank lines after the class.
                omitted.update(range(node.lineno, (node.end_lineno or node.lineno) + 3))
    remaining = [line for number, line in enumerate(lines, 1) if number not in omitted]
    return "\n".join(remaining).rstrip() + "\n", names


def _restriction(kernel: Kernel) -> str:
    """Return the reason why a kernel does not accept every call of the op, or ""."""
    if kernel.prepare:
        return "it takes constants that another function has prepared"
    return f"it is for some {', '.join(kernel.requires.dims)} only" if kernel.requires.dims else ""


def _split(target: str) -> Definition:
    module, _, name = target.partition(":")
    return module, name


def _first_line(definition: Definition) -> str:
    node = source_module(definition[0]).bindings[definition[1]]
    assert isinstance(node, ast.FunctionDef)
    return (ast.get_docstring(node) or "").partition("\n")[0].replace("|", "\\|")


def _write(folder: Path, files: dict[PurePosixPath, str]) -> None:
    for relative_path, text in files.items():
        path = folder / relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
