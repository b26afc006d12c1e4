"""The norm ops that a leaf module may compute, and the search for the matching op.

H is the hidden size.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interposer import CustomOp
from interposer_models._adapt.agreement import MAGNITUDES
from interposer_ops.norms import gemma_rms_norm, layer_norm, rms_norm

_log = logging.getLogger("interposer")
# Modules compute in float32 for any input dtype.
_RELATIVE_TOLERANCE = 2e-5
_MAX_EPS = 0.1
_HIDDEN = 48
_SEED = 2


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm that a leaf module computes.

    Attributes:
        op: called as ``op(x, weight, eps)``, or with a bias before ``eps``.
        weight, bias: names of the module's parameters; "" for none.
        eps: name of the module's attribute.
    """

    op: CustomOp[..., Any]
    weight: str
    bias: str
    eps: str

    def constants(self, module: nn.Module, size: int) -> dict[str, Tensor | None]:
        """Return the op's constants from the module's parameters."""
        weight = module._parameters.get(self.weight) if self.weight else None
        if self.op is not layer_norm:
            return {"weight": weight}
        return {"weight": weight, "bias": module._parameters.get(self.bias) if self.bias else None}

    def dims(self, size: int) -> dict[str, int | bool]:
        """Return the dimensions of the kernel request."""
        dims: dict[str, int | bool] = {"hidden_size": size}
        if self.op is layer_norm:
            dims |= {"weighted": bool(self.weight), "biased": bool(self.bias)}
        return dims


_NORMS: dict[str, Norm | None] = {}
_SOURCES: weakref.WeakKeyDictionary[type[nn.Module], bytes] = weakref.WeakKeyDictionary()


def find_norm(module: nn.Module) -> Norm | None:
    """Return the norm that the class of a leaf computes, None for unsupported classes.

    Results are cached by a hash of the class's source and of the attributes that may change the
    computation: bools and strings.
    """
    names = [name for name, value in module._parameters.items() if value is not None]
    shapes = {tuple(module._parameters[name].shape) for name in names}  # type: ignore[union-attr]
    if len(names) > 2 or len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        return None
    if not any(True for _ in _eps_names(module)):
        return None
    key = _key(module, names)
    if key not in _NORMS:
        size = next(iter(shapes))[0] if shapes else _HIDDEN
        _NORMS[key] = _search(module, names, size)
    return _NORMS[key]


def _key(module: nn.Module, names: list[str]) -> str:
    kind = type(module)
    if kind not in _SOURCES:
        _SOURCES[kind] = _source(kind)
    digest = hashlib.sha256(_SOURCES[kind])
    facts = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | str) and name != "training"
    }
    digest.update(repr((sorted(names), sorted(facts.items()))).encode())
    return digest.hexdigest()


def _source(kind: type[nn.Module]) -> bytes:
    """Return the source code of a class and its base classes."""
    parts = []
    for base in kind.__mro__:
        if base is nn.Module:
            break
        try:
            parts.append(inspect.getsource(base))
        except (OSError, TypeError):
            parts.append(f"{base.__module__}.{base.__qualname__} {id(base)}")
    return "\n".join(parts).encode()


def _search(module: nn.Module, names: list[str], size: int) -> Norm | None:
    """Return the first candidate that agrees with the class in float64 at every magnitude."""
    generator = torch.Generator().manual_seed(_SEED)
    try:
        probe = copy.copy(module)
        probe._parameters = {
            name: nn.Parameter(torch.randn(size, generator=generator).double(), False)
            for name in names
        }
    except (RuntimeError, TypeError):
        return None
    inputs = [
        (torch.randn(3, 5, size, generator=generator).double() + 0.3) * scale
        for scale in MAGNITUDES
    ]
    outputs = []
    with torch.no_grad():
        for x in inputs:
            try:
                y = type(module).forward(probe, x)
            except Exception as error:  # noqa: BLE001 - foreign code may raise anything
                _log.debug("%s is no norm: its probe raised %r", type(module).__name__, error)
                return None
            if not isinstance(y, Tensor) or y.shape != x.shape:
                return None
            outputs.append(y.double())
        for candidate in _candidates(module, names):
            eps = getattr(module, candidate.eps)
            constants = candidate.constants(probe, size)
            # RMS norm ops require a weight.
            if candidate.op is not layer_norm and constants["weight"] is None:
                constants["weight"] = torch.ones(size, dtype=torch.float64)
            if all(
                _agrees(candidate.op, x, y, constants, eps)
                for x, y in zip(inputs, outputs, strict=True)
            ):
                return candidate
    return None


def _candidates(module: nn.Module, names: list[str]) -> Iterator[Norm]:
    for eps in _eps_names(module):
        if not names:
            yield Norm(rms_norm, "", "", eps)
            yield Norm(layer_norm, "", "", eps)
        elif len(names) == 1:
            yield Norm(rms_norm, names[0], "", eps)
            yield Norm(gemma_rms_norm, names[0], "", eps)
            yield Norm(layer_norm, names[0], "", eps)
        else:
            for weight, bias in (names, names[::-1]):
                yield Norm(layer_norm, weight, bias, eps)


def _eps_names(module: nn.Module) -> Iterator[str]:
    for name, value in vars(module).items():
        if isinstance(value, float) and 0 < value <= _MAX_EPS:
            yield name


def _agrees(
    op: Callable[..., Tensor], x: Tensor, y: Tensor, constants: dict[str, Tensor | None], eps: float
) -> bool:
    actual = op(x, **constants, eps=eps)
    return bool((actual - y).abs().max() <= _RELATIVE_TOLERANCE * y.abs().max())
