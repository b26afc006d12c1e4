"""The encoder of a model's images: pictures in, prompts with vectors in place of pictures out.

The tokens of a picture come from the processor of transformers, run on that picture alone. They
replace the placeholder as token ids: text of a user can never become a placeholder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from math import isqrt, sqrt
from typing import Any

from torch import Size, Tensor

from interposer.errors import RequestError, described, foreign_errors
from interposer_adapt._image_decoding import ImageLimits, ImageSource, decode_image, read_image
from interposer_adapt._image_tower import ImageTower, ImageVectors
from interposer_adapt._media_encoder import CACHED_BYTES, MediaEncoder, MediaPlan, Tokens
from interposer_engine import EmbeddedInput, Media

_FRAMED = frozenset({"paligemma"})
"""Values of ``model_type``: BOS follows the last picture, and a newline ends the prompt."""
_MAX_NEWLINES = 32
# Width and height in pixels of the pictures by which the memory of a step is measured.
_SAMPLE_SIDE, _MIN_SAMPLE_SIDE = 2048, 64
_TEXT_INPUTS = frozenset(
    {"attention_mask", "input_ids", "labels", "mm_token_type_ids", "token_type_ids"}
)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """A picture that is ready for the encoder.

    Attributes:
        source: the content.
        token_ids: the tokens that stand for the picture.
        count: the number of tokens among them that get vectors.
        inputs: the encoder's inputs, by name.
    """

    source: ImageSource
    token_ids: list[int]
    count: int
    inputs: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the encoder's inputs in bytes."""
        return sum(tensor.nbytes for tensor in self.inputs.values())

    @property
    def shapes(self) -> tuple[tuple[str, Size], ...]:
        """The shapes that the pictures of a batch have in common."""
        return tuple((name, tensor.shape[1:]) for name, tensor in sorted(self.inputs.items()))


class ImageEncoder(MediaEncoder[ImageSource, PreparedImage, ImageVectors]):
    """Encodes the pictures of prompts by the image encoder of a transformers model.

    ``interposer.explain(encoder)`` lists its kernels.

    Attributes:
        limits: limits on the pictures of one prompt.
    """

    kinds = frozenset({"image"})
    noun = "image"

    def __init__(
        self,
        tower: ImageTower,
        processor: Any,
        plan: MediaPlan,
        *,
        limits: ImageLimits | None = None,
        cached_bytes: int = CACHED_BYTES,
    ) -> None:
        """Create an encoder.

        Args:
            tower: computes the vectors.
            processor: a processor of transformers with a fast tokenizer.
            plan: the plan of the model that reads the vectors.
            limits: limits on the pictures of a prompt; None takes those of ``ImageLimits``.
            cached_bytes: size of the vectors to keep.
        """
        config = tower.adapted.model.config
        self.limits = ImageLimits() if limits is None else limits
        # image_token_id of some processors is the token that gets vectors.
        token_id: int = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        super().__init__(tower.adapted, token_id, plan, self.limits.images, cached_bytes)
        self._tower = tower
        self._processor = processor
        # The tokens that get vectors, which are not the placeholder in all models.
        self._vector_id: int = config.image_token_id
        self._attends_both_ways = _attends_both_ways(config)
        self._is_framed = config.model_type in _FRAMED
        self._newlines = _newlines(processor.tokenizer)
        settings = [config.to_dict(), processor.image_processor.to_dict()]
        settings += [str(plan.path), str(plan.dtype)]
        self._seed = json.dumps(settings, sort_keys=True, default=str).encode()

    def embed(
        self, token_ids: Sequence[int], media: Sequence[Media], *, cache_salt: str = ""
    ) -> Tokens:
        """Put pictures in place of the placeholders of a prompt; see ``MediaEncoder.embed``."""
        if self._is_framed and self.token_id in token_ids:
            token_ids = self._framed(token_ids)
        return super().embed(token_ids, media, cache_salt=cache_salt)

    def _framed(self, token_ids: Sequence[int]) -> list[int]:
        """Insert BOS after the last picture of a prompt, and append a newline."""
        tokenizer = self._processor.tokenizer
        # The tokenizer writes BOS first, the processor after the pictures.
        tokens: Tokens = [*token_ids[token_ids[0] == tokenizer.bos_token_id :]]
        tokens.insert(len(tokens) - tokens[::-1].index(self.token_id), tokenizer.bos_token_id)
        self._extend(tokens, tokenizer.encode("\n", add_special_tokens=False))
        return [token for token in tokens if isinstance(token, int)]

    def _sample(self, max_tokens: int) -> PreparedImage:
        from PIL import Image

        side = min(_SAMPLE_SIDE, isqrt(self.limits.pixels))
        while True:
            picture = Image.new("RGB", (side, side))
            sample = self._prepare(ImageSource("The sample", picture, b"", self.limits))
            if sample.count <= max_tokens or side <= _MIN_SAMPLE_SIDE:
                return sample
            # The tokens of many models grow with the area; those of others, by whole tiles.
            side = int(side * min(0.9, sqrt(max_tokens / sample.count)))
            side = max(side, _MIN_SAMPLE_SIDE)

    def _read(self, medium: Media) -> ImageSource:
        return read_image(medium, self.limits)

    def _prepare(self, source: ImageSource) -> PreparedImage:
        """Decode a picture, and run the processor on it.

        Raises: RequestError: the picture cannot be decoded or processed.
        """
        image = decode_image(source)
        try:
            out = self._processor(
                images=[image],
                text=[self._processor.image_token],
                return_tensors="pt",
                add_special_tokens=False,
            )
        except foreign_errors() as error:
            raise RequestError(
                f"{source.place}, {image.width} x {image.height} pixels, is refused by the model's "
                f"image processor: {described(error)[:200]}"
            ) from error
        token_ids = out["input_ids"][0].tolist()
        if self._is_framed:
            # The processor took the placeholder for a whole prompt.
            token_ids = [token_id for token_id in token_ids if token_id == self._vector_id]
        names = self._tower.input_names & out.keys() - _TEXT_INPUTS
        inputs = {name: out[name] for name in names}
        return PreparedImage(source, token_ids, token_ids.count(self._vector_id), inputs)

    def _vectors(self, media: Sequence[PreparedImage]) -> Sequence[ImageVectors]:
        return self._tower.encode(
            [image.inputs for image in media], [image.count for image in media]
        )

    def _tokens(self, medium: PreparedImage, vectors: ImageVectors) -> Tokens:
        """Put vectors in place of the image tokens of a picture."""
        rope = self._tower.rope_positions(medium.inputs, self._vector_id, medium.count)
        positions, num_positions = (None, None) if rope is None else rope
        tokens: Tokens = []
        start = 0
        for is_vector, group in groupby(
            medium.token_ids, lambda token_id: token_id == self._vector_id
        ):
            token_ids = list(group)
            if not is_vector:
                tokens += token_ids
                continue
            end = start + len(token_ids)
            layers = vectors.layer_embeddings
            tokens.append(
                EmbeddedInput(
                    kind="image",
                    digest=blake2b(
                        self._seed + medium.source.digest + start.to_bytes(8, "little")
                    ).digest(),
                    embeddings=vectors.embeddings[start:end],
                    positions=positions,
                    num_positions=num_positions,
                    attends_both_ways=self._attends_both_ways,
                    layer_embeddings=None if layers is None else layers[:, start:end],
                )
            )
            start = end
        return tokens

    def _extend(self, prompt: Tokens, tokens: Tokens | list[int]) -> None:
        """Append tokens; newlines on both sides of the border become the tokens of one text.

        Gemma 3 has newlines around a picture, and one token for several newlines.
        """
        num_before = _count_newlines(reversed(prompt), self._newlines)
        num_after = _count_newlines(tokens, self._newlines)
        if num_before and num_after:
            border = [*prompt[-num_before:], *tokens[:num_after]]
            text = "\n" * sum(self._newlines[token] for token in border)
            merged = self._processor.tokenizer.encode(text, add_special_tokens=False)
            prompt[-num_before:] = merged
            tokens = tokens[num_after:]
        prompt += tokens


def _attends_both_ways(config: Any) -> bool:
    """Return whether the tokens of a picture attend to each other in both directions."""
    mode = getattr(config.get_text_config(), "use_bidirectional_attention", None)
    # Gemma 4 states it.
    return config.model_type == "gemma3" or mode == "vision"


def _newlines(tokenizer: Any) -> dict[Any, int]:
    """Return the tokens that consist of newlines, with the number of newlines."""
    counts = {}
    for count in range(1, _MAX_NEWLINES):
        token_ids = tokenizer.encode("\n" * count, add_special_tokens=False)
        if len(token_ids) == 1:
            counts[token_ids[0]] = count
    return counts


def _count_newlines(tokens: Any, newlines: Mapping[Any, int]) -> int:
    """Return the number of tokens at the beginning that consist of newlines."""
    count = 0
    for token in tokens:
        if token not in newlines:
            break
        count += 1
    return count
