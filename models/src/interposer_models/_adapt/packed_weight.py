"""A parameter whose numbers exist only in the form that a kernel packed.

It has the shape, dtype and device of the plain weight. Whoever reads its values gets the plain
weight, made anew and bit for bit; whoever writes to it gets an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from interposer.errors import ConfigError
from interposer_models._adapt.shards import Sharding, is_sharded, local

Restore = Callable[[Tensor], None]
"""Fills an empty tensor of the plain weight's shape, or that of its part in this process."""

_WRITES = (
    "{} would write to {!r}, which is packed for the kernel that reads it. "
    "Try: adapted.restore(), change the weights, and adapt() again"
)
_DETACH = torch.ops.aten.detach.default
_EMBEDDING = torch.ops.aten.embedding.default


class PackedWeight(nn.Parameter):
    """The place of a weight that was packed; see the module's text.

    Attributes:
        restore: None where the weight was quantized, so that nothing gives it back.
        lookup: returns rows of it without the others, None where nothing does.
    """

    restore: Restore | None
    lookup: Callable[[Tensor], Tensor] | None
    label: str

    @staticmethod
    def __new__(
        cls,
        plain: Tensor,
        restore: Restore | None,
        label: str,
        lookup: Callable[[Tensor], Tensor] | None = None,
    ) -> PackedWeight:
        """Return a tensor without memory with the facts of ``plain``."""
        packed: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, dtype=plain.dtype, device=plain.device, requires_grad=False
        )
        packed.restore, packed.label, packed.lookup = restore, label, lookup
        packed._known = None
        packed._part = local(plain).shape
        packed._sharding = Sharding(plain) if is_sharded(plain) else None
        return packed

    def __init__(self, *_: Any) -> None:
        pass

    _known: weakref.ref[Tensor] | None
    _made: int
    _part: torch.Size
    _sharding: Sharding | None

    def plain(self) -> Tensor:
        """Return the plain weight, the same tensor as long as anybody holds it.

        Raises: ConfigError: it was quantized.
        """
        known = None if self._known is None else self._known()
        # What somebody wrote to is no copy of the weight any more.
        if known is not None and _version(known) == self._made:
            return known
        made = self.part()
        if self._sharding is not None:
            made = self._sharding.whole(made)
        self._known, self._made = weakref.ref(made), _version(made)
        return made

    def part(self) -> Tensor:
        """Return the part of the plain weight that this process holds, made anew; mostly all.

        Raises: ConfigError: it was quantized.
        """
        if self.restore is None:
            raise ConfigError(
                f"The plain weight {self.label!r} was given up when it was quantized. "
                "Try: load the model again, and save or restore that one"
            )
        # Views of it in inference mode share its version counter, which inference tensors lack.
        with torch.inference_mode(False):
            made = torch.empty(self._part, dtype=self.dtype, device=self.device)
        self.restore(made)
        return made

    @property
    def data(self) -> Tensor:
        """Return the plain weight, as detaching does."""
        return self.plain()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ConfigError(_WRITES.format("Assigning data", self.label))

    def __deepcopy__(self, memo: object) -> PackedWeight:
        # The kernel's memory is constant, so that copies can share it.
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedWeight({self.label!r}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on the plain weight."""
        if func is _DETACH:
            return args[0].plain()
        if func is _EMBEDDING and isinstance(args[0], cls) and args[0].lookup is not None:
            return args[0].lookup(args[1])
        named = dict(kwargs or {})
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, cls):
                raise ConfigError(_WRITES.format(func, value.label))

        def plain(value: Any) -> Any:
            return value.plain() if isinstance(value, cls) else value

        plain_args, plain_named = _pytree.tree_map(plain, (args, named))
        return func(*plain_args, **plain_named)


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written; those of inference mode do not count."""
    return -1 if tensor.is_inference() else int(tensor._version)
