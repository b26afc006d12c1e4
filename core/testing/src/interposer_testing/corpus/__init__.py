"""The corpus that tests judges of kernels: known cheats, and honest kernels with unusual habits.

A judge must refuse each kernel of the folder ``cheats`` and accept each kernel of the folder
``honest``. The kernels import PyTorch, the standard library and their ``Needs`` only, as submitted
solutions do. Neither folder is a package: ``entries`` reads the files and never imports one, and a
judge must load them in a process of its own.

Each public function of a file is one kernel. The first paragraph of its docstring says why a judge
refuses or accepts the kernel; fields in its docstring, or in that of the file, say the rest::

    Op: silu_and_mul
    Kind: replay
    Source: https://github.com/gpu-mode/reference-kernels/pull/102
    Needs: compiler          (default: cpu)
    Symptom: form            (default of a cheat: values)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

__all__ = ["Entry", "Kind", "Need", "Symptom", "Verdict", "entries"]

Verdict = Literal["refused", "accepted"]
"""The expected verdict of a judge."""

Kind = Literal[
    "wrong computation",
    "replay",
    "deferral",
    "stealing",
    "knows the test",
    "tampering",
    "time",
    "wrong gradient",
    "memory",
    "numerics",
    "state",
    "threads",
    "libraries",
    "gradient",
    "compilation",
    "style",
]
"""The kind of cheat, or from ``memory`` on the kind of honest habit."""

Need = Literal["cpu", "compiler", "numpy", "triton", "cuda"]
"""The requirement of a kernel beside PyTorch."""

Symptom = Literal["values", "form", "memory", "exit", "state", ""]
"""The trace of a cheat that a judge in another process can see.

``values``: a result is wrong, in some call or for some inputs. ``form``: the result is no plain
tensor of the expected form. ``memory``: the kernel writes to an argument, or reuses the memory of
an earlier result. ``exit``: the kernel ends its process, or raises. ``state``: all results are
right, and only state of the process has changed, such as its clock. Empty for honest kernels.
"""

_FIELD = re.compile(r"^(Op|Kind|Source|Needs|Symptom): (.+)$", re.MULTILINE)
_FOLDERS: tuple[tuple[str, Verdict], ...] = (("cheats", "refused"), ("honest", "accepted"))


@dataclass(frozen=True)
class Entry:
    """One kernel of the corpus.

    Attributes:
        name: ``FILE.FUNCTION``, unique in the corpus.
        op: name of the standard op that the kernel claims to compute.
        path: the Python file.
        function: name of the function in the file; it takes the op's arguments by position.
        kind: kind of cheat or of honest habit.
        source: URL or publication that describes the cheat, or "own".
        verdict: expected verdict of a judge.
        needs: requirement of the kernel.
        symptom: the trace that a judge in another process can see.
        why: the reason for the verdict, a sentence or two.
    """

    name: str
    op: str
    path: Path
    function: str
    kind: Kind
    source: str
    verdict: Verdict
    needs: Need
    symptom: Symptom
    why: str

    @property
    def backward(self) -> bool:
        """Whether the verdict is on the backward pass; the forward pass is right."""
        return self.kind in ("wrong gradient", "gradient")


def entries(
    kind: Kind | None = None, op: str | None = None, verdict: Verdict | None = None
) -> list[Entry]:
    """Return the kernels of the corpus, cheats first.

    Args:
        kind: return only kernels of this kind.
        op: return only kernels of this op.
        verdict: return only kernels with this expected verdict.
    Raises: ValueError: a kernel lacks a field, or has an unknown value in a field.
    """
    return [
        entry
        for entry in _corpus()
        if kind in (None, entry.kind)
        and op in (None, entry.op)
        and verdict in (None, entry.verdict)
    ]


@cache
def _corpus() -> tuple[Entry, ...]:
    home = Path(__file__).parent
    return tuple(
        entry
        for folder, verdict in _FOLDERS
        for path in sorted((home / folder).glob("*.py"))
        for entry in _entries_of(path, verdict)
    )


def _entries_of(path: Path, verdict: Verdict) -> Iterator[Entry]:
    """Parse the entries of a file, without importing it."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    shared = dict(_FIELD.findall(ast.get_docstring(module) or ""))
    for function, docstring in _public_kernels(module):
        name = f"{path.stem}.{function}"
        fields = shared | dict(_FIELD.findall(docstring))
        missing = [field for field in ("Op", "Kind", "Source") if field not in fields]
        if missing:
            raise ValueError(
                f"Kernel {name} of the corpus has no field {missing[0]!r}. Try: add the line "
                f"'{missing[0]}: ...' to its docstring in {path}"
            )
        yield Entry(
            name=name,
            op=fields["Op"],
            path=path,
            function=function,
            kind=_checked(name, "Kind", fields["Kind"], get_args(Kind)),
            source=fields["Source"],
            verdict=verdict,
            needs=_checked(name, "Needs", fields.get("Needs", "cpu"), get_args(Need)),
            symptom=_checked(
                name,
                "Symptom",
                fields.get("Symptom", "values" if verdict == "refused" else ""),
                get_args(Symptom),
            ),
            why=" ".join(docstring.partition("\n\n")[0].split()),
        )


def _public_kernels(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of each public function, and of each public assignment."""
    for node, following in zip(module.body, [*module.body[1:], None], strict=True):
        match node:
            case ast.FunctionDef(name=name) if not name.startswith("_"):
                yield name, ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id=name)]) if not name.startswith("_"):
                match following:
                    case ast.Expr(value=ast.Constant(value=str(docstring))):
                        yield name, docstring
                    case _:
                        yield name, ""


def _checked(name: str, field: str, value: str, allowed: tuple[Any, ...]) -> Any:
    for choice in allowed:
        if choice == value:
            return choice
    raise ValueError(
        f"Kernel {name} of the corpus has {field.lower()} {value!r}. Try one of: "
        f"{', '.join(map(str, allowed))}"
    )
