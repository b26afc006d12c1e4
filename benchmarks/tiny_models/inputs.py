"""Inputs for a tiny model, from the signature of its forward and its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS, TARGETS = 2, 12, 6
# Below the special tokens of a tiny vocabulary, above the usual ids of padding, start and end.
LOW, HIGH = 5, 200
Inputs = dict[str, Any]


def find(config: Any, *names: str) -> Any:
    """Return the first of the named values in a configuration or in one below it, or None."""
    below = [
        value
        for value in vars(config).values()
        if hasattr(value, "model_type") and hasattr(value, "to_dict")
    ]
    for name in names:
        value = vars(config).get(name)
        if value is None and name in type(config).attribute_map:
            value = getattr(config, name, None)
        if value is not None:
            return value
    for each in below:
        if (value := find(each, *names)) is not None:
            return value
    return None


def vision_of(config: Any) -> Any:
    """Return the configuration that describes images."""
    for name in ("vision_config", "image_config", "vit_config", "vision_tower_config", "encoder"):
        if hasattr(vars(config).get(name), "to_dict"):
            return vision_of(vars(config)[name])
    return config


def audio_of(config: Any) -> Any:
    """Return the configuration that describes sound."""
    for name in ("audio_config", "audio_encoder_config", "encoder_config", "speech_config"):
        if hasattr(vars(config).get(name), "to_dict"):
            return vars(config)[name]
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
        self.main = getattr(model, "main_input_name", "input_ids")
        self._generator = torch.Generator().manual_seed(seed)

    def candidates(self) -> Iterator[tuple[str, Callable[[], Inputs]]]:
        """Yield ways to call the model, the fullest first."""
        if special := SPECIAL.get(self.config.model_type):
            yield "inputs of its own", lambda: special(self)
        has = self.parameters.__contains__
        text = has("input_ids")
        grid = next((n for n in ("image_grid_thw", "grid_thw", "target_sizes") if has(n)), None)
        pixels = next((n for n in ("pixel_values", "pixel_values_videos") if has(n)), None)
        if grid:
            for packed in (True, False):
                if text:
                    yield "text, patches", lambda packed=packed: self.text_and_patches(grid, packed)
                yield "patches", lambda packed=packed: self.patches(grid, packed)
        if pixels:
            for shape in self.images():
                if text:
                    yield (
                        f"text, image {len(shape)}d",
                        lambda shape=shape: self.text_and_image(pixels, shape) | self.targets(),
                    )
        if pixels:
            for shape in self.images():
                yield (
                    f"image {len(shape)}d",
                    lambda shape=shape: self.image(pixels, shape) | self.targets(),
                )
        names = ("input_features", "input_values", "audio_values", "audio_spectrogram", "spectrogram", "audio_mel")
        for sound in [name for name in names if has(name)]:
            for shape in self.sounds(sound):
                for words in (True, False) if text else (False,):
                    yield (
                        f"{'text, ' * words}sound {len(shape)}d",
                        lambda sound=sound, shape=shape, words=words: (
                            (self.text() if words else {})
                            | self.sound(sound, shape)
                            | self.targets()
                        ),
                    )
        if has("past_values"):
            yield from self.series()
        if has("input_ids"):
            yield "text", lambda: self.text() | self.targets() | self.required()
            yield "text alone", lambda: {"input_ids": self.ids(TOKENS)}
            if find(self.config, "num_codebooks", "n_codes_total", "num_channels"):
                yield "codes", lambda: {"input_ids": self.codes()}
                yield "codes first", lambda: {"input_ids": self.codes().transpose(1, 2)}
        for name in ("inputs_embeds", "hidden_states", "query_embeds", "encoder_hidden_states"):
            if has(name):
                for shape in ((BATCH, TOKENS, self.hidden()), (TOKENS, self.hidden())):
                    yield (
                        f"{name} {len(shape)}d",
                        lambda name=name, shape=shape: self.required() | {name: self.draw(shape)},
                    )
        yield "what is required", lambda: self.required()

    def series(self) -> Iterator[tuple[str, Callable[[], Inputs]]]:
        """Yield ways to pass time series."""
        config = self.config
        length = find(config, "context_length") or 64
        channels = find(config, "num_input_channels") or 1
        lags = max(find(config, "lags_sequence") or [0])
        shapes: list[tuple[int, ...]] = [(BATCH, length, channels), (BATCH, length)]
        for shape in shapes:
            yield f"series {len(shape)}d", lambda shape=shape: {"past_values": self.draw(shape)}
        past, future = length + lags, find(config, "prediction_length") or 1

        def with_future() -> Inputs:
            features = len(find(config, "lags_sequence") or ()) * 0 + 1
            return {
                "past_values": self.draw((BATCH, past)),
                "past_time_features": self.draw((BATCH, past, features)),
                "past_observed_mask": torch.ones(BATCH, past),
                "future_values": self.draw((BATCH, future)),
                "future_time_features": self.draw((BATCH, future, features)),
            }

        yield "series with time", with_future

    def required(self) -> Inputs:
        """Return what has no default, by the names that these arguments have everywhere."""
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
        low = min(LOW, high - 1)
        return torch.randint(low, high, (rows, length), generator=self._generator)

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
        """Return what a decoder starts from."""
        if "decoder_input_ids" in self.parameters:
            return {"decoder_input_ids": self.ids(TARGETS)}
        return {}

    def images(self) -> Iterator[tuple[int, ...]]:
        """Yield shapes of images that the model may want."""
        config = vision_of(self.config)
        channels = find(config, "num_channels", "in_channels", "in_chans", "num_input_channels")
        channels = channels if isinstance(channels, int) else 3
        size = find(config, "image_size", "img_size", "input_size", "resolution", "crop_size")
        if isinstance(size, dict):
            size = [size["height"], size["width"]]
        height, width = size[-2:] if isinstance(size, (list, tuple)) else (size, size)
        sides = [(height, width)] if isinstance(height, int) else []
        for height, width in [*sides, (64, 64), (128, 128), (224, 224)]:
            yield (BATCH, channels, height, width)
        frames = find(config, "num_frames") or 2
        for height, width in [*sides, (64, 64)]:
            yield (BATCH, frames, channels, height, width)
            yield (BATCH, channels, frames, height, width)
        patch = find(config, "patch_size") or 16
        if isinstance(patch, int):
            yield (BATCH, 16, channels * patch * patch)

    def image(self, name: str, shape: tuple[int, ...]) -> Inputs:
        """Return images of a shape, and what stands beside them."""
        inputs: Inputs = {name: self.draw(shape)}
        if "pixel_mask" in self.parameters:
            inputs["pixel_mask"] = torch.ones(shape[0], *shape[-2:], dtype=torch.int64)
        if "image_sizes" in self.parameters:
            inputs["image_sizes"] = torch.tensor([shape[-2:]] * shape[0])
        for key in ("pixel_position_ids", "image_position_ids"):
            if key in self.parameters:
                side = int(shape[1] ** 0.5)
                at = torch.arange(shape[1])
                inputs[key] = torch.stack((at % side, at // side), -1).expand(shape[0], -1, -1)
        if "spatial_shapes" in self.parameters and len(shape) == 3:
            inputs["spatial_shapes"] = torch.tensor([[4, 4]] * shape[0])
            inputs["pixel_attention_mask"] = torch.ones(shape[:2], dtype=torch.int64)
        if "qformer_input_ids" in self.parameters:
            inputs["qformer_input_ids"] = self.ids(TOKENS)
        return inputs

    def image_token(self) -> int | None:
        """Return the token that stands for a part of an image."""
        names = ("image_token_id", "image_token_index", "media_placeholder_token_id")
        return find(self.config, *names)

    def text_and_image(self, name: str, shape: tuple[int, ...]) -> Inputs:
        """Return tokens and images, with as many image tokens as the images have features."""
        inputs = self.image(name, shape)
        features = getattr(self.model, "get_image_features", None)
        token = self.image_token()
        if features is None or not isinstance(token, int):
            return self.text() | inputs
        wanted = inspect.signature(features).parameters
        with torch.no_grad():
            found = features(**{key: value for key, value in inputs.items() if key in wanted})
        return self.with_tokens(token, found, shape[0]) | inputs

    def with_tokens(self, token: int, found: Any, rows: int) -> Inputs:
        """Return rows of tokens in which ``token`` stands once for every feature of ``found``."""
        found = getattr(found, "pooler_output", found)
        parts = list(found) if isinstance(found, (list, tuple)) else [found]
        count = sum(part.shape[:-1].numel() for part in parts) // rows
        ids = self.ids(TOKENS + count, rows)
        ids[:, 3 : 3 + count] = token
        inputs: Inputs = {"input_ids": ids}
        if "attention_mask" in self.parameters:
            inputs["attention_mask"] = torch.ones_like(ids)
        for key in ("mm_token_type_ids", "token_type_ids"):
            if key in self.parameters:
                inputs[key] = (ids == token).long()
        return inputs

    def patches(self, grid: str, packed: bool) -> Inputs:
        """Return the patches of one image of four by four patches."""
        config = vision_of(self.config)
        channels = find(config, "in_channels", "in_chans", "num_channels") or 3
        patch = find(config, "patch_size") or 14
        patch = patch[0] if isinstance(patch, (list, tuple)) else patch
        frames = vars(config).get("temporal_patch_size") or 1
        shape = (16, channels * frames * patch * patch) if packed else (16, channels, patch, patch)
        names = ("pixel_values", "hidden_states", "pixel_values_images")
        name = next(each for each in names if each in self.parameters)
        sides = [[4, 4]] if grid == "target_sizes" else [[1, 4, 4]]
        return {name: self.draw(shape), grid: torch.tensor(sides)}

    def text_and_patches(self, grid: str, packed: bool) -> Inputs:
        """Return one row of tokens with the tokens of an image in it, and its patches."""
        inputs = self.patches(grid, packed)
        token = self.image_token()
        features = getattr(self.model, "get_image_features", None)
        if features is None or not isinstance(token, int):
            raise NotImplementedError
        with torch.no_grad():
            found = features(**inputs)
        return self.with_tokens(token, found, 1) | inputs

    def codes(self) -> Tensor:
        """Return tokens of several codebooks."""
        books = find(self.config, "num_codebooks", "n_codes_total", "num_channels")
        return self.ids(TOKENS * books).view(BATCH, TOKENS, books)

    def sound(self, name: str, shape: tuple[int, ...]) -> Inputs:
        """Return sound of a shape, with the masks that have no default."""
        inputs: Inputs = {name: self.draw(shape)}
        for mask in ("input_features_mask", "attention_mask", "padding_mask", "audio_mel_mask"):
            parameter = self.parameters.get(mask)
            if parameter and (parameter.default is inspect.Parameter.empty or "features" in mask):
                inputs[mask] = torch.ones(shape[0], max(shape[1:]), dtype=torch.int64)
        return inputs

    def sounds(self, name: str) -> Iterator[tuple[int, ...]]:
        """Yield shapes of sound that the model may want."""
        config = audio_of(self.config)
        bins = find(
            config, "feature_projection_input_dim", "num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "n_mel_bins",
            "mel_dim", "input_dim", "input_size", "num_mels", "model_in_dim",
        )
        positions = find(config, "max_source_positions")
        frames = 2 * positions if isinstance(positions, int) and positions <= 64 else 64
        bins = bins if isinstance(bins, int) else 80
        if name in ("input_features", "audio_mel"):
            for each in dict.fromkeys((bins, 80, 128, 160)):
                yield (BATCH, each, frames)
                yield (BATCH, frames, each)
            yield (BATCH, 1, frames, bins)
        yield (BATCH, 4000)
        yield (BATCH, 1, 4000)
        yield (BATCH, 16000)
        yield (BATCH, 1, 16000)
        if name != "input_features":
            yield (BATCH, bins, frames)
            yield (BATCH, frames, bins)
            yield (BATCH, 1024, 128)


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
