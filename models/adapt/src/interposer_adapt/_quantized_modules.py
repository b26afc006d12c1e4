"""Quantization of a transformers model's modules, by the rules of ``load(quantization=...)``.

Only torch's own classes are replaced: linear layers, and the embedding table that the head shares.
A module that the scheme excludes keeps its plain weight. A packed weight is specific to the
processor that it was packed on, so the replacing modules are neither saved nor pickled.

Dimensions: V vocabulary, H hidden size, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from interposer import Resolver, Site
from interposer.errors import ConfigError
from interposer_ops.layers.embedding import Embedding, LMHead, PlainEmbedding
from interposer_ops.layers.linear import Linear, PlainLinear

_SUGGESTION = (
    "Try: save the model before it is quantized, or `interposer quantize PATH NEW` for a "
    "checkpoint of quantized weights"
)


class QuantizedModule(nn.Module):
    """A module without parameters that runs one kernel with constant operands.

    Attributes:
        place: the name of the module in the model.
        dtype, device: dtype and device of inputs and results.
    """

    def __init__(self, place: str, like: Tensor, kernel: Callable[..., Tensor], *operands: Any):
        super().__init__()
        self.place = place
        self.dtype = like.dtype
        self.device = like.device
        self._kernel = kernel
        self._operands = operands

    def train(self, mode: bool = True) -> QuantizedModule:
        """Refuse training mode, because kernels record no gradients.

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
        """Return a module that shares the kernel's constants, which never change."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            copy.__dict__[name] = dict(self.__dict__[name])
        return copy

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"{self.place} holds weights that are packed for this processor, so it cannot be "
            f"pickled. {_SUGGESTION}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModule:
        """Refuse to convert the module to another dtype or device.

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
        """Raise an error for any op on the tensor, which has no values."""
        names = [argument.place for argument in args if isinstance(argument, cls)]
        raise ConfigError(
            f"{func} reads the plain weight of {', '.join(names) or 'a module'}, which was given "
            f"up when it was quantized. {_SUGGESTION}"
        )


class QuantizedLinear(QuantizedModule):
    """A quantized linear layer from ``[..., I]`` to ``[..., O]``."""

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
    """A quantized embedding table, from ids of any shape to rows of size H."""

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


def quantize_modules(model: Any, resolver: Resolver) -> list[str]:
    """Replace the modules that the resolver's scheme quantizes, one after the other.

    Args:
        model: a model of transformers, with its weights in memory.
    Returns: the names of the replaced modules.
    Raises:
        ConfigError: the scheme quantizes none of the model's modules.
        CheckpointError: a weight has values that are not finite.
    """
    names = {id(module): name for name, module in model.named_modules()}
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for key, child in parent.named_children():
            holders.setdefault(id(child), []).append((parent, key))
    head, table = model.get_output_embeddings(), _input_embeddings(model)
    replaced = dict[str, QuantizedModule]()
    tied_head = None
    if isinstance(head, nn.Linear) and table is not None and head.weight is table.weight:
        tied_head = head
        replaced |= _quantize_tied(resolver, head, names[id(head)], table, names[id(table)])
        for name, quantized_module in replaced.items():
            _replace(holders[id(model.get_submodule(name))], quantized_module)
        # Releases the reference to the plain table.
        del table
    for name in [*names.values()]:
        module = model.get_submodule(name)
        # A subclass may use the weight in another way.
        if type(module) is not nn.Linear or module is tied_head:
            continue
        quantized = _quantize_linear(resolver, module, name, is_head=module is head)
        if quantized is not None:
            _replace(holders[id(module)], quantized)  # at once, to free the plain weight
            replaced[name] = quantized
    if not replaced:
        raise ConfigError(
            f"{type(model).__name__} has no torch.nn.Linear that quantization_config quantizes. "
            "Try: from_pretrained without it, or fewer names in 'modules_to_not_convert'"
        )
    return list(replaced)


def _quantize_linear(
    resolver: Resolver, module: nn.Linear, name: str, *, is_head: bool
) -> QuantizedLinear | None:
    site = Site(resolver, name, module.weight.dtype)
    layer: Linear | LMHead
    with torch.device("meta"):
        if is_head and module.bias is None:
            layer = LMHead(site, module.out_features, module.in_features)
        else:
            layer = Linear(site, module.in_features, module.out_features, module.bias is not None)
    if isinstance(layer.method, PlainLinear):
        return None
    _quantize_weights(layer, weight=module.weight, bias=module.bias)
    assert layer.kernel is not None, "finalize sets it"
    return QuantizedLinear(name, module, layer.kernel, *layer.operands)


def _quantize_tied(
    resolver: Resolver, head: nn.Linear, head_name: str, table: nn.Embedding, table_name: str
) -> dict[str, QuantizedModule]:
    """Quantize an LM head and the embedding that shares its weight; return both modules by name."""
    dtype = table.weight.dtype
    site, head_site = Site(resolver, table_name, dtype), Site(resolver, head_name, dtype)
    # The tied layer computes a head without a bias only.
    if head.bias is not None:
        return {}
    with torch.device("meta"):
        layer = Embedding(site, table.num_embeddings, table.embedding_dim, head_site)
    if isinstance(layer.method, PlainEmbedding):
        return {}
    _quantize_weights(layer, weight=table.weight)
    lookup, head_call = layer.lookup, layer.head_call
    assert lookup is not None, "finalize sets it"
    assert head_call is not None, "there is a head"
    return {
        table_name: QuantizedEmbedding(table_name, table, lookup, *layer.constants),
        head_name: QuantizedLinear(head_name, head, head_call[0], *head_call[1]),
    }


def _quantize_weights(layer: Linear | LMHead | Embedding, **plain: Tensor | None) -> None:
    """Replace a layer's meta parameters by plain weights, and quantize the weights."""
    for name, parameter in layer._parameters.items():
        if parameter is None:
            continue
        weight = plain[name]
        assert weight is not None, f"{name} of {layer.prefix}"
        filled = nn.Parameter(weight.detach(), requires_grad=False)
        filled.__dict__.update(vars(parameter))
        layer._parameters[name] = filled
    layer.finalize()


def _input_embeddings(model: Any) -> nn.Embedding | None:
    try:
        embeddings = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    # Subclasses may scale or add: only torch's own class is a plain lookup.
    return embeddings if type(embeddings) is nn.Embedding else None


def _replace(holders: list[tuple[nn.Module, str]], module: nn.Module) -> None:
    """Replace a module in all of its parents; some models share a module."""
    nn.Module.train(module, mode=False)  # as transformers leaves a model that it loads
    for parent, key in holders:
        setattr(parent, key, module)
