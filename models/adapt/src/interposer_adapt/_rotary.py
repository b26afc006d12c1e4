"""Rotary embeddings of transformers models: functions that a forward calls by a global name.

Such a function is recognized by results. An instance runs a copy of the class's forward in
which the name refers to the kernel; the class's Python module stays unchanged.

Dimensions: B sequences, N heads, K kv heads, T tokens, D head size.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interposer import Verdict
from interposer.errors import NoCandidateError
from interposer_adapt._adaptation import Adaptation, Place, kernel_name
from interposer_adapt._agreement import check_agreement, random_normals
from interposer_adapt._forwards import GlobalOverride, forward_of, undecorated
from interposer_ops.rotary import rotary_embedding

_log = logging.getLogger("interposer")
_NUM_OPERANDS = 4
_TOLERANCE = 2e-5  # functions may compute in float32 for any input dtype
_IS_ROTARY: weakref.WeakKeyDictionary[FunctionType, bool] = weakref.WeakKeyDictionary()

Pair = tuple[Tensor, Tensor]
Rotate = Callable[..., Pair]


def bind_rotary(adaptation: Adaptation) -> None:
    """Let modules call a rotary kernel in place of the rotary function of their class."""
    if adaptation.device.type != "cpu":
        # Each step compares the halves of a table, which would synchronize with a device.
        return
    tables = RotaryTables()
    for name, module in adaptation.model.named_modules():
        class_forward: Any = type(module).forward
        if not module._modules or not isinstance(class_forward, FunctionType):
            continue
        function = undecorated(class_forward)
        names = [label for label in function.__code__.co_names if _is_rotary(function, label)]
        forward = forward_of(module)
        if len(names) != 1 or forward is None or forward.override is not None:
            continue
        original = function.__globals__[names[0]]
        rotary = AdaptedRotary(adaptation, module, name, original, tables)
        adaptation.changes.set(forward, "override", GlobalOverride(class_forward, names[0], rotary))
        adaptation.changes.set(module, "forward", forward)


class AdaptedRotary:
    """Replacement for the rotary function that one module calls, with a kernel and a fallback.

    Args:
        original: the replaced function, for calls that the kernel does not support.
    """

    def __init__(
        self,
        adaptation: Adaptation,
        module: nn.Module,
        name: str,
        original: Rotate,
        tables: RotaryTables,
    ) -> None:
        self._adaptation, self._kind, self._name = adaptation, type(module).__name__, name
        self._original, self._tables = original, tables
        self._kernels: dict[tuple[int, torch.dtype], Rotate | None] = {}

    def __call__(self, query: Any, key: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        """Rotate queries and keys, ``[B, N, T, D]`` and ``[B, K, T, D]``."""
        if not args and not kwargs and _is_supported(query, key, cos, sin):
            size, dtype = query.shape[-1], query.dtype
            if (size, dtype) not in self._kernels:
                self._kernels[size, dtype] = self._bind(size, dtype)
            kernel = self._kernels[size, dtype]
            tables = None if kernel is None else self._tables.prepare(cos, sin, query.shape[0])
            if kernel is not None and tables is not None:
                return _rotate(kernel, query, key, *tables)
        return self._original(query, key, cos, sin, *args, **kwargs)

    def _bind(self, size: int, dtype: torch.dtype) -> Rotate | None:
        """Return a rotary kernel that is no reference and agrees with the function, else None."""
        if size % 2:
            return None
        site = self._adaptation.site(self._name, dtype)
        try:
            bound_kernel = site.bind_kernel(rotary_embedding, head_size=size, rotary_size=size)
        except NoCandidateError:
            return None
        # The reference is not faster than the class's own function.
        if bound_kernel.function is rotary_embedding.reference:
            return None
        verdict = self._check_kernel(bound_kernel.function, size, dtype)
        name = kernel_name(bound_kernel.choice)
        self._record(
            name if verdict else "",
            f"rotary embedding by {name}"
            if verdict
            else f"its rotary embedding stays its own: {name}: {verdict.reason}",
        )
        return bound_kernel.function if verdict else None

    def _check_kernel(self, kernel: Rotate, size: int, dtype: torch.dtype) -> Verdict:
        case = _random_case(size, dtype)
        cos, sin = (table.float()[..., : size // 2].flatten(0, 1) for table in case[2:])
        expected = self._original(*case)
        largest = float(
            max(states.abs().max() for states in case[:2]) * max(t.abs().max() for t in case[2:])
        )
        for reference, actual in zip(expected, _rotate(kernel, *case[:2], cos, sin), strict=True):
            verdict = check_agreement(
                rotary_embedding.tolerance, reference, actual, 2, 2 * largest, 2 * largest
            )
            if verdict and reference.stride() != actual.stride():
                verdict = Verdict.refuse("returns another layout")
            if not verdict:
                return verdict
        return Verdict.accept()

    def _record(self, kernel: str, reason: str) -> None:
        results = self._adaptation.results
        previous = results.get(self._name)
        if previous is not None:
            kernel = previous.kernel or kernel
            reason = "; ".join(filter(None, (previous.reason, reason)))
        results[self._name] = Place(self._name, self._kind, kernel, reason)


class _CachedTables(NamedTuple):
    """The prepared cosine and sine tables of a step, with the tensors they were made from."""

    cos: weakref.ref[Tensor]
    sin: weakref.ref[Tensor]
    versions: tuple[int, int]
    copies: tuple[Tensor, Tensor] | None
    batch: int
    tables: Pair | None


class RotaryTables(threading.local):
    """The last cosine and sine tables in the layout of the rotary op, shared by all layers."""

    # All layers of a step get the same tables, so that one entry suffices.
    cached: _CachedTables | None = None

    def prepare(self, cos: Tensor, sin: Tensor, batch: int) -> Pair | None:
        """Return both tables as ``[B * T, D / 2]`` in float32; None if a table's halves differ."""
        cached = self.cached
        if cached is not None and cached.batch == batch and _is_current(cached, cos, sin):
            return cached.tables
        has_no_version = cos.is_inference() or sin.is_inference()
        prepared = _CachedTables(
            weakref.ref(cos),
            weakref.ref(sin),
            (0, 0) if has_no_version else (cos._version, sin._version),
            (cos.clone(), sin.clone()) if has_no_version else None,
            batch,
            _first_halves(cos, sin, batch),
        )
        self.cached = prepared
        return prepared.tables


def _is_current(cached: _CachedTables, cos: Tensor, sin: Tensor) -> bool:
    if cached.cos() is not cos or cached.sin() is not sin:
        return False
    if cached.copies is None:
        return (cos._version, sin._version) == cached.versions
    # Inference tensors have no version counter, so that values are compared.
    return torch.equal(cos, cached.copies[0]) and torch.equal(sin, cached.copies[1])


def _first_halves(cos: Tensor, sin: Tensor, batch: int) -> Pair | None:
    half = cos.shape[-1] // 2
    prepared = []
    for table in (cos, sin):
        first, second = table[..., :half], table[..., half:]
        if not torch.equal(first, second):
            return None
        rows = first.float().expand(batch, -1, -1)
        prepared.append(rows.reshape(-1, half).contiguous())
    return prepared[0], prepared[1]


def _rotate(kernel: Rotate, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Rotate queries and keys by a kernel, and return both in the layout of projections."""
    rotated = kernel(_rows(query), _rows(key), cos, sin)
    batch, _, tokens, _ = query.shape
    rotated_query, rotated_key = (
        states.view(batch, tokens, *states.shape[1:]).transpose(1, 2) for states in rotated
    )
    return rotated_query, rotated_key


def _rows(x: Tensor) -> Tensor:
    """Reshape ``[B, N, T, D]`` to ``[B * T, N, D]``."""
    return x.transpose(1, 2).contiguous().view(-1, x.shape[1], x.shape[3])


def _is_supported(query: Any, key: Any, cos: Any, sin: Any) -> bool:
    """Return True if the kernel supports the tensors and keeps the layout of the results."""
    for tensor in (query, key, cos, sin):
        if not isinstance(tensor, Tensor) or not tensor.is_cpu or tensor.requires_grad:
            return False
    if query.ndim != 4 or key.ndim != 4:
        return False
    batch, heads, tokens, size = query.shape
    if key.shape != (batch, kv_heads := key.shape[1], tokens, size) or not batch * tokens:
        return False
    # The kernel's result is token-major: the inputs must be token-major, too, unless a stride is
    # irrelevant.
    if tokens != 1 and (
        (heads != 1 and query.stride(2) <= query.stride(1))
        or (kv_heads != 1 and key.stride(2) <= key.stride(1))
    ):
        return False
    table = cos.shape
    return (
        (table == (batch, tokens, size) or table == (1, tokens, size))
        and sin.shape == table
        and query.dtype is key.dtype
        and cos.dtype is sin.dtype
    )


def _random_case(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random queries, keys and tables in the layout of an attention layer."""
    cpu = torch.device("cpu")
    query = random_normals((2, 3, 4, size), dtype, cpu).transpose(1, 2)
    key = random_normals((2, 3, 2, size), dtype, cpu).flip(-1).transpose(1, 2)
    table = random_normals((2, 2, 3, size // 2), dtype, cpu)
    cos, sin = torch.cat((table, table), dim=-1)
    return query, key, cos, sin


def _is_rotary(forward: FunctionType, name: str) -> bool:
    """Return True if a global name that the forward calls refers to a rotary function."""
    function = forward.__globals__.get(name)
    if not isinstance(function, FunctionType):
        return False
    if function not in _IS_ROTARY:
        _IS_ROTARY[function] = _computes_rotary(function)
    return _IS_ROTARY[function]


def _computes_rotary(function: FunctionType) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())
    operands, options = parameters[:_NUM_OPERANDS], parameters[_NUM_OPERANDS:]
    if len(operands) < _NUM_OPERANDS or any(parameter.kind not in kinds for parameter in operands):
        return False
    if any(
        parameter.default is parameter.empty and parameter.kind in kinds for parameter in options
    ):
        return False
    case = _random_case(8, torch.float64)
    tables = (table[..., :4].flatten(0, 1) for table in case[2:])
    expected = _rotate(rotary_embedding.reference, *case[:2], *tables)
    try:
        actual = function(*case)
        pairs = list(zip(actual, expected, strict=True))
        return all(
            isinstance(a, Tensor)
            and a.shape == b.shape
            and bool(((a - b).abs() <= _TOLERANCE).all())
            for a, b in pairs
        )
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        _log.debug("%s is no rotary embedding: it raised %r", function.__name__, error)
        return False
