"""Decorators that declare standard ops and kernels next to their code.

``python -m interposer_ops._declare`` collects the declarations and writes ``_records.json``, which
the plugin reads without importing torch or triton. A test compares file and declarations.
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
"""How a reference emulates a quantized GEMM whose arithmetic torch lacks, as records state it."""

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
    differentiable: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Define a standard op by its PyTorch reference and declare the op's record.

    Args:
        cases: the module that holds ``<name>_cases`` and, with ``sample``, ``<name>_sample``.
        batch_invariant: set if the reference only copies, compares, adds, multiplies and divides.
            The rounding of an element then does not depend on the position in the batch. Torch may
            split a sum over a row differently for more rows, and may compute an exponential
            differently at the end of a chunk of memory.
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
        differentiable=differentiable,
    )

    def declare(reference: Callable[P, R]) -> CustomOp[P, R]:
        family = ".".join(reference.__module__.split(".")[:2])
        properties = PLAIN | {"batch_invariant"} if batch_invariant else PLAIN
        properties |= {"differentiable"} if differentiable else frozenset()
        _declared.append(OpEntry(name, f"{family}:{name}", properties, emulation))
        return define(reference)

    return declare


def standard_kernel(op: str, technique: str, **facts: Any) -> Callable[[F], F]:
    """Declare the record of a kernel for ``op``, named ``<op>_<technique>``.

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
    """Declare the record of a kernel that calls torch functions, for any device of torch.

    Its score of 3 ranks the kernel above the reference (0) and below every kernel for specific
    hardware (at least 5).

    Args:
        traceable: False if the kernel loops over a size, which a compiler would unroll.
    """
    requires = Requires(dtypes=("float32", "bfloat16", "float16"), dims=dims or {})
    properties = PLAIN if traceable else PLAIN - {"traceable"} | {"opaque"}
    return standard_kernel(op, technique, requires=requires, score=3.0, properties=properties)


def declared_records() -> list[OpEntry | Kernel]:
    """Import all modules, and return the declared records sorted by type and name."""
    for module in _modules(_PACKAGE):
        import_module(module)
    return sorted(_declared, key=lambda record: (type(record) is Kernel, record.name))


def _modules(package: str) -> Iterator[str]:
    folder = Path(__file__).parent
    for module in pkgutil.walk_packages([str(folder)], f"{package}."):
        if not module.name.endswith("__main__"):
            yield module.name


if __name__ == "__main__":
    # Modules register in ``interposer_ops._declare``; this ``__main__`` is a second, empty copy.
    declared = import_module(f"{_PACKAGE}._declare").declared_records()
    RECORDS.write_text(records_text(declared), encoding="utf-8")
