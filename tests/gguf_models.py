"""Models of random weights, and GGUF files of them as llama.cpp converts each architecture."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tests.gguf_kinds import FIELDS, NAMES, SIZES, TYPES
from tests.gguf_metadata import global_head_size, metadata_of, rope_of, write_metadata
from tests.gguf_tensors import in_file
from transformers import AutoConfig, AutoModelForCausalLM

_TABLES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
# Architectures that this version of gguf-py does not know, and one whose table names their tensors.
_LIKE = {"deepseek32": "glm-dsa"}
_F32, _MXFP4 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.MXFP4


def make(folder: Path, kind: str, **sizes: Any) -> None:
    """Write a model of random weights."""
    torch.manual_seed(0)
    usual = {} if kind in ("gpt2", "bloom") else SIZES
    special = {"bos_token_id": None, "eos_token_id": None, "vocab_size": 128}
    fields = {**usual, **special, **FIELDS[kind], **sizes}
    config = AutoConfig.for_model(TYPES.get(kind, kind), **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.0 if "bias" in key else 1.0, 0.2)
    model.save_pretrained(folder)


def rounded(
    folder: Path,
    target: Path,
    kind: str,
    stored_as: gguf.GGMLQuantizationType,
    older: bool = False,
) -> Path:
    """Write the model with the numbers that blocks of a type have for its own."""
    shutil.copytree(folder, target)
    config, tensors = AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith("kv_b_proj.weight") and not older:
            (_, keys), (_, others) = in_file(kind, config, key, tensor.numpy())
            parts = (of_blocks(keys, stored_as).swapaxes(1, 2), of_blocks(others, stored_as))
            values = np.concatenate(parts, 1).reshape(tensor.shape)
        else:
            values = of_blocks(tensor.numpy(), stored_as)
        tensors[key] = torch.from_numpy(np.ascontiguousarray(values))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def of_blocks(values: np.ndarray, stored_as: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return the numbers that a file of a type has."""
    if not is_stored_as(stored_as, values):
        return values
    blocks = gguf.quants.quantize(values, stored_as)
    result: np.ndarray = gguf.quants.dequantize(blocks, stored_as)
    return result


def is_stored_as(kind: gguf.GGMLQuantizationType, values: torch.Tensor | np.ndarray) -> bool:
    """Say whether a file of that type has it so: blocks divide rows, and it is no vector."""
    size = gguf.GGML_QUANT_SIZES[kind][0]
    if kind == _MXFP4 and values.ndim < 3:
        return False
    return min(values.ndim, values.squeeze().ndim) > 1 and values.shape[-1] % size == 0


def as_stored(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a model directory, matrices of experts as one tensor of a layer."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", key)
        if found is None:
            yield key, values
        else:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = values
    for key, parts in experts.items():
        yield key, np.stack([parts[index] for index in range(len(parts))])


def write(
    folder: Path,
    path: Path,
    kind: str,
    stored_as: Any = None,
    tokenizer: Callable[[gguf.GGUFWriter, Any], None] | None = None,
    older: bool = False,
    further: int = 0,
    as_numbers: bool = False,
    changes: Mapping[str, Any] | None = None,
    without: str = "",
) -> None:
    """Write a model directory as llama.cpp's conversion of its architecture does.

    Args:
        stored_as: the type of what has more than one dimension, unless blocks do not divide it;
            of MXFP4, that of experts.
        tokenizer: adds the tokenizer; without it, there is one of a few words.
        older: projections of DeepSeek and Qwen3-Next are as the first files have them.
        further: blocks behind the others, for the prediction of further tokens.
        as_numbers: the numbers that blocks stand for are stored in place of them.
        changes: other values of metadata, or None to leave them out.
        without: a tensor that is left out.
    """
    name, config = NAMES.get(kind, kind), AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, name)
    metadata = {**metadata_of(kind, config, older, further), **(changes or {})}
    write_metadata(writer, {key: v for key, v in metadata.items() if v is not None})
    for index in range(further):
        block = f"blk.{config.num_hidden_layers + index}"
        writer.add_tensor(f"{block}.nextn.eh_proj.weight", np.ones((64, 128), dtype=np.float32))
    table = gguf.get_tensor_name_map(_TABLES[_LIKE.get(name, name)], config.num_hidden_layers)
    tensors = (t for pair in as_stored(folder) for t in in_file(kind, config, *pair, older))
    for key, values in tensors:
        stored = table.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        if stored == without:
            continue
        form = _F32
        if stored_as is not None and is_stored_as(stored_as, values):
            form = stored_as
        if as_numbers:
            values, form = of_blocks(values, form), _F32
        writer.add_tensor(stored, gguf.quants.quantize(values, form), raw_dtype=form)
    add_factors(writer, config, without)
    (tokenizer or few_words)(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_factors(writer: gguf.GGUFWriter, config: Any, without: str) -> None:
    """Add the factors of wavelengths that some conversions compute."""
    rope = rope_of(config)
    for field in ("short_factor", "long_factor"):
        if field in rope:
            values = np.array(rope[field], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{field.removesuffix('_factor')}.weight", values)
    if rope.get("rope_type") == "proportional" and without != "rope_freqs.weight":
        half = global_head_size(config) // 2
        rotated = int(half * rope["partial_rotary_factor"])
        values = np.array([1.0] * rotated + [1e30] * (half - rotated), dtype=np.float32)
        writer.add_tensor("rope_freqs.weight", values)


def few_words(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add a tokenizer whose text nobody reads."""
    words = ["a", "b", "ab", *(f"w{i}" for i in range(3, config.vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
