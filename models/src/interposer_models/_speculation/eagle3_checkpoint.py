"""Checkpoints of EAGLE-3: which they are, for which model, and of which tokens.

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
from interposer_models._speculation.head_guesses import HeadGuesses, load_head
from interposer_models._speculation.settings import Speculation
from interposer_models._speculation.target import Target
from interposer_ops.attention import common_page_size

_ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
_LEAST_LAYERS = 6  # of which the usual three are different ones


def separate_head(path: str | Path, settings: Speculation, target: Target) -> HeadGuesses | None:
    """Return the head in a folder, or of a model on the hub; None where there is a model instead.

    Raises: CheckpointError: it is not for the model, or incomplete.
    """
    planned = target.planned
    if not _is_head(path, planned.resolver.config):
        return None
    checkpoint = open_folder(path)
    check_sources(planned.path, planned.model)
    source, model = config_source(checkpoint), planned.model
    if not isinstance(model, CausalLM):
        raise ConfigError(
            f"{planned.path} is a {type(model).__name__}, whose layers tell no states, which the "
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
    found = dict(checkpoint.stream(lambda name: name.endswith("d2t")))
    tokens = _tokens(next(iter(found.values()), None), config, source)
    embeds = any(name.endswith("embed_tokens.weight") for name in checkpoint.names())
    with torch.device("meta"):
        page_size = common_page_size(resolver, [(config.spec(site, 1), site.at("attn"))])
        head = Eagle3Head(site, config, page_size, model, embeds)
    head.places = None if tokens is None else tokens.to(device)
    dequantize_once(head, site, planned.placement)
    load_head(head, checkpoint, target, resolver)
    return HeadGuesses(head, settings, target, page_size, f"EAGLE-3 head {path}")


def _is_head(path: str | Path, config: Config) -> bool:
    """Say whether the config at a path is of a head; of what is on the hub no weight is read."""
    stated = open_checkpoint(path, config)[0].config
    named = stated.get("architectures") or ()
    return "draft_vocab_size" in stated or not _ARCHITECTURES.isdisjoint(named)


def _check_fit(config: Eagle3, model: CausalLM, source: Path) -> None:
    """Raise CheckpointError where a head is for a model of other sizes."""
    stated = {
        "vocab_size": config.vocab_size,
        "target_hidden_size": config.target_hidden_size or config.hidden_size,
    }
    own = {
        "vocab_size": model.model.config.vocab_size,
        "target_hidden_size": model.model.config.hidden_size,
    }
    for name, size in stated.items():
        if size != own[name]:
            raise CheckpointError(
                source,
                f"is of a head for a model with {name} {size}, the model has {own[name]}",
                "give the head that was trained for this model",
            )
    count, layers = model.model.config.num_hidden_layers, config.stated_layers
    if count < _LEAST_LAYERS:
        raise CheckpointError(
            source, f"is of a head that reads three layers, the model has {count}"
        )
    # Some programs count by what enters a layer, and others by what leaves it.
    usual = read_layers(count)
    if layers not in (None, [*usual], [number - 1 for number in usual]):
        raise CheckpointError(
            source,
            f"has eagle_aux_hidden_state_layer_ids {layers}, which may be counted by the inputs of "
            f"layers or by their outputs; heads that read what enters {[*usual]} are supported",
            "give a head of these layers",
        )


def _tokens(offsets: Tensor | None, config: Eagle3, source: Path) -> Tensor | None:
    """Return the tokens of the model that those of the head are, ``[W]``; None for all of them.

    Args:
        offsets: ``d2t``, what is to be added to each.
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
