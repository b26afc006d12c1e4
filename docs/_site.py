"""Hooks of mkdocs: pages that are made, not written, and links that leave the folder of the docs.

    python docs/_site.py [--check]

writes public-names.txt, the snapshot of every public name, or compares it with the code.

Made are the API reference of every public module, the list of ops, the page of Triton targets and
one page for each README. A public name without a docstring, and a link to a file that does not
exist, are warnings, which a strict build does not accept.
"""

from __future__ import annotations

import ast
import difflib
import logging
import os
import posixpath
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = [
    "api_modules",
    "missing_docstrings",
    "on_config",
    "on_files",
    "on_page_markdown",
    "public_names",
]

ROOT = Path(__file__).resolve().parents[1]
LOG = logging.getLogger("mkdocs.hooks.site")

# Written by `make triton-targets`, which compiles every kernel for every GPU and takes an hour.
TARGETS = ROOT / ".docs_cache" / "triton-targets.md"
NO_TARGETS = """# Triton targets

This build of the site has no table. `make triton-targets` compiles every Triton kernel for every
GPU architecture, which takes about an hour, and the next `make docs` shows the table here:
registers, shared memory and matrix instructions per kernel. The slow tests compile the same kernels
and check that no register spills.
"""

NAMES = Path(__file__).with_name("public-names.txt")

# A block of code, a link, or a span of code, whichever begins first.
MARKS = re.compile(
    r"^```.*?^```|(?<!!)\[(?P<text>(?:[^]`[]|`[^`]*`)*)\]"
    r"\((?P<target>(?!https?:|mailto:|#)[^)\s]+)\)|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)
# Modules that only an entry point imports, and programs.
NO_API = {"plugin", "__main__"}


@dataclass(frozen=True)
class Module:
    """A public module: its dotted name, its public names, and whether it has public submodules."""

    name: str
    members: tuple[str, ...]
    is_package: bool

    @property
    def top(self) -> str:
        """The package that is imported first."""
        return self.name.partition(".")[0]


def sources() -> list[Path]:
    """Return the source folders of all distributions, the core first."""
    order = ("core", "core/*", "ops", "quantization", "models", "models/*", "serve")
    patterns = (*order, "platforms/*", "plugins/*", "examples/*")
    return [path for pattern in patterns for path in sorted(ROOT.glob(f"{pattern}/src"))]


def exported(file: Path) -> tuple[str, ...]:
    """Return ``__all__`` of a module, without running it."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return tuple(ast.literal_eval(node.value))
    return ()


def api_modules() -> Iterator[Module]:
    """Yield every public module of every distribution that offers names or has its own text.

    Python files in a folder that is no package are data, such as templates.
    """
    for source in sources():
        for file in sorted(source.rglob("*.py")):
            parts = file.relative_to(source).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            is_private = any(part.startswith("_") for part in parts)
            is_data = not file.with_name("__init__.py").is_file()
            if not is_private and not is_data and parts[-1] not in NO_API:
                name = ".".join(parts)
                yield Module(name, exported(file), file.name == "__init__.py")


def public_names() -> str:
    """Return every public module and every public name by its dotted path, a line each."""
    lines = []
    for module in api_modules():
        lines += [module.name, *(f"{module.name}.{name}" for name in module.members)]
    return "".join(f"{line}\n" for line in lines)


def _loaded() -> tuple[griffe.GriffeLoader, list[Module]]:
    reading = griffe.load_extensions(str(Path(__file__).with_name("_reading.py")))
    loader = griffe.GriffeLoader(extensions=reading, search_paths=sources(), allow_inspection=False)
    modules = list(api_modules())
    for top in dict.fromkeys(module.top for module in modules):
        loader.load(top)
    loader.resolve_aliases(implicit=True, external=False)
    return loader, modules


def missing_docstrings() -> list[str]:
    """Return every public name, method and property without a docstring, by its public path."""
    loader, modules = _loaded()
    found = []
    for module in modules:
        package = loader.modules_collection[module.name]
        if not package.has_docstring:
            found.append(module.name)
        for name in module.members:
            member: Any = package.members.get(name)
            if member is None:
                found.append(f"{module.name}.{name}: not found")
                continue
            found.extend(f"{module.name}.{path}" for path in _undocumented(member, name))
    return sorted(set(found))


def _undocumented(member: Any, path: str) -> Iterator[str]:
    """Yield the paths without a docstring: of a function or class, and of a class's methods."""
    target = member.final_target if member.is_alias else member
    if target.is_attribute:
        return  # a comment or the docstring of the class says what it is
    if not target.has_docstring:
        yield path
    if target.is_class:
        for name, inner in target.members.items():
            if (
                name.startswith("_")
                or inner.is_alias
                or not (inner.is_function or _is_property(inner))
            ):
                continue
            overridden = any(name in base.members for base in target.mro())
            if not inner.has_docstring and not overridden:
                yield f"{path}.{name}"


def _is_property(member: Any) -> bool:
    return member.is_attribute and "property" in member.labels


def api_page(module: Module) -> str:
    """Return the page of a module: its docstring, then its public names."""
    text = f"# {module.name}\n\n::: {module.name}\n    options:\n"
    if not module.members:
        return text + "      members: false\n"
    return text + "      members:\n" + "".join(f"        - {name}\n" for name in module.members)


def readmes() -> dict[Path, str]:
    """Return the page of every README and of what lies at the top, by its file."""
    files = [source.with_name("README.md") for source in sources()]
    pages = {file: f"distributions/{distribution(file)}.md" for file in files}
    return {**pages, ROOT / "CONTRIBUTING.md": "contributing.md"}


def distribution(file: Path) -> str:
    """Return the name in the first heading of a README."""
    return file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").strip()


def ops_page() -> str:
    """Return the page that ``interposer ops --markdown`` writes, or the error if it writes none."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "ops.md")
        call = "from interposer_tools import main; main()"
        options = ["ops", "--from", "interposer-ops", "--markdown", str(page)]
        command = [sys.executable, "-c", call, *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            LOG.warning("the list of ops cannot be written: %s", done.stderr)
            return f"# Ops\n\n```text\n{done.stderr}\n```\n"
        return page.read_text(encoding="utf-8")


def ops_in_use_page() -> str:
    """Return the page of what binds each op."""
    tool = runpy.run_path(str(Path(__file__).with_name("_ops_in_use.py")))
    text: str = tool["page"](tool["uses"]())
    return text


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that are made into the navigation."""
    assert config.nav is not None
    sections = {title: entries for entry in config.nav for title, entries in entry.items()}
    api: dict[str, list[dict[str, str]]] = {}
    for module in api_modules():
        api.setdefault(module.top, []).append({module.name: f"api/{module.name}.md"})
    read = [{Path(page).stem: page} for page in readmes().values()]
    modules = [{top: pages} for top, pages in api.items()]
    sections["Reference"] += [{"API": modules}, {"Distributions": read}]
    records = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    sections["Decisions"] += [f"decisions/{record.name}" for record in records]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    made = {f"api/{module.name}.md": api_page(module) for module in api_modules()}
    made |= {page: file.read_text(encoding="utf-8") for file, page in readmes().items()}
    made["ops.md"] = ops_page()
    made["ops-in-use.md"] = ops_in_use_page()
    made["triton-targets.md"] = (
        TARGETS.read_text(encoding="utf-8") if TARGETS.is_file() else NO_TARGETS
    )
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    for name in missing_docstrings():
        LOG.warning("%s has no docstring", name)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files of the repository to their pages, or show them as paths."""
    pages = {file.relative_to(ROOT).as_posix(): uri for file, uri in readmes().items()}
    homes = {uri: posixpath.dirname(file) for file, uri in pages.items()}
    uri = page.file.src_uri
    home = homes.get(uri, posixpath.join("docs", posixpath.dirname(uri)))

    def lead(match: re.Match[str]) -> str:
        if match["target"] is None:
            return match[0]
        text, (target, hash_, heading) = match["text"], match["target"].partition("#")
        path = posixpath.normpath(posixpath.join(home, target))
        readme = posixpath.join(path, "README.md")
        inside = pages.get(path) or pages.get(readme)
        if path == "docs/decisions":
            inside = "decisions/index.md"
        elif path == "README.md":
            inside = "index.md"
        elif inside is None and path.startswith("docs/"):
            inside = path.removeprefix("docs/")
        if inside is None:
            if not (ROOT / path).exists():
                LOG.warning("%s links to %s, which does not exist", uri, path)
            return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"
        relative = os.path.relpath(inside, posixpath.dirname(uri) or ".")
        return f"[{text}]({relative}{hash_}{heading})"

    return MARKS.sub(lead, markdown)


def main() -> None:
    """Write the snapshot of public names, or compare it with the code."""
    if "--check" not in sys.argv:
        NAMES.write_text(public_names(), encoding="utf-8")
        return
    kept, found = NAMES.read_text("utf-8"), public_names()
    if kept != found:
        changes = difflib.unified_diff(kept.splitlines(), found.splitlines(), "kept", "found", n=0)
        sys.exit("\n".join([*changes, "Public names changed. Try: python docs/_site.py"]))


if __name__ == "__main__":
    main()
