"""Loading of EAGLE-3 checkpoints, with checks that the head fits the model.

Dimensions: W vocabulary of the head.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from interposer import Config, Resolver, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_models._checkpoint.files import config_source, open_checkpoint, open_folder
from interposer_models._decoder.decoder import CausalLM
from interposer_models._dequantization.decision import dequantize_once
from interposer_models._online_quantization import quantization_settings
from interposer_models._speculation.draft_checks import check_sources
from interposer_models._speculation.eagle3 import Eagle3, Eagle3Head, read_layers
from interposer_models._speculation.head_draft_source import HeadDraftSource, load_head
from interposer_models._speculation.settings import Speculation
from interposer_models._speculation.target import Target
from interposer_ops.attention import common_page_size

_ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
_LEAST_LAYERS = 6  # with fewer, the three layers that a head reads would coincide


def load_eagle3_head(
    path: str | Path, settings: Speculation, target: Target
) -> HeadDraftSource | None:
    """Load the EAGLE-3 head in a folder or on the hub; return None if the path holds a model.

    Raises:
        CheckpointError: the head does not fit the model, or is incomplete.
        ConfigError: the model is no ``CausalLM`` or has an encoder.
    """
    planned = target.planned
    if not _is_head(path, planned.resolver.config):
        return None
    checkpoint = open_folder(path)
    check_sources(planned.path, planned.model)
    source, model = config_source(checkpoint), planned.model
    if not isinstance(model, CausalLM):
        raise ConfigError(
            f"{planned.path} is a {type(model).__name__}, whose layers expose no states, which the "
            f"head {path} reads. Try: speculation='ngram'"
        )
    config = Eagle3.parse(checkpoint.config, source)
    _check_fit(config, model, source)
    resolver = Resolver.at(planned.placement, planned.resolver.config)
    scheme = quantization_settings(
        None, config.quantization_config, resolver.registry, checkpoint.path
    )
    if scheme is not None:
        resolver.choose_scheme(scheme)
    site, device = Site(resolver, "", planned.dtype), planned.placement.device.torch_device
    # Read the token map first: it decides the size of the head's vocabulary.
    offset_tensors = dict(checkpoint.stream(lambda name: name.endswith("d2t")))
    tokens = _tokens(next(iter(offset_tensors.values()), None), config, source)
    has_embedding = any(name.endswith("embed_tokens.weight") for name in checkpoint.names())
    with torch.device("meta"):
        page_size = common_page_size(resolver, [(config.spec(site, 1), site.at("attn"))])
        head = Eagle3Head(site, config, page_size, model, has_embedding)
    head.places = None if tokens is None else tokens.to(device)
    dequantize_once(head, site, planned.placement)
    load_head(head, checkpoint, target, resolver)
    return HeadDraftSource(head, settings, target, page_size, f"EAGLE-3 head {path}")


def _is_head(path: str | Path, config: Config) -> bool:
    """Return whether the config at a path is of a head; weights are not read."""
    fields = open_checkpoint(path, config)[0].config
    architectures = fields.get("architectures") or ()
    return "draft_vocab_size" in fields or not _ARCHITECTURES.isdisjoint(architectures)


def _check_fit(config: Eagle3, model: CausalLM, source: Path) -> None:
    """Raise CheckpointError if the head was trained for a model of other sizes."""
    head_sizes = {
        "vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size or config.hidden_size,
    }
    model_sizes = {
        "vocab_size": model.model.config.vocab_size,
        "target_hidden_size": model.model.config.hidden_size,
    }
    for name, size in head_sizes.items():
        if size != model_sizes[name]:
            raise CheckpointError(
                source,
                f"is of a head for a model with {name} {size}, the model has {model_sizes[name]}",
                "give the head that was trained for this model",
            )
    count, layers = model.model.config.num_hidden_layers, config.stated_layers
    if count < _LEAST_LAYERS:
        raise CheckpointError(
            source, f"is of a head that reads three layers, the model has {count}"
        )
    # Some programs count by the inputs of layers, and others by the outputs.
    supported_layers = read_layers(count)
    if layers not in (None, [*supported_layers], [number - 1 for number in supported_layers]):
        raise CheckpointError(
            source,
            f"has eagle_aux_hidden_state_layer_ids {layers}, which may be counted by the inputs of "
            "layers or by their outputs; supported are heads that read the inputs of "
            f"{[*supported_layers]}",
            "give a head of these layers",
        )


def _tokens(offsets: Tensor | None, config: Eagle3, source: Path) -> Tensor | None:
    """Return the model's token id of each token of the head, ``[W]``; None if the ids are equal.

    Args:
        offsets: Tensor ``d2t``: the difference between the model's and the head's token id.
    """
    size = config.draft_vocab_size
    if offsets is None and size == config.vocab_size:
        return None
    tokens = None if offsets is None else torch.arange(len(offsets)) + offsets.long()
    if (
        tokens is None
        or len(tokens) != size
        or not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size
        or len(tokens.unique()) != size
    ):
        raise CheckpointError(
            source,
            f"states a vocabulary of {size} tokens, but d2t does not say which of the model's "
            f"{config.vocab_size} they are",
            "copy the checkpoint again",
        )
    return tokens
