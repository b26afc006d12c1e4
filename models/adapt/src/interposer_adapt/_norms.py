"""Norms of transformers models: nn.LayerNorm, and leaf modules that compute a norm.

The norm op of a leaf is found by comparing results. A norm without a weight holds neither size nor
dtype of its input. Both are taken from the parent's other modules: the input comes from a
projection or a table, as a whole or split into heads.

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

from interposer import BoundKernel, CustomOp, Site, Verdict
from interposer_adapt._adaptation import Adaptation, kernel_name
from interposer_adapt._agreement import MAGNITUDES, check_calls, random_normals
from interposer_adapt._forwards import Forward, class_forward, forward_one_input
from interposer_adapt._neighbours import Neighbours, bind_by_size
from interposer_ops.norms import gemma_rms_norm, layer_norm, rms_norm

_log = logging.getLogger("interposer")
# Modules compute in float32 for any input dtype.
_RELATIVE_TOLERANCE = 2e-5
_MAX_EPS = 0.1
_HIDDEN = 48
_SEED = 2

_ROWS = (2, 3)


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm op that a leaf module computes, and the names of its weight, bias and epsilon.

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
        """Return weight and bias of the module as keyword arguments of the norm op."""
        weight = module._parameters.get(self.weight) if self.weight else None
        if self.op is not layer_norm:
            return {"weight": weight}
        return {"weight": weight, "bias": module._parameters.get(self.bias) if self.bias else None}

    def dims(self, size: int) -> dict[str, int | bool]:
        """Return the dimensions by which a kernel for the norm op is selected."""
        dims: dict[str, int | bool] = {"hidden_size": size}
        if self.op is layer_norm:
            dims |= {"weighted": bool(self.weight), "biased": bool(self.bias)}
        return dims


_NORMS: dict[str, Norm | None] = {}
_SOURCES: weakref.WeakKeyDictionary[type[nn.Module], bytes] = weakref.WeakKeyDictionary()


def bind_norm(adaptation: Adaptation, module: nn.Module, name: str, norm: Norm) -> str | Verdict:
    """Bind a leaf module that computes a norm to a kernel of the norm op."""
    verdict = adaptation.check_module(module)
    if not verdict:
        return verdict
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not parameters:
        return bind_unweighted_norm(adaptation, module, name, norm)
    dtype, size = parameters[0].dtype, parameters[0].shape[0]
    bound_kernel = adaptation.site(name, dtype).bind_kernel(norm.op, **norm.dims(size))
    constants = {
        key: None if tensor is None else tensor.detach()
        for key, tensor in norm.constants(module, size).items()
    }
    prepared = bound_kernel.prepared(**constants)
    eps = float(getattr(module, norm.eps))
    # The order of a norm op's constants is the order of its arguments.
    operands: tuple[Any, ...] = (*(prepared[key] for key in constants), eps)
    original = class_forward(module)
    kernel = bound_kernel.function
    with torch.no_grad():
        # Kernels return the layout of their input. Code after the module may call view, so if the
        # class always returns a contiguous tensor, the kernel must do so, too.
        columns = torch.ones(2, size, 3, dtype=dtype, device=parameters[0].device).transpose(1, 2)
        if original(columns).is_contiguous():
            kernel = _contiguous_kernel(kernel)
    forward = forward_one_input(kernel, operands, original, dtype, adaptation.device)
    largest_constants = sum(
        float(t.abs().max()) for t in constants.values() if t is not None and t.numel()
    )
    for scale in MAGNITUDES:
        x: Tensor = (
            random_normals((*_ROWS, size), torch.float32, parameters[0].device).mul(scale).to(dtype)
        )
        # After normalization, a row has the norm sqrt(size), which bounds each partial sum.
        magnitude = (1 + largest_constants) * size**0.5
        verdict = check_calls(norm.op.tolerance, original, forward, x, size, magnitude)
        if not verdict:
            return verdict
    adaptation.bind_forward(module, name, forward)
    return kernel_name(bound_kernel.choice)


def bind_unweighted_norm(
    adaptation: Adaptation, module: nn.Module, name: str, norm: Norm
) -> str | Verdict:
    """Bind a norm without a weight to one kernel for each row size of its neighbours."""
    original, eps = class_forward(module), float(getattr(module, norm.eps))

    def bind_size(
        site: Site, neighbours: Neighbours, size: int
    ) -> tuple[BoundKernel[..., Any], tuple[Any, ...]]:
        bound_kernel = site.bind_kernel(norm.op, **norm.dims(size))
        constants: dict[str, Tensor | None] = {"weight": None, "bias": None}
        if norm.op is not layer_norm:
            ones = torch.ones(size, dtype=neighbours.dtype, device=neighbours.device)
            constants = {"weight": ones}
        prepared = bound_kernel.prepared(**constants)
        return bound_kernel, (*(prepared[key] for key in constants), eps)

    def check(forward: Forward, x: Tensor) -> Verdict:
        size = x.shape[-1]
        return check_calls(norm.op.tolerance, original, forward, x, size, 2 * size**0.5)

    return bind_by_size(adaptation, module, name, bind_size, check)


def find_norm(module: nn.Module) -> Norm | None:
    """Return the norm that the class of a leaf module computes, None if unknown.

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
    """Return the source code of a class and of its base classes."""
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
    """Return the first candidate norm that agrees with the class in float64 at every magnitude."""
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


def find_layer_norm(module: nn.LayerNorm) -> Norm | Verdict:
    """Return the norm that an nn.LayerNorm computes, or a refusal."""
    if len(module.normalized_shape) != 1:
        shape = tuple(module.normalized_shape)
        return Verdict.refuse(f"it normalises over {len(shape)} dimensions {shape}, kernels over 1")
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    weight, bias = (name if name in names else "" for name in ("weight", "bias"))
    return Norm(layer_norm, weight, bias, "eps")


def _contiguous_kernel(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a norm kernel so that its result is contiguous for any input layout."""

    def call(x: Tensor, *operands: Any) -> Tensor:
        return kernel(x.contiguous(), *operands)

    return call
