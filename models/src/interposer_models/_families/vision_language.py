"""Text decoders of checkpoints that also contain an encoder of images or sounds, such as Llava.

A ``TextDecoder`` reads the nested ``text_config`` of config.json, and maps the tensor names of all
published layouts to ``model.language_model.*`` and ``lm_head``. The tensors of the encoder have no
place in the decoder.

Source: arXiv:2304.08485 (Llava), arXiv:2310.03744 (Llava 1.5), llava-vl.github.io (Llava-Next),
mistral.ai/news/mistral-small-3-1, mistral.ai/news/mistral-3, arXiv:2408.12637 (Idefics3),
arXiv:2504.05299 (SmolVLM), arXiv:2504.10479 (InternVL3), arXiv:2407.07726 (PaliGemma),
arXiv:2412.03555 (PaliGemma 2), arXiv:2503.19786 (Gemma 3), transformers 5.23, models/gemma4 (Gemma
4), arXiv:2409.12191 (Qwen2-VL), arXiv:2502.13923 (Qwen2.5-VL), arXiv:2511.21631 (Qwen3-VL),
huggingface.co/Qwen/Qwen3.5-27B, huggingface.co/Qwen/Qwen3.5-35B-A3B,
ai.meta.com/blog/llama-4-multimodal-intelligence, arXiv:2407.10759 (Qwen2-Audio), arXiv:2507.13264
(Voxtral).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

from torch import nn

from interposer import AttentionSpec, Site
from interposer.errors import CheckpointError
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.moe import MixtureMLP
from interposer_models._decoder.settings import FrameNames
from interposer_models._families.gemma import Gemma, Gemma2, Gemma3
from interposer_models._families.gemma4 import Gemma4
from interposer_models._families.gpt_oss import GptOss
from interposer_models._families.llama import Llama, Ministral3, Mistral
from interposer_models._families.llama4 import Llama4
from interposer_models._families.qwen import Qwen2, Qwen3, Qwen3Moe
from interposer_models._families.qwen3_next import Qwen3_5, Qwen3_5Moe
from interposer_models._family_choice import UnknownDecoderError

_DECODER = "model.language_model"
# The decoder's names in the published layouts. Names may be in regular expressions of
# quantization_config, in which dots are escaped.
_HEAD = re.compile(r"^(re:)?(\^?)language_model\\?\.lm_head\b")
_BODY = re.compile(
    r"^(re:)?(\^?)(?:language_model\\?\.model|language_model"
    r"|model\\?\.(?:language_model|text_model)(?:\\?\.model)?"
    r"|model(?=\\?\.(?:embed_tokens|layers|norm)\b))(?=\\?\.|$)"
)
# The encoder of images or sounds, and the modules between encoder and decoder.
_ENCODER = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|visual|audio_tower|multi_modal_projector"
    r"|connector|image_newline|embed_vision|embed_audio)(?:\.|$)"
)


def decoder_name(name: str) -> str:
    """Return a tensor's or module's name in the layout of ``TextDecoder``."""
    return _BODY.sub(rf"\1\2{_DECODER}", _HEAD.sub(r"\1\2lm_head", name))


def _with_decoder_names(setting: Any) -> Any:
    """Return a part of quantization_config in which all modules have their names in the decoder."""
    if isinstance(setting, Mapping):
        return {decoder_name(key): _with_decoder_names(part) for key, part in setting.items()}
    if isinstance(setting, list):
        return [_with_decoder_names(part) for part in setting]
    return decoder_name(setting) if isinstance(setting, str) else setting


def text_config_of(config: Mapping[str, Any], source: object) -> Mapping[str, Any]:
    """Return the settings of the decoder in config.json.

    Raises: CheckpointError: they are missing.
    """
    text_config = config.get("text_config")
    if not isinstance(text_config, Mapping):
        reason = f"text_config: must be the settings of the text model (got {text_config!r:.100})"
        raise CheckpointError(source, reason, "correct the field")
    return text_config


class TextDecoder(DecoderFamily):
    """Base that makes a family of text models the decoder of a checkpoint with an encoder.

    Attributes:
        defaults: values of fields that transformers 4 did not write to a nested ``text_config``.
    """

    frame = FrameNames(_DECODER)
    defaults: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate the text decoder's settings in config.json, and return them."""
        text_config = text_config_of(config, source)
        fields = {**cls.defaults, **text_config}
        # Both may state these fields; transformers reads the outer ones.
        quantization = config.get("quantization_config", text_config.get("quantization_config"))
        dtypes = (part.get(name) for part in (config, fields) for name in ("dtype", "torch_dtype"))
        fields["dtype"] = next((dtype for dtype in dtypes if dtype is not None), None)
        fields["quantization_config"] = _with_decoder_names(quantization)
        # A checkpoint that stores an LM head is loaded with it in any case.
        ties = [part.get("tie_word_embeddings") for part in (config, text_config)]
        if any(tie is not None for tie in ties):
            fields["tie_word_embeddings"] = any(ties)
        return super().parse(fields, f"{source}, text_config")

    def is_encoder_tensor(self, name: str) -> bool:
        """Say whether the checkpoint tensor ``name`` belongs to an encoder of images or sounds."""
        return _ENCODER.match(name) is not None

    def renamed(self, name: str) -> str | None:
        """Map the name of a checkpoint tensor to the decoder's; None for the encoder's tensors."""
        return None if self.is_encoder_tensor(name) else decoder_name(name)


class LlamaText(Llama, TextDecoder):
    """Llama as the decoder of a vision-language checkpoint."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }


class VoxtralText(LlamaText):
    """Llama as the decoder of Voxtral; config.json may omit the fields of the smaller model."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000000.0,
        "head_dim": 128,
    }


class MistralText(Mistral, TextDecoder):
    """Mistral as the decoder of a vision-language checkpoint."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }


class Ministral3Text(Ministral3, TextDecoder):
    """Ministral 3 as the decoder of a vision-language checkpoint."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
    }


class Qwen2Text(Qwen2, TextDecoder):
    """Qwen2 as the decoder of a vision-language checkpoint."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    }


class Qwen3Text(Qwen3, TextDecoder):
    """Qwen3 as the decoder of a vision-language checkpoint."""

    defaults: ClassVar[Mapping[str, Any]] = Qwen2Text.defaults


class Qwen3MoeText(Qwen3Moe, TextDecoder):
    """Qwen3's MoE model as the decoder of a vision-language checkpoint."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    }


class GptOssText(GptOss, TextDecoder):
    """gpt-oss as the decoder of a vision-language checkpoint."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }


class PrefixText(TextDecoder):
    """Base of PaliGemma's decoders: the tokens of a prompt attend to each other in both directions.

    Windows do not apply within a prompt. The context is therefore at most one window, in which they
    have no effect.
    """

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate the decoder's settings in config.json, and return them."""
        # transformers writes this field, by which only models without a prefix differ.
        text_config = {**text_config_of(config, source), "use_bidirectional_attention": False}
        settings = super().parse({**config, "text_config": text_config}, source)
        context, window = settings.max_position_embeddings, settings.sliding_window
        context = context if window is None else min(context, window)
        return settings.model_copy(update={"max_position_embeddings": context})

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec of a prefix-LM without windows."""
        spec = super().attention_spec(site, index, page_size)
        return replace(spec, prefix_lm=True, window_tokens=None)


class GemmaText(Gemma, PrefixText):
    """Gemma as the decoder of PaliGemma."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }


class Gemma2Text(Gemma2, PrefixText):
    """Gemma 2 as the decoder of PaliGemma 2."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    }


class Gemma3Text(Gemma3, TextDecoder):
    """Gemma 3 as the decoder of a vision-language checkpoint."""

    runs_attend_both_ways: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    }


class Gemma4Text(Gemma4, TextDecoder):
    """Gemma 4 as the decoder of a checkpoint with encoders.

    In the larger models, the tokens of an image attend to each other in both directions in layers
    with a window, as far as the window reaches.
    """

    runs_attend_both_ways: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    }

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate the decoder's settings in config.json, and return them.

        Raises:
            CheckpointError: the text_config is missing, or one of its fields is not valid.
            UnknownDecoderError: the decoder has experts.
        """
        if text_config_of(config, source).get("enable_moe_block"):
            raise UnknownDecoderError(
                source,
                "text_config has enable_moe_block, and experts of Gemma 4 have no family",
                "interposer_engine.load or `interposer run`, which adapt the model of transformers",
            )
        return super().parse(config, source)

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        """Return the attention spec, in which only windowed layers may attend both ways."""
        spec = super().attention_spec(site, index, page_size)
        attends_both_ways = self.use_bidirectional_attention == "vision" and spec.window_tokens
        return replace(spec, prefix_lm=spec.prefix_lm and bool(attends_both_ways))

    def renamed(self, name: str) -> str | None:
        """Map a tensor's name; None for the encoders, and for layers that read another's cache."""
        decoder = TextDecoder.renamed(self, name)
        return None if decoder is None else Gemma4.renamed(self, decoder)


class Qwen2VL(Qwen2, TextDecoder):
    """Settings of the decoder of Qwen2-VL and Qwen2.5-VL, which has M-RoPE."""

    default_mrope_section: ClassVar[tuple[int, int, int] | None] = (16, 24, 24)
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
    }

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate the decoder's settings; the first releases state them outside of text_config."""
        if config.get("text_config") is None:
            config = {**config, "text_config": config}
        return super().parse(config, source)


class Qwen3VL(Qwen3, TextDecoder):
    """Settings of the decoder of Qwen3-VL, which has interleaved M-RoPE."""

    default_mrope_section: ClassVar[tuple[int, int, int] | None] = (24, 20, 20)
    is_mrope_interleaved: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
    }


class Qwen3VLMoe(Qwen3Moe, TextDecoder):
    """Settings of the decoder of Qwen3-VL's MoE models, whose experts are stored stacked."""

    default_mrope_section: ClassVar[tuple[int, int, int] | None] = (24, 20, 20)
    is_mrope_interleaved: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
    }

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Self:
        """Validate the decoder's settings in config.json, and return them."""
        # transformers 5 writes its default of this field to text_config, and does not read it.
        text_config = {**text_config_of(config, source), "tie_word_embeddings": None}
        return super().parse({**config, "text_config": text_config}, source)

    def mlp(self, block: Site, index: int) -> nn.Module:
        """Build the MoE layer of layer ``index``, or a dense MLP."""
        if not self.has_experts(index):
            return DecoderFamily.mlp(self, block, index)
        layer = MixtureMLP(block.at("mlp"), self.experts(), "gate", renormalize=True)
        # Published matrices are [inputs, outputs]; transformers 5 writes [outputs, inputs].
        for matrices in layer.experts.parameters():
            matrices.stored_either_way = True  # type: ignore[attr-defined]
        return layer


class Qwen3_5VL(Qwen3_5, TextDecoder):
    """Settings of the decoder of Qwen3.5's dense models, which has interleaved M-RoPE."""

    default_mrope_section: ClassVar[tuple[int, int, int] | None] = (11, 11, 10)
    is_mrope_interleaved: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    }


class Qwen3_5MoeVL(Qwen3_5Moe, TextDecoder):
    """Settings of the decoder of Qwen3.5's MoE models, which has interleaved M-RoPE."""

    default_mrope_section: ClassVar[tuple[int, int, int] | None] = (11, 11, 10)
    is_mrope_interleaved: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    }


class Llama4Text(Llama4, TextDecoder):
    """Llama 4 as the decoder of a vision-language checkpoint."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "max_position_embeddings": 131072,
    }


class AnyText(TextDecoder):
    """Checkpoints whose ``text_config`` names the family of the decoder, whose settings they have.

    These are Llava, Llava-Next, Mistral 3, Idefics3, SmolVLM and InternVL.

    Attributes:
        decoders: the families of decoders by ``model_type`` of ``text_config``.
        default_decoder: the type of a ``text_config`` that names none.
    """

    # Llava's oldest checkpoints name no type.
    default_decoder: ClassVar[str] = "llama"

    decoders: ClassVar[Mapping[str, type[TextDecoder]]] = {
        "llama": LlamaText,
        "mistral": MistralText,
        "ministral3": Ministral3Text,
        "qwen2": Qwen2Text,
        "qwen3": Qwen3Text,
        "qwen3_moe": Qwen3MoeText,
        "gpt_oss": GptOssText,
    }

    @classmethod
    def parse(  # type: ignore[override]  # the settings are of the class of the decoder
        cls, config: Mapping[str, Any], source: object
    ) -> TextDecoder:
        """Validate the decoder's settings in config.json, and return them.

        Raises:
            CheckpointError: the text_config is missing, or one of its fields is not valid.
            UnknownDecoderError: the decoder is of another family.
        """
        kind = text_config_of(config, source).get("model_type", cls.default_decoder)
        if kind not in cls.decoders:
            known = ", ".join(cls.decoders)
            raise UnknownDecoderError(
                source,
                f"text_config has the model_type {kind!r}; decoders are of {known}",
                "interposer_engine.load or `interposer run`, which adapt the model of transformers",
            )
        return cls.decoders[kind].parse(config, source)


class PaliGemma(AnyText):
    """Settings of the decoder of PaliGemma and PaliGemma 2."""

    default_decoder: ClassVar[str] = "gemma"
    decoders: ClassVar[Mapping[str, type[TextDecoder]]] = {"gemma": GemmaText, "gemma2": Gemma2Text}


class Qwen2Audio(AnyText):
    """Settings of the decoder of Qwen2-Audio."""

    default_decoder: ClassVar[str] = "qwen2"
    decoders: ClassVar[Mapping[str, type[TextDecoder]]] = {"qwen2": Qwen2Text}


class Voxtral(AnyText):
    """Settings of the decoder of Voxtral."""

    decoders: ClassVar[Mapping[str, type[TextDecoder]]] = {"llama": VoxtralText}
