"""Functions that replace the forward of single module instances, and calls within a forward.

``ModuleForward`` runs the forward of a class on one instance, with parts of the class's code
replaced.

``intercepted_by`` sends a model's attention calls and masks to an interceptor. It applies to the
current thread: to all models that the thread calls while the ``with`` block is open.

``find_rewrap`` handles forwards that another library wrapped around the class's forward, as tensor
parallelism of transformers and the hooks of accelerate do. The wrapper moves tensors between
processes or devices, and calls the class's forward in between. A kernel replaces only that inner
call.

Dimensions: B sequences, N heads, T tokens, D size of a query and key, E size of a value.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules import module as module_hooks

from interposer import AttentionBackend


class Scope(Protocol):
    """A context that is entered before a module's forward runs, and exited after it."""

    def enter(self) -> Any:
        """Enter the context before a forward, and return the state for ``exit``."""
        ...

    def exit(self, before: Any) -> None:
        """Leave the context after a forward, with the state that ``enter`` returned."""
        ...


def undecorated(function: FunctionType) -> FunctionType:
    """Return the innermost function below all decorators that use ``functools.wraps``."""
    inner = getattr(function, "__wrapped__", None)
    return undecorated(inner) if isinstance(inner, FunctionType) else function


class GlobalOverride:
    """A copy of a function in which one global name refers to another function.

    The copy has the function's decorators. The function's module is not changed. If the name is
    reassigned in the module later, ``apply`` no longer uses the copy.

    Args:
        name: the name of a function in the globals of ``undecorated(function)``.
        replacement: the function that the name refers to in the copy.
    """

    def __init__(self, function: FunctionType, name: str, replacement: Callable[..., Any]) -> None:
        self._function, self._name = function, name
        self._globals = undecorated(function).__globals__
        self._original = self._globals[name]
        self._copy = _with_global(function, name, replacement)

    def apply(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the copy if ``function`` and the global name are unchanged, else ``function``."""
        if function is self._function and self._globals.get(self._name) is self._original:
            return self._copy
        return function


def _with_global(
    function: FunctionType, name: str, replacement: Callable[..., Any]
) -> FunctionType:
    """Return a copy of a decorated function whose inner function sees another value of a global."""
    inner = getattr(function, "__wrapped__", None)
    if not isinstance(inner, FunctionType):
        return _copy_function(
            function, {**function.__globals__, name: replacement}, function.__closure__
        )
    inner_copy = _with_global(inner, name, replacement)
    closure = tuple(
        CellType(inner_copy) if _holds(cell, inner) else cell for cell in function.__closure__ or ()
    )
    return _copy_function(function, function.__globals__, closure)


def _holds(cell: CellType, content: object) -> bool:
    try:
        return cell.cell_contents is content
    except ValueError:  # not filled yet
        return False


def _copy_function(
    function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    """Return a copy of a function with replaced globals and closure."""
    twin = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(vars(function))
    return twin


class ModuleForward:
    """Replacement forward that runs the class's forward with one function overridden.

    Attributes:
        override: replaces a function that the forward calls, except under ``torch.compile``.
        scope: open while the forward runs, unless a child in ``watched_children`` has a hook.
        watched_children: names of children.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.override: GlobalOverride | None = None
        self.scope: Scope | None = None
        self.watched_children: tuple[str, ...] = ()
        self._hooks: list[Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleForward:
        # deepcopy reached this forward through its module, so the memo already has the copy.
        twin = ModuleForward(copy.deepcopy(self.module, memo))
        twin.override, twin.scope, twin.watched_children = (
            self.override,
            self.scope,
            self.watched_children,
        )
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module's class within the scope."""
        module = self.module
        forward: Any = type(module).forward
        if self.override is not None and not is_compiling():
            forward = self.override.apply(forward)
        scope = self.scope
        if scope is None or any(self._hooks or self._find_hooks()):
            return forward(module, *args, **kwargs)
        state = scope.enter()
        try:
            return forward(module, *args, **kwargs)
        finally:
            scope.exit(state)

    def _find_hooks(self) -> list[Any]:
        # A hook may read or change a child's input between the projections, which a shared matmul
        # would not see. The dictionaries are collected once, as torch updates them in place.
        hooks = [module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks]
        for label in self.watched_children:
            child = self.module._modules[label]
            if child is not None:
                hooks += [child._forward_hooks, child._forward_pre_hooks]
        self._hooks = hooks
        return hooks


def forward_of(module: nn.Module) -> ModuleForward | None:
    """Return the instance's ``ModuleForward`` or a new one; None for another library's wrapper."""
    forward = vars(module).get("forward")
    if forward is None:
        return ModuleForward(module)
    return forward if isinstance(forward, ModuleForward) else None


Forward = Callable[..., Any]


def class_forward(module: nn.Module) -> Forward:
    """Return the forward that the module's class defines, bound to the module."""
    return partial(type(module).forward, module)


def forward_one_input(
    kernel: Callable[..., Tensor],
    operands: tuple[Any, ...],
    original: Forward,
    dtype: torch.dtype,
    device: torch.device,
) -> Forward:
    """Return a forward that calls ``kernel(x, *operands)`` if supported, else ``original``.

    ``original`` serves other dtypes, devices and arguments, and inputs that require a gradient: the
    kernel reads memory in the dtype it was bound for, and records no backward pass.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            if x.dtype is dtype and x.device == device and not x.requires_grad:
                return kernel(x, *operands)
        return original(*args, **kwargs)

    return forward


def forward_lookup(
    kernel: Callable[..., Tensor],
    operands: tuple[Any, ...],
    original: Forward,
    num_rows: int,
    device: torch.device,
) -> Forward:
    """Return a forward that looks up rows by ``kernel``, and calls ``original`` for invalid ids."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or args[0].device != device:
            return original(*args, **kwargs)
        (ids,) = args
        flat = ids.reshape(-1).long()
        # The original raises for an id out of range; a kernel would read past the table.
        # Under torch.compile, reading values would break the graph.
        if not is_compiling() and flat.numel():
            lowest, highest = flat.aminmax()
            if lowest < 0 or highest >= num_rows:
                return original(ids)
        rows = kernel(flat, *operands)
        return rows.view(*ids.shape, rows.shape[-1])

    return forward


MakeMask = Callable[..., Tensor | None]


class AttentionCall(NamedTuple):
    """The arguments of one attention call, as transformers passes them.

    Attributes:
        query: ``[B, N, T, D]``; key and value have the same layout.
        options: the remaining keywords, such as ``softcap``.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float | None
    is_causal: bool | None
    options: Mapping[str, Any]


PagedCache = tuple[AttentionBackend, Tensor, object]
"""The backend of a layer, its KV cache and the plan of the step."""


class AttentionInterceptor(Protocol):
    """Interface that replaces the attention and mask functions of a model."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Compute the attention of a call, ``[B, T, N, E]``."""
        ...

    def paged_cache(self, module: nn.Module) -> PagedCache | None:
        """Return the paged cache that a decoder block may use directly for ``module``.

        With None the block calls ``attend``, as other layers do.
        """
        ...

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        """Return the mask for the model; ``make(**settings)`` makes transformers' own mask."""
        ...


INTERCEPTOR: ContextVar[AttentionInterceptor | None] = ContextVar(
    "interposer_attention_interceptor", default=None
)


@contextmanager
def intercepted_by(interceptor: AttentionInterceptor) -> Iterator[None]:
    """Send attention calls and masks to ``interceptor`` within a ``with`` block."""
    token = INTERCEPTOR.set(interceptor)
    try:
        yield
    finally:
        INTERCEPTOR.reset(token)


Rewrap = Callable[[Forward], tuple[str, Any]]
"""Returns the attribute to set on the module, and its value, for another inner forward."""

# Depth of the search in nested objects: an expert-parallel wrapper holds strategy objects.
_DEPTH = 2


def is_wrapped(module: nn.Module) -> bool:
    """Return True if the instance's forward is not the forward of its class."""
    forward = vars(module).get("forward")
    return forward is not None and not _is_class_forward(forward, module)


def find_rewrap(module: nn.Module) -> Rewrap | None:
    """Return a function that rebuilds the instance's wrapper around another inner forward.

    The wrapper must hold the class's forward in a variable of its closure, in an attribute of an
    object there, or in one attribute of the module. The wrapper itself is not changed, but
    rebuilt around copies.

    Returns: None if the wrapper does not hold the class's forward.
    """
    attributes = [name for name, value in vars(module).items() if _is_class_forward(value, module)]
    if attributes:
        (name, *more_attributes) = attributes
        return None if more_attributes else lambda inner: (name, inner)
    outer = vars(module).get("forward")
    if not isinstance(outer, FunctionType):
        return None
    cells = outer.__closure__ or ()
    if not any(_replace_in_cell(cell, module, _placeholder)[1] for cell in cells):
        return None

    def rewrap(inner: Forward) -> tuple[str, Any]:
        closure = tuple(_replace_in_cell(cell, module, inner)[0] for cell in cells)
        return "forward", _copy_function(outer, outer.__globals__, closure)

    return rewrap


def _placeholder(*_: Any) -> None:
    """Placeholder for the inner forward while only the wrapper's closure is searched."""


def _replace_in_cell(cell: CellType, module: nn.Module, inner: Forward) -> tuple[CellType, bool]:
    """Return a cell with ``inner`` in place of the class's forward, and whether it was replaced."""
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return cell, False
    replaced = _replace_in(content, module, inner, _DEPTH)
    return (cell, False) if replaced is content else (CellType(replaced), True)


def _replace_in(value: Any, module: nn.Module, inner: Forward, depth: int) -> Any:
    """Return ``value`` with ``inner`` in place of the class's forward; copy changed objects."""
    if _is_class_forward(value, module):
        return inner
    if not depth or isinstance(value, nn.Module | type) or not hasattr(value, "__dict__"):
        return value
    changed: dict[str, Any] = {}
    for name, attribute in vars(value).items():
        replaced = _replace_in(attribute, module, inner, depth - 1)
        if replaced is not attribute:
            changed[name] = replaced
    if not changed:
        return value
    twin = copy.copy(value)
    vars(twin).update(changed)
    return twin


def _is_class_forward(value: object, module: nn.Module) -> bool:
    """Return True if a value is the class's forward bound to the module."""
    if not isinstance(value, MethodType) or value.__self__ is not module:
        return False
    return value.__func__ is type(module).forward
