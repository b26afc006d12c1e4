"""Pooling of token vectors to one vector for each text, as configured in the checkpoint.

The files of sentence-transformers are modules.json, and a config.json for each module.
Dimensions: B texts, T tokens, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_models._checkpoint.checkpoint import read_json

Pool = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Pooling:
    """The pooling of a checkpoint.

    Attributes:
        modes: names of ``POOLS``; the vectors of several modes are concatenated.
        unit: vectors are scaled to unit length.
        max_tokens: longer texts are truncated; None uses the tokenizer's limit.
        prompts: texts that can be prepended, by name.
        default_prompt: name of the prompt that is prepended by default.
    """

    modes: tuple[str, ...] = ("mean",)
    unit: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None

    @classmethod
    def of(cls, folder: Path) -> Pooling:
        """Read the pooling from the files in ``folder``; without files, the mean of all tokens.

        Raises:
            CheckpointError: a file is corrupt.
            UnsupportedModelError: a file names an unsupported module or pooling mode.
        """
        if not (folder / "modules.json").is_file():
            return cls()
        modes: tuple[str, ...] = ("mean",)
        unit = False
        for path, kind in _modules(folder):
            if kind == "Pooling":
                modes = _modes(folder / path / "config.json")
            elif kind == "Normalize":
                unit = True
            elif kind != "Transformer":
                raise UnsupportedModelError(
                    folder, f"modules.json has a {kind!r}; read are Transformer, Pooling, Normalize"
                )
        settings = _optional(folder / "config_sentence_transformers.json")
        max_tokens = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
        prompts = {k: v for k, v in (settings.get("prompts") or {}).items() if isinstance(v, str)}
        return cls(modes, unit, max_tokens, prompts, settings.get("default_prompt_name"))

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Pool token vectors to ``[B, H * modes]`` float32.

        Args:
            hidden: ``[B, T, H]``.
            mask: ``[B, T]``, 1 for tokens of the text, 0 for padding.
        """
        wide = hidden.float()
        out = torch.cat([POOLS[mode](wide, mask) for mode in self.modes], dim=1)
        return normalize(out, dim=1) if self.unit else out


def _cls(hidden: Tensor, mask: Tensor) -> Tensor:
    # The first token that is no padding: padding may be on the left.
    return hidden[torch.arange(len(hidden)), mask.argmax(1)]


def _max(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    return _sum(hidden, mask) / mask.sum(1, keepdim=True).clamp(min=1)


def _mean_sqrt_len(hidden: Tensor, mask: Tensor) -> Tensor:
    return _sum(hidden, mask) / mask.sum(1, keepdim=True).clamp(min=1).sqrt()


def _weighted_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask.cumsum(1) * mask
    return _sum(hidden, weights) / weights.sum(1, keepdim=True).clamp(min=1)


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    return hidden[torch.arange(len(hidden)), last]


def _sum(hidden: Tensor, weights: Tensor) -> Tensor:
    return (hidden * weights[..., None]).sum(1)


POOLS: dict[str, Pool] = {
    "cls": _cls,
    "lasttoken": _last,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
}
"""By names of sentence-transformers: functions ``(hidden [B, T, H], mask [B, T]) -> [B, H]``."""
_RENAMED_MODES = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean"}
_RENAMED_MODES |= {"weightedmean_tokens": "weightedmean"}


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return path and class name of each module in modules.json."""
    file = folder / "modules.json"
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        return [(entry["path"], entry["type"].rpartition(".")[2]) for entry in modules]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(file, f"is no list of modules: {error}", "copy it again") from error


def _modes(file: Path) -> tuple[str, ...]:
    settings = read_json(file)
    stored_modes: Any = settings.get("pooling_mode")
    # Older files have a boolean for each mode instead.
    if stored_modes is None:
        enabled = [key.removeprefix("pooling_mode_") for key, on in settings.items() if on is True]
        stored_modes = [
            _RENAMED_MODES.get(name, name) for name in enabled if f"pooling_mode_{name}" in settings
        ]
    modes = (stored_modes,) if isinstance(stored_modes, str) else tuple(stored_modes)
    unknown = [mode for mode in modes if mode not in POOLS]
    if unknown or not modes:
        pooling = f"pools by {unknown}" if unknown else "names no pooling mode"
        raise UnsupportedModelError(file, f"{pooling}; known are {', '.join(POOLS)}")
    return modes


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
