"""The door to the engine: an adapted decoder as a ``LanguageModel``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interposer import Placement, Resolver, Site
from interposer.errors import ConfigError, UnsupportedModelError
from interposer_models._adapt.attention_names import (
    following,
    named_attention,
    register_attention,
)
from interposer_models._adapt.attention_trace import AttentionTrace, UnservedLayerError
from interposer_models._adapt.handle import Adapted, is_in_force, remark
from interposer_models._adapt.paged_decoder import DecoderSizes, PagedDecoder
from interposer_models._adapt.paged_trial import try_paging
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
from interposer_models._language_model import LanguageModel
from interposer_models._tokenizer import MissingTokenizer, TextTokenizer
from interposer_ops.layers.sampler import Sampler

_SAMPLER = "sampler"
_TRACED_TOKENS = 3


@dataclass(frozen=True, eq=False)
class _Plan:
    """The part of a plan that a ``LanguageModel`` reads."""

    resolver: Resolver
    placement: Placement
    path: Path
    quantization: Any

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
    """
    check_sizes(
        cache_tokens=cache_tokens, max_sequences=max_sequences, max_step_tokens=max_step_tokens
    )
    _check(adapted)
    model = adapted.model
    name = str(getattr(model.config, "name_or_path", "")) or type(model).__name__
    plan = _Plan(adapted.resolver, adapted.placement, Path(name), adapted.quantization)
    device = plan.placement.device.torch_device
    try:
        paged = _paged(adapted, plan, device, cache_tokens)
        _try(adapted, paged, device, plan)
    except UnservedLayerError as error:
        raise UnsupportedModelError(
            name,
            f"{error.layer} {error.reason}, so the engine cannot run this model",
            "adapted.model.generate(...), which runs every model",
        ) from None
    size, platform = paged.page_size, plan.placement.platform
    backends = [layer.backend for layer in paged.attention_layers]
    shape = CacheShape.of(backends, size, max_sequences, max_step_tokens)
    if cache_tokens is None:
        wanted = max_sequences * paged.config.max_position_embeddings
        budget = unmeasured_budget(platform, device, shape, wanted, max_step_tokens)
    else:
        check_cache("language_model", platform.memory(device).free_bytes, shape, cache_tokens)
        budget = CacheBudget.asked_for(device, shape, cache_tokens)
    remark(adapted, str(budget))
    runner = Runner(
        paged,
        device,
        page_size=size,
        num_pages=-(-budget.tokens // size),
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        numerics=plan.numerics,
    )
    engine = Engine(
        runner,
        Sampler(Site(plan.resolver, _SAMPLER, model.dtype), paged.config.vocab_size),
        stop_token_ids=_stop_tokens(model),
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


def _paged(
    adapted: Adapted[Any], plan: _Plan, device: str, cache_tokens: int | None
) -> PagedDecoder:
    """Trace one forward and return the decoder over pages."""
    model: Any = adapted.model
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        encoder = model.get_encoder()
        found = next((n for n, module in model.named_modules() if module is encoder), "encoder")
        raise UnservedLayerError(
            found, type(encoder).__name__, "has outputs that a decoder attends to"
        )
    if not callable(getattr(model, "get_output_embeddings", None)) or (
        model.get_output_embeddings() is None
    ):
        raise UnservedLayerError("", kind, "has no head that returns logits")
    trace = AttentionTrace(model, register_attention())
    ids = torch.arange(_TRACED_TOKENS, device=device)[None]
    with (
        plan.numerics(),
        torch.inference_mode(),
        named_attention(following(model)),
        visited_by(trace),
    ):
        out = model(input_ids=ids, position_ids=ids, use_cache=False, return_dict=True)
    text = model.config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None) or cache_tokens
    if context is None:
        raise ConfigError(
            f"The config of {kind} names no max_position_embeddings. "
            "Try: language_model(adapted, cache_tokens=4096), which is the context then"
        )
    sizes = DecoderSizes(out.logits.shape[-1], context)
    return PagedDecoder(model, trace.layers, plan.resolver, sizes, lambda: is_in_force(adapted))


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
    """Return the ids that end a generation of the model."""
    config: Any = model.config
    settings = getattr(model, "generation_config", None) or config.get_text_config(decoder=True)
    found = getattr(settings, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list | tuple) else [found])
