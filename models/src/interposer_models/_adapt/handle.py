"""The door: a model of another library on the kernels that the machine selects, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from torch import nn

from interposer import Config, Placement, Resolver, effective_config, place
from interposer.errors import ConfigError
from interposer_models._adapt.adaptation import Adaptation
from interposer_models._adapt.attention_names import bind_attention
from interposer_models._adapt.block_binding import bind_blocks
from interposer_models._adapt.generation import bind_generation
from interposer_models._adapt.modules import bind_composites, bind_leaves, bind_tables, head_ids
from interposer_models._adapt.place import Place, notes
from interposer_models._adapt.rotary import bind_rotary
from interposer_models._adapt.shards import is_sharded
from interposer_models._online_quantization import quantization_settings
from interposer_ops.devices import host_memory

M = TypeVar("M", bound=nn.Module)
_MARK = "_interposer_adapted"


class Adapted(Generic[M]):
    """A model on kernels of interposer. ``interposer.explain`` says what each module runs on.

    Attributes:
        model: the model itself, of its own class; use it as before.
        quantization: the method by which its weights were quantized, None for plain ones.
    """

    def __init__(
        self, model: M, adaptation: Adaptation, quantization: str | Mapping[str, Any] | None
    ) -> None:
        self.model = model
        self.quantization = quantization
        self.placement: Placement = adaptation.placement
        self._adaptation = adaptation

    def __deepcopy__(self, memo: object) -> Adapted[M]:
        # A copy of the model shares what kernels hold; this handle gives the first one back.
        return self

    @property
    def resolver(self) -> Resolver:
        """The resolver that made the choices, with a note for every reason of a module."""
        resolver = self._adaptation.resolver
        resolver.notes[:] = [*notes(self.places), *self._adaptation.remarks]
        return resolver

    @property
    def places(self) -> tuple[Place, ...]:
        """The outcome for each module that is bound, or was left for a reason."""
        return tuple(self._adaptation.places.values())

    def new_cache(self) -> Any:
        """Return an empty cache that grows in place, to pass as ``past_key_values``.

        ``generate`` passes one by itself.
        """
        from interposer_models._adapt.cache import new_cache

        config: Any = self.model.config
        return new_cache(config)

    def restore(self) -> M:
        """Give the model back as it was, bit for bit; this handle is of no use afterwards.

        Raises: ConfigError: its weights were quantized.
        """
        if self.quantization is not None:
            raise ConfigError(
                f"The weights were quantized by {self.quantization!r}, so that the plain ones are "
                "gone. Try: load the model again"
            )
        self._adaptation.changes.undo()
        return self.model


def is_in_force(adapted: Adapted[Any]) -> bool:
    """Say whether the model is adapted by this handle, so that it was not restored since."""
    return vars(adapted.model).get(_MARK) is adapted


def remark(adapted: Adapted[Any], text: str) -> None:
    """Add a note about the model as a whole to what ``interposer.explain`` says."""
    resolver = adapted.resolver
    adapted._adaptation.remarks.append(text)
    resolver.notes.append(text)


def adapt(
    model: M,
    config: Config | None = None,
    *,
    quantization: str | Mapping[str, Any] | None = None,
) -> Adapted[M]:
    """Bind what a model of transformers computes to the kernels that this machine selects.

    The model is changed in place, instance by instance; its classes stay. A module that cannot be
    bound is left as it is, with a reason.

    Args:
        model: in evaluation mode, with its weights in memory.
        config: policy for this model, above every other source.
        quantization: a method by which weights are quantized, as ``load`` takes it.
    Raises:
        ConfigError: it is no module, is adapted already, or in training mode; weights are to be
            quantized of which this process holds parts.
        UnknownNameError: nothing quantizes by that method.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is of the type {type(model).__name__}, must be a torch.nn.Module. "
            "Try: adapt(AutoModelForCausalLM.from_pretrained(path))"
        )
    if _MARK in vars(model):
        raise ConfigError("The model is adapted already. Try: adapted.restore()")
    if model.training:
        raise ConfigError("The model is in training mode. Try: model.eval()")
    config = effective_config(config)
    placement = place(config)
    resolver = Resolver.at(placement, config)
    own = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantization is not None:
        if any(is_sharded(parameter) for parameter in model.parameters()):
            raise ConfigError(
                f"quantization is {quantization!r}, but this process holds parts of the weights: "
                "scales of parts are not those of the whole. Try: adapt(model) as it is, or load "
                "the model without a plan of parallelism"
            )
        settings = quantization_settings(
            quantization, _as_mapping(own), resolver.registry, type(model).__name__
        )
        assert settings is not None
        resolver.choose_scheme(settings)
    adaptation = Adaptation(model, placement, resolver)
    heads = set(head_ids(model))
    with placement.platform.numerics(config.numerics), host_memory.reused():
        try:
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
    resolver.check_places()
    adapted = Adapted(model, adaptation, quantization)
    adaptation.changes.set(model, _MARK, adapted)
    return adapted


def _as_mapping(settings: Any) -> Mapping[str, Any] | None:
    """Return settings of a model as plain data; transformers holds them as an object."""
    if settings is None or isinstance(settings, Mapping):
        return settings
    plain: Mapping[str, Any] = settings.to_dict()
    return plain
