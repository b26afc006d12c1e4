"""Rotary embeddings of a foreign model: functions that its classes call by a name of their module.

Such a function is known by what it computes. An instance runs a copy of its class's forward, to
which the name means the kernel; the module of the class stays as it is.

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
from interposer_models._adapt.adaptation import Adaptation, kernel_name
from interposer_models._adapt.agreement import judge_agreement, normals
from interposer_models._adapt.module_forward import Renamed, forward_of
from interposer_models._adapt.place import Place
from interposer_ops.rotary import rotary_embedding

_log = logging.getLogger("interposer")
_OPERANDS = 4
_CLOSE = 2e-5  # functions may compute in float32, whatever they get
_TURNS: weakref.WeakKeyDictionary[FunctionType, bool] = weakref.WeakKeyDictionary()

Pair = tuple[Tensor, Tensor]
Rotate = Callable[..., Pair]


def bind_rotary(adaptation: Adaptation) -> None:
    """Let modules that rotate queries and keys by a function of their own call the kernel."""
    if adaptation.device.type != "cpu":
        # The halves of a table are compared at every step, which would wait for another device.
        return
    tables = RotaryTables()
    for name, module in adaptation.model.named_modules():
        function: Any = type(module).forward
        if not module._modules or not isinstance(function, FunctionType):
            continue
        found = [label for label in function.__code__.co_names if _turns(function, label)]
        forward = forward_of(module)
        if len(found) != 1 or forward is None or forward.renamed is not None:
            continue
        original = function.__globals__[found[0]]
        rotary = AdaptedRotary(adaptation, module, name, original, tables)
        adaptation.changes.set(forward, "renamed", Renamed(function, found[0], rotary))
        adaptation.changes.set(module, "forward", forward)


class AdaptedRotary:
    """The function that rotates queries and keys of one module.

    Args:
        original: what it stands for; every call that no kernel takes is left to it.
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

    def __call__(self, query: Any, key: Any, cos: Any, sin: Any, *args: Any, **named: Any) -> Any:
        """Return both rotated, ``[B, N, T, D]`` and ``[B, K, T, D]``."""
        if not args and not named and _fits(query, key, cos, sin):
            size, dtype = query.shape[-1], query.dtype
            if (size, dtype) not in self._kernels:
                self._kernels[size, dtype] = self._bound(size, dtype)
            kernel = self._kernels[size, dtype]
            tables = None if kernel is None else self._tables.of(cos, sin, query.shape[0])
            if kernel is not None and tables is not None:
                return _rotated(kernel, query, key, *tables)
        return self._original(query, key, cos, sin, *args, **named)

    def _bound(self, size: int, dtype: torch.dtype) -> Rotate | None:
        """Return the kernel, None where there is none beside the reference, or it disagrees."""
        if size % 2:
            return None
        site = self._adaptation.site(self._name, dtype)
        try:
            bound = site.bind_kernel(rotary_embedding, head_size=size, rotary_size=size)
        except NoCandidateError:
            return None
        if bound.function is rotary_embedding.reference:
            return None
        verdict = self._judge(bound.function, size, dtype)
        name = kernel_name(bound.choice)
        self._tell(
            name if verdict else "",
            f"rotary embedding by {name}"
            if verdict
            else f"its rotary embedding is its own: {name}: {verdict.reason}",
        )
        return bound.function if verdict else None

    def _judge(self, kernel: Rotate, size: int, dtype: torch.dtype) -> Verdict:
        case = _case(size, dtype)
        cos, sin = (table.float()[..., : size // 2].flatten(0, 1) for table in case[2:])
        expected = self._original(*case)
        largest = float(
            max(each.abs().max() for each in case[:2]) * max(t.abs().max() for t in case[2:])
        )
        for right, found in zip(expected, _rotated(kernel, *case[:2], cos, sin), strict=True):
            verdict = judge_agreement(
                rotary_embedding.tolerance, right, found, 2, 2 * largest, 2 * largest
            )
            if verdict and right.stride() != found.stride():
                verdict = Verdict.refuse("returns another layout")
            if not verdict:
                return verdict
        return Verdict.accept()

    def _tell(self, kernel: str, reason: str) -> None:
        places = self._adaptation.places
        before = places.get(self._name)
        if before is not None:
            kernel = before.kernel or kernel
            reason = "; ".join(filter(None, (before.reason, reason)))
        places[self._name] = Place(self._name, self._kind, kernel, reason)


class _Known(NamedTuple):
    """Tables of a step, with what they were made of."""

    cos: weakref.ref[Tensor]
    sin: weakref.ref[Tensor]
    versions: tuple[int, int]
    copies: tuple[Tensor, Tensor] | None
    batch: int
    tables: Pair | None


class RotaryTables(threading.local):
    """Tables as the op reads them, made once for the layers that get the same ones."""

    known: _Known | None = None

    def of(self, cos: Tensor, sin: Tensor, batch: int) -> Pair | None:
        """Return ``[B * T, D / 2]`` in float32 of both; None if the halves of one differ."""
        known = self.known
        if known is not None and known.batch == batch and _same(known, cos, sin):
            return known.tables
        uncounted = cos.is_inference() or sin.is_inference()
        made = _Known(
            weakref.ref(cos),
            weakref.ref(sin),
            (0, 0) if uncounted else (cos._version, sin._version),
            (cos.clone(), sin.clone()) if uncounted else None,
            batch,
            _halves(cos, sin, batch),
        )
        self.known = made
        return made.tables


def _same(known: _Known, cos: Tensor, sin: Tensor) -> bool:
    if known.cos() is not cos or known.sin() is not sin:
        return False
    if known.copies is None:
        return (cos._version, sin._version) == known.versions
    # Nothing counts what is written to tensors of inference mode.
    return torch.equal(cos, known.copies[0]) and torch.equal(sin, known.copies[1])


def _halves(cos: Tensor, sin: Tensor, batch: int) -> Pair | None:
    half = cos.shape[-1] // 2
    found = []
    for table in (cos, sin):
        first, second = table[..., :half], table[..., half:]
        if not torch.equal(first, second):
            return None
        rows = first.float().expand(batch, -1, -1)
        found.append(rows.reshape(-1, half).contiguous())
    return found[0], found[1]


def _rotated(kernel: Rotate, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Return both rotated, in the memory order that products of them have."""
    rotated = kernel(_rows(query), _rows(key), cos, sin)
    batch, _, tokens, _ = query.shape
    turned, other = (each.view(batch, tokens, *each.shape[1:]).transpose(1, 2) for each in rotated)
    return turned, other


def _rows(x: Tensor) -> Tensor:
    """Return ``[B * T, N, D]`` of ``[B, N, T, D]``."""
    return x.transpose(1, 2).contiguous().view(-1, x.shape[1], x.shape[3])


def _fits(query: Any, key: Any, cos: Any, sin: Any) -> bool:
    """Say whether the kernel takes these, and returns them as the original would lay them out."""
    for each in (query, key, cos, sin):
        if not isinstance(each, Tensor) or not each.is_cpu or each.requires_grad:
            return False
    if query.ndim != 4 or key.ndim != 4:
        return False
    batch, heads, tokens, size = query.shape
    if key.shape != (batch, kv_heads := key.shape[1], tokens, size) or not batch * tokens:
        return False
    # All heads of a token lie before those of the next one in what the kernel returns.
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


def _case(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and tables of random numbers, as a layer lays them out."""
    cpu = torch.device("cpu")
    query = normals((2, 3, 4, size), dtype, cpu).transpose(1, 2)
    key = normals((2, 3, 2, size), dtype, cpu).flip(-1).transpose(1, 2)
    table = normals((2, 2, 3, size // 2), dtype, cpu)
    cos, sin = torch.cat((table, table), dim=-1)
    return query, key, cos, sin


def _turns(forward: FunctionType, name: str) -> bool:
    """Say whether a name of a forward's module is a function that does what the op does."""
    function = forward.__globals__.get(name)
    if not isinstance(function, FunctionType):
        return False
    if function not in _TURNS:
        _TURNS[function] = _computes(function)
    return _TURNS[function]


def _computes(function: FunctionType) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())
    taken, others = parameters[:_OPERANDS], parameters[_OPERANDS:]
    if len(taken) < _OPERANDS or any(each.kind not in kinds for each in taken):
        return False
    if any(each.default is each.empty and each.kind in kinds for each in others):
        return False
    case = _case(8, torch.float64)
    tables = (table[..., :4].flatten(0, 1) for table in case[2:])
    expected = _rotated(rotary_embedding.reference, *case[:2], *tables)
    try:
        found = function(*case)
        pairs = list(zip(found, expected, strict=True))
        return all(
            isinstance(a, Tensor) and a.shape == b.shape and bool(((a - b).abs() <= _CLOSE).all())
            for a, b in pairs
        )
    except Exception as error:  # noqa: BLE001 - what it raises says only that it is another
        _log.debug("%s is no rotary embedding: it raised %r", function.__name__, error)
        return False
