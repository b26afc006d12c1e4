"""A parameter whose values exist only in the packed form that a kernel reads.

The parameter has the shape, dtype and device of the plain weight. Reading values restores the
plain weight bit for bit; writing raises an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from interposer.errors import ConfigError
from interposer_adapt._forwards import Forward
from interposer_adapt._shards import Sharding, is_sharded, local_part

Restore = Callable[[Tensor], None]
"""Fills a tensor with the plain weight, or with this process's shard of it."""

_WRITES = (
    "{} would write to {!r}, which is packed for the kernel that reads it. "
    "Try: adapted.restore(), change the weights, and adapt() again"
)
# Reading ``.data`` or detaching must return a plain tensor: code of the user copies weights that
# way.
_DETACH = torch.ops.aten.detach.default
_EMBEDDING = torch.ops.aten.embedding.default


class PackedWeight(nn.Parameter):
    """Stand-in for the weight of a module, after a kernel has packed the weight.

    Attributes:
        restore: None for a quantized weight: the plain values are lost.
        lookup: returns single rows without restoring the others; None if not supported.
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
        """Return a tensor without storage, with shape, dtype and device of ``plain``."""
        packed: PackedWeight = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, dtype=plain.dtype, device=plain.device, requires_grad=False
        )
        packed.restore, packed.label, packed.lookup = restore, label, lookup
        packed._restored = None
        packed._shard_shape = local_part(plain).shape
        packed._sharding = Sharding(plain) if is_sharded(plain) else None
        return packed

    def __init__(self, *_: Any) -> None:
        pass

    _restored: weakref.ref[Tensor] | None
    _restored_version: int
    _shard_shape: torch.Size
    _sharding: Sharding | None

    def plain(self) -> Tensor:
        """Restore the weight from packed form, or return the last restored tensor if still in use.

        Raises: ConfigError: the weight was quantized.
        """
        restored = None if self._restored is None else self._restored()
        # A tensor that was written to no longer equals the weight.
        if restored is not None and _version(restored) == self._restored_version:
            return restored
        plain = self.part()
        if self._sharding is not None:
            plain = self._sharding.global_tensor(plain)
        self._restored, self._restored_version = weakref.ref(plain), _version(plain)
        return plain

    def part(self) -> Tensor:
        """Restore this process's shard of the weight from packed form; unsharded, the whole weight.

        Raises: ConfigError: the weight was quantized.
        """
        if self.restore is None:
            raise ConfigError(
                f"The plain weight {self.label!r} was given up when it was quantized. "
                "Try: load the model again, and save or restore that one"
            )
        # An inference tensor has no version counter, which plain() needs.
        with torch.inference_mode(False):
            shard = torch.empty(self._shard_shape, dtype=self.dtype, device=self.device)
        self.restore(shard)
        return shard

    @property
    def data(self) -> Tensor:
        """The restored weight as a normal tensor; assigning raises ConfigError."""
        return self.plain()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ConfigError(_WRITES.format("Assigning data", self.label))

    def __deepcopy__(self, memo: object) -> PackedWeight:
        # The kernel's constants never change, so that copies can share them.
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
        """Run ``func`` on the restored weight, or refuse a ``func`` that writes to the weight."""
        if func is _DETACH:
            return args[0].plain()
        # A lookup restores only the requested rows of a large table.
        if func is _EMBEDDING and isinstance(args[0], cls) and args[0].lookup is not None:
            return args[0].lookup(args[1])
        keywords = dict(kwargs or {})
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.is_write and isinstance(value, cls):
                raise ConfigError(_WRITES.format(func, value.label))

        def restore_plain(value: Any) -> Any:
            return value.plain() if isinstance(value, cls) else value

        plain_args, plain_named = _pytree.tree_map(restore_plain, (args, keywords))
        return func(*plain_args, **plain_named)


def _version(tensor: Tensor) -> int:
    """Return a tensor's version counter, -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else int(tensor._version)


def wrapped_forward(
    module: nn.Module,
    call: tuple[Callable[..., Tensor], tuple[Any, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> Forward:
    """Return a forward that runs the kernel, and adds the bias that the module has at the call.

    The wrapper may hide the bias during the call, and passes DTensors when gradients are recorded.
    The class's forward serves DTensors and calls with another weight.

    Args:
        call: the kernel with operands, without a bias.
    """
    kernel, operands = call
    original = unpacked_forward(module)
    initial_weight = module._parameters["weight"]
    known_weights = [initial_weight, None if initial_weight is None else local_part(initial_weight)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            weight = module._parameters["weight"]
            is_known = isinstance(weight, PackedWeight) or any(
                weight is candidate for candidate in known_weights
            )
            is_plain = x.dtype is dtype and x.device == device and not x.requires_grad
            if is_known and is_plain and not is_sharded(x):
                out = kernel(x, *operands)
                bias = module._parameters.get("bias")
                return out if bias is None else out + local_part(bias)
        return original(*args, **kwargs)

    return forward


def unpacked_forward(module: nn.Module) -> Forward:
    """Return the class's forward, run with the packed weights restored to plain tensors."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        is_global = any(is_sharded(argument) for argument in args)
        packed = {
            name: parameter
            for name, parameter in module._parameters.items()
            if isinstance(parameter, PackedWeight)
        }
        plain: Any = {
            name: weight.plain() if is_global else weight.part() for name, weight in packed.items()
        }
        # The class's forward reads the parameters of the module, so that plain tensors are put
        # there for the call.
        module._parameters.update(plain)
        try:
            return type(module).forward(module, *args, **kwargs)
        finally:
            module._parameters.update(packed)

    return forward
