"""Facts about Python code, which is parsed and never executed."""

from __future__ import annotations

import ast
import warnings


def top_level_names(source: str, *, with_imports: bool = False) -> list[str]:
    """Return the functions, classes and variables that a module defines at its top level.

    Args:
        with_imports: also return the names that the module imports from other modules.
    Raises: ValueError: the code has a syntax error.
    """
    names = list[str]()
    for statement in _parsed(source).body:
        match statement:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                names.append(name)
            case ast.Assign(targets):
                names += [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.ImportFrom(names=aliases) if with_imports:
                names += [alias.asname or alias.name for alias in aliases]
    return names


def imported_packages(source: str) -> set[str]:
    """Return the packages that the code imports anywhere.

    Raises: ValueError: the code has a syntax error.
    """
    packages = set[str]()
    for node in ast.walk(_parsed(source)):
        match node:
            case ast.Import(aliases):
                packages.update(alias.name.partition(".")[0] for alias in aliases)
            case ast.ImportFrom(str(module)):
                packages.add(module.partition(".")[0])
    return packages


def _parsed(source: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes, which concern the author
            return ast.parse(source)
    except (SyntaxError, RecursionError, MemoryError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"no valid Python{line}: {error}") from error
