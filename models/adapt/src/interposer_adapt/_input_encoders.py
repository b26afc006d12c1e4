"""Provider of input encoders, entry point of the group ``interposer.input_encoders``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from interposer.errors import install_command
from interposer_engine import Checkpoint, Plan

if TYPE_CHECKING:
    from interposer_adapt._image_encoder import ImageEncoder

MODEL_TYPES = frozenset(
    {
        "gemma3",
        "idefics3",
        "internvl",
        "llama4",
        "llava",
        "llava_next",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    }
)
"""Models whose images are encoded, by ``model_type`` of config.json."""

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def load_input_encoder(checkpoint: Checkpoint, plan: Plan) -> ImageEncoder | None:
    """Load the image encoder of a checkpoint whose text half is loaded by ``plan``.

    Returns: None if the model takes no images, Pillow is not installed, or the checkpoint has no
        processor.
    Raises:
        CheckpointError: files or tensors are missing or corrupt.
        UnsupportedModelError: transformers lacks the model or its processor.
    """
    model_type = checkpoint.config.get("model_type")
    if model_type not in MODEL_TYPES or "vision_config" not in checkpoint.config:
        return None
    notes = plan.resolver.notes
    if find_spec("PIL") is None:
        notes.append(
            "images are refused, because Pillow is not installed. "
            f"Try: {install_command('interposer-adapt[images]')}"
        )
        return None
    if not any((checkpoint.path / name).is_file() for name in _PROCESSOR_FILES):
        notes.append(
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
    num_bound = sum(place.is_bound for place in tower.adapted.places)
    notes.append(
        f"images are encoded by {type(tower.adapted.model).__name__} of transformers, with "
        f"{num_bound} of {len(tower.adapted.places)} modules on kernels: "
        "interposer.explain(lm.input_encoder) lists them"
    )
    return ImageEncoder(tower, processor, plan)
