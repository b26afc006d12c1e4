"""Provider of input encoders, entry point of the group ``interposer.input_encoders``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from interposer.errors import install_command
from interposer_engine import Checkpoint, Plan

if TYPE_CHECKING:
    from interposer_adapt._api import Adapted
    from interposer_adapt._audio_encoder import AudioEncoder
    from interposer_adapt._image_encoder import ImageEncoder

IMAGE_MODELS = frozenset(
    {
        "gemma3",
        "gemma4",
        "idefics3",
        "internvl",
        "llama4",
        "llava",
        "llava_next",
        "mistral3",
        "paligemma",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    }
)
"""Models whose images are encoded, by ``model_type`` of config.json."""
AUDIO_MODELS = frozenset({"qwen2_audio", "voxtral"})
"""Models whose sounds are encoded, by ``model_type`` of config.json."""
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def load_input_encoder(checkpoint: Checkpoint, plan: Plan) -> ImageEncoder | AudioEncoder | None:
    """Load the encoder of images or sounds of a checkpoint whose text half is loaded by ``plan``.

    Returns: None if the model takes neither, or a package or a file that images need is missing.
    Raises:
        CheckpointError: files or tensors are missing or corrupt.
        UnsupportedModelError: transformers lacks the model or its processor.
    """
    model_type = checkpoint.config.get("model_type")
    if model_type in IMAGE_MODELS and "vision_config" in checkpoint.config:
        return _image_encoder(checkpoint, plan, str(model_type))
    if model_type in AUDIO_MODELS and "audio_config" in checkpoint.config:
        return _audio_encoder(checkpoint, plan)
    return None


def _image_encoder(checkpoint: Checkpoint, plan: Plan, model_type: str) -> ImageEncoder | None:
    if find_spec("PIL") is None:
        plan.resolver.notes.append(
            "images are refused, because Pillow is not installed. "
            f"Try: {install_command('interposer-adapt[images]')}"
        )
        return None
    if not any((checkpoint.path / name).is_file() for name in _PROCESSOR_FILES):
        plan.resolver.notes.append(
            f"images are refused, because {checkpoint.path} has none of "
            f"{', '.join(_PROCESSOR_FILES)}. Try: copy these files of the checkpoint again"
        )
        return None
    # These import transformers and Pillow.
    from interposer_adapt._image_encoder import ImageEncoder
    from interposer_adapt._image_processors import load_processor
    from interposer_adapt._image_tower import load_tower

    processor = load_processor(checkpoint.path, model_type)
    tower = load_tower(checkpoint, plan)
    plan.resolver.notes.append(_note("images", tower.adapted))
    return ImageEncoder(tower, processor, plan)


def _audio_encoder(checkpoint: Checkpoint, plan: Plan) -> AudioEncoder:
    # These import transformers.
    from interposer_adapt._audio_encoder import AudioEncoder
    from interposer_adapt._audio_tower import load_audio_tower

    tower = load_audio_tower(checkpoint, plan)
    plan.resolver.notes.append(_note("sounds", tower.adapted))
    return AudioEncoder(tower, plan)


def _note(media: str, adapted: Adapted[Any]) -> str:
    num_bound = sum(place.is_bound for place in adapted.places)
    return (
        f"{media} are encoded by {type(adapted.model).__name__} of transformers, with "
        f"{num_bound} of {len(adapted.places)} modules on kernels: "
        "interposer.explain(lm.input_encoder) lists them"
    )
