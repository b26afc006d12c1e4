"""Encoders of images and sounds in checkpoints, and the packages that implement the encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from interposer import CheckpointFile
from interposer.errors import InterposerError, PluginError, described, foreign_errors
from interposer.tooling import entry_points
from interposer_engine._checkpoint.files import Checkpoint
from interposer_engine._embedded_input import EmbeddedInput
from interposer_engine._media import Media
from interposer_engine._plan import Plan

GROUP = "interposer.input_encoders"
"""Entry points with functions ``(Checkpoint, Plan) -> InputEncoder | None``."""

_KIND_BY_FIELD = {"vision_config": "image", "audio_config": "audio"}


class InputEncoder(Protocol):
    """Computes the vectors of images and sounds of a prompt.

    Attributes:
        kinds: Kinds of media that it takes.
        max_step_tokens: Most tokens whose vectors it computes at once; a medium with more tokens
            is computed alone. ``load`` sets its option of this name.
    """

    kinds: frozenset[str]
    max_step_tokens: int

    def embed(
        self, token_ids: Sequence[int], media: Sequence[Media], *, cache_salt: str = ""
    ) -> list[int | EmbeddedInput]:
        """Decode and encode media, and put the results in place of the placeholder tokens.

        Any thread may call this.

        Args:
            token_ids: A prompt with one placeholder token for each medium, in the same order, as
                chat templates write it.
            cache_salt: Only calls with the same salt share cached vectors, as in
                ``SamplingParams``.
        Raises: RequestError: a medium cannot be decoded or is too large, or the number of
            placeholders differs.
        """
        ...


@runtime_checkable
class MeasurableEncoder(Protocol):
    """Further members of an ``InputEncoder``, by which ``load`` leaves memory for the encoder.

    Attributes:
        max_cached_bytes: Most memory of the host that cached vectors take.
    """

    max_cached_bytes: int

    def run_sample(self, max_tokens: int) -> int:
        """Compute the vectors of sample media as in one step, and drop the vectors.

        Args:
            max_tokens: Most tokens of the step. A single medium may have more.
        Returns: the number of tokens.
        """
        ...


def encoder_kinds(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of media for which a checkpoint has an encoder, by its config.json."""
    return frozenset(kind for field, kind in _KIND_BY_FIELD.items() if config.get(field))


def load_input_encoder(
    checkpoint: Checkpoint | CheckpointFile, planned: Plan, max_step_tokens: int
) -> tuple[InputEncoder | None, list[str]]:
    """Load the encoder of a checkpoint, by the first provider that implements the encoder.

    Args:
        max_step_tokens: See ``InputEncoder``.
    Returns: the encoder; None if the checkpoint has none, or if no installed package implements it.
        Then notes for the user.
    Raises:
        PluginError: a provider failed.
        InterposerError: as a provider raises it, such as CheckpointError for missing tensors.
    """
    kinds = encoder_kinds(checkpoint.config)
    # Providers read folders only. A file of a plugin, such as GGUF, has the text half.
    if not kinds or isinstance(checkpoint, CheckpointFile):
        return None, []
    # The choice must not depend on the order of installation.
    points = sorted(entry_points(GROUP), key=lambda point: (point.name, point.value))
    num_notes = len(planned.resolver.notes)
    for point in points:
        try:
            encoder: InputEncoder | None = point.load()(checkpoint, planned)
        except InterposerError:
            raise
        except foreign_errors() as error:
            origin = point.dist.name if point.dist is not None else point.value
            raise PluginError(
                point.name,
                origin,
                f"its input encoder failed for {checkpoint.path}: {described(error)}",
                "load(..., text_only=True), or report it to its authors",
            ) from error
        if encoder is not None:
            encoder.max_step_tokens = max_step_tokens
            note = (
                f"the input encoder computes up to {max_step_tokens} tokens at once, as "
                "max_step_tokens says"
            )
            return encoder, [note]
    if len(planned.resolver.notes) > num_notes:
        return None, []  # a provider has noted what is missing
    names = " and ".join(sorted(kinds))
    reason = "no installed package implements" if points else "no package is installed to load"
    package = "'interposer-adapt[images]'" if "image" in kinds else "interposer-adapt"
    advice = "" if points else f". Try: pip install {package}"
    return None, [f"prompts are texts only: {reason} the {names} encoder of {planned.path}{advice}"]
