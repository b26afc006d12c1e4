"""The image encoder of a vision-language model of transformers, without the model's decoder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interposer_adapt._api import Adapted
from interposer_adapt._media_tower import load_encoder
from interposer_engine import Checkpoint, Plan


@dataclass(frozen=True, slots=True, eq=False)
class ImageVectors:
    """Vectors of one picture, on the CPU. N tokens, H hidden size, L blocks.

    Attributes:
        embeddings: ``[N, H]``.
        layer_embeddings: ``[L, N, H]`` to add after the first L blocks of the decoder, or None.
    """

    embeddings: Tensor
    layer_embeddings: Tensor | None

    @property
    def nbytes(self) -> int:
        """Size of the vectors in bytes."""
        layers = self.layer_embeddings
        return self.embeddings.nbytes + (0 if layers is None else layers.nbytes)


class ImageTower:
    """An adapted image encoder, with the projection to the decoder's hidden size.

    Attributes:
        adapted: the adapted model; its decoder and its embeddings of tokens are missing.
        input_names: inputs of the processor that the encoder reads.
    """

    def __init__(self, adapted: Adapted[Any]) -> None:
        self.adapted = adapted
        self._model: Any = adapted.model
        names = set(inspect.signature(type(self._model).forward).parameters)
        self.input_names = frozenset(names)

    def encode(
        self, inputs: Sequence[Mapping[str, Tensor]], counts: Sequence[int]
    ) -> list[ImageVectors]:
        """Compute the vectors of pictures whose inputs have equal shapes after the first dimension.

        Args:
            inputs: for each picture the encoder's inputs, by name.
            counts: for each picture the number of its tokens.
        Raises: RuntimeError: the encoder returns another number of vectors.
        """
        if sum(counts) == 1:
            # Mistral 3 loses the dimension of tokens if there is one.
            return self.encode([*inputs, *inputs], [1, 1])[:1]
        model = self._model
        batch = {}
        for name in inputs[0]:
            values = torch.cat([image[name] for image in inputs])
            dtype = model.dtype if values.is_floating_point() else values.dtype
            batch[name] = values.to(model.device, dtype)
        with torch.no_grad():
            out = image_features_of(model)(**batch, return_dict=True)
            if model.config.model_type == "llama4":
                # The only model that projects outside of this method.
                vectors = model.multi_modal_projector(_rows(out.last_hidden_state))
            else:
                vectors = _rows(out.pooler_output)
            deepstack = getattr(out, "deepstack_features", None)
            layers = (
                None if deepstack is None else torch.stack([_rows(layer) for layer in deepstack])
            )
        vectors, layers = vectors.cpu(), None if layers is None else layers.cpu()
        if len(vectors) != sum(counts):
            raise RuntimeError(f"{len(vectors)} vectors for {sum(counts)} tokens")
        # Copies: a view would keep the vectors of the whole batch in memory.
        return [
            ImageVectors(rows.clone(), None if layers is None else layers[:, start:end].clone())
            for rows, start, end in _split(vectors, counts)
        ]

    def rope_positions(
        self, inputs: Mapping[str, Tensor], token_id: int, count: int
    ) -> tuple[Tensor, int] | None:
        """Return the M-RoPE positions of a picture, relative to its start.

        Args:
            token_id: the placeholder of image tokens.
            count: the number of tokens of the picture.
        Returns: ``[count, 3]`` positions (time, height, width) and the position of the next token;
            None if the model has plain positions.
        """
        index = getattr(self._model.base_model, "get_rope_index", None)
        if index is None:
            return None
        # The picture, and a text token behind it.
        kinds = torch.tensor([[1] * count + [0]], dtype=torch.int)
        token_ids = torch.tensor([[token_id] * count + [0]])
        positions, _ = index(token_ids, kinds, image_grid_thw=inputs["image_grid_thw"])
        return positions[:, 0, :count].T.contiguous(), int(positions[0, 0, count])


def image_features_of(model: Any) -> Any:
    """Return the method that encodes images, of a model or of its part below the head, or None."""
    method = getattr(model, "get_image_features", None)
    return method or getattr(model.base_model, "get_image_features", None)


def _rows(vectors: Any) -> Tensor:
    """Return the vectors of all pictures as ``[N, H]``."""
    if not isinstance(vectors, Tensor):
        vectors = torch.cat([image.flatten(0, -2) for image in vectors])
    rows: Tensor = vectors.flatten(0, -2)
    return rows


def _split(vectors: Tensor, counts: Sequence[int]) -> list[tuple[Tensor, int, int]]:
    ranges, start = [], 0
    for count in counts:
        ranges.append((vectors[start : start + count], start, start + count))
        start += count
    return ranges


def load_tower(checkpoint: Checkpoint, plan: Plan) -> ImageTower:
    """Load and adapt the image encoder of a checkpoint; no tensor of its decoder is read.

    Raises: CheckpointError, UnsupportedModelError: as ``load_encoder`` does.
    """
    return ImageTower(load_encoder(checkpoint, plan, "image"))
