"""GELU modules of transformers models.

The op and its form are found by comparing results. These modules have no parameters, so the dtype
and the size of their input are taken from the other modules of the parent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interposer import BoundKernel, CustomOp, Site, Verdict
from interposer_adapt._adaptation import Adaptation
from interposer_adapt._agreement import check_calls
from interposer_adapt._forwards import Forward, class_forward
from interposer_adapt._neighbours import Neighbours, bind_by_size
from interposer_ops.activations import gelu, quick_gelu

_log = logging.getLogger("interposer")
# A GELU in float64, and its spellings; some compute their constants in float32.
_RELATIVE_TOLERANCE = 1e-6
_NUMBERS = torch.linspace(-60, 60, 2401, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Activation:
    """The op that a leaf module computes.

    Attributes:
        op: called as ``op(x, **options)``.
        options: options of the op by name, which are dims of its kernels as well.
    """

    op: CustomOp[..., Any]
    options: Mapping[str, str]


_CANDIDATES = (
    Activation(gelu, {"approximate": "none"}),
    Activation(gelu, {"approximate": "tanh"}),
    Activation(quick_gelu, {}),
)


def find_activation(module: nn.Module) -> Activation | None:
    """Return the activation that has the float64 results of a leaf module; None if unknown.

    Only classes with a name like GELU are tried, because trying runs their code.
    """
    if "gelu" not in type(module).__name__.lower() or module._parameters or module._buffers:
        return None
    try:
        with torch.no_grad():
            expected = type(module).forward(module, _NUMBERS)
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        _log.debug("%s is no activation: it raised %r", type(module).__name__, error)
        return None
    if not isinstance(expected, Tensor) or expected.shape != _NUMBERS.shape:
        return None
    for candidate in _CANDIDATES:
        distance = (candidate.op(_NUMBERS, **candidate.options) - expected).abs()
        if bool((distance <= _RELATIVE_TOLERANCE * (1 + _NUMBERS.abs())).all()):
            return candidate
    return None


def bind_activation(
    adaptation: Adaptation, module: nn.Module, name: str, activation: Activation
) -> str | Verdict:
    """Bind an activation module to one kernel for each row size of its neighbours."""
    op, options = activation.op, activation.options
    original = class_forward(module)

    def bind_size(
        site: Site, _: Neighbours, size: int
    ) -> tuple[BoundKernel[..., Any], tuple[str, ...]]:
        bound_kernel = site.bind_kernel(op, intermediate_size=size, **options)
        return bound_kernel, tuple(options.values())

    def once_rounded(x: Tensor) -> Tensor:
        # A module that rounds each of its operations differs by more than the op's tolerance.
        result: Tensor = original(x.float())
        return result.to(x.dtype)

    def check(forward: Forward, x: Tensor) -> Verdict:
        # Four operations in float32, whose errors are relative to the largest input.
        return check_calls(op.tolerance, once_rounded, forward, x, 4, float(x.abs().max()))

    return bind_by_size(adaptation, module, name, bind_size, check)
