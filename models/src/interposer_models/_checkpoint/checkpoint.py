"""Reading a Hugging Face model directory: config, index and tensors, shard by shard."""

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
# Up to the first number: what follows belongs to one block.
_BLOCK = re.compile(r".*?\.\d+\.")
_QUANTIZATION = "hf_quant_config.json"
# Files that state what config.json calls quantization_config, in the first releases of AutoGPTQ and
# AutoAWQ alone. The former names no method there.
_WRITERS_OWN = ("quantize_config.json", "quant_config.json")
_AWQ_FIELD, _AWQ_METHOD, _GPTQ_METHOD = "zero_point", "awq", "gptq"
_ADAPTER = "adapter_config.json"
_LISTED = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory whose config and list of shards were read and found complete.

    Attributes:
        shards: safetensors files in natural order; empty where only the description was read.
        source: where the weights are to be fetched from, None where they are here.
        tensors: file by tensor name as the index promises; empty without an index.
    """

    path: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, str]
    source: HubModel | None = None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Return the checkpoint at ``path``.

        What hf_quant_config.json says of the quantization, under ``quantization`` there, is found
        under that name in ``quantization_config`` of the config. Where config.json states no
        quantization, quantize_config.json or quant_config.json can.

        Raises: CheckpointError: no directory, no or a corrupt config.json, no weights, an index
            that names a missing shard, or a hf_quant_config.json of another quantization.
        """
        root = Path(path)
        described = cls.described(root)
        if not (root / _INDEX).exists():
            if not (root / _SINGLE).is_file():
                raise _without_weights(root)
            return replace(described, shards=(root / _SINGLE,))
        tensors = _indexed(root)
        if (root / _SINGLE).is_file() and set(tensors.values()) != {_SINGLE}:
            # The index of another save, which transformers does not read either.
            return replace(described, shards=(root / _SINGLE,))
        shards = [root / name for name in sorted(set(tensors.values()))]
        for shard in shards:
            if not shard.is_file():
                raise CheckpointError(
                    root / _INDEX,
                    f"names the shard {shard.name!r}, which is missing",
                    "copy it again",
                )
        return replace(described, shards=tuple(shards), tensors=tensors)

    @classmethod
    def described(cls, root: Path, source: HubModel | None = None) -> Checkpoint:
        """Return the checkpoint at ``root`` without its weights, which need not be there.

        Raises: CheckpointError: no directory, or something is wrong with its description.
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
        """Return the size of all shards in bytes."""
        return sum(shard.stat().st_size for shard in self.shards)

    def names(self) -> frozenset[str]:
        """Return the names of all tensors that ``stream`` yields.

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
        """Yield ``(name, tensor)``: what belongs to no block, then the blocks shard by shard.

        Those that are not ``wanted`` are left out.

        Two forms of a layer are held while it is packed, and the largest ones are mostly tables,
        which are no part of a block: those two are held before anything else is.

        What was written to a tensor is lost when the next one is asked for: its pages are given
        back, which would else be held until the end of the file.

        Files have all tensors of one dtype together, so that in their order the scales of
        quantized layers come after the codes of all of them.

        Raises: CheckpointError: a shard is truncated or not safetensors, or lacks a tensor that
            the index promises.
        """
        seen: set[str] = set()
        for numbered in (False, True):
            for shard in self.shards:
                with reading(shard), safe_open(shard, framework="pt") as file:
                    pages: MappedPages | None = None
                    for name in _by_block(file.offset_keys(), numbered):
                        seen.add(name)
                        if wanted is None or wanted(name):
                            tensor = file.get_tensor(name)
                            pages = pages or MappedPages(shard)
                            yield name, tensor
                            pages.drop(tensor)
        for name, shard_name in self.tensors.items():
            if name not in seen:
                raise CheckpointError(
                    self.path / _INDEX,
                    f"names the tensor {name!r} in {shard_name!r}, which lacks it",
                )


def weight_files(root: Path) -> list[str]:
    """Return the names of the files that the weights of the model in ``root`` are stored in.

    Raises: CheckpointError: the index is corrupt.
    """
    return sorted(set(_indexed(root).values())) if (root / _INDEX).exists() else [_SINGLE]


def file_of(stored: str, path: object) -> object:
    """Return the shard that holds a tensor, or ``path`` where that is no folder with one."""
    if not isinstance(path, Path) or not path.is_dir():
        return path
    try:
        for shard in Checkpoint.open(path).shards:
            with safe_open(shard, framework="pt") as file:
                if stored in file.keys():  # noqa: SIM118 - it is no mapping
                    return shard
    except (InterposerError, OSError):
        pass
    return path


def _without_weights(root: Path) -> CheckpointError:
    """Return the error for a folder without an index and without a whole file of weights."""
    if (root / _ADAPTER).is_file():
        return _adapter_without_model(root, f"{_SINGLE} or {_INDEX}")
    shards, others, pickled = (
        ", ".join(sorted(file.name for file in root.glob(pattern))[:_LISTED])
        for pattern in ("*-of-*.safetensors", "*.safetensors", "*.bin")
    )
    mend = "copy the weights of the model to this folder"
    if "consolidated" in others:
        mend = (
            f"download the files of transformers' format: {others} has the names of Mistral's own"
        )
    elif shards:
        mend = f"copy {_INDEX} again, which says what {shards} hold"
    elif others:
        mend = f"rename the file that holds the whole model to {_SINGLE}: there is {others}"
    elif pickled:
        mend = f"save the model as safetensors: {pickled} is pickled, which runs code"
    return CheckpointError(root, f"holds neither {_SINGLE} nor {_INDEX}", mend)


def _adapter_without_model(root: Path, missing: str) -> CheckpointError:
    """Return the error for the folder of an adapter, given as that of a model."""
    base = read_json(root / _ADAPTER).get("base_model_name_or_path")
    named = repr(base) if isinstance(base, str) and base else "the base model"
    return CheckpointError(
        root / _ADAPTER,
        f"describes a LoRA adapter, and the folder holds no model ({missing})",
        f"load {named} with adapters={{'name': {str(root)!r}}}",
    )


def _indexed(root: Path) -> dict[str, str]:
    """Return the file of each tensor, by its name, which the index in ``root`` states.

    Raises: CheckpointError: it states none, or a file outside of ``root``.
    """
    tensors = read_json(root / _INDEX).get("weight_map")
    if not isinstance(tensors, dict) or not tensors:
        raise CheckpointError(root / _INDEX, "has no 'weight_map'")
    if not all(isinstance(name, str) for name in tensors.values()):
        raise CheckpointError(root / _INDEX, "has a 'weight_map' that names no files")
    for name in sorted(set(tensors.values())):
        if (root / name).parent != root:
            raise CheckpointError(root / _INDEX, f"names {name!r}, outside the directory")
    return tensors


def _by_block(names: Iterable[str], numbered: bool) -> Iterator[str]:
    """Yield names grouped by block, the blocks in the order of their first names.

    Args:
        numbered: yield those of numbered blocks; else those of layers outside them.
    """
    blocks: dict[str, list[str]] = {}
    for name in names:
        found = _BLOCK.match(name)
        if (found is not None) == numbered:
            blocks.setdefault(found[0] if found else name.rpartition(".")[0], []).append(name)
    for block in blocks.values():
        yield from sorted(block)


@contextmanager
def reading(shard: Path) -> Iterator[None]:
    """Turn what safetensors says of a bad file into a CheckpointError, inside a ``with`` block."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            shard, f"is truncated or not a safetensors file: {error}", "copy it again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; CheckpointError if it is missing or corrupt."""
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
    """Return ``config`` with what files beside it state of the quantization, if there are any."""
    path = root / _QUANTIZATION
    if not path.exists():
        return _with_writers_own(root, config)
    beside = read_json(path)
    producer, quantization = beside.get("producer"), beside.get("quantization")
    method = producer.get("name") if isinstance(producer, dict) else None
    if not isinstance(method, str) or not isinstance(quantization, dict):
        raise CheckpointError(path, "lacks 'quantization' or the name of its 'producer'")
    stated = config.get("quantization_config") or {}
    if not isinstance(stated, dict):
        return config  # what is wrong with it is said when the config is parsed
    expected = {"quant_method": method, "quantization": quantization}
    for name, value in expected.items():
        if stated.get(name, value) != value:
            raise CheckpointError(
                path,
                f"contradicts config.json, whose quantization_config has {name} "
                f"{shortened(stated[name])}, not {shortened(value)}",
                "restore the file that was changed",
            )
    return {**config, "quantization_config": {**stated, **expected}}


def _with_writers_own(root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the quantization of the writer's file, where it states none itself."""
    files = [root / name for name in _WRITERS_OWN if (root / name).exists()]
    if config.get("quantization_config") is not None or not files:
        return config
    stated = read_json(files[0])
    method = _AWQ_METHOD if _AWQ_FIELD in stated else _GPTQ_METHOD
    return {**config, "quantization_config": {"quant_method": method, **stated}}
