"""Find out which tests execute the lines of mutants, with a call before each such line.

Tracing every line of every test, as coverage does, makes a run twice as long. These calls cost
nothing that can be measured, and they see forks, child processes and processes that are killed.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.mutants.drawing import Mutant, find_line

__all__ = ["installed", "read_intervals", "read_tests"]

# Installed into the environment of the tests, where every process that starts imports it. A process
# that another one forks has the same, and one without it (another environment) records nothing.
_RUNTIME = """
import builtins, os, time

_written = set()


def _signpost(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (number, test) not in _written:
        _written.add((number, test))
        line = f"{{number}}\\t{{time.time()}}\\t{{test}}\\n"
        try:
            file = os.open({file!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(file, line.encode())
            os.close(file)
        except OSError:
            pass  # in a sandbox


builtins._signpost = _signpost
"""
_CALL = "try: _signpost({})\n{}except NameError: pass\n"


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def _is_compiled(function: ast.AST) -> bool:
    """Say whether Triton reads the function's source, which must stay as it is."""
    return any("jit" in ast.unparse(one) for one in getattr(function, "decorator_list", []))


def _find_statement(source: str, line: int) -> int | None:
    """Return the line of the statement to put a call before, None if it runs at import."""
    lines, found = source.splitlines(), None

    def visit(node: ast.AST, in_function: bool) -> None:
        nonlocal found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                start = _first_line(child)
                if not start <= line <= (child.end_lineno or 0):
                    continue
                text = lines[start - 1]
                is_first = not text[: child.col_offset].strip(" @")  # on its line
                if in_function and is_first and not text.lstrip().startswith("elif"):
                    found = start
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # The defaults and decorators of a function run where it is defined.
                if not _is_compiled(child) and line >= child.body[0].lineno:
                    visit(child, in_function=True)
            else:
                visit(child, in_function)

    visit(ast.parse(source), in_function=False)
    return found


def _find_functions(source: str) -> list[int]:
    """Return the first line of each function's body, behind its docstring."""
    starts, lines = set[int](), source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_compiled(node):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and not lines[_first_line(body[0]) - 1][: body[0].col_offset].strip():
                starts.add(_first_line(body[0]))
    return sorted(starts)


@contextlib.contextmanager
def installed(checkout: Path, mutants: list[Mutant], file: Path) -> Iterator[None]:
    """Put the calls into the sources of ``checkout``; each writes a line to ``file``.

    A line that runs at import counts for all tests that call a function of its module.
    """
    calls = defaultdict[str, dict[int, list[int]]](lambda: defaultdict(list))
    for number, mutant in enumerate(mutants):
        line = find_line(checkout, mutant)
        if line is not None:
            source = (checkout / mutant.path).read_text(encoding="utf-8")
            statement = _find_statement(source, line)
            starts = _find_functions(source) if statement is None else [statement]
            for start in starts:
                calls[mutant.path][start].append(number)
    version = f"python{sysconfig.get_python_version()}"
    packages = checkout / ".venv" / "lib" / version / "site-packages"
    contents = {
        packages / "interposer_signposts.py": _RUNTIME.format(file=str(file.resolve())),
        packages / "interposer_signposts.pth": "import interposer_signposts\n",
    }
    originals = dict[Path, str]()
    for name, by_line in calls.items():
        path = checkout / name
        originals[path] = original = path.read_text(encoding="utf-8")
        lines = original.splitlines(keepends=True)
        for start, numbers in by_line.items():
            text = lines[start - 1]
            indent = text[: len(text) - len(text.lstrip())]
            added = "".join(indent + _CALL.format(number, indent) for number in numbers)
            lines[start - 1] = added + text
        contents[path] = "".join(lines)
    try:
        for path, content in contents.items():
            path.write_text(content, encoding="utf-8")
        yield
    finally:
        for path in contents:
            if path in originals:
                path.write_text(originals[path], encoding="utf-8")
            else:
                path.unlink(missing_ok=True)


def _without_group(test: str) -> str:
    """Return the id of a test without the group that the workers of xdist append."""
    return re.sub(r"@[^@\]]*$", "", test)


def read_tests(
    hits: Path, intervals: Mapping[str, Iterable[tuple[float, float]]]
) -> dict[int, set[str]]:
    """Return the ids of the tests that execute each mutant's line, by the mutant's number.

    What the setup of a test executes counts for all tests of its module, as a fixture may be
    theirs as well. A process that does not know its test counts for all tests of that time.
    """
    modules = defaultdict[str, list[str]](list)
    for test in intervals:
        modules[test.partition("::")[0]].append(test)
    found = defaultdict[int, set[str]](set)
    for line in hits.read_text(encoding="utf-8").splitlines():
        number, moment, running = line.split("\t")
        test, _, phase = running.rpartition(" (")
        test = _without_group(test)
        if not test:
            found[int(number)].update(
                test
                for test, times in intervals.items()
                if any(start <= float(moment) <= end for start, end in times)
            )
        elif phase.startswith("call"):
            found[int(number)].add(test)
        else:
            found[int(number)].update(modules[test.partition("::")[0]])
    return found


def read_intervals(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the times at which each test ran, as the recorder wrote them."""
    intervals = defaultdict[str, list[tuple[float, float]]](list)
    for file in folder.glob("intervals-*.json"):
        for test, start, end in json.loads(file.read_text(encoding="utf-8")):
            intervals[_without_group(test)].append((start, end))
    return intervals
