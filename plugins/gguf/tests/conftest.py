"""Models as directories and the GGUF files that the library ``gguf`` makes of them."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import pytest
import torch
import transformers

from interposer_gguf._block_formats import FORMATS
from interposer_gguf._cases import random_rows

EXAMPLES = Path(__file__).parents[3] / "examples"
SHIPPED = EXAMPLES / "models" / "stdlib-lm"
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "tied": lambda: transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
}


@pytest.fixture(scope="session")
def converter() -> ModuleType:
    """Return examples/write_gguf.py."""
    spec = importlib.util.spec_from_file_location("write_gguf", EXAMPLES / "write_gguf.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["write_gguf"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a model with random weights, by the name of its architecture.

    They are numbers that every float type of GGUF files has.
    """
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
            for key, parameter in model.named_parameters():
                if key.endswith("bias") or "norm" in key:
                    torch.nn.init.normal_(parameter, 1.0, 0.2)
                short = parameter.data.bfloat16().float()
                parameter.data = torch.where(short.half().float() == short, short, 0)
            model.save_pretrained(made[name])
            shutil.copy(SHIPPED / "tokenizer.json", made[name])
        return made[name]

    return make


@pytest.fixture
def write(tmp_path: Path, converter: ModuleType) -> Callable[..., Path]:
    """Return a function that writes a model directory as a GGUF file."""

    def written(source: Path, stored_as: str = "f16", **options: Any) -> Path:
        target = tmp_path / f"{source.name}-{stored_as}.gguf"
        converter.write_gguf(source, target, stored_as, **options)
        return target

    return written


@pytest.fixture
def requantize(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that rewrites a file, with random blocks in each matrix's named format."""

    def written(path: Path, kind: Callable[[str], str], seed: int = 0) -> Path:
        reader, generator = gguf.GGUFReader(path), torch.Generator().manual_seed(seed)
        target = tmp_path / f"random-{seed}.gguf"
        writer = copied_metadata(reader, target)
        for stored in reader.tensors:
            name = kind(stored.name)
            if len(stored.shape) == 1 or name == "f32":
                writer.add_tensor(stored.name, stored.data)
                continue
            width, rows = (int(size) for size in stored.shape)
            blocks = random_rows(FORMATS[name], rows, width, generator, width**-0.5)
            number = gguf.GGMLQuantizationType[name.upper()]
            writer.add_tensor(stored.name, blocks.numpy(), raw_dtype=number)
        finish(writer)
        return target

    return written


@pytest.fixture
def dequantize(tmp_path: Path) -> Callable[[Path], Path]:
    """Return a function that rewrites a file with the numbers that the library reads from it."""

    def written(path: Path) -> Path:
        reader, target = gguf.GGUFReader(path), tmp_path / "dequantized.gguf"
        writer = copied_metadata(reader, target)
        for stored in reader.tensors:
            writer.add_tensor(stored.name, gguf.quants.dequantize(stored.data, stored.tensor_type))
        finish(writer)
        return target

    return written


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the smallest model with changed metadata; None removes it."""

    def written(name: str = "small.gguf", tensors: Any = (), **changes: Any) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
        for key, value in {**METADATA, **changes}.items():
            if value is not None:
                add(writer, key, value)
        shapes = {**SHAPES, **dict(tensors)}
        generator = torch.Generator().manual_seed(0)
        for stored, shape in shapes.items():
            if shape is not None:
                values = torch.randn(shape, generator=generator).numpy()
                kind = gguf.GGMLQuantizationType.F32
                if stored.startswith("blk.0.ffn") and len(shape) > 1:
                    kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        finish(writer)
        return path

    return written


def copied_metadata(reader: gguf.GGUFReader, target: Path) -> gguf.GGUFWriter:
    """Return a writer of a file with the metadata of another."""
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            value, sub_type = field.contents(), field.types[-1]
            is_list = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, value, field.types[0], sub_type if is_list else None)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


METADATA: dict[str, Any] = {
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<s>", "a", "b", "c", "ab", "abc", "</s>"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 6,
    "tokenizer.ggml.add_bos_token": True,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (7, 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (16, 32),
    "blk.0.attn_v.weight": (16, 32),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.ffn_gate.weight": (64, 32),
    "blk.0.ffn_up.weight": (64, 32),
    "blk.0.ffn_down.weight": (32, 64),
}
