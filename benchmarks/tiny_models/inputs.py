"""Inputs for a tiny model, from the signature of its forward and its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS, TARGETS = 2, 12, 6
# Below the special tokens of a tiny vocabulary, above the usual ids of padding, start and end.
LOW, HIGH = 5, 200
# An image whose patches are passed has this many on a side; two by two may be merged, twice.
SIDE = 4
Inputs = dict[str, Any]
Call = Callable[[], Inputs]

IMAGES = ("pixel_values", "pixel_values_videos")
GRIDS = ("image_grid_thw", "grid_thw", "target_sizes")
SOUNDS = (
    "input_features",
    "input_values",
    "audio_values",
    "audio_spectrogram",
    "spectrogram",
    "audio_mel",
)
HIDDEN_STATES = ("inputs_embeds", "hidden_states", "query_embeds", "encoder_hidden_states")
IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
VISION = ("vision_config", "image_config", "vit_config", "vision_tower_config", "encoder")
AUDIO = ("audio_config", "audio_encoder_config", "encoder_config", "speech_config")
BINS = (
    "feature_projection_input_dim",
    "num_mel_bins",
    "n_mels",
    "feature_size",
    "input_feat_per_channel",
    "n_mel_bins",
    "mel_dim",
    "input_dim",
    "input_size",
    "num_mels",
    "model_in_dim",
)


def is_config(value: Any) -> bool:
    """Return whether a value is a configuration."""
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def find(config: Any, *names: str) -> Any:
    """Return the first of the named values in a configuration or in one below it, or None."""
    for name in names:
        value = vars(config).get(name)
        if value is None and name in type(config).attribute_map:
            value = getattr(config, name, None)
        if value is not None:
            return value
    for below in filter(is_config, vars(config).values()):
        if (value := find(below, *names)) is not None:
            return value
    return None


def part_of(config: Any, names: tuple[str, ...]) -> Any:
    """Return the configuration of one modality, which may be the whole."""
    for name in names:
        if is_config(part := vars(config).get(name)):
            return part_of(part, names)
    return config


class Maker:
    """Makes inputs for one model.

    Args:
        seed: what is drawn is the same for the same seed.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.model = model
        self.config: Any = model.config
        self.parameters = inspect.signature(model.forward).parameters
        self._generator = torch.Generator().manual_seed(seed)

    def candidates(self) -> Iterator[tuple[str, Call]]:
        """Yield ways to call the model, in words and as a function, the fullest first."""
        text = "input_ids" in self.parameters
        if special := SPECIAL.get(self.config.model_type):
            yield "its own", partial(special, self)
        yield from self._with_patches(text)
        yield from self._with_images(text)
        yield from self._with_sound(text)
        if "past_values" in self.parameters:
            yield from self._with_series()
        if text:
            yield "text", lambda: self.text() | self.targets() | self.required()
            yield "text alone", lambda: {"input_ids": self.ids(TOKENS)}
            if find(self.config, "num_codebooks", "n_codes_total", "num_channels"):
                yield "codes", lambda: {"input_ids": self.codes()}
                yield "codes first", lambda: {"input_ids": self.codes().transpose(1, 2)}
        for name in self._present(HIDDEN_STATES):
            for shape in ((BATCH, TOKENS, self.hidden()), (TOKENS, self.hidden())):
                yield f"{name} {len(shape)}d", partial(self._hidden_states, name, shape)
        yield "what is required", self.required

    def _present(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if name in self.parameters]

    def _with_patches(self, text: bool) -> Iterator[tuple[str, Call]]:
        for grid in self._present(GRIDS)[:1]:
            for packed in (True, False):
                if text:
                    yield "text, patches", partial(self.text_and_patches, grid, packed)
                yield "patches", partial(self.patches, grid, packed)

    def _with_images(self, text: bool) -> Iterator[tuple[str, Call]]:
        for words in (True, False) if text else (False,):
            for name in self._present(IMAGES)[:1]:
                for shape in self.images():
                    call = self.text_and_image if words else self.image
                    label = f"{'text, ' * words}image {len(shape)}d"
                    yield label, partial(self._and_targets, partial(call, name, shape))

    def _with_sound(self, text: bool) -> Iterator[tuple[str, Call]]:
        for name in self._present(SOUNDS):
            for shape in self.sounds(name):
                for words in (True, False) if text else (False,):
                    label = f"{'text, ' * words}sound {len(shape)}d"
                    yield (
                        label,
                        partial(self._and_targets, partial(self.sound, name, shape, words)),
                    )

    def _with_series(self) -> Iterator[tuple[str, Call]]:
        length = find(self.config, "context_length") or 64
        channels = find(self.config, "num_input_channels") or 1
        for shape in ((BATCH, length, channels), (BATCH, length)):
            yield f"series {len(shape)}d", partial(self._drawn, "past_values", shape)
        yield "series with time", partial(self.series_with_time, length)

    def _and_targets(self, call: Call) -> Inputs:
        return call() | self.targets()

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Inputs:
        return {name: self.draw(shape)}

    def _hidden_states(self, name: str, shape: tuple[int, ...]) -> Inputs:
        return self.required() | {name: self.draw(shape)}

    def hidden(self) -> int:
        """Return the hidden size."""
        return int(find(self.config, "hidden_size", "d_model", "embed_dim") or 64)

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """Return normal numbers."""
        return torch.randn(shape, generator=self._generator)

    def ids(self, length: int, rows: int = BATCH) -> Tensor:
        """Return tokens that are not special."""
        vocab = find(self.config, "vocab_size")
        high = min(HIGH, vocab) if isinstance(vocab, int) and vocab > 0 else HIGH
        return torch.randint(min(LOW, high - 1), high, (rows, length), generator=self._generator)

    def codes(self) -> Tensor:
        """Return tokens of several codebooks."""
        books = find(self.config, "num_codebooks", "n_codes_total", "num_channels")
        return self.ids(TOKENS * books).view(BATCH, TOKENS, books)

    def text(self) -> Inputs:
        """Return tokens, and what stands beside them."""
        inputs: Inputs = {"input_ids": self.ids(TOKENS)}
        if "attention_mask" in self.parameters:
            inputs["attention_mask"] = torch.ones(BATCH, TOKENS, dtype=torch.int64)
        if "bbox" in self.parameters:
            corners = torch.randint(0, 400, (BATCH, TOKENS, 2), generator=self._generator)
            inputs["bbox"] = torch.cat((corners, corners + 50), -1)
        return inputs

    def targets(self) -> Inputs:
        """Return the decoder's input tokens, or no inputs if the model takes none."""
        if "decoder_input_ids" in self.parameters:
            return {"decoder_input_ids": self.ids(TARGETS)}
        return {}

    def required(self) -> Inputs:
        """Return inputs for parameters without a default, by the names that all models use."""
        hidden = (BATCH, TOKENS, self.hidden())
        makers: dict[str, Callable[[], Any]] = {
            "qformer_input_ids": lambda: self.ids(TOKENS),
            "decoder_input_ids": lambda: self.ids(TARGETS),
            "attention_mask": lambda: torch.ones(BATCH, TOKENS, dtype=torch.int64),
            "hidden_states": lambda: self.draw(hidden),
            "query_embeds": lambda: self.draw(hidden),
            "encoder_hidden_states": lambda: self.draw(hidden),
            "position_ids": lambda: torch.arange(TOKENS).expand(BATCH, -1),
        }
        return {
            name: makers[name]()
            for name, parameter in self.parameters.items()
            if parameter.default is inspect.Parameter.empty and name in makers
        }

    def images(self) -> Iterator[tuple[int, ...]]:
        """Yield shapes of images that the model may want."""
        config = part_of(self.config, VISION)
        channels = find(config, "num_channels", "in_channels", "in_chans", "num_input_channels")
        channels = channels if isinstance(channels, int) else 3
        size = find(config, "image_size", "img_size", "input_size", "resolution", "crop_size")
        if isinstance(size, dict):
            size = [size["height"], size["width"]]
        height, width = size[-2:] if isinstance(size, (list, tuple)) else (size, size)
        own = [(height, width)] if isinstance(height, int) else []
        sides = dict.fromkeys((*own, (64, 64), (128, 128), (224, 224)))
        yield from ((BATCH, channels, *side) for side in sides)
        frames = find(config, "num_frames", "frames_per_clip") or 2
        for side in dict.fromkeys((*own, (64, 64))):
            yield (BATCH, frames, channels, *side)
            yield (BATCH, channels, frames, *side)
        patch = find(config, "patch_size") or 16
        if isinstance(patch, int):
            yield (BATCH, SIDE * SIDE, channels * patch * patch)

    def image(self, name: str, shape: tuple[int, ...]) -> Inputs:
        """Return images of a shape, and what stands beside them."""
        inputs: Inputs = {name: self.draw(shape)}
        if "pixel_mask" in self.parameters:
            inputs["pixel_mask"] = torch.ones(shape[0], *shape[-2:], dtype=torch.int64)
        if "image_sizes" in self.parameters:
            inputs["image_sizes"] = torch.tensor([shape[-2:]] * shape[0])
        for key in self._present(("pixel_position_ids", "image_position_ids")):
            at = torch.arange(shape[1])
            side = int(shape[1] ** 0.5)
            inputs[key] = torch.stack((at % side, at // side), -1).expand(shape[0], -1, -1)
        if "spatial_shapes" in self.parameters and len(shape) == 3:
            inputs["spatial_shapes"] = torch.tensor([[SIDE, SIDE]] * shape[0])
            inputs["pixel_attention_mask"] = torch.ones(shape[:2], dtype=torch.int64)
        if "qformer_input_ids" in self.parameters:
            inputs["qformer_input_ids"] = self.ids(TOKENS)
        return inputs

    def text_and_image(self, name: str, shape: tuple[int, ...]) -> Inputs:
        """Return tokens and images, with as many image tokens as the images have features."""
        return self._with_image_tokens(self.image(name, shape), shape[0])

    def patches(self, grid: str, packed: bool) -> Inputs:
        """Return the patches of one image, each as a row or as a small image."""
        config = part_of(self.config, VISION)
        channels = find(config, "in_channels", "in_chans", "num_channels") or 3
        patch = find(config, "patch_size") or 14
        patch = patch[0] if isinstance(patch, (list, tuple)) else patch
        frames = vars(config).get("temporal_patch_size") or 1
        one = (channels * frames * patch * patch,) if packed else (channels, patch, patch)
        names = self._present(("pixel_values", "hidden_states", "pixel_values_images"))
        sides = [SIDE, SIDE] if grid == "target_sizes" else [1, SIDE, SIDE]
        return {names[0]: self.draw((SIDE * SIDE, *one)), grid: torch.tensor([sides])}

    def text_and_patches(self, grid: str, packed: bool) -> Inputs:
        """Return one row of tokens with the tokens of an image in it, and its patches."""
        return self._with_image_tokens(self.patches(grid, packed), 1)

    def _with_image_tokens(self, inputs: Inputs, rows: int) -> Inputs:
        features = getattr(self.model, "get_image_features", None)
        token = find(self.config, *IMAGE_TOKENS)
        if features is None or not isinstance(token, int):
            return self.text() | inputs
        wanted = inspect.signature(features).parameters
        with torch.no_grad():
            found = features(**{key: value for key, value in inputs.items() if key in wanted})
        found = getattr(found, "pooler_output", found)
        parts = list(found) if isinstance(found, (list, tuple)) else [found]
        count = sum(part.shape[:-1].numel() for part in parts) // rows
        ids = self.ids(TOKENS + count, rows)
        ids[:, 3 : 3 + count] = token
        text: Inputs = {"input_ids": ids}
        if "attention_mask" in self.parameters:
            text["attention_mask"] = torch.ones_like(ids)
        for key in self._present(("mm_token_type_ids", "token_type_ids")):
            text[key] = (ids == token).long()
        return text | inputs

    def sounds(self, name: str) -> Iterator[tuple[int, ...]]:
        """Yield shapes of sound that the model may want."""
        config = part_of(self.config, AUDIO)
        bins = find(config, *BINS)
        bins = bins if isinstance(bins, int) else 80
        positions = find(config, "max_source_positions")
        frames = 2 * positions if isinstance(positions, int) and positions <= 64 else 64
        if name in ("input_features", "audio_mel"):
            for each in dict.fromkeys((bins, 80, 128, 160, 320)):
                yield (BATCH, each, frames)
                yield (BATCH, frames, each)
            yield (BATCH, 1, frames, bins)
        for samples in (4000, 16000):
            yield (BATCH, samples)
            yield (BATCH, 1, samples)
        if name not in ("input_features", "audio_mel"):
            yield (BATCH, bins, frames)
            yield (BATCH, frames, bins)
            yield (BATCH, 1024, 128)

    def sound(self, name: str, shape: tuple[int, ...], words: bool) -> Inputs:
        """Return sound of a shape, with the masks that it needs, and perhaps tokens."""
        inputs: Inputs = self.text() if words else {}
        inputs[name] = self.draw(shape)
        for mask in ("input_features_mask", "attention_mask", "padding_mask", "audio_mel_mask"):
            parameter = self.parameters.get(mask)
            if parameter and (parameter.default is inspect.Parameter.empty or "features" in mask):
                dtype = torch.bool if mask == "audio_mel_mask" else torch.int64
                inputs[mask] = torch.ones(shape[0], max(shape[1:]), dtype=dtype)
        if "audio_mel_mask" in inputs:  # true where nothing is
            inputs["audio_mel_mask"] = torch.zeros(shape[:2], dtype=torch.bool)
        return inputs

    def series_with_time(self, length: int) -> Inputs:
        """Return the past and the future of a series, each with features of the time."""
        past = length + max(find(self.config, "lags_sequence") or [0])
        future = find(self.config, "prediction_length") or 1
        features = find(self.config, "num_time_features") or 0
        return {
            "past_values": self.draw((BATCH, past)),
            "past_time_features": self.draw((BATCH, past, features)),
            "past_observed_mask": torch.ones(BATCH, past),
            "future_values": self.draw((BATCH, future)),
            "future_time_features": self.draw((BATCH, future, features)),
        }


# Families whose arguments are no one else's.
SPECIAL: dict[str, Callable[[Maker], Inputs]] = {
    "decision_transformer": lambda maker: {
        "states": maker.draw((BATCH, TARGETS, maker.config.state_dim)),
        "actions": maker.draw((BATCH, TARGETS, maker.config.act_dim)),
        "rewards": maker.draw((BATCH, TARGETS, 1)),
        "returns_to_go": maker.draw((BATCH, TARGETS, 1)),
        "timesteps": torch.arange(TARGETS).expand(BATCH, -1),
        "attention_mask": torch.ones(BATCH, TARGETS, dtype=torch.int64),
    },
    "lxmert": lambda maker: (
        maker.text()
        | {
            "visual_feats": maker.draw((BATCH, 5, maker.config.visual_feat_dim)),
            "visual_pos": maker.draw((BATCH, 5, maker.config.visual_pos_dim)),
        }
    ),
    "oneformer": lambda maker: (
        maker.image("pixel_values", (BATCH, 3, 64, 64))
        | {"task_inputs": maker.ids(maker.config.task_seq_len)}
    ),
    # Its base model begins after what turns sound or text into hidden states.
    "speecht5": lambda maker: {
        "input_values": maker.draw((BATCH, TOKENS, maker.config.hidden_size)),
        "decoder_input_values": maker.draw((BATCH, TARGETS, maker.config.hidden_size)),
    },
}
