"""Share of the breakages that plugin authors mended that `interposer seams` predicts.

For each plugin release and its successor, which was built for a newer vLLM, the command predicts
from the older release and the newer vLLM which uses break. The truth comes from another method: a
use of vLLM that the successor changed or removed, and that fails with the newer vLLM by a search
for names in its text, without types or scopes.

    python benchmarks/seams_backtest.py FOLDER [--series vllm-ascend] [--sample 40]

FOLDER receives the Python files of the wheels, which pip downloads: 12 GB of downloads, 0.4 GB on
disk.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

# Releases of each plugin with the vLLM that they were built for. Several releases for one vLLM, and
# releases between two versions of vLLM, are left out.
SERIES = {
    "vllm-ascend": [
        *(("0.9.0rc2", "0.9.0"), ("0.9.1rc1", "0.9.1"), ("0.9.2rc1", "0.9.2")),
        *(("0.10.0rc1", "0.10.0"), ("0.10.1rc1", "0.10.1.1"), ("0.10.2rc1", "0.10.2")),
        *(("0.11.0rc0", "0.11.0"), ("0.12.0rc1", "0.12.0"), ("0.13.0rc1", "0.13.0")),
        *(("0.14.0rc1", "0.14.1"), ("0.15.0rc1", "0.15.0"), ("0.16.0rc1", "0.16.0")),
        *(("0.17.0rc1", "0.17.0"), ("0.18.0rc1", "0.18.0"), ("0.19.1rc1", "0.19.1")),
        *(("0.20.2rc1", "0.20.2"), ("0.21.0rc1", "0.21.0"), ("0.22.1rc1", "0.22.1")),
        *(("0.23.0rc1", "0.23.0"), ("0.24.0rc1", "0.24.0"), ("0.25.1rc1", "0.25.1")),
        ("0.26.0rc1", "0.26.0"),
    ],
    "tpu-inference": [
        *(("0.11.1", "0.11.1"), ("0.12.0", "0.12.0"), ("0.13.2", "0.13.0")),
        *(("0.18.0", "0.18.0"), ("0.19.0", "0.19.0"), ("0.20.0", "0.20.0")),
        *(("0.21.0", "0.21.0"), ("0.22.0", "0.22.0"), ("0.23.0", "0.23.0")),
        *(("0.24.0", "0.24.0"), ("0.25.0", "0.25.0"), ("0.26.0", "0.26.0")),
        *(("0.27.0", "0.27.0"), ("0.28.0", "0.28.0"), ("0.29.0", "0.29.0")),
        *(("0.30.0", "0.30.0"), ("0.31.0", "0.31.0"), ("0.32.0", "0.32.0")),
    ],
    "vllm-omni": [
        *(("0.12.0rc1", "0.12.0"), ("0.14.0", "0.14.0"), ("0.16.0", "0.16.0")),
        *(("0.18.0", "0.18.0"), ("0.20.0", "0.20.0"), ("0.22.0", "0.22.0")),
        *(("0.24.0", "0.24.0"), ("0.26.0", "0.26.0"), ("0.28.0", "0.28.0")),
        *(("0.30.0", "0.30.0"), ("0.32.0rc1", "0.32.0")),
    ],
}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_PLATFORMS = ("manylinux1", "manylinux2014", "manylinux_2_24", "manylinux_2_28", "manylinux_2_31")


def wheel(folder: Path, dist: str, version: str) -> Path:
    """Return the Python files of a wheel, downloaded on the first call."""
    target = folder / f"{dist.replace('-', '_')}-{version}-py3-none-any.whl"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as downloads:
        options = ["--no-deps", "--only-binary", ":all:", "--dest", downloads]
        for name in _PLATFORMS:
            options += ["--platform", f"{name}_x86_64"]
        python = "3.11" if dist == "vllm-ascend" else "3.12"
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--python-version", python),
                *(*options, f"{dist}=={version}"),
            ],
            check=True,
        )
        (source,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as kept:
            for name in archive.namelist():
                if name.endswith((".py", "METADATA")):
                    kept.writestr(name, archive.read(name), zipfile.ZIP_DEFLATED)
    return target


@dataclass
class Source:
    """The text of each Python file of a wheel, by path."""

    path: Path
    texts: dict[str, str] = field(default_factory=dict)
    _trees: dict[str, ast.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                if name.endswith(".py"):
                    self.texts[name] = archive.read(name).decode("utf-8", "replace")

    def tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = self._parse(file)
        return self._trees[file]

    def _parse(self, file: str) -> ast.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return ast.parse(self.texts.get(file, ""))
            except SyntaxError:
                return ast.Module([], [])

    @cached_property
    def identifiers(self) -> set[str]:
        found: set[str] = set()
        for text in self.texts.values():
            found.update(IDENTIFIER.findall(text))
        return found

    @cached_property
    def defined(self) -> set[str]:
        """Return the names of functions, classes, attributes, fields and module variables."""
        found = set(self.files_by_definition)
        for text in self.texts.values():
            found.update(re.findall(r"\bself\.(\w+)\s*[:=]", text))
            found.update(re.findall(r"^(?:    )?(\w+)\s*[:=]", text, re.MULTILINE))
        return found

    @cached_property
    def files_by_definition(self) -> dict[str, list[str]]:
        found = defaultdict(list)
        for file, text in self.texts.items():
            for name in set(re.findall(r"^\s*(?:async )?(?:def|class) (\w+)", text, re.MULTILINE)):
                found[name].append(file)
        return found

    def has_import(self, module: str, name: str) -> bool:
        """Return whether ``from module import name`` finds the name, by the module's statements."""
        path = module.replace(".", "/")
        if any(f"{path}/{name}{end}" in self.texts for end in (".py", "/__init__.py")):
            return True
        file = next((f for f in (f"{path}.py", f"{path}/__init__.py") if f in self.texts), None)
        if file is None:
            return False
        text = self.texts[file]
        if "__getattr__" in text or "import *" in text:
            return bool(re.search(rf"\b{name}\b", text)) or "import *" in text
        for node in ast.walk(self.tree(file)):
            match node:
                case ast.alias() if name in (node.asname, node.name.partition(".")[0]):
                    return True
                case ast.Name(id=found, ctx=ast.Store()) if found == name:
                    return True
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if (
                    node.name == name
                ):
                    return True
        return False

    def functions(self, name: str) -> Iterator[ast.arguments]:
        """Yield the arguments of each function or method ``name``."""
        for file in self.files_by_definition.get(name, ()):
            for node in ast.walk(self.tree(file)):
                if isinstance(node, FunctionNode) and node.name == name:
                    yield node.args

    def classes(self, name: str) -> list[ast.ClassDef]:
        return [
            node
            for file in self.files_by_definition.get(name, ())
            for node in ast.walk(self.tree(file))
            if isinstance(node, ast.ClassDef) and node.name == name
        ]

    def method(self, cls: str, name: str, depth: int = 0) -> ast.arguments | None:
        """Return the arguments of a method of a class or of a base of the same name."""
        for node in self.classes(cls):
            for statement in node.body:
                if isinstance(statement, FunctionNode) and statement.name == name:
                    return statement.args
            for base in node.bases:
                if depth < 6 and (found := self.method(last_name(base), name, depth + 1)):
                    return found
        return None


def last_name(node: ast.AST) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Subscript():
            return last_name(node.value)
    return ""


@dataclass(frozen=True, order=True)
class Place:
    """A use of vLLM in a plugin release.

    Attributes:
        first, last: the lines of the statement, or of the head of a function.
        kind: the way of the search that found it: import, name, call or override.
    """

    file: str
    first: int
    last: int
    kind: str
    name: str


@dataclass
class Statement:
    """One simple statement, or the head of a compound one, with the names around it."""

    node: ast.stmt
    scope: str
    is_guarded: bool

    @property
    def parts(self) -> list[ast.AST]:
        return [
            child
            for child in ast.iter_child_nodes(self.node)
            if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case)
        ]

    @property
    def lines(self) -> tuple[int, int]:
        ends = [int(getattr(part, "end_lineno", None) or 0) for part in self.parts]
        return self.node.lineno, max([self.node.lineno, *ends])

    def nodes(self) -> Iterator[ast.AST]:
        for part in self.parts:
            yield from ast.walk(part)


def statements(tree: ast.AST, scope: str = "", guarded: bool = False) -> Iterator[Statement]:
    """Yield all statements; guarded ones depend on a version, an attribute or a failed import."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, ast.stmt):
            yield from statements(child, scope, guarded)
            continue
        yield Statement(child, scope, guarded)
        inner, is_guarded = scope, guarded
        if isinstance(child, FunctionNode | ast.ClassDef):
            inner = f"{scope}.{child.name}"
        elif isinstance(child, ast.If):
            text = ast.unparse(child.test).lower()
            is_guarded |= "version" in text or "hasattr" in text or "type_checking" in text
        elif isinstance(child, ast.Try):
            types = " ".join(ast.unparse(h.type) for h in child.handlers if h.type is not None)
            is_guarded |= bool(re.search("Import|Attribute|NotFound|Exception|Type", types))
        yield from statements(child, inner, is_guarded)


def imports(node: ast.stmt) -> list[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
        return [(node.module or "", alias.name) for alias in node.names]
    if isinstance(node, ast.Import):
        return [
            (alias.name.rpartition(".")[0], alias.name.rpartition(".")[2])
            for alias in node.names
            if alias.name.startswith("vllm.")
        ]
    return []


def parameters(args: ast.arguments) -> str:
    """Return the parameters as text, without annotations."""
    plain = ast.parse(f"def f({ast.unparse(args)}): pass")
    for node in ast.walk(plain):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(plain)


def shape(call: ast.Call) -> tuple[int, frozenset[str]] | None:
    """Return the number of positional arguments and the keywords; None with ``*`` or ``**``."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(not k.arg for k in call.keywords):
        return None
    return len(call.args), frozenset(k.arg for k in call.keywords if k.arg)


def accepts(args: ast.arguments, call: tuple[int, frozenset[str]]) -> bool:
    """Return whether a function, with or without ``self``, may be called so."""
    names = [a.arg for a in (*args.posonlyargs, *args.args)]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    given = set(names[: call[0]]) | call[1]
    known = {*names, *(a.arg for a in args.kwonlyargs)}
    required = set(names[: len(names) - len(args.defaults)]) | {
        a.arg for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is None
    }
    return (
        (call[0] <= len(names) or args.vararg is not None)
        and (call[1] <= known or args.kwarg is not None)
        and required <= given
    )


class Truth:
    """Search for the uses in ``old`` that ``new`` mended because ``h0`` became ``h1``."""

    def __init__(self, old: Source, new: Source, h0: Source, h1: Source) -> None:
        self.old, self.new, self.h0, self.h1 = old, new, h0, h1
        self.gone = h0.defined - h1.identifiers

    def places(self) -> Iterator[Place]:
        for file in self.old.texts:
            if "vllm" in self.old.texts[file]:
                yield from set(self._file(file))

    def _file(self, file: str) -> Iterator[Place]:
        later = list(statements(self.new.tree(file)))
        kept = {(s.scope, ast.unparse(part)) for s in later if not s.is_guarded for part in s.parts}
        open_imports = {i for s in later if not s.is_guarded for i in imports(s.node)}
        shapes = defaultdict(set)
        for statement in later:
            for node in statement.nodes():
                if isinstance(node, ast.Call):
                    shapes[statement.scope, last_name(node.func)].add(shape(node))
        bases = {
            f"{s.scope}.{s.node.name}": [last_name(base) for base in s.node.bases]
            for s in statements(self.old.tree(file))
            if isinstance(s.node, ast.ClassDef)
        }
        heads = {
            (s.scope, s.node.name): parameters(s.node.args)
            for s in later
            if isinstance(s.node, FunctionNode)
        }
        for statement in statements(self.old.tree(file)):
            if statement.is_guarded:
                continue
            node, lines = statement.node, statement.lines
            for module, name in imports(node):
                if (
                    (module, name) not in open_imports
                    and self.h0.has_import(module, name)
                    and not self.h1.has_import(module, name)
                ):
                    yield Place(file, *lines, "import", name)
            if isinstance(node, FunctionNode):
                if heads.get((statement.scope, node.name)) != parameters(node.args):
                    for base in bases.get(statement.scope, ()):
                        if self._is_override_broken(base, node):
                            yield Place(file, *lines, "override", node.name)
                continue
            if all((statement.scope, ast.unparse(p)) in kept for p in statement.parts):
                continue
            for part in statement.nodes():
                if isinstance(part, ast.Attribute) and self._is_gone(part.attr):
                    yield Place(file, *lines, "name", part.attr)
                if isinstance(part, ast.Call):
                    for keyword in part.keywords:
                        if keyword.arg and self._is_gone(keyword.arg):
                            yield Place(file, *lines, "name", keyword.arg)
                    name, own = last_name(part.func), shape(part)
                    changed = shapes.get((statement.scope, name), set())
                    if own and changed and own not in changed and self._is_call_broken(name, own):
                        yield Place(file, *lines, "call", name)

    def _is_gone(self, name: str) -> bool:
        return name in self.gone and name not in self._own_names and name not in self._modules

    @cached_property
    def _modules(self) -> set[str]:
        """Return the names of vLLM's modules: a use of one follows from its import."""
        return {Path(file).stem for file in self.h0.texts}

    @cached_property
    def _own_names(self) -> set[str]:
        """Return names that the plugin itself defines, which vLLM's cannot be told from."""
        found = set()
        for file in self.old.texts:
            for node in ast.walk(self.old.tree(file)):
                match node:
                    case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                        found.add(node.name)
                    case ast.Attribute(ctx=ast.Store()):
                        found.add(node.attr)
                    case ast.AnnAssign(target=ast.Name() as target):
                        found.add(target.id)
                    case ast.arg():
                        found.add(node.arg)
        return found

    def _is_call_broken(self, name: str, call: tuple[int, frozenset[str]]) -> bool:
        if name in self._own_names:
            return False
        if name[:1].isupper():
            return any(accepts(a, call) for a in _constructors(self.h0, name)) and not any(
                accepts(a, call) for a in _constructors(self.h1, name)
            )
        return any(accepts(a, call) for a in self.h0.functions(name)) and not any(
            accepts(a, call) for a in self.h1.functions(name)
        )

    def _is_override_broken(self, base: str, node: FunctionNode) -> bool:
        before, after = self.h0.method(base, node.name), self.h1.method(base, node.name)
        if before is None or node.name == "__init__":
            return False
        if after is None:
            return bool(self.h1.classes(base))
        own = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        names = {a.arg for a in (*after.posonlyargs, *after.args, *after.kwonlyargs)}
        old_names = {a.arg for a in (*before.posonlyargs, *before.args, *before.kwonlyargs)}
        gained = names - old_names - own
        lost = (old_names - names) & own
        return bool((gained and node.args.kwarg is None) or lost)


def _constructors(source: Source, name: str) -> Iterator[ast.arguments]:
    for cls in source.classes(name):
        if found := source.method(name, "__init__"):
            yield found
        elif not any(isinstance(s, FunctionNode) and s.name == "__new__" for s in cls.body):
            fields = [s for s in cls.body if isinstance(s, ast.AnnAssign)]
            if fields and not cls.bases:
                text = ", ".join(
                    f"{ast.unparse(s.target)}{'=0' if s.value is not None else ''}"
                    for s in sorted(fields, key=lambda s: s.value is not None)
                )
                function = ast.parse(f"def f({text}): pass").body[0]
                assert isinstance(function, ast.FunctionDef)
                yield function.args


def predictions(old: Path, h0: Path, h1: Path) -> list[dict[str, object]]:
    """Return the breakages that the command prints as JSON."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "interposer_tools", "seams", "vllm", str(h1)),
            *("--of", str(old), "--works-with", str(h0), "--json"),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    breakages: list[dict[str, object]] = json.loads(done.stdout)["breakages"]
    return breakages


def survives(old: Source, new: Source, breakage: dict[str, object]) -> bool:
    """Return whether the successor has the predicted use unchanged and without a guard.

    The use is the imported name, the arguments of an override, or the expression that has the name.
    """
    file, line, kind = str(breakage["file"]), int(str(breakage["line"])), str(breakage["kind"])
    name = str(breakage["name"])
    last = name.rpartition(".")[2]
    later = [s for s in statements(new.tree(file)) if not s.is_guarded]
    for statement in statements(old.tree(file)):
        first, end = statement.lines
        if not first <= line <= end:
            continue
        node = statement.node
        if kind == "import":
            kept = {i for s in later for i in imports(s.node)}
            if any(i in kept for i in imports(node) if last in (i[1], i[0].rpartition(".")[2])):
                return True
        elif kind in ("override", "abstract") and isinstance(node, FunctionNode | ast.ClassDef):
            if node.name != (last if kind == "override" else node.name):
                continue
            for s in later:
                if s.scope == statement.scope and _head(s.node) == _head(node):
                    return kind == "override" or last not in _method_names(s.node)
        else:
            texts = _expressions(statement, kind, last)
            kept_texts = {
                text
                for s in later
                if s.scope == statement.scope
                for text in _expressions(s, kind, last)
            }
            if texts and texts <= kept_texts:
                return True
    return False


def _head(node: ast.stmt) -> str:
    if isinstance(node, FunctionNode):
        return f"{node.name}({parameters(node.args)})"
    return node.name if isinstance(node, ast.ClassDef) else ""


def _method_names(node: ast.stmt) -> set[str]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return {s.name for s in body if isinstance(s, FunctionNode)}


def _expressions(statement: Statement, kind: str, name: str) -> set[str]:
    """Return the calls, attributes or texts of a statement that have ``name``."""
    found = set()
    for node in statement.nodes():
        match node:
            case ast.Call() if kind in ("call", "declared") and (
                last_name(node.func) == name
                or name in ("__init__", "")
                or isinstance(node.func, ast.Attribute | ast.Name)
            ):
                found.add(ast.unparse(node))
            case ast.Attribute(attr=attribute) if attribute == name:
                found.add(ast.unparse(node))
            case ast.Constant(value=str(text)) if kind == "declared" and name in text:
                found.add(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--series", action="append", choices=SERIES)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--details", type=Path, help="add each place to this file, a line of JSON")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    details: list[dict[str, object]] = []
    totals: Counter[str] = Counter()
    print(f"{'plugin':26} {'vllm':>8} {'predicted':>9} {'kept':>5} {'mended':>6} {'found':>6}")
    for dist in options.series or SERIES:
        for (p0, v0), (p1, v1) in zip(SERIES[dist], SERIES[dist][1:], strict=False):
            paths = [
                wheel(options.folder, *pair)
                for pair in ((dist, p0), (dist, p1), ("vllm", v0), ("vllm", v1))
            ]
            pair_details = compare(paths)
            counts = Counter(str(d["class"]) for d in pair_details)
            totals += counts
            pair = [{"plugin": f"{dist} {p0}", "vllm": v1, **d} for d in pair_details]
            details.extend(pair)
            if options.details:
                with options.details.open("a") as file:
                    file.writelines(json.dumps(detail) + "\n" for detail in pair)
            print(row(f"{dist} {p0}", v1, counts), flush=True)
    print(row("all", "", totals))
    for kind in ("import", "name", "call", "override"):
        of_kind = Counter(str(d["class"]) for d in details if d.get("truth") == kind)
        mended = of_kind["mended, predicted"] + of_kind["mended, missed"]
        print(f"mended, {kind}: {of_kind['mended, predicted']} of {mended} predicted")
    for kind in ("import", "attribute", "call", "override", "abstract", "patch", "declared"):
        of_kind = Counter(str(d["class"]) for d in details if d.get("kind") == kind)
        number = of_kind["predicted, changed"] + of_kind["predicted, kept"]
        print(f"predicted, {kind}: {number}, of which {of_kind['predicted, kept']} kept")
    for detail in random.Random(0).sample(details, min(options.sample, len(details))):
        print(json.dumps(detail))


def row(plugin: str, version: str, counts: Counter[str]) -> str:
    predicted = counts["predicted, changed"] + counts["predicted, kept"]
    mended = counts["mended, predicted"] + counts["mended, missed"]
    return (
        f"{plugin:26} {version:>8} {predicted:>9} {counts['predicted, kept']:>5} {mended:>6} "
        f"{counts['mended, predicted']:>6}"
    )


def compare(paths: Iterable[Path]) -> list[dict[str, object]]:
    """Return each prediction and each mended use of one pair of releases, with its class."""
    old_path, new_path, h0_path, h1_path = paths
    old, new, h0, h1 = map(Source, (old_path, new_path, h0_path, h1_path))
    breakages = predictions(old_path, h0_path, h1_path)
    again = {(b["file"], b["kind"], b["name"]) for b in predictions(new_path, h0_path, h1_path)}
    details: list[dict[str, object]] = []
    lines = defaultdict(set)
    for breakage in breakages:
        lines[breakage["file"]].add(int(str(breakage["line"])))
        # An unchanged expression may be mended by another import or another base class.
        is_again = (breakage["file"], breakage["kind"], breakage["name"]) in again
        kept = is_again and survives(old, new, breakage)
        fields = {k: breakage[k] for k in ("file", "line", "kind", "name", "reason")}
        details.append({"class": f"predicted, {'kept' if kept else 'changed'}", **fields})
    for place in sorted(set(Truth(old, new, h0, h1).places())):
        is_predicted = any(place.first <= line <= place.last for line in lines[place.file])
        details.append(
            {
                "class": f"mended, {'predicted' if is_predicted else 'missed'}",
                "truth": place.kind,
                "file": place.file,
                "line": place.first,
                "name": place.name,
            }
        )
    return details


if __name__ == "__main__":
    main()
