"""From the vectors of a text's tokens to one of the text, as its checkpoint says.

The files are those of sentence-transformers: modules.json, and a config.json for each module.
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
    """The way in which a checkpoint makes one vector of many.

    Attributes:
        modes: names of ``POOLS``; the vectors of several stand one behind the other.
        unit: vectors are scaled to a length of 1.
        max_tokens: longer texts are cut; None leaves that to the tokenizer.
        prompts: texts that are put in front, by name.
        default_prompt: the one that is put in front unless another is asked for.
    """

    modes: tuple[str, ...] = ("mean",)
    unit: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None

    @classmethod
    def of(cls, folder: Path) -> Pooling:
        """Return what the files in ``folder`` say; the mean of all tokens where there are none.

        Raises:
            CheckpointError: a file is corrupt.
            UnsupportedModelError: it says what is not computed here.
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
        said = _optional(folder / "config_sentence_transformers.json")
        max_tokens = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
        prompts = {k: v for k, v in (said.get("prompts") or {}).items() if isinstance(v, str)}
        return cls(modes, unit, max_tokens, prompts, said.get("default_prompt_name"))

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return ``[B, H]`` for each mode, float32.

        Args:
            hidden: ``[B, T, H]``.
            mask: ``[B, T]``, 1 where a token is one of the text.
        """
        wide = hidden.float()
        out = torch.cat([POOLS[mode](wide, mask) for mode in self.modes], dim=1)
        return normalize(out, dim=1) if self.unit else out


def _cls(hidden: Tensor, mask: Tensor) -> Tensor:
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
"""By the names of sentence-transformers, of ``(hidden [B, T, H], mask [B, T]) -> [B, H]``."""
_OLDER = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean"}
_OLDER |= {"weightedmean_tokens": "weightedmean"}


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return path and kind of each module."""
    file = folder / "modules.json"
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        return [(entry["path"], entry["type"].rpartition(".")[2]) for entry in modules]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(file, f"is no list of modules: {error}", "copy it again") from error


def _modes(file: Path) -> tuple[str, ...]:
    said = read_json(file)
    found: Any = said.get("pooling_mode")
    if found is None:
        named = [key.removeprefix("pooling_mode_") for key, on in said.items() if on is True]
        found = [_OLDER.get(name, name) for name in named if f"pooling_mode_{name}" in said]
    modes = (found,) if isinstance(found, str) else tuple(found)
    if unknown := [mode for mode in modes if mode not in POOLS] or not modes:
        raise UnsupportedModelError(file, f"pools by {unknown}; known are {', '.join(POOLS)}")
    return modes


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
