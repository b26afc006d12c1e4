"""The state of one ``adapt`` call: supported dtypes, an undo log, and the result of each module."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from interposer import Choice, Placement, PluggableLayer, Resolver, Site, Verdict
from interposer.errors import ConfigError
from interposer_adapt._forwards import Forward, class_forward, find_rewrap, is_wrapped
from interposer_adapt._packed_weight import PackedWeight
from interposer_adapt._shards import is_sharded, local_part
from interposer_ops.devices import host_memory

_MAX_LISTED_NAMES = 3


@dataclass(frozen=True, slots=True)
class Place:
    """The kernel on which a module of an adapted model runs, or the reason why none was chosen.

    Attributes:
        name: dotted, as in ``named_modules``.
        kind: the name of the module's class.
        kernel: ``provider/name`` of the kernel the module is bound to; "" if the module was
            skipped.
        reason: why the module was skipped; for a bound module a remark, mostly "".
    """

    name: str
    kind: str
    kernel: str = ""
    reason: str = ""

    @property
    def is_bound(self) -> bool:
        """Whether the module runs on a kernel that ``adapt`` selected."""
        return bool(self.kernel)


def notes(places: Iterable[Place]) -> Iterator[str]:
    """Yield a line for each reason, with the names of the first modules it applies to."""
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for place in places:
        if place.reason:
            groups.setdefault((place.is_bound, place.reason, place.kind), []).append(place.name)
    for (is_bound, reason, kind), names in groups.items():
        listed = ", ".join(name or "(the model)" for name in names[:_MAX_LISTED_NAMES])
        num_unlisted = len(names) - _MAX_LISTED_NAMES
        suffix = f" and {num_unlisted} more" if num_unlisted > 0 else ""
        outcome = "bound" if is_bound else "left as it was"
        yield f"{kind} {listed}{suffix}: {outcome}: {reason}"


_ACCEPTED = Verdict.accept()


def check_module(
    module: nn.Module,
    device: torch.device,
    supported_dtypes: Sequence[torch.dtype],
    *,
    sharded: bool = False,
) -> Verdict:
    """Refuse a module in training mode, with a replaced forward, or with unreadable tensors.

    Args:
        device: where the kernels run.
        supported_dtypes: the dtypes in which the platform computes.
        sharded: accept parameters that are ``DTensor``s.
    """
    if module.training:
        return Verdict.refuse("it is in training mode. Try: model.eval()")
    if is_wrapped(module) and find_rewrap(module) is None:
        return Verdict.refuse("the forward of this instance is replaced already")
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        tensor = local_part(parameter) if sharded and is_sharded(parameter) else parameter
        verdict = _check_tensor(name, tensor, device, supported_dtypes)
        if not verdict:
            return verdict
    return _ACCEPTED


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    kernel_device: torch.device,
    supported_dtypes: Sequence[torch.dtype],
) -> Verdict:
    """Refuse a tensor unless it is plain, strided memory on the device in a supported dtype."""
    if type(tensor) not in (nn.Parameter, torch.Tensor):
        return Verdict.refuse(f"its {name} is a {type(tensor).__name__}, not a plain tensor")
    if tensor.layout is not torch.strided:
        return Verdict.refuse(f"its {name} has the layout {tensor.layout}")
    if tensor.is_meta:
        return Verdict.refuse(f"its {name} has no memory: it is on the meta device")
    if tensor.device.type != kernel_device.type:
        return Verdict.refuse(
            f"its {name} is on {tensor.device}, the kernels run on {kernel_device}"
        )
    if tensor.dtype not in supported_dtypes:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported_dtypes)
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        return Verdict.refuse(f"its {name} is {dtype_name}, the platform computes in {listed}")
    return _ACCEPTED


_MISSING = object()
_TRIM_AFTER_BYTES = 64 << 20


class Changes:
    """Undo log of the attributes that ``adapt`` changed on module instances, never on classes."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._freed_bytes = 0

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an instance's attribute directly in its ``__dict__``, bypassing ``__setattr__``."""
        attributes = vars(owner)
        before = attributes.get(name, _MISSING)

        def undo() -> None:
            if before is _MISSING:
                attributes.pop(name, None)
            else:
                attributes[name] = before

        attributes[name] = value
        self._undo.append(undo)

    def pack(self, holders: list[tuple[nn.Module, str]], packed: PackedWeight) -> None:
        """Replace one parameter by ``packed`` in all modules that hold it, and free its memory.

        Args:
            holders: each module that holds the parameter, with the parameter's name there.
        """
        module, name = holders[0]
        plain = module._parameters[name]
        assert plain is not None
        part = local_part(plain)

        def undo() -> None:
            part.data = packed.part()
            for holder, parameter_name in holders:
                holder._parameters[parameter_name] = plain

        self._undo.append(undo)
        for holder, parameter_name in holders:
            holder._parameters[parameter_name] = packed
        num_bytes = part.nbytes if part.device.type == "cpu" else 0
        # Another reference to the parameter, such as an optimizer's, must not keep its memory.
        part.data = torch.empty(0, dtype=plain.dtype, device=plain.device)
        # The allocator keeps freed blocks below 32 MiB; trim returns their memory to the system.
        self._freed_bytes += num_bytes
        if self._freed_bytes >= _TRIM_AFTER_BYTES:
            self._freed_bytes = 0
            host_memory.trim()

    def on_undo(self, undo: Callable[[], None]) -> None:
        """Register ``undo``, a function to call when the changes are undone."""
        self._undo.append(undo)

    def savepoint(self) -> int:
        """Return the current position in the undo log, for ``undo``."""
        return len(self._undo)

    def undo(self, savepoint: int = 0) -> None:
        """Undo the changes made since ``savepoint``, by default all, the last change first."""
        while len(self._undo) > savepoint:
            self._undo.pop()()


Bind = Callable[[], str | Verdict]
"""Binds one module and returns the kernel's name, or a refusal with the reason."""


class Adaptation:
    """State that all parts of one ``adapt`` call share: undo log, kernel resolver, module results.

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
        """Refuse a module whose forward no kernel can replace, such as one in training mode.

        Args:
            sharded: accept parameters that are ``DTensor``s.
        """
        return check_module(module, self.device, self._supported_dtypes, sharded=sharded)

    def check_rows(self, dtype: torch.dtype, device: torch.device) -> Verdict:
        """Refuse an input whose dtype or device the platform's kernels cannot read."""
        if device.type == self.device.type and dtype in self._supported_dtypes:
            return Verdict.accept()
        return Verdict.refuse(f"rows of {dtype} on {device} are not supported by the platform")

    def site(self, name: str, dtype: torch.dtype) -> Site:
        """Return the site, by whose name kernels for the module ``name`` are selected."""
        return Site(self.resolver, name, dtype)

    def attempt(self, module: nn.Module, name: str, bind: Bind) -> bool:
        """Bind a module to a kernel and return True; undo the changes if ``bind`` fails or refuses.

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
        """Record that no kernel replaces the module, with the reason."""
        self.results[name] = Place(name, type(module).__name__, reason=reason)
        self.handled_ids.add(id(module))

    def mark_bound(self, module: nn.Module, name: str, kernel: str, reason: str = "") -> None:
        """Record that the module runs on ``kernel``."""
        self.results[name] = Place(name, type(module).__name__, kernel, reason)
        self.handled_ids.add(id(module))

    def bind_forward(
        self, module: nn.Module, name: str, forward: Forward, *, guarded: bool = True
    ) -> None:
        """Make one module instance run ``forward`` instead of its class's forward.

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
            attribute, value = rewrap(_guard(module, forward) if guarded else forward)
        self.changes.set(module, attribute, value)
        self.changes.set(module, "train", _refuse_training(module, name))
        self.changes.set(module, "_apply", _refuse_conversion(module, name))


def kernel_name(choice: Choice) -> str:
    """Return ``provider/name`` of the chosen kernel."""
    return choice.chosen.qualified_name


def _guard(module: nn.Module, forward: Forward) -> Forward:
    """Return a forward that runs ``forward`` while no parameter was exchanged, else the class's."""
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
                f"{name or 'The model'} is bound to kernels that record no gradients, so it "
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
                    f"{sample.device}, so it cannot become {converted.dtype} on "
                    f"{converted.device}. "
                    "Try: adapted.restore(), convert the model, and adapt() again"
                )
        return module

    return apply
