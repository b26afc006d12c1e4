"""One-time dequantization at load time, for layers that no quantized kernel supports.

``dequantize_once`` finds such layers in a planned model, and gives them methods that store the
weights in the model's dtype, if memory allows.

Dimensions: O output features, I input features, V vocabulary, H hidden size.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interposer import Call, Choice, EmbeddingMethod, LinearMethod, Placement, Site, Verdict
from interposer.records import OpEntry
from interposer_models import CausalLM
from interposer_ops.devices import host_memory
from interposer_ops.embedding import embedding
from interposer_ops.layers.embedding import PlainEmbedding
from interposer_ops.layers.linear import Linear, PlainLinear
from interposer_ops.linear import linear

_log = logging.getLogger("interposer")


class DequantizedLinear(LinearMethod):
    """Linear method that dequantizes the weight ``[O, I]`` of another method once."""

    def __init__(
        self, method: LinearMethod, site: Site, in_features: int, out_features: int
    ) -> None:
        self.method = method
        self.dtype = site.dtype
        self.plain = PlainLinear()
        self.plain.bound = site.bind_kernel(
            linear, in_features=in_features, out_features=out_features
        )

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the quantized parameters of ``method``."""
        self.method.create_weights(layer, site, in_features, out_features, bias)

    def dequantized(self, layer: nn.Module) -> Tensor | None:
        """Return the float64 weight that results from dequantizing the parameters of ``method``."""
        return self.method.dequantized(layer)

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """Return the kernel of the op ``linear``, weight and bias.

        Raises: CheckpointError: as ``method`` does.
        """
        weight, bias = (
            _dequantized_weight(self.method, layer, self.dtype),
            layer._parameters.get("bias"),
        )
        stored = self.method.finalize(layer)
        if weight is None:
            return stored
        # The stored method has checked the weights; free its operands before packing the plain one.
        del stored
        _replace_parameters(layer, weight, bias)
        return self.plain.finalize(layer)


class DequantizedEmbedding(EmbeddingMethod):
    """Embedding method that dequantizes the table ``[V, H]`` of another method once."""

    def __init__(
        self, method: EmbeddingMethod, site: Site, vocab_size: int, hidden_size: int, head: Site
    ) -> None:
        self.method = method
        self.dtype = site.dtype
        self.plain = PlainEmbedding()
        table = {"vocab_size": vocab_size, "hidden_size": hidden_size}
        sizes = {"in_features": hidden_size, "out_features": vocab_size}
        bound = site.bind_table(embedding, table, linear, sizes, head)
        self.plain.lookup, self.plain.product = bound

    def create_weights(
        self, layer: nn.Module, site: Site, vocab_size: int, hidden_size: int, head: Site | None
    ) -> None:
        """Register the quantized parameters of ``method``."""
        self.method.create_weights(layer, site, vocab_size, hidden_size, head)

    def dequantized(self, layer: nn.Module) -> Tensor | None:
        """Return the float64 table that results from dequantizing the parameters of ``method``."""
        return self.method.dequantized(layer)

    def finalize(self, layer: nn.Module) -> tuple[Call, Call | None]:
        """Return the kernels of the ops ``embedding`` and ``linear`` on the table.

        Raises: CheckpointError: as ``method`` does.
        """
        weight = _dequantized_weight(self.method, layer, self.dtype)
        stored = self.method.finalize(layer)
        if weight is None:
            return stored
        del stored
        _replace_parameters(layer, weight)
        return self.plain.finalize(layer)


def _dequantized_weight(
    method: LinearMethod | EmbeddingMethod, layer: nn.Module, dtype: torch.dtype
) -> Tensor | None:
    """Return the weight in the model's dtype; None if the method cannot dequantize."""
    exact = method.dequantized(_on_host(layer))
    if exact is None:
        prefix = getattr(layer, "prefix", "a layer")
        _log.warning("%s: its method states no weight, so it keeps the reference", prefix)
        return None
    device = next(layer.parameters()).device
    if device.type != "cpu":
        return exact.to(dtype).to(device)
    weight = host_memory.empty(exact.shape, dtype)
    return weight.copy_(exact)


def _on_host(layer: nn.Module) -> nn.Module:
    """Return the layer, or a copy of the layer with all parameters in host memory.

    Some accelerators cannot compute in float64, and their memory might not hold several copies.
    """
    if all(parameter.device.type == "cpu" for parameter in layer.parameters()):
        return layer
    host_layer = object.__new__(type(layer))
    vars(host_layer).update(vars(layer), _parameters={})
    for name, parameter in layer._parameters.items():
        host_parameter = None if parameter is None else nn.Parameter(parameter.data.cpu(), False)
        if host_parameter is not None:
            host_parameter.__dict__.update(vars(parameter))
        host_layer.register_parameter(name, host_parameter)
    return host_layer


def _replace_parameters(layer: nn.Module, weight: Tensor, bias: nn.Parameter | None = None) -> None:
    """Replace all parameters of the layer by ``weight`` and ``bias``."""
    for name in list(layer._parameters):
        layer.register_parameter(name, None)
    layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    layer.register_parameter("bias", bias)


# Fraction of the free memory for weights; the cache and the steps use the remaining memory.
_WEIGHT_FRACTION = 0.75
# Dequantizing computes in float64, with one more float64 tensor each for values and scales.
_TEMPORARY_BYTES = 3 * 8

Choices = Mapping[tuple[object, ...], Choice]


@dataclass(frozen=True, slots=True)
class _SlowLayer:
    """A quantized layer whose matmul only the reference implementation of an op computes.

    Attributes:
        references: choices of such ops, by key in the resolver.
        other_choices: choices of other ops that the layer's method calls.
        num_weights: number of weights of the matmul.
        dequantizing_method: returns the method that holds the weights dequantized.
    """

    layer: Any
    references: Choices
    other_choices: Choices
    num_weights: int
    dequantizing_method: Callable[[], Any]

    @property
    def stored_bytes(self) -> int:
        """Size of the stored weight in bytes, without bias."""
        parameters = self.layer._parameters.items()
        return sum(p.nbytes for name, p in parameters if p is not None and name != "bias")


def dequantize_once(model: nn.Module, site: Site, placement: Placement) -> list[str]:
    """Replace methods that dequantize weights in every step by ones that dequantize while loading.

    A layer keeps its method if no plain matmul can replace the method. All layers keep their
    methods if the memory is too small. Choices record the reason. Call this before weights are
    loaded.

    Args:
        site: site of the model.
        placement: device of the model.
    Returns: notes with the sizes of the layers that are, or should be, dequantized.
    """
    resolver: Any = site.resolver
    if not resolver.config.dequantize:
        return []
    notes: list[str] = []
    slow_layers: list[_SlowLayer] = []
    refused: dict[tuple[object, ...], Verdict] = {}
    for slow_layer in _slow_layers(model, site):
        verdict = slow_layer.layer.method.dequantizable()
        if verdict:
            slow_layers.append(slow_layer)
        else:
            emulated = {k: c for k, c in slow_layer.references.items() if c.chosen.emulation}
            refused.update(dict.fromkeys(emulated, verdict))
    verdict = (
        _judge_memory(slow_layers, model, site, placement) if slow_layers else Verdict.accept()
    )
    if not verdict:
        refused.update({key: verdict for layer in slow_layers for key in layer.references})
        notes.append(
            f"{_describe_layers(slow_layers)} are dequantized in every step, slowly: "
            f"{verdict.reason}"
        )
    for key, refusal in refused.items():
        resolver.annotate(key, f"not dequantized while loading: {refusal.reason}")
    if not (slow_layers and verdict):
        return notes
    layers_by_choice: dict[tuple[object, ...], list[_SlowLayer]] = defaultdict(list)
    # A choice is idle if all layers that made the choice are dequantized.
    for layer in slow_layers:
        for key in (*layer.references, *layer.other_choices):
            layers_by_choice[key].append(layer)
    for key, layers in layers_by_choice.items():
        num_prefixes = len(set(resolver.choices[key][1]))
        note = (
            f"not called at {len(layers)} of {num_prefixes} places: their weights are dequantized "
            f"once, while loading, to {_sizes(layers, site)}, and multiplied by the op 'linear'"
        )
        resolver.annotate(key, note, idle=len(layers) == num_prefixes)
    for slow_layer in slow_layers:
        slow_layer.layer.method = slow_layer.dequantizing_method()
    notes.append(
        f"{_describe_layers(slow_layers)} are dequantized once, while loading, to "
        f"{_sizes(slow_layers, site)}. "
        "Config(dequantize=False) keeps them as they are stored, and is slow"
    )
    return notes


def _slow_layers(model: nn.Module, site: Site) -> Iterator[_SlowLayer]:
    """Yield the layers whose matmul no kernel computes, only a reference implementation.

    Ops with a dim ``in_features`` are matmuls. A reference that the user requested does not count.
    """
    by_prefix: dict[str, dict[tuple[object, ...], Choice]] = defaultdict(dict)
    for key, (choice, prefixes) in site.resolver.choices.items():
        if choice.request.kind == "kernel" and not choice.idle:
            for prefix in prefixes:
                by_prefix[prefix][key] = choice

    def if_slow(
        layer: Any, prefixes: Sequence[str], size: tuple[int, int], method: Any, *sites: Site
    ) -> Iterator[_SlowLayer]:
        choices = {k: c for prefix in prefixes for k, c in by_prefix[prefix].items()}
        references = {key: choice for key, choice in choices.items() if _is_slow(choice)}
        if references:
            layer_site = Site(site.resolver, layer.prefix, site.dtype)
            other_choices = {k: c for k, c in choices.items() if k not in references}

            def dequantizing_method() -> Any:
                return method(layer.method, layer_site, *size, *sites)

            yield _SlowLayer(
                layer, references, other_choices, size[0] * size[1], dequantizing_method
            )

    for module in model.modules():
        if isinstance(module, Linear):
            size = module.in_features, sum(module.parts.values())
            yield from if_slow(module, (module.prefix,), size, DequantizedLinear)
    if not isinstance(model, CausalLM):
        return  # the embedding table and the head of other models are unknown
    head, table = model.lm_head, model.model.embed_tokens
    hidden, vocab = model.model.config.hidden_size, model.config.vocab_size
    # One tied table serves embedding and head: both prefixes have choices.
    if table.is_tied:
        head_site = Site(site.resolver, head.prefix, site.dtype)
        tied_prefixes = head.prefix, table.prefix
        yield from if_slow(table, tied_prefixes, (vocab, hidden), DequantizedEmbedding, head_site)
    else:
        yield from if_slow(head, (head.prefix,), (hidden, vocab), DequantizedLinear)


def _is_slow(choice: Choice) -> bool:
    return (
        isinstance(choice.chosen.record, OpEntry)
        and not choice.wished
        and "in_features" in choice.request.dims
        and choice.request.name != "linear"
    )


def _judge_memory(
    slow_layers: Sequence[_SlowLayer], model: nn.Module, site: Site, placement: Placement
) -> Verdict:
    """Refuse if all weights, after dequantization, exceed the device's free memory."""
    needed_bytes = sum(parameter.nbytes for parameter in model.parameters())
    needed_bytes += sum(_plain_bytes(layer, site) - layer.stored_bytes for layer in slow_layers)
    device = placement.device
    if device.torch_device.partition(":")[0] == "cpu":
        needed_bytes += _TEMPORARY_BYTES * max(layer.num_weights for layer in slow_layers)
    # A described device is not present: its declared memory counts as free.
    if placement.described:
        free_bytes = device.capability.memory_bytes
    else:
        free_bytes = placement.platform.memory(device.torch_device).free_bytes
    if needed_bytes <= _WEIGHT_FRACTION * free_bytes or (placement.described and not free_bytes):
        return Verdict.accept()
    return Verdict.refuse(
        f"dequantized, they would need {_mebibytes(needed_bytes)} with all other weights, and "
        f"{_WEIGHT_FRACTION:.0%} of the free memory are "
        f"{_mebibytes(int(_WEIGHT_FRACTION * free_bytes))}"
    )


def _describe_layers(slow_layers: Sequence[_SlowLayer]) -> str:
    ops = sorted(
        {choice.request.name for layer in slow_layers for choice in layer.references.values()}
    )
    return (
        f"the weights of {len(slow_layers)} layers, "
        f"which only the reference of {', '.join(ops)} reads,"
    )


def _sizes(slow_layers: Sequence[_SlowLayer], site: Site) -> str:
    plain_bytes = sum(_plain_bytes(layer, site) for layer in slow_layers)
    stored_bytes = sum(layer.stored_bytes for layer in slow_layers)
    return f"{_mebibytes(plain_bytes)} instead of {_mebibytes(stored_bytes)}"


def _plain_bytes(layer: _SlowLayer, site: Site) -> int:
    return layer.num_weights * site.dtype.itemsize


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
