"""Processors of transformers for vision-language models, without torchvision and other extras.

A processor turns one picture into the inputs of the image encoder, and into the tokens that stand
for the picture in a prompt. ``AutoProcessor`` needs torchvision for processors that also take
videos, so the parts that pictures need are put together here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin
from transformers.models.auto import processing_auto

from interposer.errors import CheckpointError, UnsupportedModelError, described, foreign_errors
from interposer_adapt._llama4_images import Llama4ImageProcessor
from interposer_engine.parts import read_json

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class PixtralProcessor(ProcessorMixin):
    """Stands for the class of this name in transformers, which needs torchvision.

    A picture becomes rows of image tokens; each row ends with a break token, and the last row with
    an end token.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: Any = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **_: Any,
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            image_processor, tokenizer, chat_template=chat_template
        )
        self.token_size = patch_size * spatial_merge_size
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        self.image_break_token = image_break_token
        self.image_end_token = image_end_token

    def _process_images(self, images: Any, **kwargs: Any) -> Any:
        # Sides are rounded up to whole tokens.
        return super()._process_images(images, **{**kwargs, "patch_size": self.token_size})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        """Return the tokens of one picture."""
        height, width = (int(side) for side in image_inputs["image_sizes"][image_idx])
        row = self.image_token * (width // self.token_size)
        rows = [row] * (height // self.token_size)
        return self.image_break_token.join(rows) + self.image_end_token


_REPLACEMENTS: Mapping[str, Any] = {
    "PixtralProcessor": PixtralProcessor,
    # Writes the same tokens, and its frames of videos need the package num2words.
    "SmolVLMProcessor": transformers.Idefics3Processor,
}


def load_processor(path: Path, model_type: str) -> Any:
    """Return the processor for pictures of the checkpoint in the folder ``path``.

    Raises:
        CheckpointError: a file of the processor or the tokenizer is missing or corrupt.
        UnsupportedModelError: transformers has no such processor.
    """
    settings = _optional(path / "processor_config.json")
    base = _processor_class(path, settings, model_type)

    class Processor(base):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            # Checkpoints of models that take videos have a part that reads them; here is none.
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    Processor.__name__ = base.__name__
    names: Sequence[str] = Processor.get_attributes()
    accepted = inspect.signature(base.__init__).parameters
    options = {key: settings[key] for key in settings if key in accepted and key not in names}
    options.pop("chat_template", None)
    try:
        if issubclass(base, transformers.Llama4Processor):
            image_processor: Any = Llama4ImageProcessor.from_pretrained(path, **_LOCAL)
        else:
            # The same pixels on every machine, whether torchvision is installed or not.
            image_processor = AutoImageProcessor.from_pretrained(path, backend="pil", **_LOCAL)
        tokenizer = AutoTokenizer.from_pretrained(path, **_LOCAL)
        parts = {"image_processor": image_processor, "tokenizer": tokenizer}
        return Processor(*map(parts.get, names), **options)
    except foreign_errors() as error:
        raise CheckpointError(
            path,
            f"transformers does not load the processor for its images: {described(error)}",
            "copy all files of the checkpoint again, or load(path, text_only=True)",
        ) from error


def _processor_class(path: Path, settings: Mapping[str, Any], model_type: str) -> Any:
    name = (
        settings.get("processor_class")
        or _optional(path / "preprocessor_config.json").get("processor_class")
        or vars(processing_auto)["PROCESSOR_MAPPING_NAMES"].get(model_type)
    )
    processor = _REPLACEMENTS.get(str(name)) or getattr(transformers, str(name), None)
    if not (isinstance(processor, type) and issubclass(processor, ProcessorMixin)):
        raise UnsupportedModelError(
            path,
            f"its images need the processor {name!r}, which transformers "
            f"{transformers.__version__} lacks",
            "load(path, text_only=True)",
        )
    return processor


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
