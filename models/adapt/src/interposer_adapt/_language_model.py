"""The entry point ``language_model``, which runs an adapted decoder in interposer's engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interposer import Placement, Resolver, Site
from interposer.errors import ConfigError, InterposerError, UnsupportedModelError, described
from interposer_adapt._adapted_images import UnsupportedImagesError, add_images
from interposer_adapt._agreement import plain_logits
from interposer_adapt._api import Adapted, add_note, is_in_force
from interposer_adapt._attention_registry import (
    configs_naming_attention,
    register_attention,
    using_adapted_attention,
)
from interposer_adapt._attention_trace import AttentionTrace, UnsupportedLayerError
from interposer_adapt._forwards import intercepted_by
from interposer_adapt._media_encoder import CACHED_BYTES
from interposer_adapt._paged_decoder import FAILURES, DecoderSizes, PagedDecoder, try_paging
from interposer_adapt._sequence_caches import SequenceCaches, sequence_caches
from interposer_engine import LanguageModel, TextTokenizer
from interposer_engine.parts import (
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_MAX_STEP_TOKENS,
    CacheBudget,
    CacheShape,
    Engine,
    GenerationSettings,
    MissingTokenizer,
    Runner,
    check_cache,
    check_sizes,
    end_token_ids,
    unmeasured_budget,
)
from interposer_ops.layers.sampler import Sampler

_SAMPLER = "sampler"
_TRACED_TOKENS = 3
_DEFAULT_CONTEXT_TOKENS = 4096
_GENERATE_INSTEAD = "adapted.model.generate(...), which runs every model"


@dataclass(frozen=True, eq=False)
class _Plan:
    """The fields of a plan that a ``LanguageModel`` reads."""

    resolver: Resolver
    placement: Placement
    path: Path
    quantization: Any
    generation: GenerationSettings
    dtype: torch.dtype

    def numerics(self) -> AbstractContextManager[None]:
        return self.placement.platform.numerics(self.resolver.config.numerics)


def language_model(
    adapted: Adapted[Any],
    tokenizer: Any = None,
    *,
    cache_tokens: int | None = None,
    max_sequences: int = DEFAULT_MAX_SEQUENCES,
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS,
    processor: Any = None,
) -> LanguageModel:
    """Load an adapted decoder into interposer's engine: continuous batching over a paged KV cache.

    The model's own forward runs. A trace records the attention layers, and a trial compares the
    logits of a paged batch with the model's logits without a cache.

    Args:
        adapted: the result of ``adapt``; do not restore the model while the engine is in use.
        tokenizer: a tokenizer of transformers, a ``TextTokenizer``, or a directory. Without one,
            prompts are token ids.
        cache_tokens, max_sequences, max_step_tokens: as for ``load``; if ``cache_tokens`` is None,
            the cache may take a quarter of the free memory.
        processor: a processor of transformers for the images of prompts. Another trial compares the
            logits of a prompt with images; if they differ, or the model encodes no images, a note
            in ``explain`` gives the reason, and prompts are texts only.
    Raises:
        UnsupportedModelError: a layer keeps a state that pages cannot hold, such as a recurrent
            state, or no paged backend supports the attention; the message names the layer.
        NoCandidateError: no installed backend supports the attention of a layer.
        ConfigError: the model was restored, a size is not a positive integer, the cache does not
            fit, or the config enables graphs or compilation.
        CheckpointError: a configuration of the model states invalid end tokens.
    """
    sizes = {"max_sequences": max_sequences, "max_step_tokens": max_step_tokens}
    check_sizes(cache_tokens=cache_tokens, **sizes)
    _check_adapted(adapted)
    model = adapted.model
    stop_token_ids = _stop_tokens(model)
    name = str(getattr(model.config, "name_or_path", "")) or type(model).__name__
    generation = _generation_settings(model, name)
    if note := generation.unapplied_note(has_encoder=False):
        add_note(adapted, note)
    plan = _Plan(
        adapted.resolver,
        adapted.placement,
        Path(name),
        adapted.quantization,
        generation,
        model.dtype,
    )
    device = plan.placement.device.torch_device
    platform = plan.placement.platform
    decoder, shape, state_bytes = _choose_decoder(adapted, plan, device, cache_tokens, sizes)
    page_size = decoder.page_size
    if cache_tokens is None:
        max_cached_tokens = max_sequences * decoder.config.max_position_embeddings
        budget = unmeasured_budget(
            platform,
            device,
            shape,
            max_cached_tokens,
            max_step_tokens,
            state_bytes,
            encoder_cached_bytes=None if processor is None else CACHED_BYTES,
        )
    else:
        free_bytes = platform.memory(device).free_bytes
        check_cache("language_model", free_bytes, shape, cache_tokens, state_bytes)
        budget = CacheBudget.for_tokens(device, shape, cache_tokens, state_bytes)
    add_note(adapted, str(budget))
    runner = Runner(
        decoder,
        device,
        page_size=page_size,
        num_pages=-(-budget.tokens // page_size),
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        numerics=plan.numerics,
    )
    # The pool assigns the slots by which the decoder finds the cache of a sequence.
    if isinstance(decoder, SequenceCaches):
        decoder.pool = runner.pools[0]
    engine = Engine(
        runner,
        Sampler(Site(plan.resolver, _SAMPLER, model.dtype), decoder.config.vocab_size),
        stop_token_ids=stop_token_ids,
        seed=plan.resolver.config.seed,
    )
    lm = LanguageModel(engine, _text_tokenizer(tokenizer, plan.path), plan, None)
    if processor is not None:
        try:
            add_images(lm, adapted, decoder, processor, plan)
            add_note(
                adapted,
                f"images are encoded by the adapted model, up to {max_step_tokens} tokens at once",
            )
        except UnsupportedImagesError as error:
            add_note(adapted, f"images are refused: {error}")
    return lm


def _check_adapted(adapted: Adapted[Any]) -> None:
    if not isinstance(adapted, Adapted):
        raise ConfigError(
            f"adapted is of the type {type(adapted).__name__}, must be what adapt() returns. "
            "Try: language_model(adapt(model))"
        )
    if not is_in_force(adapted):
        raise ConfigError("The model was restored. Try: language_model(adapt(model))")
    config = adapted.resolver.config
    if config.kv_cache != "auto":
        raise ConfigError(
            f"kv_cache={config.kv_cache!r} was requested, but the layers of an adapted model are "
            "compared with their own, which round nothing. Try: interposer_engine.load"
        )
    for name, setting in (("graphs", config.graphs == "on"), ("compile", config.compile != "off")):
        if setting:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} was requested, but the forward of an adapted "
                f"model runs as it is. Try: Config({name}='off')"
            )


def _choose_decoder(
    adapted: Adapted[Any],
    plan: _Plan,
    device: str,
    cache_tokens: int | None,
    sizes: Mapping[str, int],
) -> tuple[PagedDecoder | SequenceCaches, CacheShape, int]:
    """Return a decoder over paged KV caches, or one with a transformers cache for each sequence.

    Returns: the decoder, the cache shape of a token, and the bytes of state for ``max_sequences``.
    Raises: UnsupportedModelError: both decoders disagree with the model.
    """
    try:
        config = _decoder_sizes(adapted, plan, device, cache_tokens)
        try:
            paged = _trace_paged_decoder(adapted, plan, device, config)
            _run_trial(adapted, paged, device, plan)
            backends = [layer.backend for layer in paged.attention_layers]
            return paged, CacheShape.of(backends, paged.page_size, **sizes), 0
        except UnsupportedLayerError as error:
            # Pages do not serve the layer; a transformers cache for each sequence may.
            model, in_force = adapted.model, lambda: is_in_force(adapted)
            decoder_and_shape = sequence_caches(model, config, device, plan.numerics, in_force)
            if decoder_and_shape is None:
                raise
            decoder, shape, sequence_bytes = decoder_and_shape
            suffix = ", token by token after the first ones" if decoder.by_token else ""
            add_note(
                adapted,
                f"{error.layer} {error.reason}: each sequence has a cache of transformers, and the "
                f"sequences of a step are computed one after the other{suffix}",
            )
            return decoder, shape, sequence_bytes * (sizes["max_sequences"] + 1)
    except UnsupportedLayerError as error:
        raise UnsupportedModelError(
            plan.path,
            f"{error.layer} {error.reason}, so the engine cannot run this model",
            _GENERATE_INSTEAD,
        ) from None
    except InterposerError:
        raise
    except (AssertionError, *FAILURES) as error:
        raise UnsupportedModelError(
            plan.path,
            f"{type(adapted.model).__name__} fails in a trial of the engine: {described(error)}",
            _GENERATE_INSTEAD,
        ) from error


def _decoder_sizes(
    adapted: Adapted[Any], plan: _Plan, device: str, cache_tokens: int | None
) -> DecoderSizes:
    """Return the vocabulary and context size of a decoder.

    Raises: UnsupportedLayerError: the model is no decoder with a head.
    """
    model: Any = adapted.model
    class_name = type(model).__name__
    if model.config.is_encoder_decoder:
        encoder = model.get_encoder()
        encoder_name = next(
            (n for n, module in model.named_modules() if module is encoder), "encoder"
        )
        raise UnsupportedLayerError(
            encoder_name, type(encoder).__name__, "has outputs that a decoder attends to"
        )
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise UnsupportedLayerError("", class_name, "has no head that returns logits")
    try:
        with plan.numerics(), torch.inference_mode():
            vocab_size = plain_logits(model, [*range(_TRACED_TOKENS)], device).shape[-1]
    except FAILURES as error:
        reason = f"fails on a text of {_TRACED_TOKENS} tokens: {described(error)}"
        raise UnsupportedLayerError("", class_name, reason) from error
    text = model.config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None) or cache_tokens
    if context is None:
        context = _DEFAULT_CONTEXT_TOKENS
        add_note(
            adapted,
            f"the context is {context} tokens, as the config of {class_name} names no "
            "max_position_embeddings; set cache_tokens for another",
        )
    return DecoderSizes(vocab_size, context)


def _trace_paged_decoder(
    adapted: Adapted[Any], plan: _Plan, device: str, config: DecoderSizes
) -> PagedDecoder:
    """Trace one forward of the model, and return a decoder over paged KV caches."""
    model: Any = adapted.model
    trace = AttentionTrace(model, register_attention())
    ids = torch.arange(_TRACED_TOKENS, device=device)[None]
    with (
        plan.numerics(),
        torch.inference_mode(),
        using_adapted_attention(configs_naming_attention(model)),
        intercepted_by(trace),
    ):
        try:
            model(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
        except FAILURES as error:
            reason = f"fails while its layers are traced: {described(error)}"
            raise UnsupportedLayerError("", type(model).__name__, reason) from error
    return PagedDecoder(model, trace.layers, plan.resolver, config, lambda: is_in_force(adapted))


def _run_trial(adapted: Adapted[Any], paged: PagedDecoder, device: str, plan: _Plan) -> None:
    """Run the trial of the paged decoder; after a failure, again with the original rotary angles.

    Some models change all angles as soon as one position of a batch exceeds that context.
    """
    try:
        try_paging(paged, device, plan.numerics)
    except UnsupportedLayerError as error:
        text_config = adapted.model.config.get_text_config(decoder=True)
        rope_parameters = getattr(text_config, "rope_parameters", None) or {}
        original_context = rope_parameters.get("original_max_position_embeddings")
        original_context = original_context or getattr(
            text_config, "original_max_position_embeddings", None
        )
        context = paged.config.max_position_embeddings
        if not isinstance(original_context, int) or original_context >= context:
            raise
        paged.config = replace(paged.config, max_position_embeddings=original_context)
        try_paging(paged, device, plan.numerics)
        add_note(
            adapted,
            f"the context is {original_context} of {context} tokens: beyond, {error.layer} "
            "computes the positions of all sequences of a batch by its longest",
        )


def _text_tokenizer(tokenizer: Any, path: Path) -> TextTokenizer:
    if tokenizer is None:
        return MissingTokenizer(path, "language_model(adapted, tokenizer)")
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        return TextTokenizer(Path(tokenizer))
    if not (
        callable(getattr(tokenizer, "encode", None))
        and callable(getattr(tokenizer, "decode", None))
    ):
        raise ConfigError(
            f"tokenizer is of the type {type(tokenizer).__name__}, which does not encode "
            "and decode. Try: AutoTokenizer.from_pretrained(path), or the path"
        )
    return TextTokenizer.of_transformers(tokenizer)


def _stop_tokens(model: nn.Module) -> frozenset[int]:
    """Return the token ids that end a generation.

    Raises: CheckpointError: a configuration states invalid ids.
    """
    config: Any = model.config
    configs = getattr(model, "generation_config", None), config.get_text_config(decoder=True)
    for config_with_ids in configs:
        if (value := getattr(config_with_ids, "eos_token_id", None)) is not None:
            owner = (
                f"{type(config_with_ids).__name__} of {config.name_or_path or type(model).__name__}"
            )
            return end_token_ids(value, owner)
    return frozenset()


def _generation_settings(model: nn.Module, name: str) -> GenerationSettings:
    """Return the settings of the model's generation config."""
    config: Any = getattr(model, "generation_config", None)
    settings = {} if config is None else config.to_dict()
    return GenerationSettings(f"GenerationConfig of {name}", settings)
