"""Modules with quantized weights that replace torch's modules with plain weights.

A packed weight is specific to the processor that it was packed on, so such modules are neither
saved nor pickled.

Dimensions: V vocabulary, H hidden size, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from interposer.errors import ConfigError

_SUGGESTION = (
    "Try: save the model before it is quantized, or `interposer quantize PATH NEW` for a "
    "checkpoint of quantized weights"
)


class QuantizedModule(nn.Module):
    """A kernel with its constants, as a module without parameters.

    Attributes:
        place: the name of the module in the model.
        dtype, device: of inputs and results.
    """

    def __init__(self, place: str, like: Tensor, kernel: Callable[..., Tensor], *operands: Any):
        super().__init__()
        self.place = place
        self.dtype = like.dtype
        self.device = like.device
        self._kernel = kernel
        self._operands = operands

    def train(self, mode: bool = True) -> QuantizedModule:
        """Refuse training mode, as kernels record no gradients.

        Raises: ConfigError: ``mode`` is true.
        """
        if mode:
            raise ConfigError(
                f"{self.place} holds quantized weights, which cannot be trained. Try: load the "
                "model without quantization_config"
            )
        super().train(mode)
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> QuantizedModule:
        """Return a module that shares the constants, which never change."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            copy.__dict__[name] = dict(self.__dict__[name])
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"{self.place} holds weights that are packed for this processor, so that it cannot be "
            f"pickled. {_SUGGESTION}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModule:
        """Refuse another dtype or device.

        torch and transformers move and convert modules by ``_apply``.
        """
        sample = torch.empty(1, dtype=self.dtype, device=self.device)
        converted = fn(sample)
        if (converted.dtype, converted.device) != (sample.dtype, sample.device):
            raise ConfigError(
                f"{self.place} holds weights that are quantized for {self.dtype} on {self.device}, "
                f"not for {converted.dtype} on {converted.device}. Try: "
                "from_pretrained(..., dtype=...), which quantizes for it"
            )
        return self


class _WeightFacts(Tensor):
    """A tensor with the shape, dtype and device of a weight, but without its values."""

    place: str

    @staticmethod
    def __new__(cls, shape: tuple[int, int], module: QuantizedModule) -> _WeightFacts:
        facts: _WeightFacts = Tensor._make_wrapper_subclass(
            cls, shape, dtype=module.dtype, device=module.device, requires_grad=False
        )
        facts.place = module.place
        return facts

    # torch's type stubs declare less than torch passes to these two methods.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"the weight of {self.place}, {tuple(self.shape)}, {self.dtype}, quantized"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> NoReturn:
        """Refuse any computation on the missing values."""
        names = [argument.place for argument in args if isinstance(argument, cls)]
        raise ConfigError(
            f"{func} reads the plain weight of {', '.join(names) or 'a module'}, which was given "
            f"up when it was quantized. {_SUGGESTION}"
        )


class QuantizedLinear(QuantizedModule):
    """A linear layer from ``[..., I]`` to ``[..., O]``."""

    def __init__(self, place: str, plain: nn.Linear, kernel: Callable[..., Tensor], *operands: Any):
        super().__init__(place, plain.weight, kernel, *operands)
        self.in_features, self.out_features = plain.in_features, plain.out_features

    @property
    def weight(self) -> Tensor:
        """A tensor without values, for code that reads dtype, device or shape.

        Reading values raises.
        """
        return _WeightFacts((self.out_features, self.in_features), self)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``input`` by the quantized weight, and add the bias if any."""
        return self._kernel(input, *self._operands)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class QuantizedEmbedding(QuantizedModule):
    """An embedding table: ids of any shape to rows of size H."""

    def __init__(
        self, place: str, plain: nn.Embedding, kernel: Callable[..., Tensor], *operands: Any
    ):
        super().__init__(place, plain.weight, kernel, *operands)
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim

    @property
    def weight(self) -> Tensor:
        """A tensor without values, for code that reads dtype, device or shape."""
        return _WeightFacts((self.num_embeddings, self.embedding_dim), self)

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows of the ids in ``input``."""
        rows = self._kernel(input.reshape(-1), *self._operands)
        return rows.reshape(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"{self.num_embeddings}, {self.embedding_dim}"
