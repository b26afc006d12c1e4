"""Modules that compute with quantized weights, in place of those that held plain ones.

A packed weight is made for the processor it was packed on, so it is neither saved nor pickled.

Dimensions: V vocabulary, H hidden size, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from interposer.errors import ConfigError

_NEXT = (
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
        """Refuse to be trained: no gradients are recorded.

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
        """Return a module that shares the constants, as nobody writes to them."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            copy.__dict__[name] = dict(self.__dict__[name])
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"{self.place} holds weights that are packed for this processor, so that it cannot be "
            f"pickled. {_NEXT}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModule:
        """Refuse another dtype or device; transformers and torch move and convert by this."""
        sample = torch.empty(1, dtype=self.dtype, device=self.device)
        made = fn(sample)
        if (made.dtype, made.device) != (sample.dtype, sample.device):
            raise ConfigError(
                f"{self.place} holds weights that are quantized for {self.dtype} on {self.device}, "
                f"not for {made.dtype} on {made.device}. Try: from_pretrained(..., dtype=...), "
                "which quantizes for it"
            )
        return self


class _WeightFacts(Tensor):
    """The shape, dtype and device of a weight whose plain numbers are gone."""

    place: str

    @staticmethod
    def __new__(cls, shape: tuple[int, int], module: QuantizedModule) -> _WeightFacts:
        facts: _WeightFacts = Tensor._make_wrapper_subclass(
            cls, shape, dtype=module.dtype, device=module.device, requires_grad=False
        )
        facts.place = module.place
        return facts

    # torch's own stubs say less of these two than it asks for.
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
        """Refuse to compute with it."""
        places = [each.place for each in args if isinstance(each, cls)]
        raise ConfigError(
            f"{func} reads the plain weight of {', '.join(places) or 'a module'}, which was given "
            f"up when it was quantized. {_NEXT}"
        )


class QuantizedLinear(QuantizedModule):
    """A projection of ``[..., I]`` to ``[..., O]``."""

    def __init__(self, place: str, plain: nn.Linear, kernel: Callable[..., Tensor], *operands: Any):
        super().__init__(place, plain.weight, kernel, *operands)
        self.in_features, self.out_features = plain.in_features, plain.out_features

    @property
    def weight(self) -> Tensor:
        """A tensor without numbers, which tells the dtype, the device and the shape.

        Some models ask for these. What reads its numbers raises.
        """
        return _WeightFacts((self.out_features, self.in_features), self)

    def forward(self, input: Tensor) -> Tensor:
        """Return the projection of ``input``."""
        return self._kernel(input, *self._operands)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class QuantizedEmbedding(QuantizedModule):
    """A table that is looked up: integers of any shape to rows of H."""

    def __init__(
        self, place: str, plain: nn.Embedding, kernel: Callable[..., Tensor], *operands: Any
    ):
        super().__init__(place, plain.weight, kernel, *operands)
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim

    @property
    def weight(self) -> Tensor:
        """A tensor without numbers, which tells the dtype, the device and the shape."""
        return _WeightFacts((self.num_embeddings, self.embedding_dim), self)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ``input``."""
        rows = self._kernel(input.reshape(-1), *self._operands)
        return rows.reshape(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"{self.num_embeddings}, {self.embedding_dim}"
