"""The forward of a class on one instance, with parts of the class's code replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as module_hooks


class Scope(Protocol):
    """A context that is open while a forward runs."""

    def enter(self) -> Any:
        """Open the context, and return the state for ``exit``."""
        ...

    def exit(self, before: Any) -> None:
        """Close the context."""
        ...


class GlobalOverride:
    """A copy of a function in which one global name refers to another function.

    The function's module is not changed. If the name is reassigned in the module later, ``apply``
    no longer uses the copy.

    Args:
        name: of a function in the globals of ``function``.
        replacement: the function that the name refers to in the copy.
    """

    def __init__(self, function: FunctionType, name: str, replacement: Callable[..., Any]) -> None:
        self._function, self._name = function, name
        self._original = function.__globals__[name]
        self._copy = FunctionType(
            function.__code__,
            {**function.__globals__, name: replacement},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        self._copy.__kwdefaults__ = function.__kwdefaults__

    def apply(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the copy if ``function`` and the global name are unchanged, else ``function``."""
        overridden = self._function
        if function is overridden and overridden.__globals__.get(self._name) is self._original:
            return self._copy
        return function


class ModuleForward:
    """The forward of ``module``'s class, with an override and a scope.

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
        """Run the forward of the class within the scope."""
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
    """Return the module's ``ModuleForward`` or a new one; None for another library's forward."""
    forward = vars(module).get("forward")
    if forward is None:
        return ModuleForward(module)
    return forward if isinstance(forward, ModuleForward) else None
