"""Linear layers that read the same input, merged into one matmul.

A trace finds the projections that read the same input: children return meta tensors, so that
nothing is computed. The trace ends where the class needs real values; the calls until then are
used.

The forward of the class stays. The first projection that the class calls computes the merged
matmul; the other projections return slices of the result, while the forward runs and the input is
the same tensor.

Dimensions: I input features, O output features of all projections.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from interposer import Verdict
from interposer_adapt._adaptation import Adaptation, kernel_name
from interposer_adapt._forwards import class_forward, forward_of, forward_one_input
from interposer_adapt._packed_weight import PackedWeight, Restore
from interposer_adapt._projections import (
    check_projection,
    find_restore,
    kernel_call,
    layer_kernel_name,
    release_weight,
    set_weights,
)
from interposer_ops.layers.linear import Linear, MergedLinear, PlainLinear

_log = logging.getLogger("interposer")
_SHAPE = (1, 3)
_MIN_GROUP_SIZE = 2


def bind_merged(
    adaptation: Adaptation, module: nn.Module, name: str, group: tuple[str, ...]
) -> str | Verdict:
    """Bind linear layers of ``module`` that read the same input to one merged matmul.

    Returns: the kernel's name.
    """
    module_forward = forward_of(module)
    if module_forward is None or module_forward.scope is not None:
        return Verdict.refuse("the forward of this instance is replaced already")
    parts: list[Any] = [module._modules[label] for label in group]
    names = [f"{name}.{label}" if name else label for label in group]
    for part in parts:
        verdict = adaptation.check_module(part)
        if not verdict:
            return verdict
    weights: list[Tensor] = [part.weight for part in parts]
    dtype = weights[0].dtype
    if any(weight.dtype is not dtype for weight in weights):
        return Verdict.refuse("its projections differ in their dtype")
    layer = _merged_layer(adaptation, name, dict(zip(group, parts, strict=True)), dtype)
    quantized = not isinstance(layer.method, PlainLinear)
    kernel, merged_kernels = layer_kernel_name(layer), _kernels_at(adaptation, layer.prefix)
    for part_name, part in zip(names, parts, strict=True):
        # A merged site has other sizes and another name, so that rules or measurements may select
        # another kernel. Merging must not change the selection.
        unmerged_kernels = _kernels_without_merging(adaptation, part_name, part, dtype)
        if unmerged_kernels != merged_kernels:
            listed = [
                ", ".join(sorted(kernels)) or "no kernel"
                for kernels in (unmerged_kernels, merged_kernels)
            ]
            return Verdict.refuse(f"{part_name} runs on {listed[0]}, one product on {listed[1]}")
    set_weights(
        layer, weight=torch.cat([weight.data for weight in weights]), bias=_merged_bias(parts)
    )
    function, operands = kernel_call(layer)
    matmul = SharedMatmul(function, operands, len(parts))
    restore = None if quantized else find_merged_restore(layer, operands)
    if restore is None and not quantized:
        return Verdict.refuse(
            "its kernel cannot restore the plain weights, which would stay in memory twice"
        )
    merged_weight = None
    if restore is not None:
        merged_weight = _MergedWeight(restore, sum(weight.shape[0] for weight in weights))
        # The checks below restore each projection: one restore of the merged weight serves all of
        # them.
        merged_weight.cache(weights[0])
    start = 0
    for part_name, part in zip(names, parts, strict=True):
        end = start + part.out_features
        forward = forward_one_input(
            partial(matmul.part, start, end), (), class_forward(part), dtype, adaptation.device
        )
        part_restore = None
        if merged_weight is not None:
            part_restore = partial(merged_weight.part, start)
            verdict = check_projection(part, forward, part.weight, part.weight.data, part.bias)
            if not verdict:
                return verdict
        packed = PackedWeight(part.weight, part_restore, f"{part_name}.weight")
        verdict = release_weight(adaptation, [(part, "weight")], part.weight, packed)
        if not verdict:
            return verdict
        adaptation.bind_forward(part, part_name, forward)
        other_labels = ", ".join(label for label in group if module._modules[label] is not part)
        adaptation.mark_bound(part, part_name, kernel, f"one product with {other_labels}")
        start = end
    if merged_weight is not None:
        merged_weight.clear()
    adaptation.changes.set(module_forward, "scope", matmul)
    adaptation.changes.set(module_forward, "watched_children", group)
    adaptation.changes.set(module, "forward", module_forward)
    adaptation.layers_by_modules[tuple(map(id, parts))] = layer
    return kernel


class _MatmulResult:
    """The result of the merged matmul for one input; valid while the forward runs."""

    __slots__ = ("num_unread_parts", "out", "version", "x")

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.out: Tensor | None = None
        self.version = 0
        self.num_unread_parts = 0


class _ThreadState(threading.local):
    """The matmul result that the forward running in this thread has cached."""

    result: _MatmulResult | None = None


class SharedMatmul:
    """A merged matmul that is computed once for each input during a module's forward.

    Args:
        kernel: called with the input and ``operands``, returns ``[..., O]``.
        num_parts: the number of projections that read a slice of the result.
    """

    def __init__(
        self, kernel: Callable[..., Tensor], operands: tuple[Any, ...], num_parts: int
    ) -> None:
        self._kernel, self._operands, self._num_parts = kernel, operands, num_parts
        self._state = _ThreadState()
        self._traced: _MatmulResult | None = None

    def __deepcopy__(self, memo: object) -> SharedMatmul:
        return self

    def part(self, start: int, end: int, x: Tensor) -> Tensor:
        """Return the columns ``start`` to ``end`` of the merged matmul's result, contiguous."""
        return self._matmul(x)[..., start:end].contiguous()

    def _matmul(self, x: Tensor) -> Tensor:
        compiling = is_compiling()
        result = self._traced if compiling else self._state.result
        if result is None:
            return self._kernel(x, *self._operands)
        # Inference tensors have no version counter. The trace showed that the class does not write
        # to the input between the projections.
        version = 0 if compiling or x.is_inference() else x._version
        out = result.out
        if out is None or result.x is not x or result.version != version:
            out = self._kernel(x, *self._operands)
            result.x, result.out, result.version = x, out, version
            result.num_unread_parts = self._num_parts
        result.num_unread_parts -= 1
        if not result.num_unread_parts:
            result.x = result.out = None
        return out

    def enter(self) -> _MatmulResult | None:
        """Start to cache the matmul result, and return the state for ``exit``."""
        if is_compiling():
            previous, self._traced = self._traced, _MatmulResult()
        else:
            previous, self._state.result = self._state.result, _MatmulResult()
        return previous

    def exit(self, previous: _MatmulResult | None) -> None:
        """Discard the matmul result that was cached since ``enter``."""
        if is_compiling():
            self._traced = previous
        else:
            self._state.result = previous


def _merged_layer(
    adaptation: Adaptation, name: str, parts: dict[str, Any], dtype: torch.dtype
) -> MergedLinear:
    """Return the standard layer that merges the linear layers, on the meta device."""
    label = "+".join(parts)
    site = adaptation.site(f"{name}.{label}" if name else label, dtype)
    sizes = {label: part.out_features for label, part in parts.items()}
    has_bias = any(part.bias is not None for part in parts.values())
    in_features = next(iter(parts.values())).in_features
    with torch.device("meta"):
        return MergedLinear(site, in_features, sizes, has_bias)


def _kernels_without_merging(
    adaptation: Adaptation, name: str, projection: Any, dtype: torch.dtype
) -> set[str]:
    """Return the kernels on which the linear layers would run without merging."""
    with torch.device("meta"):
        Linear(
            adaptation.site(name, dtype),
            projection.in_features,
            projection.out_features,
            projection.bias is not None,
        )
    return _kernels_at(adaptation, name)


def _kernels_at(adaptation: Adaptation, name: str) -> set[str]:
    """Return the kernels that the resolver chose for the site ``name``."""
    choices = adaptation.resolver.choices.values()
    return {kernel_name(choice) for choice, prefixes in choices if name in prefixes}


def _merged_bias(parts: list[Any]) -> Tensor | None:
    """Return the concatenated bias, with zeros for layers without one; None without any bias."""
    if all(part.bias is None for part in parts):
        return None
    biases = [
        part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.data
        for part in parts
    ]
    return torch.cat(biases)


def find_merged_restore(layer: MergedLinear, operands: tuple[Any, ...]) -> Restore | None:
    """Return a function that restores the merged weight from packed form, or None."""
    assert isinstance(layer.method, PlainLinear)
    restore = find_restore(layer.method.bound, operands)
    if restore is not None:
        return restore
    # A kernel that does not pack still holds the plain weight as an operand.
    weight = operands[0] if operands else None
    sizes = (sum(layer.parts.values()), layer.in_features)
    if isinstance(weight, Tensor) and weight.shape == sizes:
        return partial(_copy_into, weight)
    return None


def _copy_into(weight: Tensor, into: Tensor) -> None:
    into.copy_(weight)


class _MergedWeight:
    """The merged weight, restored from packed form, of which each linear layer reads some rows."""

    def __init__(self, restore: Restore, num_rows: int) -> None:
        self._restore = restore
        self._num_rows = num_rows
        self._cached: Tensor | None = None

    def cache(self, like: Tensor) -> None:
        """Restore the merged weight now, and keep it for all calls of ``part`` until ``clear``."""
        self._cached = self._restore_all(like)

    def clear(self) -> None:
        """Drop the cached weight; later calls of ``part`` restore the weight each time."""
        self._cached = None

    def part(self, start: int, into: Tensor) -> None:
        """Copy rows of the merged weight, from row ``start`` on, into ``into``."""
        merged = self._restore_all(into) if self._cached is None else self._cached
        into.copy_(merged[start : start + into.shape[0]])

    def _restore_all(self, like: Tensor) -> Tensor:
        merged = torch.empty(self._num_rows, like.shape[1], dtype=like.dtype, device=like.device)
        self._restore(merged)
        return merged


class _Call(NamedTuple):
    """A recorded call of a child module with its input, kept so that the id stays unique."""

    child: str
    x: Tensor
    version: int


class _RecordingChild(nn.Module):
    """Stand-in for a child module that records calls instead of computing."""

    def __init__(self, child: nn.Module, name: str, calls: list[_Call]) -> None:
        super().__init__()
        vars(self).update(child=child, name=name, calls=calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["child"], name)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Record the call and return a meta tensor in the shape of the child's result."""
        child = vars(self)["child"]
        if not isinstance(x, Tensor) or args or kwargs or child._modules:
            raise TypeError("a trace follows children that take one tensor")
        self.calls.append(_Call(self.name, x, x._version))
        size = child.out_features if type(child) is nn.Linear else x.shape[-1]
        return x.new_empty(*x.shape[:-1], size)


class _UnknownArgument:
    """Stand-in for an argument of the traced forward whose value is unknown."""

    def __iter__(self) -> Iterator[_UnknownArgument]:
        # Classes unpack only the pair of cosines and sines before they project.
        return iter((_UnknownArgument(), _UnknownArgument()))


def find_sharing(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the groups of linear layers that always read the same tensor.

    Projections of an optional argument, such as encoder states, form a separate group.
    """
    linears = {n: c for n, c in module._modules.items() if type(c) is nn.Linear}
    if len(linears) < _MIN_GROUP_SIZE:
        return []
    groups = []
    # Projections of different input sizes cannot read the same tensor.
    for size in dict.fromkeys(linear.in_features for linear in linears.values()):
        same_size_names = {name for name, linear in linears.items() if linear.in_features == size}
        if len(same_size_names) >= _MIN_GROUP_SIZE:
            groups += _groups(module, same_size_names, size)
    return groups


def _groups(module: nn.Module, names: set[str], size: int) -> list[tuple[str, ...]]:
    first: Any = module._modules[min(names)]
    dtype: torch.dtype = first.weight.dtype
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return []

    def trace_with(argument: str = "") -> tuple[list[_Call], bool]:
        """Trace the module with a tensor for ``argument`` and defaults for other arguments."""
        arguments: dict[str, Any] = {
            parameter.name: _UnknownArgument()
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        }
        for name in filter(None, (parameters[0].name, argument)):
            arguments[name] = torch.empty(*_SHAPE, size, dtype=dtype, device="meta")
        return _trace(module, arguments)

    calls, _ = trace_with()
    called_children = [call.child for call in calls]
    called_once = {name for name in names if called_children.count(name) == 1}
    groups = _parts(called_once, calls, is_complete=True)
    # An optional argument, such as encoder states, may replace the input of some projections.
    for parameter in parameters[1:] if groups else []:
        if parameter.kind not in _VARIADIC:
            trace = trace_with(parameter.name)
            groups = [part for group in groups for part in _parts(set(group), *trace)]
    return groups


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parts(names: set[str], calls: list[_Call], is_complete: bool) -> list[tuple[str, ...]]:
    """Return the groups of linear layers in ``names`` that read the same tensor in one trace."""
    readers: dict[tuple[int, int], list[str]] = {}
    for call in calls:
        if call.child in names:
            readers.setdefault((id(call.x), call.version), []).append(call.child)
    uncalled = sorted(names.difference(*readers.values()))
    if uncalled and not is_complete and len(readers) <= 1:
        # The trace ended before these calls, so that it does not contradict earlier traces.
        return [(*next(iter(readers.values()), ()), *uncalled)]
    return [
        tuple(group) for group in (*readers.values(), uncalled) if len(group) >= _MIN_GROUP_SIZE
    ]


def _trace(module: nn.Module, arguments: dict[str, Any]) -> tuple[list[_Call], bool]:
    """Run the forward; return the recorded calls, and True if the forward completed."""
    calls: list[_Call] = []
    stand_in: Any = object.__new__(type(module))
    vars(stand_in).update(vars(module))
    # Copies on the meta device: assignments and writes of the class must not reach the model.
    for attribute in ("_parameters", "_buffers"):
        tensors = vars(module)[attribute].items()
        vars(stand_in)[attribute] = {
            n: t if t is None else t.detach().to("meta") for n, t in tensors
        }
    children = {
        name: None if child is None else _RecordingChild(child, name, calls)
        for name, child in module._modules.items()
    }
    vars(stand_in)["_modules"] = children
    try:
        with torch.no_grad():
            type(module).forward(stand_in, **arguments)
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        _log.debug("the trace of %s ended with %r", type(module).__name__, error)
        return calls, False
    return calls, True
