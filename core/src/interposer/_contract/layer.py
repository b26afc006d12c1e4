"""Layers whose class a plugin can replace whole, and the site at which one is built."""

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
    """A kernel's function, its preparation of constants if it has one, its choice, the inverse."""

    function: Callable[P, R]
    prepare: Callable[..., Any] | None
    choice: Choice
    restore: Callable[..., None] | None = None

    def prepared(self, **constants: Any) -> dict[str, Any]:
        """Return the op's constant tensors as the kernel wants them; once, after loading."""
        return constants if self.prepare is None else self.prepare(**constants)


class Binder(Protocol):
    """The selection as layers see it; ``Resolver`` is the one that there is.

    Attributes:
        registry: the ``Registry`` whose candidates are chosen among.
        config: the ``Config`` that holds.
        device: where the model runs.
        described: the device is only described, so nothing may be loaded.
        scheme: the checkpoint's ``QuantizationScheme``, or None where weights are plain.
        choices: every distinct choice with the prefixes that share it, in order of construction.
        failures: kernels that failed at run time and were replaced.
        notes: what is to be said of the model as a whole.
        ranks: the processes that compute the model together; None where this one is alone.
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
        """Return the kernel for ``op``, loaded."""
        ...

    def table(
        self,
        lookup: tuple[CustomOp[P, R], Dims, str],
        product: tuple[CustomOp[Q, S], Dims, str],
        dtype: torch.dtype,
    ) -> tuple[BoundKernel[P, R], BoundKernel[Q, S]]:
        """Return kernels that look rows of a table up and multiply by it, and hold it once."""
        ...

    def layer(self, standard: type[L], site: Site) -> type[L]:
        """Return the class to build for ``standard``: itself or its replacement."""
        ...

    def attention(self, spec: Any, site: Site) -> Any:
        """Return the ``AttentionBackend`` for an ``AttentionSpec``."""
        ...

    def communicator(
        self, collective: str, dtype: torch.dtype, num_bytes: int, prefix: str
    ) -> tuple[Choice, Communicator | None]:
        """Return what is chosen for a collective over ``ranks``, None where they are described."""
        ...

    def choose_scheme(self, settings: Mapping[str, Any]) -> None:
        """Set ``scheme`` to the one for a checkpoint's ``quantization_config``."""
        ...


@dataclass(frozen=True, slots=True)
class Site:
    """The place of a layer: the resolver to ask, the dotted prefix and the model's dtype."""

    resolver: Binder
    prefix: str
    dtype: torch.dtype

    def at(self, name: str) -> Site:
        """Return the site ``prefix.name``."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    def bind(self, op: CustomOp[P, R], **dims: int | float | str | bool) -> Callable[P, R]:
        """Return the chosen kernel's function for ``op``; it is called as it is, unwrapped.

        For ops without constants: a kernel may want constants prepared, see ``bind_kernel``.

        Raises: RecordError: the op has constants.
        """
        if op.constants:
            raise RecordError(f"op {op.name!r} has the constants {op.constants}. Use bind_kernel")
        return self.bind_kernel(op, **dims).function

    def bind_kernel(
        self, op: CustomOp[P, R], **dims: int | float | str | bool
    ) -> BoundKernel[P, R]:
        """Return the chosen kernel with its choice and its preparation of constants."""
        return self.resolver.kernel(op, self.dtype, dims, self.prefix)

    def bind_table(
        self,
        lookup: CustomOp[P, R],
        table: Mapping[str, int | float | str | bool],
        product: CustomOp[Q, S],
        sizes: Mapping[str, int | float | str | bool],
        head: Site | None,
    ) -> tuple[BoundKernel[P, R], BoundKernel[Q, S] | None]:
        """Return the kernel that looks rows of a table up, and that of a head which shares it.

        Both read one form of the table, so that it is held once if they prepare the same tensors.
        Where there is a head, both state ``tied``.

        Args:
            table: dims of ``lookup``.
            sizes: dims of ``product``.
            head: the site of the head, None where there is none.
        """
        if head is None:
            return self.resolver.kernel(lookup, self.dtype, table, self.prefix), None
        return self.resolver.table(
            (lookup, {**table, "tied": True}, self.prefix),
            (product, {**sizes, "tied": True}, head.prefix),
            self.dtype,
        )


class PluggableLayer(nn.Module):
    """A module whose class is chosen when it is constructed.

    A class that sets ``layer_id`` is a standard layer. Constructing it asks the site's resolver
    for the class to use: itself or a replacement, which subclasses it and keeps its signature,
    so that the replacement's own ``__init__`` runs with the same arguments.
    """

    layer_id: ClassVar[str] = ""
    reduces: ClassVar[bool] = False
    """Results are added up over ranks. A replacement of such a layer sets it in its own
    class body to say that it does so as well; else it is refused where there are ranks."""

    def __new__(cls, site: Site | None = None, *args: Any, **kwargs: Any) -> PluggableLayer:
        """Return an uninitialised instance of the chosen class.

        ``site`` is missing only where Python copies or unpickles an instance.
        """
        chosen: type[PluggableLayer] = cls
        if site is not None and "layer_id" in cls.__dict__:
            chosen = site.resolver.layer(cls, site)
        return super().__new__(chosen)

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.prefix = site.prefix

    def finalize(self) -> None:
        """Prepare for inference, as soon as all weights of this layer were loaded.

        When weights are exchanged it is called for a shallow copy that holds the new ones, and what
        it leaves in the copy's attributes is taken over: nothing that depends on weights may be
        kept elsewhere.
        """


def check_replacement(standard: type[PluggableLayer], replacement: object, name: str) -> None:
    """Raise RecordError unless ``replacement`` can stand wherever ``standard`` does."""
    if not (isinstance(replacement, type) and issubclass(replacement, standard)):
        raise RecordError(
            f"layer {name!r} is {replacement!r}, which does not subclass {standard.__qualname__}"
        )
    expected = list(inspect.signature(standard.__init__).parameters.values())
    found = list(inspect.signature(replacement.__init__).parameters.values())
    same = [(p.name, p.kind, p.default) for p in expected]
    if [(p.name, p.kind, p.default) for p in found] != same:
        raise RecordError(
            f"layer {name!r} takes {inspect.signature(replacement.__init__)}, "
            f"but {standard.__qualname__} takes {inspect.signature(standard.__init__)}"
        )
