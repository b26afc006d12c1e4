"""The files of a Hugging Face checkpoint: config, index and tensors, from a folder or a model hub.

A model by name is downloaded into the cache of the hub's own library. Endpoint, token, cache folder
and offline mode are settings of that library, such as ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``
and ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from interposer.errors import CheckpointError, InterposerError, foreign_errors
from interposer.tooling import irregular

_READ = frozenset(
    {".bpe", ".gguf", ".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt"}
)

# Other files of a repository are for other programs, or hold the same content in other formats.
DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab*",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
    "tekken.json",
    # Written by sentence-transformers.
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*_Pooling/config.json",
)
"""Patterns of the files of a model that describe it, without weights."""
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_SAMPLES = 32
_SAMPLE_BYTES = 4096
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The name up to the first number identifies the block of a tensor.
_BLOCK = re.compile(r".*?\.\d+\.")
_QUANTIZATION = "hf_quant_config.json"
# The first releases of AutoGPTQ and AutoAWQ wrote the quantization_config to these files instead of
# config.json. AutoGPTQ's file does not name the method.
_LEGACY_QUANTIZATION = ("quantize_config.json", "quant_config.json")
_AWQ_FIELD, _AWQ_METHOD, _GPTQ_METHOD = "zero_point", "awq", "gptq"
_ADAPTER_CONFIG = "adapter_config.json"
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
        """Open the checkpoint in the model directory ``path``.

        The ``quantization`` of hf_quant_config.json is added to ``quantization_config`` of the
        config under the same name. If config.json states no quantization, quantize_config.json or
        quant_config.json can.

        Raises: CheckpointError: no directory, no or a corrupt config.json, no weights, an index
            that names a missing shard, or a hf_quant_config.json of another quantization.
        """
        root = Path(path)
        description = cls.open_description(root)
        if not (root / _INDEX).exists():
            if not (root / _SINGLE).is_file():
                raise _without_weights(root)
            return replace(description, shards=(root / _SINGLE,))
        tensors = _read_index(root)
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
    def open_description(cls, root: Path, source: HubModel | None = None) -> Checkpoint:
        """Open the checkpoint at ``root`` for its config and tokenizer; weights may be missing.

        Raises: CheckpointError: no directory, or the description is invalid.
        """
        mend = "give the folder of a model, or its name on a hub, such as Qwen/Qwen3-0.6B"
        if not root.is_dir():
            reason = "is not a directory" if root.exists() else "does not exist"
            raise CheckpointError(root, reason, mend)
        check_folder(root)
        if (root / _ADAPTER_CONFIG).is_file() and not (root / "config.json").exists():
            raise _adapter_without_model(root, "config.json")
        if not (root / "config.json").exists():
            raise CheckpointError(root, "holds no model: config.json is missing", mend)
        return cls(root, _with_quantization(root, read_json(root / "config.json")), (), {}, source)

    @property
    def num_bytes(self) -> int:
        """Total size of all shards in bytes."""
        return sum(shard.stat().st_size for shard in self.shards)

    def names(self) -> frozenset[str]:
        """Return the names of all tensors that ``stream`` can yield.

        Raises: CheckpointError: a shard is truncated or not safetensors.
        """
        return frozenset(self.dtypes())

    def dtypes(self) -> dict[str, str]:
        """Return the dtypes of all tensors by name, as safetensors calls them, such as ``BF16``.

        Raises: CheckpointError: a shard is truncated or not safetensors.
        """
        dtypes: dict[str, str] = {}
        for shard in self.shards:
            with reading(shard), safe_open(shard, framework="pt") as file:
                dtypes |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        return dtypes

    def stream(
        self, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, tensor)``: tensors outside of blocks first, then block by block.

        While a layer is packed, its plain and its packed weights are both in memory. The largest
        layers are mostly embedding tables. They belong to no block, and come first, while little
        else is in memory.

        Each iteration returns the memory pages of the last tensor to the system, which would
        otherwise keep the pages until the end of the file. Changes to the tensor are lost.

        Tensors are grouped by block because files group all tensors by dtype: in file order, the
        scales of quantized layers would arrive after the packed weights of all layers.

        Args:
            wanted: returns True for the names of tensors to yield; None yields all tensors.
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


def stored_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a safetensors file, or of all such files of a folder, by name.

    Raises: CheckpointError: there is no such file, or a file is truncated or not safetensors.
    """
    shards = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not shards or not path.exists():
        reason = "holds no safetensors file" if path.exists() else "does not exist"
        raise CheckpointError(path, reason, "give a folder or file that safetensors has written")
    for shard in shards:
        check_regular(shard)
    yield from Checkpoint(path, {}, tuple(shards), {}).stream()


def check_regular(path: Path) -> None:
    """Refuse a path that is a FIFO, device, folder or link loop; a missing file passes.

    Raises: CheckpointError: ``path`` is not a regular file; the text names the kind.
    """
    if fault := irregular(path):
        raise CheckpointError(path, fault, "put the file there, or remove it")


def check_folder(folder: Path) -> None:
    """Refuse a folder in which a model or adapter file is not a regular file.

    Raises: CheckpointError: with the first such path.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return  # opening a file of the folder raises a more precise error
    for path in paths:
        if path.suffix.lower() in _READ:
            check_regular(path)


class MappedPages:
    """Address ranges at which this process has mapped a file into memory; empty except on Linux.

    A dropped page is read from the file again at the next access, so that only changes that this
    process made to the page are lost.
    """

    def __init__(self, path: Path) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._library = None
        if sys.platform != "linux":
            return
        self._library = ctypes.CDLL(None)
        name = str(path.resolve())
        # A line is "start-end permissions offset device inode path"; a file can have several.
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            addresses, _, fields = line.partition(" ")
            if fields.endswith(f" {name}"):
                start, end = (int(edge, 16) for edge in addresses.split("-"))
                self._ranges.append((start, end))

    def drop(self, tensor: torch.Tensor) -> None:
        """Release memory pages entirely inside ``tensor`` to the system, if they map the file."""
        # Round inwards: the first and last page may hold parts of other tensors.
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and any(first <= start and end <= last for first, last in self._ranges):
            assert self._library is not None
            address, size = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
            self._library.madvise(address, size, mmap.MADV_DONTNEED)


class HubModel(NamedTuple):
    """The name, and optionally the revision, of a model on a model hub.

    Attributes:
        repository: ``namespace/name``.
        revision: a branch, a tag or a commit; None is the main branch.
    """

    repository: str
    revision: str | None = None

    @classmethod
    def named(cls, text: str | Path) -> HubModel | None:
        """Parse ``namespace/name`` or ``namespace/name@revision``; return None for any other text.

        A path that exists on the disk is never a name, nor is ``"./namespace/name"``.
        """
        match = _NAME.fullmatch(text.as_posix() if isinstance(text, Path) else text)
        if match is None or Path(text).exists():
            return None
        return cls(match["repository"], match["revision"])

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    def description(self) -> Path:
        """Download config and tokenizer files, but no weights; return the folder.

        Raises: CheckpointError: the model does not exist, needs permission, or cannot be
            downloaded.
        """
        return self._download(DESCRIPTION, self.revision)

    def weights(self, folder: Path, files: Collection[str]) -> None:
        """Download weight ``files`` into ``folder``, which ``description`` returned.

        Raises: CheckpointError: a file is missing or cannot be downloaded.
        """
        # The folder is named after the commit: the branch may have moved since.
        self._download(files, folder.name)
        if missing := sorted(name for name in files if not (folder / name).is_file()):
            mend = "choose a repository that stores them as safetensors; pickled ones run code"
            raise self._error(f"has no {', '.join(missing)}", mend)

    def adapter(self) -> Path:
        """Download the LoRA adapter of this name, and return the folder.

        Raises: CheckpointError: as ``description``.
        """
        return self._download(_ADAPTER_FILES, self.revision)

    def _download(self, patterns: Collection[str], revision: str | None) -> Path:
        """Download the files that match ``patterns``; return the folder in the cache."""
        # Imported here: most models are folders, and the import takes long.
        from huggingface_hub import constants, errors, snapshot_download

        try:
            folder = snapshot_download(
                self.repository,
                revision=revision,
                allow_patterns=list(patterns),
            )
        except errors.GatedRepoError as error:
            url = f"{constants.ENDPOINT}/{self.repository}"
            raise self._error("is gated", f"ask for access at {url}, `hf auth login`") from error
        except errors.RevisionNotFoundError as error:
            raise self._error("has no such revision", "leave it out, or look it up") from error
        except errors.RepositoryNotFoundError as error:
            reason = f"is neither a folder here nor a model at {constants.ENDPOINT}"
            mend = "check the spelling; if it is private, `hf auth login`"
            raise self._error(reason, mend) from error
        except foreign_errors() as error:  # the type depends on the library's transport
            if constants.is_offline_mode():
                mend = "unset HF_HUB_OFFLINE to download it, or give a folder"
                raise self._error("is not in the cache", mend) from error
            message = str(error.__cause__ or error).strip() or type(error).__name__
            reason = f"cannot be fetched: {message.splitlines()[0]}"
            mend = "check the network and run it again: downloaded parts are kept"
            raise self._error(reason, mend) from error
        return Path(folder)

    def _error(self, reason: str, mend: str) -> CheckpointError:
        return CheckpointError(str(self), reason, mend)


def sampled_digest(path: Path) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of 32 samples at equal distances in a file.

    A digest of all bytes would take as long as loading the weights.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            # The first sample covers the header, which differs between most files.
            file.seek(size * number // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def weight_files(root: Path) -> list[str]:
    """Return the names of the weight files of the model in ``root``.

    Raises: CheckpointError: the index is corrupt.
    """
    return sorted(set(_read_index(root).values())) if (root / _INDEX).exists() else [_SINGLE]


def file_of(stored: str, path: object) -> object:
    """Return the shard file that contains a tensor; ``path`` itself if no shard is found."""
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
    """Return the error for a folder without an index and without a single weight file."""
    if (root / _ADAPTER_CONFIG).is_file():
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
    """Return the error for an adapter folder that was passed as a model folder."""
    base = read_json(root / _ADAPTER_CONFIG).get("base_model_name_or_path")
    model = repr(base) if isinstance(base, str) and base else "the base model"
    return CheckpointError(
        root / _ADAPTER_CONFIG,
        f"describes a LoRA adapter, and the folder holds no model ({missing})",
        f"load {model} with adapters={{'name': {str(root)!r}}}",
    )


def _read_index(root: Path) -> dict[str, str]:
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
    """Yield tensor names grouped by block, in the order of each block's first name.

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
    """Convert safetensors errors about ``shard`` to CheckpointError, inside a ``with`` block."""
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
    """Return ``config`` with the quantization settings of separate files, if there are any."""
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
    """Return ``config`` with a legacy file's quantization settings, unless ``config`` has some."""
    files = [root / name for name in _LEGACY_QUANTIZATION if (root / name).exists()]
    if config.get("quantization_config") is not None or not files:
        return config
    settings = read_json(files[0])
    method = _AWQ_METHOD if _AWQ_FIELD in settings else _GPTQ_METHOD
    return {**config, "quantization_config": {"quant_method": method, **settings}}
