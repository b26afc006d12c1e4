"""The entry point ``adapt``, and its passes over a model's modules.

Each pass proposes a kernel or a standard layer for the modules of one kind.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import wraps
from typing import Any, Generic, TypeVar

from torch import nn

from interposer import Config, Placement, Resolver, Verdict, effective_config, place
from interposer.errors import ConfigError
from interposer_adapt._activations import bind_activation, find_activation
from interposer_adapt._adaptation import Adaptation, Place, notes
from interposer_adapt._attention_registry import bind_attention
from interposer_adapt._blocks import bind_blocks
from interposer_adapt._cache_argument import CACHE_ARGUMENTS, generate_cache_argument
from interposer_adapt._convolutions import KINDS as CONVOLUTIONS
from interposer_adapt._convolutions import bind_convolution
from interposer_adapt._experts import bind_experts, looks_like_experts
from interposer_adapt._gated_mlp import GatedParts, bind_gated_mlp, find_gated
from interposer_adapt._merged_projections import bind_merged, find_sharing
from interposer_adapt._norms import bind_norm, find_layer_norm, find_norm
from interposer_adapt._packed_weight import PackedWeight
from interposer_adapt._projections import bind_projection
from interposer_adapt._rotary import bind_rotary
from interposer_adapt._routers import bind_router, looks_like_router
from interposer_adapt._shards import is_sharded
from interposer_adapt._tables import NamedModule, bind_table
from interposer_engine.parts import quantization_settings
from interposer_ops.devices import host_memory

Holders = dict[int, list[tuple[str, nn.Module, str]]]
"""By the id of a parameter, its holders: module name, module, and the parameter's name there."""

M = TypeVar("M", bound=nn.Module)
_HANDLE_ATTRIBUTE = "_interposer_adapted"
_DYNAMIC = (None, "dynamic")


class Adapted(Generic[M]):
    """A model that runs on interposer's kernels.

    ``interposer.explain`` lists the kernel of each module.

    Attributes:
        model: the model that was passed to ``adapt``; use it as before.
        quantization: the method by which the weights were quantized, None for plain weights.
    """

    def __init__(
        self, model: M, adaptation: Adaptation, quantization: str | Mapping[str, Any] | None
    ) -> None:
        self.model = model
        self.quantization = quantization
        self.placement: Placement = adaptation.placement
        self._adaptation = adaptation

    def __deepcopy__(self, memo: object) -> Adapted[M]:
        # A copied model shares the kernels' constants, so the handle still restores the original.
        return self

    def __repr__(self) -> str:
        """Describe class, number of bound modules and device of the model."""
        name = f"{type(self).__name__} {type(self.model).__name__}"
        if not is_in_force(self):
            return f"<{name}: restored>"
        num_bound = sum(place.is_bound for place in self.places)
        device = self.placement.device
        return (
            f"<{name}: {num_bound} of {len(self.places)} modules bound, {device.torch_device} "
            f"({self.placement.platform.name}: {device.name})>"
        )

    @property
    def resolver(self) -> Resolver:
        """The resolver that chose the kernels, with notes for all module results.

        Raises: ConfigError: the model was restored.
        """
        if not is_in_force(self):
            raise ConfigError(
                f"The {type(self.model).__name__} was restored and runs without interposer, so no "
                "choice is in force. Try: adapt(model)"
            )
        resolver = self._adaptation.resolver
        resolver.notes[:] = [*notes(self.places), *self._adaptation.notes]
        return resolver

    @property
    def places(self) -> tuple[Place, ...]:
        """The result for each module that was bound, or skipped with a reason."""
        return tuple(self._adaptation.results.values())

    def new_cache(self) -> Any:
        """Return an empty KV cache that grows in place, to pass to the model's forward.

        The argument's name is ``cache``, or ``past_key_values`` before transformers 5.24.
        ``generate`` creates such a cache unless you pass one.
        """
        from interposer_adapt._caches import new_cache

        config: Any = self.model.config
        return new_cache(config)

    def restore(self) -> M:
        """Undo the adaptation and return the model, bit for bit as before.

        This handle is of no use afterwards.

        Raises: ConfigError: the weights were quantized.
        """
        if self.quantization is not None:
            raise ConfigError(
                f"The weights were quantized by {self.quantization!r}, so that the plain ones are "
                "gone. Try: load the model again"
            )
        self._adaptation.changes.undo()
        return self.model


def adapt(
    model: M,
    config: Config | None = None,
    *,
    quantization: str | Mapping[str, Any] | None = None,
) -> Adapted[M]:
    """Run a transformers model on the kernels that interposer selects for this machine.

    The model is changed in place, instance by instance; classes stay unchanged. A module that no
    kernel can replace keeps the class's forward, with a reason in ``places``.

    Args:
        model: a model in evaluation mode, with its weights in memory.
        config: policy for this model; it overrides every other source.
        quantization: a method that quantizes the weights, as for ``load``.
    Raises:
        ConfigError: ``model`` is no ``torch.nn.Module``, is adapted already or in training mode; or
            ``quantization`` is set and this process holds only shards of the weights.
        UnknownNameError: no installed plugin quantizes by this method.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is of the type {type(model).__name__}, must be a torch.nn.Module. "
            "Try: adapt(AutoModelForCausalLM.from_pretrained(path))"
        )
    if _HANDLE_ATTRIBUTE in vars(model):
        raise ConfigError("The model is adapted already. Try: adapted.restore()")
    if model.training:
        raise ConfigError("The model is in training mode. Try: model.eval()")
    config = effective_config(config)
    placement = place(config)
    resolver = Resolver.at(placement, config)
    stored_settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantization is not None:
        if any(is_sharded(parameter) for parameter in model.parameters()):
            raise ConfigError(
                f"quantization is {quantization!r}, but this process holds parts of the weights: "
                "scales of parts are not those of the whole. Try: adapt(model) as it is, or load "
                "the model without a plan of parallelism"
            )
        settings = quantization_settings(
            quantization, _as_mapping(stored_settings), resolver.registry, type(model).__name__
        )
        assert settings is not None
        resolver.choose_scheme(settings)
    adaptation = Adaptation(model, placement, resolver)
    heads = set(head_ids(model))
    with placement.platform.numerics(config.numerics), host_memory.reused():
        try:
            # The order matters. A tied weight is bound with all of its holders, and a composite
            # before its leaves. Blocks reuse the layers and the attention of bound parts.
            bind_tables(adaptation)
            bind_composites(adaptation)
            bind_leaves(adaptation, heads)
            bind_rotary(adaptation)
            bind_attention(adaptation)
            bind_blocks(adaptation)
            bind_generation(adaptation)
        except BaseException:
            adaptation.changes.undo()
            raise
    if placement.device.torch_device == "cpu":
        host_memory.trim()
    # Refuses rules of the config that name no module of this model.
    resolver.check_places()
    adapted = Adapted(model, adaptation, quantization)
    adaptation.changes.set(model, _HANDLE_ATTRIBUTE, adapted)
    return adapted


def is_in_force(adapted: Adapted[Any]) -> bool:
    """Return whether the model is still adapted, which ends with ``restore``."""
    return vars(adapted.model).get(_HANDLE_ATTRIBUTE) is adapted


def add_note(adapted: Adapted[Any], text: str) -> None:
    """Add a note about the whole model to the output of ``interposer.explain``."""
    resolver = adapted.resolver
    adapted._adaptation.notes.append(text)
    resolver.notes.append(text)


def bind_tables(adaptation: Adaptation) -> None:
    """Bind embeddings, and linear layers that share an embedding's weight, to kernels."""
    for holders in _matrices(adaptation.model).values():
        embeddings: list[NamedModule] = [(n, m) for n, m, _ in holders if type(m) is nn.Embedding]
        projections: list[NamedModule] = [(n, m) for n, m, _ in holders if type(m) is nn.Linear]
        other_holders: list[NamedModule] = [
            (n, m) for n, m, _ in holders if type(m) not in (nn.Embedding, nn.Linear)
        ]
        is_tied = bool(projections) and len(holders) > 1
        lookups = [*embeddings, *((n, m) for n, m in other_holders if isinstance(m, nn.Embedding))]
        # Without an embedding, no lookup could restore the packed weight for the other holders.
        if is_tied and not lookups:
            names = ", ".join(name for name, _, _ in holders)
            for name, module in projections:
                adaptation.mark_skipped(module, name, f"its weight is shared by {names}")
        elif embeddings or is_tied:
            holder_parameters = [(module, parameter_name) for _, module, parameter_name in holders]
            bind_table(adaptation, lookups[0][0], embeddings, projections, holder_parameters)
            for name, module in other_holders:
                if any(
                    isinstance(parameter, PackedWeight) for parameter in module._parameters.values()
                ):
                    reason = "its forward reads the weight that a head's kernel packed"
                    adaptation.mark_skipped(module, name, reason)


def bind_composites(adaptation: Adaptation) -> None:
    """Bind modules that one standard layer can compute: gated MLPs and merged projections."""
    tied_ids = {
        id(module)
        for holders in _matrices(adaptation.model).values()
        if len(holders) > 1
        for _, module, _ in holders
    }
    for name, module in adaptation.model.named_modules():
        if id(module) in adaptation.handled_ids or not module._modules:
            continue
        if any(id(child) in tied_ids for child in module.children()):
            continue
        gated_parts = find_gated(module)
        if gated_parts is not None and _bind_gated(adaptation, module, name, gated_parts):
            continue
        # Larger groups first: a projection can be merged only once.
        for group in sorted(find_sharing(module), key=len, reverse=True):
            _bind_merged(adaptation, module, name, group)


def _bind_gated(adaptation: Adaptation, module: nn.Module, name: str, parts: GatedParts) -> bool:
    results, handled_ids = dict(adaptation.results), set(adaptation.handled_ids)
    if adaptation.attempt(module, name, lambda: bind_gated_mlp(adaptation, module, name, parts)):
        # The layer's kernel computes its activation, which is called only beside hooks.
        adaptation.handled_ids.update(
            id(child) for child in module.children() if find_activation(child) is not None
        )
        return True
    # The refusal concerns the gated MLP as a whole. Its children are bound one by one later, and
    # record reasons of their own.
    adaptation.results, adaptation.handled_ids = results, handled_ids
    return False


def _bind_merged(
    adaptation: Adaptation, module: nn.Module, name: str, group: tuple[str, ...]
) -> None:
    if any(id(module._modules[label]) in adaptation.handled_ids for label in group):
        return
    results, handled_ids = dict(adaptation.results), set(adaptation.handled_ids)
    if not adaptation.attempt(module, name, lambda: bind_merged(adaptation, module, name, group)):
        adaptation.results, adaptation.handled_ids = results, handled_ids
        return
    # Only the children are bound: the parent gets its previous result back, if it had one.
    adaptation.handled_ids.discard(id(module))
    del adaptation.results[name]
    if name in results:
        adaptation.results[name] = results[name]


def bind_leaves(adaptation: Adaptation, heads: set[int]) -> None:
    """Bind linear layers, norms, activations, convolutions, experts and routers to kernels."""
    conv1d_class = _conv1d_class()
    tied_ids = {
        id(module)
        for holders in _matrices(adaptation.model).values()
        if len(holders) > 1
        for _, module, _ in holders
    }
    for name, module in adaptation.model.named_modules():
        if id(module) in adaptation.handled_ids:
            continue
        kind = type(module)
        # A subclass may override forward without changing the result: check_projection compares.
        is_derived = isinstance(module, nn.Linear) and kind.forward is not nn.Linear.forward
        is_derived = is_derived and not module._modules and id(module) not in tied_ids
        if kind is nn.Linear or kind is conv1d_class or is_derived:
            _bind_projection(adaptation, module, name, kind is conv1d_class, id(module) in heads)
        elif kind is nn.LayerNorm:
            _bind_norm(adaptation, module, name)
        elif kind in CONVOLUTIONS:
            _bind_convolution(adaptation, module, name)
        elif looks_like_experts(module):
            _bind_experts(adaptation, module, name)
        elif not module._modules:
            _bind_leaf(adaptation, module, name)


def _bind_projection(
    adaptation: Adaptation, module: nn.Module, name: str, is_transposed: bool, is_head: bool
) -> None:
    def bind() -> str | Verdict:
        return bind_projection(adaptation, module, name, transposed=is_transposed, is_head=is_head)

    adaptation.attempt(module, name, bind)


def _bind_norm(adaptation: Adaptation, module: nn.Module, name: str) -> None:
    assert isinstance(module, nn.LayerNorm)
    norm = find_layer_norm(module)
    if isinstance(norm, Verdict):
        adaptation.mark_skipped(module, name, norm.reason)
        return
    adaptation.attempt(module, name, lambda: bind_norm(adaptation, module, name, norm))


def _bind_experts(adaptation: Adaptation, module: nn.Module, name: str) -> None:
    adaptation.attempt(module, name, lambda: bind_experts(adaptation, module, name))


def _bind_convolution(adaptation: Adaptation, module: nn.Module, name: str) -> None:
    adaptation.attempt(module, name, lambda: bind_convolution(adaptation, module, name))


def _bind_leaf(adaptation: Adaptation, module: nn.Module, name: str) -> None:
    norm, activation = find_norm(module), find_activation(module)
    if looks_like_router(module):
        adaptation.attempt(module, name, lambda: bind_router(adaptation, module, name))
    elif activation is not None:
        adaptation.attempt(
            module, name, lambda: bind_activation(adaptation, module, name, activation)
        )
    elif norm is not None:
        adaptation.attempt(module, name, lambda: bind_norm(adaptation, module, name, norm))
    elif any(parameter is not None for parameter in module._parameters.values()):
        adaptation.mark_skipped(module, name, "no known op matches its class")


def _matrices(model: nn.Module) -> Holders:
    """Return the modules that hold each 2D parameter, by the parameter's id, in model order."""
    holders: Holders = {}
    for name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim == 2:
                holders.setdefault(id(parameter), []).append((name, module, parameter_name))
    return holders


def _conv1d_class() -> type[nn.Module] | None:
    """Return transformers' Conv1D, a linear layer with a transposed weight, if imported."""
    module = sys.modules.get("transformers.pytorch_utils")
    conv1d: type[nn.Module] | None = getattr(module, "Conv1D", None)
    return conv1d


def head_ids(model: nn.Module) -> Iterator[int]:
    """Yield the ids of the modules that ``get_output_embeddings`` returns: the LM heads."""
    for _, module in model.named_modules():
        get_head = getattr(module, "get_output_embeddings", None)
        head = get_head() if callable(get_head) else None
        if isinstance(head, nn.Module):
            yield id(head)


def bind_generation(adaptation: Adaptation) -> None:
    """Make this model's ``generate`` use a ``RowsCache`` unless the caller passes a cache."""
    owner: Any = adaptation.model
    model: nn.Module = owner
    if "transformers" not in sys.modules:
        return
    from transformers import GenerationMixin

    if not isinstance(model, GenerationMixin) or "generate" in vars(model):
        return
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is None or not supports():
        return
    from interposer_adapt._caches import new_cache

    original: Any = owner.generate
    parameters = inspect.signature(original).parameters

    @wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        settings = arguments.get("generation_config") or owner.generation_config

        def setting(name: str) -> Any:
            value = arguments.get(name)
            return getattr(settings, name, None) if value is None else value

        if (
            all(arguments.get(name) is None for name in CACHE_ARGUMENTS)
            and arguments.get("custom_generate") is None
            and setting("cache_implementation") in _DYNAMIC
            and setting("use_cache") is not False
        ):
            cache = new_cache(owner.config)
            if setting("is_assistant"):
                # Draft tokens may be rejected: sliding layers must keep tokens before the window.
                cache.activate_past_recording()
            kwargs = {**kwargs, generate_cache_argument(): cache}
            # Set only if necessary: transformers warns of arguments that override a configuration.
            if owner.generation_config.cache_implementation or setting("cache_implementation"):
                kwargs["cache_implementation"] = None
        return original(*args, **kwargs)

    adaptation.changes.set(model, "generate", generate)


def _as_mapping(settings: Any) -> Mapping[str, Any] | None:
    """Convert a model's quantization settings, an object in transformers, to a mapping."""
    if settings is None or isinstance(settings, Mapping):
        return settings
    plain: Mapping[str, Any] = settings.to_dict()
    return plain
