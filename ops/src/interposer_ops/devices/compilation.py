"""Kernels under torch.compile: kernels that cannot be traced become ops of the graph.

A layer calls the kernel's function directly. Here torch's compiler is given a substitute for that
function: a custom op with the op's schema, and with the op's reference as fake kernel. So only
compiled code pays for a call through torch's dispatcher.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from interposer import Candidate, CustomOp, Resolver
from interposer.errors import ConfigError
from interposer.records import Kernel, load_target

__all__ = ["expose_kernels"]

_NAMESPACE = "interposer_kernels"
_exposed: dict[Callable[..., Any], str] = {}
_libraries: list[torch.library.Library] = []  # deleting a library would delete its ops


def expose_kernels(resolver: Resolver) -> tuple[str, ...]:
    """Register every chosen kernel that is not traceable as an op for torch's compiler.

    The registration holds for this process and is done once per function. The compiler is imported,
    which takes a second.

    Returns: names of the ops, ``interposer_kernels::PROVIDER_KERNEL``.
    Raises: ConfigError: a kernel cannot be an op, as it prepares constants or is not a function.
    """
    if resolver.described:
        return ()
    names: dict[str, None] = {}
    for choice, _ in resolver.choices.values():
        chosen = choice.chosen
        if isinstance(chosen.record, Kernel) and "traceable" not in chosen.properties:
            function = resolver.registry.load(chosen, chosen.record.target)
            # Several choices may share one function; torch accepts one substitute per function.
            if function not in _exposed:
                op = load_target(resolver.registry.ops[chosen.record.op].target)
                _exposed[function] = _expose(chosen, function, op, resolver.device.torch_device)
            names[_exposed[function]] = None
    return tuple(names)


def _expose(
    candidate: Candidate, function: Callable[..., Any], op: CustomOp[..., Any], device: str
) -> str:
    record: Any = candidate.record
    reason = ""
    if record.prepare:
        reason = "it prepares its constants, so the reference cannot compute its result shape"
    elif not isinstance(function, FunctionType | BuiltinFunctionType):
        reason = f"it is a {type(function).__name__}, no function"
    if reason:
        raise ConfigError(
            f"The kernel {candidate.qualified_name} for {record.op!r} cannot be an op of a "
            f"compiled graph: {reason}. Try: Config(compile='on') before it is chosen, or "
            f"Config(kernels={{{record.op!r}: Rule(forbid=[{candidate.name!r}])}})"
        )
    if not _libraries:
        _libraries.append(torch.library.Library(_NAMESPACE, "FRAGMENT"))
    (library,) = _libraries
    name = re.sub(r"\W", "_", f"{candidate.provider}_{candidate.name}")
    library.define(name + op.schema.removeprefix(op.name))
    full_name = f"{_NAMESPACE}::{name}"
    torch.library.impl(full_name, torch.device(device).type, function, lib=library)
    torch.library.register_fake(full_name, op.reference, lib=library)
    custom_op = getattr(getattr(torch.ops, _NAMESPACE), name).default

    def as_op(*args: Any, **kwargs: Any) -> Any:
        return custom_op(*args, **kwargs)

    # The substitute takes any arguments, so torch must not compare signatures.
    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(as_op)
    return full_name
