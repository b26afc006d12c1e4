"""Fallback loader for decoders without a model family: an adapted transformers model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from interposer import Config, current_registry, place
from interposer.errors import (
    CheckpointError,
    ConfigError,
    UnsupportedModelError,
    described,
    foreign_errors,
    near_names,
)
from interposer_adapt._adapted_images import (
    UnsupportedImagesError,
    image_processor,
    takes_images,
)
from interposer_adapt._api import adapt, add_note
from interposer_adapt._language_model import language_model
from interposer_engine import Checkpoint, LanguageModel, load
from interposer_engine.parts import (
    WeightCheck,
    compute_dtype,
    config_source,
    download_weights,
    stop_tokens,
    tokenizer_of,
    unplaced_tensor_error,
)

_log = logging.getLogger("interposer")


def load_adapted(
    checkpoint: Checkpoint,
    config: Config,
    *,
    dtype: str | torch.dtype,
    quantization: str | Mapping[str, Any] | None,
    cache_tokens: int | None,
    max_sequences: int,
    max_step_tokens: int,
    text_only: bool,
    progress: Callable[[int, int], None] | None,
    **others: Any,
) -> LanguageModel:
    """Load and adapt a decoder of transformers for the engine.

    Args:
        checkpoint: a folder, or a model on a hub; weights are fetched after the config was checked.
        config: policy for this model, including the requested platform.
        others: the remaining arguments of ``interposer_engine.load``.
    Raises:
        UnsupportedModelError: transformers has no such decoder, or the engine cannot run it.
        CheckpointError: transformers cannot load the checkpoint, or tensors are missing or
            unexpected.
        ConfigError: an argument in ``others`` is not supported for adapted models.
    """
    source = config_source(checkpoint)
    architecture = str(checkpoint.config["architectures"][0])
    families = current_registry(config).subjects("model")
    decoder = _decoder_class(architecture, source, families)
    missing_family = f"no family is installed for the architecture {architecture!r}"
    if architecture in families:
        text_type = (checkpoint.config.get("text_config") or {}).get("model_type")
        missing_family = f"no family is installed for the decoder {text_type!r} of {architecture!r}"
    defaults = {name: each.default for name, each in inspect.signature(load).parameters.items()}
    for name, value in others.items():
        if value and value != defaults.get(name):
            raise ConfigError(
                f"{name}={value!r:.100} was requested, but {missing_family} in {source}: the model "
                f"of transformers is adapted, which takes none. Try: load(path) without {name}"
            )
    placement = place(config)
    # Weights may be large downloads: arguments and architecture were checked first.
    fetched = download_weights(checkpoint)
    assert isinstance(fetched, Checkpoint)
    checkpoint = fetched
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    compute = compute_dtype(dtype, str(stored or "float32"), placement)
    try:
        model, report = decoder.from_pretrained(
            str(checkpoint.path),
            dtype=compute,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except foreign_errors() as error:
        raise CheckpointError(
            checkpoint.path,
            f"{missing_family}, and transformers does not load it: {described(error)}",
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            checkpoint.path,
            f"lacks the tensor {missing[0]!r}, one of {len(missing)} that {architecture} needs",
            "copy all files of the checkpoint again",
        )
    if unexpected := sorted(report["unexpected_keys"]):
        raise unplaced_tensor_error(unexpected[0], unexpected[0], checkpoint.path)
    model = model.eval().to(placement.device.torch_device)
    check = WeightCheck(config.weight_check, placement.platform)
    check.check_parameters(model, checkpoint.path)
    tokenizer = tokenizer_of(checkpoint)
    ends = stop_tokens(checkpoint.path, checkpoint.config, tokenizer)
    model.generation_config.eos_token_id = sorted(ends) or None
    if progress is not None:
        progress(checkpoint.num_bytes, checkpoint.num_bytes)
    adapted = adapt(model, config, quantization=quantization)
    note = f"{missing_family}, so the model of transformers is adapted"
    add_note(adapted, note)
    _log.warning("%s: %s", checkpoint.path, note)
    for finding in check.findings:
        add_note(adapted, finding)
    processor = None
    if takes_images(model) and not text_only:
        try:
            processor = image_processor(checkpoint.path, model.config.model_type)
        except UnsupportedImagesError as error:
            add_note(adapted, f"images are refused: {error}")
    return language_model(
        adapted,
        tokenizer,
        cache_tokens=cache_tokens,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        processor=processor,
    )


def _decoder_class(architecture: str, source: object, families: Iterable[str]) -> Any:
    """Return the class of transformers with this name, which can generate text.

    Args:
        families: architectures with an installed family.
    Raises: UnsupportedModelError: the class is missing or does not generate text.
    """
    import transformers

    model_class = getattr(transformers, architecture, None)
    reason = (
        f"architecture {architecture!r} is not supported: transformers {transformers.__version__} "
        f"has no such model, and no family for it is installed; similar ones are "
        f"{near_names(architecture, families)}: `interposer explain` lists all"
    )
    suggestion = "a later transformers, or a plugin with a family for it"
    if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
        if model_class.can_generate():
            return model_class
        reason = f"architecture {architecture!r} does not generate text"
        suggestion = "interposer_adapt.load_encoder(path), which makes vectors or classes of texts"
    raise UnsupportedModelError(source, reason, suggestion)
