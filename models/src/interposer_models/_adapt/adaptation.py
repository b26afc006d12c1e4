"""The state of one adaptation: where it may bind, what it changed, what became of each module."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import Choice, Placement, PluggableLayer, Resolver, Site, Verdict
from interposer.errors import ConfigError
from interposer_models._adapt.changes import Changes
from interposer_models._adapt.fitness import judge_module
from interposer_models._adapt.forwards import Forward, own_forward
from interposer_models._adapt.inner_forward import around_forward, is_wrapped
from interposer_models._adapt.place import Place

Bind = Callable[[], str | Verdict]
"""Binds one module and returns the kernel's name, or why it was left."""


class Adaptation:
    """The state that all parts of an adaptation share.

    Attributes:
        places: by the name of the module.
        done: ids of the modules that need no further look.
        remarks: what is to be said besides, of the model as a whole.
        layers: what computes the products of projections, or a gated MLP, by the ids of the
            modules that it stands for.
        wrapped: ids of the modules that had a forward of another library.
    """

    def __init__(self, model: nn.Module, placement: Placement, resolver: Resolver) -> None:
        self.model = model
        self.placement = placement
        self.resolver = resolver
        self.changes = Changes()
        self.places: dict[str, Place] = {}
        self.done: set[int] = set()
        self.remarks: list[str] = []
        self.layers: dict[tuple[int, ...], PluggableLayer] = {}
        self.wrapped: set[int] = set()
        self.device = torch.device(placement.device.torch_device)
        self._offered = placement.platform.dtypes(placement.device.torch_device)

    def judge(self, module: nn.Module, *, sharded: bool = False) -> Verdict:
        """Say whether a module can be bound at all, whatever its kernel.

        Args:
            sharded: its parameters may be ``DTensor``s.
        """
        return judge_module(module, self.device, self._offered, sharded=sharded)

    def judge_place(self, dtype: torch.dtype, device: torch.device) -> Verdict:
        """Say whether rows of a dtype on a device can be what kernels read."""
        if device.type == self.device.type and dtype in self._offered:
            return Verdict.accept()
        return Verdict.refuse(f"rows of {dtype} on {device} are not what its platform computes on")

    def site(self, name: str, dtype: torch.dtype) -> Site:
        """Return the site of the module ``name``."""
        return Site(self.resolver, name, dtype)

    def attempt(self, module: nn.Module, name: str, bind: Bind) -> bool:
        """Bind a module; where that is refused or fails, take back what was done for it."""
        mark = self.changes.mark()
        try:
            bound = bind()
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            bound = Verdict.refuse(
                f"binding it failed: {type(error).__name__}: {error}", traceback.format_exc()
            )
        if isinstance(bound, Verdict):
            self.changes.undo(mark)
            self.leave(module, name, bound.reason)
            return False
        self.hold(module, name, bound)
        return True

    def leave(self, module: nn.Module, name: str, reason: str) -> None:
        """Note that a module stays as it is."""
        self.places[name] = Place(name, type(module).__name__, reason=reason)
        self.done.add(id(module))

    def hold(self, module: nn.Module, name: str, kernel: str, reason: str = "") -> None:
        """Note that a module is bound."""
        self.places[name] = Place(name, type(module).__name__, kernel, reason)
        self.done.add(id(module))

    def bind_forward(
        self, module: nn.Module, name: str, forward: Forward, *, guarded: bool = True
    ) -> None:
        """Let an instance run ``forward``; its class, its hooks and its children stay.

        What another library set around the forward of the class stays around this one. It may
        exchange parameters for the time of a call: that call is the class's own.

        Args:
            guarded: False where ``forward`` looks after that itself.
        """
        attribute: str = "forward"
        found: Any = forward
        if is_wrapped(module):
            self.wrapped.add(id(module))
            around = around_forward(module)
            assert around is not None, "the judgement refuses others"
            attribute, found = around(_guarded(module, forward) if guarded else forward)
        self.changes.set(module, attribute, found)
        self.changes.set(module, "train", _refuse_training(module, name))
        self.changes.set(module, "_apply", _refuse_conversion(module, name))


def kernel_name(choice: Choice) -> str:
    """Return ``provider/name`` of what was chosen."""
    return choice.chosen.qualified_name


def _guarded(module: nn.Module, forward: Forward) -> Forward:
    """Return ``forward`` for the parameters that are there now, the class's own for others."""
    held, original = dict(module._parameters), own_forward(module)

    def guarded(*args: Any, **named: Any) -> Any:
        now = module._parameters
        if all(now.get(name) is parameter for name, parameter in held.items()):
            return forward(*args, **named)
        return original(*args, **named)

    return guarded


def _refuse_training(module: nn.Module, name: str) -> Callable[[bool], nn.Module]:
    """Return what stands for the method ``train`` of a bound module."""

    def train(mode: bool = True) -> nn.Module:
        if mode:
            raise ConfigError(
                f"{name or 'The model'} is bound to kernels that record no gradients, so that it "
                "cannot be trained. Try: adapted.restore()"
            )
        return type(module).train(module, mode)

    return train


def _refuse_conversion(module: nn.Module, name: str) -> Callable[..., nn.Module]:
    """Return what stands for ``_apply``, by which modules are moved and converted."""

    def apply(fn: Callable[[Any], Any], *args: Any, **named: Any) -> nn.Module:
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            sample = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
            found = fn(sample)
            if (found.dtype, found.device) != (sample.dtype, sample.device):
                raise ConfigError(
                    f"{name or 'The model'} is bound to kernels for {sample.dtype} on "
                    f"{sample.device}, so that it cannot become {found.dtype} on {found.device}. "
                    "Try: adapted.restore(), convert the model, and adapt() again"
                )
        return module

    return apply
