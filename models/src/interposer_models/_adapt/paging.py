"""The door to the engine: an adapted decoder as a ``LanguageModel``."""

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
from interposer_models._adapt.attention_names import (
    following,
    named_attention,
    register_attention,
)
from interposer_models._adapt.attention_trace import AttentionTrace, UnservedLayerError
from interposer_models._adapt.handle import Adapted, is_in_force, remark
from interposer_models._adapt.noise import alone
from interposer_models._adapt.paged_decoder import DecoderSizes, PagedDecoder
from interposer_models._adapt.paged_trial import FAILURES, try_paging
from interposer_models._adapt.sequence_caches import SequenceCaches, sequence_caches
from interposer_models._adapt.visit import visited_by
from interposer_models._engine.cache_budget import (
    CacheBudget,
    check_cache,
    check_sizes,
    unmeasured_budget,
)
from interposer_models._engine.cache_shape import CacheShape
from interposer_models._engine.engine import Engine
from interposer_models._engine.runner import Runner
from interposer_models._generation_config import GenerationSettings, end_token_ids
from interposer_models._language_model import LanguageModel
from interposer_models._tokenizer import MissingTokenizer, TextTokenizer
from interposer_ops.layers.sampler import Sampler

_SAMPLER = "sampler"
_TRACED_TOKENS = 3
_UNSTATED_CONTEXT = 4096
_GENERATE = "adapted.model.generate(...), which runs every model"


@dataclass(frozen=True, eq=False)
class _Plan:
    """The part of a plan that a ``LanguageModel`` reads."""

    resolver: Resolver
    placement: Placement
    path: Path
    quantization: Any
    generation: GenerationSettings

    def numerics(self) -> AbstractContextManager[None]:
        return self.placement.platform.numerics(self.resolver.config.numerics)


def language_model(
    adapted: Adapted[Any],
    tokenizer: Any = None,
    *,
    cache_tokens: int | None = None,
    max_sequences: int = 64,
    max_step_tokens: int = 2048,
) -> LanguageModel:
    """Run an adapted decoder in this project's engine: continuous batches over a paged cache.

    The model's own forward runs. A trace says what its layers attend to, and a trial compares the
    logits of a batch over pages with those of the model without a cache.

    Args:
        adapted: of ``adapt``; it must not be restored while the result is in use.
        tokenizer: of transformers, a ``TextTokenizer``, or the directory of one. Without, prompts
            are token ids.
        cache_tokens, max_sequences, max_step_tokens: as of ``load``; where ``cache_tokens`` is
            None, the cache may take a quarter of the free memory.
    Raises:
        UnsupportedModelError: a layer keeps a state that pages do not hold, such as a recurrent
            one, or attends as no paged backend does; the text names it.
        NoCandidateError: nothing that is installed attends as a layer does.
        ConfigError: the model was restored, a size is not a positive integer, the cache does not
            fit, or graphs or compilation are asked for.
        CheckpointError: a configuration of the model states end tokens that are no tokens.
    """
    sizes = {"max_sequences": max_sequences, "max_step_tokens": max_step_tokens}
    check_sizes(cache_tokens=cache_tokens, **sizes)
    _check(adapted)
    model = adapted.model
    stop_token_ids = _stop_tokens(model)
    name = str(getattr(model.config, "name_or_path", "")) or type(model).__name__
    generation = _generation_settings(model, name)
    if note := generation.unapplied_note(has_encoder=False):
        remark(adapted, note)
    plan = _Plan(adapted.resolver, adapted.placement, Path(name), adapted.quantization, generation)
    device = plan.placement.device.torch_device
    platform = plan.placement.platform
    decoder, shape, state_bytes = _decoder(adapted, plan, device, cache_tokens, sizes)
    size = decoder.page_size
    if cache_tokens is None:
        wanted = max_sequences * decoder.config.max_position_embeddings
        budget = unmeasured_budget(platform, device, shape, wanted, max_step_tokens, state_bytes)
    else:
        free_bytes = platform.memory(device).free_bytes
        check_cache("language_model", free_bytes, shape, cache_tokens, state_bytes)
        budget = CacheBudget.asked_for(device, shape, cache_tokens, state_bytes)
    remark(adapted, str(budget))
    runner = Runner(
        decoder,
        device,
        page_size=size,
        num_pages=-(-budget.tokens // size),
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        numerics=plan.numerics,
    )
    if isinstance(decoder, SequenceCaches):
        decoder.pool = runner.pools[0]
    engine = Engine(
        runner,
        Sampler(Site(plan.resolver, _SAMPLER, model.dtype), decoder.config.vocab_size),
        stop_token_ids=stop_token_ids,
        seed=plan.resolver.config.seed,
    )
    return LanguageModel(engine, _tokenizer(tokenizer, plan.path), plan, None)


def _check(adapted: Adapted[Any]) -> None:
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
            f"kv_cache={config.kv_cache!r} was asked for, but the layers of an adapted model are "
            "compared with their own, which round nothing. Try: interposer_models.load"
        )
    for name, setting in (("graphs", config.graphs == "on"), ("compile", config.compile != "off")):
        if setting:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} was asked for, but the forward of an adapted "
                f"model runs as it is. Try: Config({name}='off')"
            )


def _decoder(
    adapted: Adapted[Any],
    plan: _Plan,
    device: str,
    cache_tokens: int | None,
    sizes: Mapping[str, int],
) -> tuple[PagedDecoder | SequenceCaches, CacheShape, int]:
    """Return the decoder over pages, or over caches of transformers where pages do not serve it.

    Returns: it, what its tokens take, and the bytes of states for the largest number of sequences.
    Raises: UnsupportedModelError: neither computes what the model computes.
    """
    try:
        config = _sizes(adapted, plan, device, cache_tokens)
        try:
            paged = _paged(adapted, plan, device, config)
            _try(adapted, paged, device, plan)
            backends = [layer.backend for layer in paged.attention_layers]
            return paged, CacheShape.of(backends, paged.page_size, **sizes), 0
        except UnservedLayerError as error:
            model, in_force = adapted.model, lambda: is_in_force(adapted)
            found = sequence_caches(model, config, device, plan.numerics, in_force)
            if found is None:
                raise
            decoder, shape, sequence_bytes = found
            way = ", token by token behind the first ones" if decoder.by_token else ""
            remark(
                adapted,
                f"{error.layer} {error.reason}: each sequence has a cache of transformers, and the "
                f"sequences of a step are computed one after the other{way}",
            )
            return decoder, shape, sequence_bytes * (sizes["max_sequences"] + 1)
    except UnservedLayerError as error:
        raise UnsupportedModelError(
            plan.path,
            f"{error.layer} {error.reason}, so the engine cannot run this model",
            _GENERATE,
        ) from None
    except InterposerError:
        raise
    except (AssertionError, *FAILURES) as error:
        raise UnsupportedModelError(
            plan.path,
            f"{type(adapted.model).__name__} fails in a trial of the engine: {described(error)}",
            _GENERATE,
        ) from error


def _sizes(
    adapted: Adapted[Any], plan: _Plan, device: str, cache_tokens: int | None
) -> DecoderSizes:
    """Return the vocabulary and the context of a decoder.

    Raises: UnservedLayerError: the model is no decoder with a head.
    """
    model: Any = adapted.model
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        encoder = model.get_encoder()
        found = next((n for n, module in model.named_modules() if module is encoder), "encoder")
        raise UnservedLayerError(
            found, type(encoder).__name__, "has outputs that a decoder attends to"
        )
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise UnservedLayerError("", kind, "has no head that returns logits")
    try:
        with plan.numerics(), torch.inference_mode():
            vocab_size = alone(model, [*range(_TRACED_TOKENS)], device).shape[-1]
    except FAILURES as error:
        reason = f"fails on a text of {_TRACED_TOKENS} tokens: {described(error)}"
        raise UnservedLayerError("", kind, reason) from error
    text = model.config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None) or cache_tokens
    if context is None:
        context = _UNSTATED_CONTEXT
        remark(
            adapted,
            f"the context is {context} tokens, as the config of {kind} names no "
            "max_position_embeddings; cache_tokens says another",
        )
    return DecoderSizes(vocab_size, context)


def _paged(adapted: Adapted[Any], plan: _Plan, device: str, config: DecoderSizes) -> PagedDecoder:
    """Trace one forward and return the decoder over pages."""
    model: Any = adapted.model
    trace = AttentionTrace(model, register_attention())
    ids = torch.arange(_TRACED_TOKENS, device=device)[None]
    with (
        plan.numerics(),
        torch.inference_mode(),
        named_attention(following(model)),
        visited_by(trace),
    ):
        try:
            model(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
        except FAILURES as error:
            reason = f"fails while its layers are traced: {described(error)}"
            raise UnservedLayerError("", type(model).__name__, reason) from error
    return PagedDecoder(model, trace.layers, plan.resolver, config, lambda: is_in_force(adapted))


def _try(adapted: Adapted[Any], paged: PagedDecoder, device: str, plan: _Plan) -> None:
    """Run the trial; where angles are in the way, within the context that they were trained for.

    Some change all angles as soon as one position of a batch is beyond that context.
    """
    try:
        try_paging(paged, device, plan.numerics)
    except UnservedLayerError as error:
        text = adapted.model.config.get_text_config(decoder=True)
        angles = getattr(text, "rope_parameters", None) or {}
        trained = angles.get("original_max_position_embeddings")
        trained = trained or getattr(text, "original_max_position_embeddings", None)
        context = paged.config.max_position_embeddings
        if not isinstance(trained, int) or trained >= context:
            raise
        paged.config = replace(paged.config, max_position_embeddings=trained)
        try_paging(paged, device, plan.numerics)
        remark(
            adapted,
            f"the context is {trained} of {context} tokens: beyond, {error.layer} computes the "
            "positions of all sequences of a batch by its longest",
        )


def _tokenizer(given: Any, path: Path) -> TextTokenizer:
    if given is None:
        return MissingTokenizer(path, "language_model(adapted, tokenizer)")
    if isinstance(given, TextTokenizer):
        return given
    if isinstance(given, str | Path):
        return TextTokenizer(Path(given))
    if not (callable(getattr(given, "encode", None)) and callable(getattr(given, "decode", None))):
        raise ConfigError(
            f"tokenizer is of the type {type(given).__name__}, which does not encode and decode. "
            "Try: AutoTokenizer.from_pretrained(path), or the path"
        )
    return TextTokenizer.of_transformers(given)


def _stop_tokens(model: nn.Module) -> frozenset[int]:
    """Return the ids that end a generation of the model.

    Raises: CheckpointError: a configuration states no tokens.
    """
    config: Any = model.config
    settings = getattr(model, "generation_config", None), config.get_text_config(decoder=True)
    for each in settings:
        if (value := getattr(each, "eos_token_id", None)) is not None:
            owner = f"{type(each).__name__} of {config.name_or_path or type(model).__name__}"
            return end_token_ids(value, owner)
    return frozenset()


def _generation_settings(model: nn.Module, name: str) -> GenerationSettings:
    """Return the settings by which the model generates."""
    config: Any = getattr(model, "generation_config", None)
    stated = {} if config is None else config.to_dict()
    return GenerationSettings(f"GenerationConfig of {name}", stated)
