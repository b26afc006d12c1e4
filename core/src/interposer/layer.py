"""Layers whose class a plugin can replace whole, and the site at which one is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import nn

from interposer.errors import RecordError

if TYPE_CHECKING:
    from interposer.op import CustomOp
    from interposer.resolver import BoundKernel, Resolver

__all__ = ["PluggableLayer", "Site", "check_replacement"]

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a layer is built: the resolver to ask, the dotted prefix and the model's dtype."""

    resolver: Resolver
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
