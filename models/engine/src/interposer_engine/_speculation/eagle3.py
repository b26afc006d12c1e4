"""EAGLE-3 draft heads: one block that reads hidden states of three layers of the target model.

``load_eagle3_head`` reads a checkpoint, and checks that the head fits the model.

Dimensions: T tokens, R tokens with requested predictions, H hidden size of the head, F three times
the hidden size of the model, V vocabulary of the model, W vocabulary of the head.

Source: arXiv:2503.01840; huggingface.co/yuhuili/EAGLE3-LLaMA3.1-Instruct-8B for names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from interposer import AttentionSpec, Config, PluggableLayer, Resolver, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_engine._checkpoint.dequantize import dequantize_once
from interposer_engine._checkpoint.opening import config_source, open_checkpoint, open_folder
from interposer_engine._quantize.settings import quantization_settings
from interposer_engine._speculation.mtp import HeadDraftSource, load_head
from interposer_engine._speculation.settings import Speculation, Target, check_sources
from interposer_models import CausalLM
from interposer_models.decoder import DecoderFamily, Positive, PredictionHead
from interposer_ops.attention import common_page_size
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.embedding import Embedding, LMHead
from interposer_ops.layers.linear import Linear, MergedLinear
from interposer_ops.layers.rotary import RotaryEmbedding
from interposer_ops.layers.self_attention import SelfAttention
from interposer_ops.rotary import rotary_table

_BLOCK = "midlayer"
_FIRST_POSITIONS = 4096


def read_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the indices of the three target-model layers whose inputs an EAGLE-3 head reads."""
    return 2, num_layers // 2, num_layers - 3


class WideAttention(SelfAttention):
    """Attention whose input ``[T, 2 * H]`` joins a token embedding and a hidden state."""

    def __init__(
        self, site: Site, spec: AttentionSpec, hidden_size: int, rotary_size: int, bias: bool
    ) -> None:
        PluggableLayer.__init__(self, site)
        size = self.head_size = spec.head_size
        width, kv_width = spec.num_heads * size, spec.num_kv_heads * size
        self.sizes = (width, kv_width, kv_width)
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True))
        # Twice the hidden size, because the input is an embedding and a hidden state side by side.
        self.qkv_proj = MergedLinear(site.at("qkv_proj"), 2 * hidden_size, parts, bias)
        self.o_proj = Linear(site.at("o_proj"), width, hidden_size, bias)
        self.q_norm = self.k_norm = None
        self.rotary = RotaryEmbedding(site.at("rotary"), size, rotary_size)
        self.attn = Attention(site.at("attn"), spec)


class Eagle3(DecoderFamily):
    """Settings of an EAGLE-3 head: a Llama of one layer, with a smaller vocabulary for drafts."""

    num_hidden_layers: Annotated[int, Field(ge=1, le=1)] = 1
    draft_vocab_size: Positive
    target_hidden_size: Positive | None = None
    eagle_config: dict[str, Any] | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None

    @property
    def stated_layers(self) -> object:
        """The layer numbers that the config states for the head's inputs, or None."""
        fields = {"eagle_aux_hidden_state_layer_ids": self.eagle_aux_hidden_state_layer_ids}
        return {**fields, **(self.eagle_config or {})}["eagle_aux_hidden_state_layer_ids"]

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}"
            )
        return self

    def self_attention(self, site: Site, index: int, spec: AttentionSpec) -> SelfAttention:
        """Build the attention that reads a token embedding and a hidden state."""
        return WideAttention(site, spec, self.hidden_size, self.rotary_size, self.attention_bias)

    def spec(self, site: Site, page_size: int) -> AttentionSpec:
        """Return the ``AttentionSpec`` of the head."""
        return self.attention_spec(site.at(f"{_BLOCK}.self_attn"), 0, page_size)


class Eagle3Head(PredictionHead):
    """An EAGLE-3 head, which drafts tokens for a target model.

    The first step predicts the token after the next one from three hidden states of the model.
    Later steps read the head's own states, which are taken before the last norm.

    Args:
        embeds: Whether the head has a separate embedding instead of the model's.
    Attributes:
        places: ``[W]`` int64, the model's token id of each token of the head; None if ids are
            equal.
    """

    config: Eagle3
    places: Tensor | None = None

    def __init__(
        self, site: Site, config: Eagle3, page_size: int, model: CausalLM, embeds: bool
    ) -> None:
        super().__init__()
        # The tuple hides the model from torch, which would register it as a submodule.
        size, self.config, self._model = config.hidden_size, config, (model,)
        self.layers = read_layers(model.model.config.num_hidden_layers)
        input_size = len(self.layers) * model.model.config.hidden_size
        self.fc = Linear(site.at("fc"), input_size, size, bias=False)
        self.embed_tokens = (
            Embedding(site.at("embed_tokens"), config.vocab_size, size) if embeds else None
        )
        block = site.at(_BLOCK)
        self.token_norm: Any = config.norm(block.at("input_layernorm"))
        self.state_norm: Any = config.norm(block.at("hidden_norm"))
        attention_site = block.at("self_attn")
        self.self_attn = config.self_attention(
            attention_site, 0, config.attention_spec(attention_site, 0, page_size)
        )
        self.inner_norm: Any = config.norm(block.at("post_attention_layernorm"))
        self.mlp: nn.Module = config.mlp(block, 0)
        self.norm: Any = config.norm(site.at("norm"))
        self.lm_head = LMHead(site.at("lm_head"), config.draft_vocab_size, size)
        self._table: tuple[Tensor, Tensor] | None = None
        self.unread = ("d2t", "t2d")

    def renamed(self, name: str) -> str | None:
        """Map a tensor name of a published EAGLE-3 checkpoint to the name in this module."""
        return name.removeprefix("model.").replace("layers.0.", f"{_BLOCK}.", 1)

    def reserve_positions(self, count: int, device: str) -> None:
        """Compute rotary angles for at least ``count`` positions."""
        if self._table is None or count > len(self._table[0]):
            # Twice the needed positions, so that growing sequences rarely compute the table again.
            rows, config = max(2 * count, _FIRST_POSITIONS), self.config
            size, longest = config.rotary_size, max(rows, config.max_position_embeddings)
            cos, sin = rotary_table(rows, size, *config.rotation(0), longest)
            self._table = cos.to(device), sin.to(device)

    def fused(self, states: Tensor) -> Tensor:
        """Project the concatenated hidden states of three layers, ``[T, F]``, to ``[T, H]``."""
        return self.fc(states)  # type: ignore[no-any-return]

    def forward(
        self,
        token_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        caches: Sequence[Any],
        plans: Sequence[Any],
        rows: Tensor,
    ) -> Tensor:
        """Compute the head's hidden states of the tokens at ``rows``; see ``PredictionHead``."""
        assert self._table is not None
        cos, sin = (table[positions] for table in self._table)
        embedding = self.embed_tokens or self._model[0].model.embed_tokens
        token = self.token_norm(embedding(token_ids))
        x = torch.cat([token, self.state_norm(states)], dim=-1)
        x = self.self_attn(x, cos, sin, caches[0], plans[0], rows)
        # The residual connection starts from the fused hidden state, not from the token embedding.
        x, residual = self.inner_norm.forward_add(x, states[rows])
        return (residual + self.mlp(x)).to(states.dtype)  # type: ignore[no-any-return]

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits ``[R, V]``; tokens outside the head's vocabulary get -inf."""
        logits: Tensor = self.lm_head(self.norm(states))
        if self.places is None:
            return logits
        size = self._model[0].config.vocab_size
        return logits.new_full((len(logits), size), float("-inf")).index_copy(
            1, self.places, logits
        )


_ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
_LEAST_LAYERS = 6  # with fewer, the three layers that a head reads would coincide


def load_eagle3_head(
    path: str | Path, settings: Speculation, target: Target
) -> HeadDraftSource | None:
    """Load an EAGLE-3 head from a folder or hub name; return None if the path is a full model.

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
    notes = dequantize_once(head, site, planned.placement)
    load_head(head, checkpoint, target, resolver)
    return HeadDraftSource(head, settings, target, page_size, f"EAGLE-3 head {path}", notes)


def _is_head(path: str | Path, config: Config) -> bool:
    """Return whether the config at a path describes an EAGLE-3 head, without reading weights."""
    fields = open_checkpoint(path, config)[0].config
    architectures = fields.get("architectures") or ()
    return "draft_vocab_size" in fields or not _ARCHITECTURES.isdisjoint(architectures)


def _check_fit(config: Eagle3, model: CausalLM, source: Path) -> None:
    """Raise CheckpointError if the head's sizes differ from those of the target model."""
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
    """Return the target model's token id of each head token, ``[W]``; None if all ids are equal.

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
