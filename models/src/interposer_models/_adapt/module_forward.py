"""The forward of a class on one instance, with a part of what it calls replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules import module as every_module


class Scope(Protocol):
    """Something that holds between the start and the end of a forward."""

    def enter(self) -> Any:
        """Return what ``leave`` wants."""
        ...

    def leave(self, before: Any) -> None:
        """End it."""
        ...


class Renamed:
    """A copy of a function to whom one name of its module means another function.

    The module itself is not touched. Whoever gives the name another meaning later is obeyed.

    Args:
        name: of a function in the globals of ``function``.
        meant: what it is to mean in the copy.
    """

    def __init__(self, function: FunctionType, name: str, meant: Callable[..., Any]) -> None:
        self._function, self._name = function, name
        self._known = function.__globals__[name]
        self._copy = FunctionType(
            function.__code__,
            {**function.__globals__, name: meant},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        self._copy.__kwdefaults__ = function.__kwdefaults__

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the copy if ``function`` and the name are what they were."""
        own = self._function
        if function is own and own.__globals__.get(self._name) is self._known:
            return self._copy
        return function


class ModuleForward:
    """The forward of ``module``, which is the one of its class but for these changes.

    Attributes:
        renamed: a name that means another function while nothing is compiled.
        scope: entered while it runs and no hook of ``watched`` is there.
        watched: names of children.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.renamed: Renamed | None = None
        self.scope: Scope | None = None
        self.watched: tuple[str, ...] = ()
        self._hooks: list[Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleForward:
        # A copied module is known already, as it is what holds this.
        twin = ModuleForward(copy.deepcopy(self.module, memo))
        twin.renamed, twin.scope, twin.watched = self.renamed, self.scope, self.watched
        return twin

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run it."""
        module = self.module
        forward: Any = type(module).forward
        if self.renamed is not None and not is_compiling():
            forward = self.renamed.of(forward)
        scope = self.scope
        if scope is None or any(self._hooks or self._found_hooks()):
            return forward(module, *args, **named)
        before = scope.enter()
        try:
            return forward(module, *args, **named)
        finally:
            scope.leave(before)

    def _found_hooks(self) -> list[Any]:
        hooks = [every_module._global_forward_hooks, every_module._global_forward_pre_hooks]
        for label in self.watched:
            child = self.module._modules[label]
            if child is not None:
                hooks += [child._forward_hooks, child._forward_pre_hooks]
        self._hooks = hooks
        return hooks


def forward_of(module: nn.Module) -> ModuleForward | None:
    """Return the forward that ``module`` has or may get, None where it has another's."""
    found = vars(module).get("forward")
    if found is None:
        return ModuleForward(module)
    return found if isinstance(found, ModuleForward) else None
