"""The image encoder of a vision-language model of transformers, without the model's decoder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from interposer.errors import CheckpointError, UnsupportedModelError, described, foreign_errors
from interposer_adapt._api import Adapted, adapt
from interposer_engine import Checkpoint, Plan
from interposer_engine.parts import WeightCheck

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


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

    Raises:
        CheckpointError: a tensor of the encoder is missing or not finite, or transformers cannot
            load the encoder.
        UnsupportedModelError: transformers lacks the model.
    """
    path = checkpoint.path
    architecture = str(checkpoint.config["architectures"][0])
    base = getattr(transformers, architecture, None)
    if base is None:
        raise UnsupportedModelError(
            path,
            f"transformers {transformers.__version__} has no {architecture!r}, whose image encoder "
            "is needed",
            "load(path, text_only=True)",
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path, **_LOCAL)
        # Encoders of quantized checkpoints are plain: a missing tensor tells if one is not.
        vars(config).pop("quantization_config", None)
        model, report = _without_decoder(base).from_pretrained(
            path, config=config, dtype=plan.dtype, output_loading_info=True, **_LOCAL
        )
    except foreign_errors() as error:
        raise CheckpointError(
            path,
            f"transformers does not load its image encoder: {described(error)}",
            "copy all files of the checkpoint again, or load(path, text_only=True)",
        ) from error
    if absent := sorted({*report["missing_keys"], *report["mismatched_keys"]}):
        raise CheckpointError(
            path,
            f"lacks the tensor {absent[0]!r}, one of {len(absent)} that its image encoder needs",
            "copy all files of the checkpoint again, or load(path, text_only=True)",
        )
    model = model.eval().to(plan.placement.device.torch_device)
    policy = plan.resolver.config
    WeightCheck(policy.weight_check, plan.placement.platform).check_parameters(model, path)
    # Rules with a glob name modules of the decoder.
    rules = {
        kind: {key: rule for key, rule in getattr(policy, kind).items() if "@" not in key}
        for kind in ("kernels", "layers", "attention")
    }
    return ImageTower(adapt(model, policy.model_copy(update={**rules, "strict": False})))


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
