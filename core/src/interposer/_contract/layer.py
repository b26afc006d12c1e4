"""Layers whose class a plugin can replace, and the site at which a layer is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from interposer._contract.capability import Device
from interposer._contract.choice import Choice
from interposer._contract.communicator import Communicator, Ranks
from interposer._contract.errors import RecordError
from interposer._contract.op import CustomOp, Dims
from interposer._contract.verdict import Refusal

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")
L = TypeVar("L", bound="PluggableLayer")


class BoundKernel(NamedTuple, Generic[P, R]):
    """A chosen kernel: function, choice, preparation of constants and the inverse preparation."""

    function: Callable[P, R]
    prepare: Callable[..., Any] | None
    choice: Choice
    restore: Callable[..., None] | None = None

    def prepared(self, **constants: Any) -> dict[str, Any]:
        """Convert the op's constant tensors to the kernel's form; called once, after loading."""
        return constants if self.prepare is None else self.prepare(**constants)


class ResolverProtocol(Protocol):
    """The interface of ``Resolver``, which this package cannot import: selection imports it.

    Attributes:
        registry: the ``Registry`` that provides the candidates.
        config: the ``Config`` in effect.
        device: the device that runs the model.
        described: the device is only described, so no kernel may be loaded.
        scheme: the checkpoint's ``QuantizationScheme``, or None if weights are not quantized.
        choices: every distinct choice with the prefixes that share it, in order of construction.
        failures: kernels that failed at run time and were replaced.
        notes: notes on the model in general.
        ranks: the processes that compute the model together; None for a single process.
    """

    registry: Any
    config: Any
    device: Device
    described: bool
    scheme: Any
    choices: dict[tuple[object, ...], tuple[Choice, list[str]]]
    failures: list[Refusal]
    notes: list[str]
    ranks: Ranks | None

    def kernel(
        self, op: CustomOp[P, R], dtype: torch.dtype, dims: Dims, prefix: str
    ) -> BoundKernel[P, R]:
        """Choose and load the kernel for ``op``."""
        ...

    def table(
        self,
        lookup: tuple[CustomOp[P, R], Dims, str],
        product: tuple[CustomOp[Q, S], Dims, str],
        dtype: torch.dtype,
    ) -> tuple[BoundKernel[P, R], BoundKernel[Q, S]]:
        """Choose lookup and matmul kernels that share one copy of a table."""
        ...

    def layer(self, standard: type[L], site: Site) -> type[L]:
        """Choose the class to build for ``standard``: the standard layer or a replacement."""
        ...

    def attention(self, spec: Any, site: Site) -> Any:
        """Choose the ``AttentionBackend`` for an ``AttentionSpec``."""
        ...

    def communicator(
        self, collective: str, dtype: torch.dtype, num_bytes: int, prefix: str
    ) -> tuple[Choice, Communicator | None]:
        """Choose the communicator for a collective; None if the ranks are only described."""
        ...

    def choose_scheme(self, settings: Mapping[str, Any]) -> None:
        """Choose the scheme for ``quantization_config`` and store the scheme as ``scheme``."""
        ...


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a layer: the resolver, the dotted prefix and the model's dtype."""

    resolver: ResolverProtocol
    prefix: str
    dtype: torch.dtype

    def at(self, name: str) -> Site:
        """Return the site ``prefix.name``."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    def bind(self, op: CustomOp[P, R], **dims: int | float | str | bool) -> Callable[P, R]:
        """Return the chosen kernel's own function for ``op``, without any wrapper.

        Only for ops without constants. A kernel may need prepared constants, see ``bind_kernel``.

        Raises: RecordError: the op has constants.
        """
        if op.constants:
            raise RecordError(f"op {op.name!r} has the constants {op.constants}. Use bind_kernel")
        return self.bind_kernel(op, **dims).function

    def bind_kernel(
        self, op: CustomOp[P, R], **dims: int | float | str | bool
    ) -> BoundKernel[P, R]:
        """Return the chosen kernel with the choice and the preparation of constants."""
        return self.resolver.kernel(op, self.dtype, dims, self.prefix)

    def bind_table(
        self,
        lookup: CustomOp[P, R],
        table: Mapping[str, int | float | str | bool],
        product: CustomOp[Q, S],
        sizes: Mapping[str, int | float | str | bool],
        head: Site | None,
    ) -> tuple[BoundKernel[P, R], BoundKernel[Q, S] | None]:
        """Return the kernels of an embedding lookup and of a head that shares the table.

        Both kernels read one form of the table, so a single copy is held if both prepare the same
        tensors. With a head, both requests state ``tied``.

        Args:
            table: dims of ``lookup``.
            sizes: dims of ``product``.
            head: the site of the head, None without one.
        """
        if head is None:
            return self.resolver.kernel(lookup, self.dtype, table, self.prefix), None
        return self.resolver.table(
            (lookup, {**table, "tied": True}, self.prefix),
            (product, {**sizes, "tied": True}, head.prefix),
            self.dtype,
        )


class PluggableLayer(nn.Module):
    """A module whose class is chosen when an instance is constructed.

    A class that sets ``layer_id`` is a standard layer. The constructor asks the site's resolver for
    the class to use: the standard layer or a replacement. A replacement subclasses the standard
    layer and keeps the signature, so the replacement's ``__init__`` runs with the same arguments.
    """

    layer_id: ClassVar[str] = ""
    reduces: ClassVar[bool] = False
    """The layer sums its results over ranks. A replacement of such a layer must set ``reduces`` in
    its own class body to declare the same; otherwise it is refused if there are ranks."""

    def __new__(cls, site: Site | None = None, *args: Any, **kwargs: Any) -> PluggableLayer:
        """Return an uninitialised instance of the layer class that the resolver chooses.

        ``site`` is missing only when Python copies or unpickles an instance.
        """
        chosen: type[PluggableLayer] = cls
        # A replacement inherits ``layer_id``, so only a class that sets it itself is standard.
        if site is not None and "layer_id" in cls.__dict__:
            chosen = site.resolver.layer(cls, site)
        return super().__new__(chosen)

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.prefix = site.prefix

    def finalize(self) -> None:
        """Prepare this layer for inference, once all weights of the layer are loaded.

        To update weights, ``finalize`` is called on a shallow copy that holds the new weights,
        and the copy's attributes are then taken over. Data that depends on weights must therefore
        be stored in attributes only.
        """


def check_replacement(standard: type[PluggableLayer], replacement: object, name: str) -> None:
    """Raise RecordError unless ``replacement`` can be used wherever ``standard`` can."""
    if not (isinstance(replacement, type) and issubclass(replacement, standard)):
        raise RecordError(
            f"layer {name!r} is {replacement!r}, which does not subclass {standard.__qualname__}"
        )
    # Annotations may differ, because they do not change how a layer is called.
    standard_parameters = list(inspect.signature(standard.__init__).parameters.values())
    replacement_parameters = list(inspect.signature(replacement.__init__).parameters.values())
    signature = [(p.name, p.kind, p.default) for p in standard_parameters]
    if [(p.name, p.kind, p.default) for p in replacement_parameters] != signature:
        raise RecordError(
            f"layer {name!r} takes {inspect.signature(replacement.__init__)}, "
            f"but {standard.__qualname__} takes {inspect.signature(standard.__init__)}"
        )
