"""Images in prompts of an adapted model that has no encoder by name: found, and tried once.

The model encodes its images by ``get_image_features``. A trial compares the logits of a prompt with
an image, as the engine computes them, with those of the model's own forward for the inputs that the
processor of transformers makes. Models that treat images in another way than as vectors between
those of the texts fail the trial, and refuse images.

Dimensions: R compared rows of the trial's prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interposer.errors import (
    CheckpointError,
    InterposerError,
    described,
    foreign_errors,
    install_command,
)
from interposer_adapt._agreement import distance, error_bound, perturb_once, perturbed_embeddings
from interposer_adapt._api import Adapted
from interposer_adapt._paged_decoder import PagedDecoder
from interposer_adapt._sequence_caches import SequenceCaches
from interposer_engine import EmbeddedInput, LanguageModel, Media

if TYPE_CHECKING:
    from interposer_adapt._image_encoder import ImageEncoder
    from interposer_adapt._media_encoder import MediaPlan

_SIZES = ((64, 48), (48, 80))
_MAX_ROWS = 64


class UnsupportedImagesError(Exception):
    """The model cannot take images in the engine; the message says why."""


def takes_images(model: nn.Module) -> bool:
    """Return whether a model of transformers takes images beside texts."""
    return "image" in getattr(model, "input_modalities", ())


def image_processor(path: Path, model_type: str) -> Any:
    """Return the processor of transformers for images of the checkpoint in the folder ``path``.

    Raises: UnsupportedImagesError: Pillow is not installed, or transformers loads no processor.
    """
    if find_spec("PIL") is None:
        raise UnsupportedImagesError(
            f"Pillow is not installed. Try: {install_command('interposer-adapt[images]')}"
        )
    from interposer_adapt._image_processors import load_processor

    try:
        return load_processor(path, model_type)
    except CheckpointError as error:
        raise UnsupportedImagesError(error.reason) from error


def add_images(
    lm: LanguageModel,
    adapted: Adapted[Any],
    decoder: PagedDecoder | SequenceCaches,
    processor: Any,
    plan: MediaPlan,
) -> None:
    """Let an engine take images, encoded by the adapted model that it runs.

    Args:
        lm: runs ``decoder``; receives an ``input_encoder``.
        processor: a processor of transformers.
    Raises: UnsupportedImagesError: the model treats images in another way; ``lm`` is unchanged.
    """
    from interposer_adapt._image_encoder import ImageEncoder
    from interposer_adapt._image_tower import ImageTower, image_features_of

    if not isinstance(decoder, PagedDecoder):
        raise UnsupportedImagesError("each sequence has a cache of transformers")
    model: Any = adapted.model
    if image_features_of(model) is None:
        raise UnsupportedImagesError(f"{type(model).__name__} has no get_image_features")
    missing = [
        f"{type(owner).__name__} has no {name}"
        for owner, name in (
            (model.config, "image_token_id"),
            (processor, "image_token"),
        )
        if getattr(owner, name, None) is None
    ]
    if missing:
        raise UnsupportedImagesError(missing[0])
    sizes = decoder.config
    try:
        encoder = ImageEncoder(ImageTower(adapted), processor, plan)
        _try_images(lm, encoder, processor, decoder, plan)
    except UnsupportedImagesError:
        decoder.config = sizes
        raise
    except InterposerError as error:
        decoder.config = sizes
        reason = str(error).partition(". Try: ")[0]
        raise UnsupportedImagesError(f"a trial of them fails: {reason}") from error
    except foreign_errors() as error:
        decoder.config = sizes
        raise UnsupportedImagesError(f"a trial of them fails: {described(error)}") from error
    encoder.max_step_tokens = lm.engine.scheduler.max_step_tokens
    lm.input_encoder = encoder


def _try_images(
    lm: LanguageModel, encoder: ImageEncoder, processor: Any, decoder: PagedDecoder, plan: MediaPlan
) -> None:
    """Raise UnsupportedImagesError unless a prompt with an image has the model's own logits.

    The decoder's ``config`` gets the sizes by which the engine checks images.
    """
    model: Any = decoder.model
    vector_id: int = model.config.image_token_id
    _compare_tokens(encoder, processor, vector_id, _SIZES)
    prompt, inputs = _compare_tokens(encoder, processor, vector_id, _SIZES[:1])
    runs = [part for part in prompt if isinstance(part, EmbeddedInput)]
    if any(run.layer_embeddings is not None for run in runs):
        raise UnsupportedImagesError("their vectors enter several blocks of the decoder")
    decoder.config = replace(
        decoder.config,
        hidden_size=runs[0].embeddings.shape[1],
        mrope_section=_mrope_section(model),
    )
    is_image = inputs["input_ids"][0] == vector_id
    # Apart, because an image has many more tokens than the text.
    rows_by_kind = {
        kind: _some(is_kind.nonzero()[:, 0].to(model.device))
        for kind, is_kind in (("the image", is_image), ("the text", ~is_image))
    }
    rows = torch.cat([*rows_by_kind.values()])
    inputs = {name: _to_model(value, model) for name, value in inputs.items()}
    changed = {
        name: perturb_once(value)
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    with plan.numerics(), torch.inference_mode():
        expected = _logits(decoder, inputs, rows)
        with perturbed_embeddings(model):
            perturbed = _logits(decoder, {**inputs, **changed}, rows)
    actual = lm.logits(prompt).to(rows.device)[rows]
    counts = [len(rows) for rows in rows_by_kind.values()]
    parts = zip(*(logits.split(counts) for logits in (actual, expected, perturbed)), strict=True)
    for kind, (actual_part, expected_part, perturbed_part) in zip(rows_by_kind, parts, strict=True):
        max_distance = error_bound(
            model, expected_part, perturbed_part, len(decoder.attention_layers)
        )
        difference = distance(actual_part, expected_part)
        # Negated, so that NaN fails the trial.
        if not difference <= max_distance:
            raise UnsupportedImagesError(
                f"in a trial, the logits of {kind} differ by {difference:.2g} of their size, and "
                f"rounding explains {max_distance:.2g}: the model computes images in another way"
            )


def _some(rows: Tensor) -> Tensor:
    """Return at most ``_MAX_ROWS`` of the rows, from the first on in equal distances."""
    return rows[:: -(-len(rows) // _MAX_ROWS)]


def _compare_tokens(
    encoder: ImageEncoder, processor: Any, vector_id: int, sizes: Sequence[tuple[int, int]]
) -> tuple[list[int | EmbeddedInput], Any]:
    """Return a prompt with images side by side, and the inputs that the processor makes of it.

    Args:
        vector_id: the token that the processor writes for each vector.
        sizes: width and height of each image.
    Raises: UnsupportedImagesError: the tokens differ.
    """
    images = [_picture(*size, seed) for seed, size in enumerate(sizes)]
    text = f"A{processor.image_token * len(images)}B"
    arguments = {"text": [text], "images": images}
    inputs = processor(**arguments, return_tensors="pt", add_special_tokens=False)
    token_ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = encoder.embed(token_ids, [Media("image", image) for image in images])
    if _token_ids(prompt, vector_id) != inputs["input_ids"][0].tolist():
        raise UnsupportedImagesError(
            f"{type(processor).__name__} writes other tokens than for each image and text alone"
        )
    return prompt, inputs


def _token_ids(prompt: Sequence[int | EmbeddedInput], vector_id: int) -> list[int]:
    """Return the token ids of a prompt, with ``vector_id`` for each vector."""
    token_ids: list[int] = []
    for part in prompt:
        token_ids += [vector_id] * len(part) if isinstance(part, EmbeddedInput) else [part]
    return token_ids


def _mrope_section(model: Any) -> Sequence[int] | None:
    text = model.config.get_text_config(decoder=True)
    section: Sequence[int] | None = (getattr(text, "rope_parameters", None) or {}).get(
        "mrope_section"
    )
    return section


def _to_model(value: Any, model: Any) -> Any:
    """Return an input of the processor on the model's device and, if it has fractions, dtype."""
    if not isinstance(value, Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else value.dtype)


def _logits(decoder: PagedDecoder, inputs: Mapping[str, Any], rows: Tensor) -> Tensor:
    """Return the logits ``[R, V]`` of the model's own forward in some rows."""
    arguments = {"logits_to_keep": rows} if decoder.has_logits_to_keep else {}
    out = decoder.model(**inputs, **arguments, use_cache=False, return_dict=True)
    logits: Tensor = out.logits[0]
    return logits if arguments else logits[rows]


def _picture(width: int, height: int, seed: int) -> Any:
    """Return a picture with random colours that change smoothly."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    colours = torch.randint(0, 256, (5, 7, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(colours.numpy()).resize((width, height), Image.Resampling.BICUBIC)
