"""Conversion of a GGUF file's metadata to the fields of a Hugging Face config.json.

Source: the keys are those of docs/gguf.md of ggml, the fields those of Hugging Face's configs.
"""

from __future__ import annotations

from typing import Any

from interposer.errors import CheckpointError, UnsupportedModelError, near_names
from interposer_gguf._architecture import Architecture
from interposer_gguf._architectures import ARCHITECTURES, architecture_of
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._metadata import CONVERT_AGAIN, MetadataReader
from interposer_gguf._positions import head_size_of, rope_of, rotated_of
from interposer_gguf._tensor_names import block_of

_EXPERT_KEYS = ("expert_count", "expert_used_count")
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# The architecture of files mmproj-*.gguf, which llama.cpp's converter writes next to the language
# model (tools/mtmd/clip.cpp).
_ENCODERS = "clip"


def decoder_config(file: GGUFFile, metadata: MetadataReader) -> dict[str, Any]:
    """Return the fields of config.json, except ``quantization_config``.

    Raises:
        CheckpointError: metadata is missing, has a wrong type or contradicts the tensors.
        UnsupportedModelError: the architecture or an option is not supported.
    """
    name = metadata.architecture
    if name == _ENCODERS:
        raise UnsupportedModelError(
            file.path,
            "holds the image or audio encoder of a model, which is not read from GGUF files: load "
            "the GGUF file of the language model for texts, or for pictures and sounds the folder "
            "of the model's safetensors files",
        )
    if name not in ARCHITECTURES:
        near = near_names(name, ARCHITECTURES)
        raise UnsupportedModelError(
            file.path,
            f"has the unsupported architecture {name[:100]!r}; similar ones are {near}: "
            "docs/models.md lists all",
        )
    architecture = architecture_of(metadata)
    # Some dense architectures have MoE variants under the same name.
    for key in _EXPERT_KEYS:
        if not architecture.has_experts and metadata.integer(key, 0):
            raise UnsupportedModelError(
                file.path, f"has {key!r}, but {name!r} is supported without experts only"
            )
    num_parts = metadata.integer("split.count", 1)
    if num_parts > 1:
        raise UnsupportedModelError(
            file.path,
            f"is one of {num_parts} parts of a model",
            "merge them: llama-gguf-split --merge FIRST-PART OUT.gguf",
        )
    width = metadata.integer("embedding_length")
    if width < 1:
        raise CheckpointError(file.path, f"says that it has a width of {width}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(file.path, "lacks the tensor 'token_embd.weight'", CONVERT_AGAIN)
    epsilon, epsilon_field = architecture.epsilon
    # ``architecture.fields`` comes last: it may replace any of the common fields.
    return {
        "architectures": [architecture.family],
        "hidden_size": width,
        "num_hidden_layers": _num_blocks(file, metadata),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": metadata.integer("context_length"),
        epsilon_field: metadata.number(epsilon),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": _dtype(file),
        **(_layers(file, metadata, architecture) if architecture.is_uniform else {}),
        **architecture.fields(metadata, file),
    }


def _layers(file: GGUFFile, metadata: MetadataReader, architecture: Architecture) -> dict[str, Any]:
    """Return the config fields of MLP sizes, attention and rotary embedding."""
    width, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    if heads < 1:
        raise CheckpointError(file.path, f"says that it has {heads} heads and a width of {width}")
    head_size = head_size_of(metadata)
    is_latent = "attention.kv_lora_rank" in metadata
    if not is_latent and metadata.integer("attention.value_length", head_size) != head_size:
        raise UnsupportedModelError(file.path, "has keys and values of different sizes")
    rotated = rotated_of(metadata)
    window = metadata.integer("attention.sliding_window", 0)
    return {
        # An MoE model may have no dense MLP, and its file no size of one.
        "intermediate_size": metadata.integer(
            "feed_forward_length", 1 if architecture.has_experts else None
        ),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_size,
        "attention_bias": _has_bias(file, metadata),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": rotated / head_size if head_size > 0 else 0,
        "rope_parameters": rope_of(file, metadata, rotated),
        **({"sliding_window": window, "use_sliding_window": True} if window else {}),
    }


def _num_blocks(file: GGUFFile, metadata: MetadataReader) -> int:
    """Return the number of decoder blocks, without the MTP blocks.

    ``block_count`` includes the MTP blocks, which come last. A file may lack the tensors of MTP
    blocks.
    """
    count = metadata.integer("block_count")
    num_mtp_blocks = metadata.integer("nextn_predict_layers", 0)
    block_numbers = {number for name in file.tensors if (number := block_of(name)) is not None}
    if block_numbers != set(range(len(block_numbers))) or len(block_numbers) not in (
        count,
        count - num_mtp_blocks,
    ):
        raise CheckpointError(
            file.path,
            f"says that it has {count:,} blocks, but holds tensors of {len(block_numbers):,}",
        )
    return count - num_mtp_blocks


def _has_bias(file: GGUFFile, metadata: MetadataReader) -> bool:
    first = next((name for name in file.tensors if name.endswith("attn_output.weight")), "blk.0.")
    names = [f"blk.{block_of(first) or 0}.attn_{name}.bias" for name in ("q", "output")]
    query, output = (name in file.tensors for name in names)
    if metadata.architecture == "llama" and query != output:
        raise UnsupportedModelError(
            file.path, f"has a bias {names[0 if query else 1]!r} without {names[query]!r}"
        )
    return output


def _dtype(file: GGUFFile) -> str:
    """Return the default compute dtype: the dtype in which most of the matrices' bytes are stored.

    Blocks count as bfloat16: float16 lacks the range of the floats that models are trained in.
    """
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            name = _DTYPES.get(tensor.stored_as, "bfloat16")
            sizes[name] = sizes.get(name, 0) + tensor.num_bytes
    return max(sizes, key=lambda name: sizes[name], default="float32")
