"""Entry point ``adapt``: run a transformers model on interposer's kernels, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from torch import nn

from interposer import Config, Placement, Resolver, effective_config, place
from interposer.errors import ConfigError
from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.attention_registration import bind_attention
from interposer_models._adapt.block_binding import bind_blocks
from interposer_models._adapt.generation import bind_generation
from interposer_models._adapt.modules import bind_composites, bind_leaves, bind_tables, head_ids
from interposer_models._adapt.place import Place, notes
from interposer_models._adapt.rotary import bind_rotary
from interposer_models._adapt.shards import is_sharded
from interposer_models._online_quantization import quantization_settings
from interposer_ops.devices import host_memory

M = TypeVar("M", bound=nn.Module)
_HANDLE_ATTRIBUTE = "_interposer_adapted"


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

    @property
    def resolver(self) -> Resolver:
        """The resolver that chose the kernels, with notes for all module results."""
        resolver = self._adaptation.resolver
        resolver.notes[:] = [*notes(self.places), *self._adaptation.notes]
        return resolver

    @property
    def places(self) -> tuple[Place, ...]:
        """The result for each module that was bound, or skipped with a reason."""
        return tuple(self._adaptation.results.values())

    def new_cache(self) -> Any:
        """Return an empty KV cache that grows in place, to pass as ``past_key_values``.

        ``generate`` creates such a cache unless you pass one.
        """
        from interposer_models._adapt.cache import new_cache

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


def is_in_force(adapted: Adapted[Any]) -> bool:
    """Return True unless the model has been restored."""
    return vars(adapted.model).get(_HANDLE_ATTRIBUTE) is adapted


def add_note(adapted: Adapted[Any], text: str) -> None:
    """Add a note about the whole model to the output of ``interposer.explain``."""
    resolver = adapted.resolver
    adapted._adaptation.notes.append(text)
    resolver.notes.append(text)


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
        model: in evaluation mode, with its weights in memory.
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


def _as_mapping(settings: Any) -> Mapping[str, Any] | None:
    """Convert a model's quantization settings, an object in transformers, to a mapping."""
    if settings is None or isinstance(settings, Mapping):
        return settings
    plain: Mapping[str, Any] = settings.to_dict()
    return plain
