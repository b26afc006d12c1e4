"""Kernels under torch.compile: those that cannot be traced become ops of the graph.

A layer binds the kernel's own function, and calls it without anything in between. torch's compiler
is told of that function, and sees an op in its place: of the custom op's schema, with the reference
as its fake kernel. So only what is compiled pays for a call through torch's dispatcher.
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
_libraries: list[torch.library.Library] = []  # what they define is gone with them


def expose_kernels(resolver: Resolver) -> tuple[str, ...]:
    """Make every kernel that was chosen, and is not traceable, an op for torch's compiler.

    It holds in this process for whatever calls these functions, and is done once for each. The
    compiler is imported, which takes a second.

    Returns: the names of the ops, ``interposer_kernels::PROVIDER_KERNEL``.
    Raises: ConfigError: a kernel cannot be one, as it prepares constants or is no function.
    """
    if resolver.described:
        return ()
    names: dict[str, None] = {}
    for choice, _ in resolver.choices.values():
        chosen = choice.chosen
        if isinstance(chosen.record, Kernel) and "traceable" not in chosen.properties:
            function = resolver.registry.load(chosen, chosen.record.target)
            if function not in _exposed:
                op = load_target(resolver.registry.ops[chosen.record.op].target)
                _exposed[function] = _expose(chosen, function, op, resolver.device.torch_device)
            names[_exposed[function]] = None
    return tuple(names)


def _expose(
    candidate: Candidate, function: Callable[..., Any], op: CustomOp[..., Any], device: str
) -> str:
    record: Any = candidate.record
    why = ""
    if record.prepare:
        why = "its constants are prepared, so that the reference does not say what it returns"
    elif not isinstance(function, FunctionType | BuiltinFunctionType):
        why = f"it is a {type(function).__name__}, no function"
    if why:
        raise ConfigError(
            f"The kernel {candidate.qualified_name} for {record.op!r} cannot be an op of a "
            f"compiled graph: {why}. Try: Config(compile='on') before it is chosen, or "
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
    seen = getattr(getattr(torch.ops, _NAMESPACE), name).default

    def as_op(*args: Any, **kwargs: Any) -> Any:
        return seen(*args, **kwargs)

    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(as_op)
    return full_name
