"""Encoders of media in models of transformers, without the decoders of the models."""

from __future__ import annotations

from typing import Any

import transformers

from interposer.errors import CheckpointError, UnsupportedModelError, described, foreign_errors
from interposer_adapt._api import Adapted, adapt
from interposer_engine import Checkpoint, Plan
from interposer_engine.parts import WeightCheck
from interposer_models.decoder import DecoderSettings

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
# Old checkpoints store the numbers of positions, too.
_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})


def load_encoder(checkpoint: Checkpoint, plan: Plan, kind: str) -> Adapted[Any]:
    """Load and adapt the encoder of a checkpoint; no tensor of its decoder is read.

    Args:
        kind: the kind of media that it encodes, for errors.
    Raises:
        CheckpointError: a tensor of the encoder is missing, quantized or not finite, or
            transformers cannot load the encoder.
        UnsupportedModelError: transformers lacks the model.
    """
    path = checkpoint.path
    architecture = str(checkpoint.config["architectures"][0])
    base = getattr(transformers, architecture, None)
    if base is None:
        raise UnsupportedModelError(
            path,
            f"transformers {transformers.__version__} has no {architecture!r}, whose {kind} "
            "encoder is needed",
            "load(path, text_only=True)",
        )
    _check_plain(checkpoint, plan, kind)
    try:
        config = transformers.AutoConfig.from_pretrained(path, **_LOCAL)
        # The encoder of a quantized checkpoint is plain.
        vars(config).pop("quantization_config", None)
        if kind == "image" and getattr(config, "audio_config", None) is not None:
            config.audio_config = None  # Gemma 4 has both encoders
        model, report = _without_decoder(base).from_pretrained(
            path, config=config, dtype=plan.dtype, output_loading_info=True, **_LOCAL
        )
    except foreign_errors() as error:
        raise CheckpointError(
            path,
            f"transformers does not load its {kind} encoder: {described(error)}",
            "copy all files of the checkpoint again, or load(path, text_only=True)",
        ) from error
    if absent := sorted({*report["missing_keys"], *report["mismatched_keys"]}):
        raise CheckpointError(
            path,
            f"lacks the tensor {absent[0]!r}, one of {len(absent)} that its {kind} encoder needs",
            "copy all files of the checkpoint again, or load(path, text_only=True)",
        )
    model = model.eval().to(plan.placement.device.torch_device)
    policy = plan.resolver.config
    WeightCheck(policy.weight_check, plan.placement.platform).check_parameters(model, path)
    # Rules with a glob name modules of the decoder.
    rules = {
        name: {key: rule for key, rule in getattr(policy, name).items() if "@" not in key}
        for name in ("kernels", "layers", "attention")
    }
    return adapt(model, policy.model_copy(update={**rules, "strict": False}))


def _check_plain(checkpoint: Checkpoint, plan: Plan, kind: str) -> None:
    """Raise CheckpointError if weights of the encoder are quantized.

    transformers would read 8-bit weights without their scales.
    """
    decoder = plan.decoder
    if not isinstance(decoder, DecoderSettings):
        return
    quantized = {
        name: dtype
        for name, dtype in sorted(checkpoint.dtypes().items())
        if dtype not in _PLAIN_DTYPES and decoder.is_encoder_tensor(name)
    }
    for name, dtype in quantized.items():
        raise CheckpointError(
            checkpoint.path,
            f"the weights of its {kind} encoder are quantized: {name!r}, one of {len(quantized)} "
            f"such tensors, is stored as {dtype}. Only plain encoders are supported",
            f"a checkpoint whose {kind} encoder was left out of quantization, or "
            "load(path, text_only=True)",
        )


def _without_decoder(base: Any) -> Any:
    """Return a subclass of a model of transformers that is built without its decoder."""

    class Encoder(base):  # type: ignore[misc]
        # Tensors of the decoder remain in the files.
        _keys_to_ignore_on_load_unexpected = ("",)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            table, head = base.get_input_embeddings(self), base.get_output_embeddings(self)
            for parent in {id(model): model for model in (self, self.base_model)}.values():
                for name, child in list(parent.named_children()):
                    modules = list(child.modules())
                    is_decoder = any(module is table or module is head for module in modules)
                    if is_decoder and self.base_model is not child:
                        delattr(parent, name)
            self.all_tied_weights_keys: dict[str, str] = {}

        def get_input_embeddings(self) -> None:
            return None

        def get_output_embeddings(self) -> None:
            return None

    Encoder.__name__ = base.__name__
    return Encoder
