"""Reads a Hugging Face model directory: config, index and tensors, shard by shard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from interposer.errors import CheckpointError, InterposerError
from interposer_models._checkpoint.mapped_pages import MappedPages
from interposer_models._checkpoint.regular_files import check_folder, check_regular

if TYPE_CHECKING:
    from interposer_models._checkpoint.hub import HubModel

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The name up to the first number identifies the block of a tensor.
_BLOCK = re.compile(r".*?\.\d+\.")
_QUANTIZATION = "hf_quant_config.json"
# The first releases of AutoGPTQ and AutoAWQ wrote the quantization_config to these files instead of
# config.json. AutoGPTQ's file does not name the method.
_LEGACY_QUANTIZATION = ("quantize_config.json", "quant_config.json")
_AWQ_FIELD, _AWQ_METHOD, _GPTQ_METHOD = "zero_point", "awq", "gptq"
_ADAPTER = "adapter_config.json"
_MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory with a complete config and list of shards.

    Attributes:
        shards: safetensors files in natural order; empty if only the description was read.
        source: the hub to download the weights from; None for weights on the disk.
        tensors: file by tensor name, from the index; empty without an index.
    """

    path: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, str]
    source: HubModel | None = None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open the checkpoint at ``path``.

        The ``quantization`` of hf_quant_config.json is added to ``quantization_config`` of the
        config under the same name. If config.json states no quantization, quantize_config.json or
        quant_config.json can.

        Raises: CheckpointError: no directory, no or a corrupt config.json, no weights, an index
            that names a missing shard, or a hf_quant_config.json of another quantization.
        """
        root = Path(path)
        description = cls.described(root)
        if not (root / _INDEX).exists():
            if not (root / _SINGLE).is_file():
                raise _without_weights(root)
            return replace(description, shards=(root / _SINGLE,))
        tensors = _indexed(root)
        if (root / _SINGLE).is_file() and set(tensors.values()) != {_SINGLE}:
            # The index belongs to another save. transformers prefers the single file, too.
            return replace(description, shards=(root / _SINGLE,))
        shards = [root / name for name in sorted(set(tensors.values()))]
        for shard in shards:
            if not shard.is_file():
                raise CheckpointError(
                    root / _INDEX,
                    f"names the shard {shard.name!r}, which is missing",
                    "copy it again",
                )
        return replace(description, shards=tuple(shards), tensors=tensors)

    @classmethod
    def described(cls, root: Path, source: HubModel | None = None) -> Checkpoint:
        """Open the description of the checkpoint at ``root``; weights may be missing.

        Raises: CheckpointError: no directory, or the description is invalid.
        """
        if not root.is_dir():
            reason = "is not a directory" if root.exists() else "does not exist"
            mend = "give the folder of a model, or its name on a hub, such as Qwen/Qwen3-0.6B"
            raise CheckpointError(root, reason, mend)
        check_folder(root)
        if (root / _ADAPTER).is_file() and not (root / "config.json").exists():
            raise _adapter_without_model(root, "config.json")
        return cls(root, _with_quantization(root, read_json(root / "config.json")), (), {}, source)

    @property
    def num_bytes(self) -> int:
        """Size of all shards in bytes."""
        return sum(shard.stat().st_size for shard in self.shards)

    def names(self) -> frozenset[str]:
        """Return the names of all tensors that ``stream`` can yield.

        Raises: CheckpointError: a shard is truncated or not safetensors.
        """
        names: set[str] = set()
        for shard in self.shards:
            with reading(shard), safe_open(shard, framework="pt") as file:
                names.update(file.keys())
        return frozenset(names)

    def stream(
        self, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)``: tensors outside of blocks first, then block by block.

        A layer needs memory for two forms while weights are packed. The largest layers are
        mostly embedding tables, which belong to no block, and come first while little else is in
        memory.

        The next iteration discards changes to a tensor: its memory pages go back to the system,
        which would keep them in memory until the end of the file otherwise.

        Tensors are grouped by block because files group all tensors by dtype: in file order, the
        scales of quantized layers would arrive after the packed weights of all layers.

        Args:
            wanted: says of a name whether the tensor is yielded; None yields all.
        Raises: CheckpointError: a shard is truncated or not safetensors, or lacks a tensor that the
            index promises.
        """
        stored_names: set[str] = set()
        for in_blocks in (False, True):
            for shard in self.shards:
                with reading(shard), safe_open(shard, framework="pt") as file:
                    pages: MappedPages | None = None
                    for name in _by_block(file.offset_keys(), in_blocks):
                        stored_names.add(name)
                        if wanted is None or wanted(name):
                            tensor = file.get_tensor(name)
                            pages = pages or MappedPages(shard)
                            yield name, tensor
                            # Without this, memory would grow by the size of the file.
                            pages.drop(tensor)
        for name, shard_name in self.tensors.items():
            if name not in stored_names:
                raise CheckpointError(
                    self.path / _INDEX,
                    f"names the tensor {name!r} in {shard_name!r}, which lacks it",
                )


def weight_files(root: Path) -> list[str]:
    """Return the names of the weight files of the model in ``root``.

    Raises: CheckpointError: the index is corrupt.
    """
    return sorted(set(_indexed(root).values())) if (root / _INDEX).exists() else [_SINGLE]


def file_of(stored: str, path: object) -> object:
    """Return the shard that contains a tensor; ``path`` if it is no folder with such a shard."""
    if not isinstance(path, Path) or not path.is_dir():
        return path
    try:
        for shard in Checkpoint.open(path).shards:
            with safe_open(shard, framework="pt") as file:
                if stored in file.keys():  # noqa: SIM118 - the file is not a mapping
                    return shard
    except (InterposerError, OSError):
        pass
    return path


def _without_weights(root: Path) -> CheckpointError:
    """Describe the error for a folder without an index and without a single weight file."""
    if (root / _ADAPTER).is_file():
        return _adapter_without_model(root, f"{_SINGLE} or {_INDEX}")
    shards, safetensors, pickles = (
        ", ".join(sorted(file.name for file in root.glob(pattern))[:_MAX_LISTED])
        for pattern in ("*-of-*.safetensors", "*.safetensors", "*.bin")
    )
    mend = "copy the weights of the model to this folder"
    if "consolidated" in safetensors:
        mend = (
            f"download the files of transformers' format: {safetensors} has the names of Mistral's "
            "own"
        )
    elif shards:
        mend = f"copy {_INDEX} again, which says what {shards} hold"
    elif safetensors:
        mend = f"rename the file that holds the whole model to {_SINGLE}: there is {safetensors}"
    elif pickles:
        mend = f"save the model as safetensors: {pickles} is pickled, which runs code"
    return CheckpointError(root, f"holds neither {_SINGLE} nor {_INDEX}", mend)


def _adapter_without_model(root: Path, missing: str) -> CheckpointError:
    """Describe the error for an adapter folder that was passed as a model folder."""
    base = read_json(root / _ADAPTER).get("base_model_name_or_path")
    model = repr(base) if isinstance(base, str) and base else "the base model"
    return CheckpointError(
        root / _ADAPTER,
        f"describes a LoRA adapter, and the folder holds no model ({missing})",
        f"load {model} with adapters={{'name': {str(root)!r}}}",
    )


def _indexed(root: Path) -> dict[str, str]:
    """Return the file of each tensor, by tensor name, from the index in ``root``.

    Raises: CheckpointError: the index has no such map, or names a file outside of ``root``.
    """
    tensors = read_json(root / _INDEX).get("weight_map")
    if not isinstance(tensors, dict) or not tensors:
        raise CheckpointError(root / _INDEX, "has no 'weight_map'")
    if not all(isinstance(name, str) for name in tensors.values()):
        raise CheckpointError(root / _INDEX, "has a 'weight_map' that names no files")
    # An index must not make the reader open files outside of the model's folder.
    for name in sorted(set(tensors.values())):
        if (root / name).parent != root:
            raise CheckpointError(root / _INDEX, f"names {name!r}, outside the directory")
    return tensors


def _by_block(names: Iterable[str], in_blocks: bool) -> Iterator[str]:
    """Yield names grouped by block, blocks in the order of first names.

    Args:
        in_blocks: yield the names in numbered blocks; otherwise the names outside of blocks.
    """
    blocks: dict[str, list[str]] = {}
    for name in names:
        match = _BLOCK.match(name)
        if (match is not None) == in_blocks:
            blocks.setdefault(match[0] if match else name.rpartition(".")[0], []).append(name)
    # Sorted, so that weights and scales of a layer follow each other.
    for block in blocks.values():
        yield from sorted(block)


@contextmanager
def reading(shard: Path) -> Iterator[None]:
    """Raise safetensors errors about ``shard`` as CheckpointError, inside a ``with`` block."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            shard, f"is truncated or not a safetensors file: {error}", "copy it again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; CheckpointError if the file is missing or corrupt."""
    check_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(path, "is missing", "copy it again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not valid JSON: {error}", "copy it again") from error
    if not isinstance(content, dict):
        reason = f"holds {type(content).__name__}, expected an object"
        raise CheckpointError(path, reason, "copy it again")
    return content


def _with_quantization(root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the quantization that separate files state, if there are any."""
    path = root / _QUANTIZATION
    if not path.exists():
        return _with_legacy_quantization(root, config)
    quantization_file = read_json(path)
    producer, quantization = (
        quantization_file.get("producer"),
        quantization_file.get("quantization"),
    )
    method = producer.get("name") if isinstance(producer, dict) else None
    if not isinstance(method, str) or not isinstance(quantization, dict):
        raise CheckpointError(path, "lacks 'quantization' or the name of its 'producer'")
    config_fields = config.get("quantization_config") or {}
    if not isinstance(config_fields, dict):
        return config  # parsing the config will report the error
    file_fields = {"quant_method": method, "quantization": quantization}
    for name, value in file_fields.items():
        if config_fields.get(name, value) != value:
            raise CheckpointError(
                path,
                f"contradicts config.json, whose quantization_config has {name} "
                f"{shortened(config_fields[name])}, not {shortened(value)}",
                "restore the file that was changed",
            )
    return {**config, "quantization_config": {**config_fields, **file_fields}}


def _with_legacy_quantization(root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the quantization of a legacy file, unless ``config`` states one."""
    files = [root / name for name in _LEGACY_QUANTIZATION if (root / name).exists()]
    if config.get("quantization_config") is not None or not files:
        return config
    settings = read_json(files[0])
    method = _AWQ_METHOD if _AWQ_FIELD in settings else _GPTQ_METHOD
    return {**config, "quantization_config": {"quant_method": method, **settings}}
