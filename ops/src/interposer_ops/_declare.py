"""Declarations of standard ops and kernels, beside their code; their records follow from them.

``python -m interposer_ops._declare`` writes the records into ``_records.json``, which the plugin
reads without importing torch or triton. A test compares the two.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from interposer import CustomOp, Dim, Kernel, OpEntry, Requires, Tolerance, custom_op
from interposer_ops._records import PLAIN, RECORDS, records_text

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

DEQUANTIZES = "dequantizes, then multiplies floats"
"""The way of references around the arithmetic that quantized products are meant for."""

_PACKAGE = "interposer_ops"
_declared: list[OpEntry | Kernel] = []


def standard_op(
    name: str,
    *,
    cases: str,
    sample: bool = True,
    batch_invariant: bool = False,
    emulation: str = "",
    mutates: tuple[str, ...] = (),
    constants: tuple[str, ...] = (),
    tolerance: Tolerance | None = None,
    batched: tuple[str, ...] = (),
    ragged: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Turn a plain PyTorch function into the definition of a standard op, and declare its record.

    Args:
        cases: the module that holds ``<name>_cases`` and, with ``sample``, ``<name>_sample``.
        batch_invariant: the reference rounds an element the same way wherever it stands: it copies,
            compares, adds, multiplies and divides. A sum over a row may be split differently for
            more rows, and an exponential computed differently at the end of a chunk of memory.
        emulation: see ``OpEntry``.
    """
    define = custom_op(
        name,
        cases=f"{cases}:{name}_cases",
        sample=f"{cases}:{name}_sample" if sample else None,
        mutates=mutates,
        constants=constants,
        tolerance=tolerance,
        batched=batched,
        ragged=ragged,
    )

    def declare(reference: Callable[P, R]) -> CustomOp[P, R]:
        family = ".".join(reference.__module__.split(".")[:2])
        properties = PLAIN | {"batch_invariant"} if batch_invariant else PLAIN
        _declared.append(OpEntry(name, f"{family}:{name}", properties, emulation))
        return define(reference)

    return declare


def standard_kernel(op: str, technique: str, **facts: Any) -> Callable[[F], F]:
    """Declare the record of a kernel for ``op``, called ``<op>_<technique>``.

    Args:
        **facts: other fields of ``Kernel``.
    """

    def declare(function: F) -> F:
        target = f"{function.__module__}:{function.__name__}"
        _declared.append(Kernel(op, f"{op}_{technique}", target, **facts))
        return function

    return declare


def torch_kernel(
    op: str, technique: str, dims: Mapping[str, Dim] | None = None, *, traceable: bool = True
) -> Callable[[F], F]:
    """Declare the record of a kernel of torch's own functions, for any device that torch has.

    It goes before the reference, whose score is 0, and behind all that was written for some
    hardware, which has 5 at least.

    Args:
        traceable: it has no loop over sizes, which a compiler would unroll for one size.
    """
    requires = Requires(dtypes=("float32", "bfloat16", "float16"), dims=dims or {})
    properties = PLAIN if traceable else PLAIN - {"traceable"} | {"opaque"}
    return standard_kernel(op, technique, requires=requires, score=3.0, properties=properties)


def declared_records() -> list[OpEntry | Kernel]:
    """Return the records as they are declared; all modules are imported, so triton is needed."""
    for module in _modules(_PACKAGE):
        import_module(module)
    return sorted(_declared, key=lambda record: (type(record) is Kernel, record.name))


def _modules(package: str) -> Iterator[str]:
    folder = Path(__file__).parent
    for found in pkgutil.walk_packages([str(folder)], f"{package}."):
        if not found.name.endswith("__main__"):
            yield found.name


if __name__ == "__main__":
    # As the module that declarations import, not as this second copy of it.
    declared = import_module(f"{_PACKAGE}._declare").declared_records()
    RECORDS.write_text(records_text(declared), encoding="utf-8")
