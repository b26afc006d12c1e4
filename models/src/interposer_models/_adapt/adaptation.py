"""The state of one adaptation: eligible dtypes, changes made, and the result for each module."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import Choice, Placement, PluggableLayer, Resolver, Site, Verdict
from interposer.errors import ConfigError
from interposer_models._adapt.changes import Changes
from interposer_models._adapt.forwards import Forward, class_forward
from interposer_models._adapt.inner_forward import find_rewrap, is_wrapped
from interposer_models._adapt.module_check import check_module
from interposer_models._adapt.place import Place

Bind = Callable[[], str | Verdict]
"""Binds one module and returns the kernel's name, or a refusal with the reason."""


class Adaptation:
    """The state shared by all parts of an adaptation.

    Attributes:
        results: module results by module name.
        handled_ids: ids of the modules that later passes skip.
        notes: remarks about the model as a whole.
        layers_by_modules: the standard layer that computes one projection, merged projections or a
            gated MLP, by the ids of the replaced modules.
        wrapped_ids: ids of the modules with a forward wrapped by another library.
    """

    def __init__(self, model: nn.Module, placement: Placement, resolver: Resolver) -> None:
        self.model = model
        self.placement = placement
        self.resolver = resolver
        self.changes = Changes()
        self.results: dict[str, Place] = {}
        self.handled_ids: set[int] = set()
        self.notes: list[str] = []
        self.layers_by_modules: dict[tuple[int, ...], PluggableLayer] = {}
        self.wrapped_ids: set[int] = set()
        self.device = torch.device(placement.device.torch_device)
        self._supported_dtypes = placement.platform.dtypes(placement.device.torch_device)

    def check_module(self, module: nn.Module, *, sharded: bool = False) -> Verdict:
        """Refuse a module that no kernel can replace, such as one in training mode.

        Args:
            sharded: accept parameters that are ``DTensor``s.
        """
        return check_module(module, self.device, self._supported_dtypes, sharded=sharded)

    def check_rows(self, dtype: torch.dtype, device: torch.device) -> Verdict:
        """Refuse rows of a dtype or on a device that the platform's kernels cannot read."""
        if device.type == self.device.type and dtype in self._supported_dtypes:
            return Verdict.accept()
        return Verdict.refuse(f"rows of {dtype} on {device} are not supported by the platform")

    def site(self, name: str, dtype: torch.dtype) -> Site:
        """Return the selection site of the module ``name``."""
        return Site(self.resolver, name, dtype)

    def attempt(self, module: nn.Module, name: str, bind: Bind) -> bool:
        """Bind a module and return True; on a refusal or failure of ``bind``, undo the changes.

        The module is marked bound or skipped.
        """
        savepoint = self.changes.savepoint()
        try:
            kernel = bind()
        # Trials run foreign forwards and plugin kernels. Any failure of these leaves the module as
        # it was.
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            kernel = Verdict.refuse(
                f"binding it failed: {type(error).__name__}: {error}", traceback.format_exc()
            )
        if isinstance(kernel, Verdict):
            self.changes.undo(savepoint)
            self.mark_skipped(module, name, kernel.reason)
            return False
        self.mark_bound(module, name, kernel)
        return True

    def mark_skipped(self, module: nn.Module, name: str, reason: str) -> None:
        """Record that a module keeps the forward of the class."""
        self.results[name] = Place(name, type(module).__name__, reason=reason)
        self.handled_ids.add(id(module))

    def mark_bound(self, module: nn.Module, name: str, kernel: str, reason: str = "") -> None:
        """Record that a module runs on ``kernel``."""
        self.results[name] = Place(name, type(module).__name__, kernel, reason)
        self.handled_ids.add(id(module))

    def bind_forward(
        self, module: nn.Module, name: str, forward: Forward, *, guarded: bool = True
    ) -> None:
        """Run ``forward`` instead of the class's forward on one instance.

        The class, hooks and children stay. A wrapper that another library put around the class's
        forward stays around ``forward``. While a parameter is exchanged, calls run the class's
        forward.

        Args:
            guarded: False if ``forward`` itself checks for exchanged parameters.
        """
        attribute: str = "forward"
        value: Any = forward
        if is_wrapped(module):
            self.wrapped_ids.add(id(module))
            rewrap = find_rewrap(module)
            assert rewrap is not None, "check_module refuses other wrappers"
            attribute, value = rewrap(_guarded(module, forward) if guarded else forward)
        self.changes.set(module, attribute, value)
        self.changes.set(module, "train", _refuse_training(module, name))
        self.changes.set(module, "_apply", _refuse_conversion(module, name))


def kernel_name(choice: Choice) -> str:
    """Return ``provider/name`` of the chosen kernel."""
    return choice.chosen.qualified_name


def _guarded(module: nn.Module, forward: Forward) -> Forward:
    """Return a forward that runs ``forward`` only while the module has the present parameters."""
    parameters, original_forward = dict(module._parameters), class_forward(module)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        current = module._parameters
        # torch.func.functional_call and adapters exchange parameters for a call. The kernel's
        # constants belong to the parameters at bind time.
        if all(current.get(name) is parameter for name, parameter in parameters.items()):
            return forward(*args, **kwargs)
        return original_forward(*args, **kwargs)

    return guarded


def _refuse_training(module: nn.Module, name: str) -> Callable[[bool], nn.Module]:
    """Return a replacement for the method ``train`` that refuses training mode."""

    def train(mode: bool = True) -> nn.Module:
        if mode:
            raise ConfigError(
                f"{name or 'The model'} is bound to kernels that record no gradients, so that it "
                "cannot be trained. Try: adapted.restore()"
            )
        return type(module).train(module, mode)

    return train


def _refuse_conversion(module: nn.Module, name: str) -> Callable[..., nn.Module]:
    """Return a replacement for ``_apply`` that refuses to change dtype or device.

    torch moves and converts modules by ``_apply``.
    """

    def apply(fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> nn.Module:
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            # fn is applied to one element: it cannot reach the kernel's constants, so only a
            # conversion that changes nothing is allowed.
            sample = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
            converted = fn(sample)
            if (converted.dtype, converted.device) != (sample.dtype, sample.device):
                raise ConfigError(
                    f"{name or 'The model'} is bound to kernels for {sample.dtype} on "
                    f"{sample.device}, so that it cannot become {converted.dtype} on "
                    f"{converted.device}. "
                    "Try: adapted.restore(), convert the model, and adapt() again"
                )
        return module

    return apply
