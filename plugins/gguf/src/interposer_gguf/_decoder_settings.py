"""From the metadata of a GGUF file to the contents of a config.json.

Source: the keys are those of docs/gguf.md of ggml, the fields those of Hugging Face's configs.
"""

from __future__ import annotations

from typing import Any

from interposer.errors import CheckpointError, UnsupportedModelError, nearest_first
from interposer_gguf._architecture import Architecture
from interposer_gguf._architectures import ARCHITECTURES, architecture_of
from interposer_gguf._file_format import GGUFFile
from interposer_gguf._positions import head_size_of, rope_of, rotated_of
from interposer_gguf._settings import EDITED, Settings
from interposer_gguf._tensor_names import block_of

_MIXTURE = ("expert_count", "expert_used_count")
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def decoder_config(file: GGUFFile, settings: Settings) -> dict[str, Any]:
    """Return what config.json would hold, ``quantization_config`` apart.

    Raises:
        CheckpointError: metadata is missing, mistyped or contradicts the tensors.
        UnsupportedModelError: the model is none of ``ARCHITECTURES``, or has what they have not.
    """
    architecture = settings.architecture
    if architecture not in ARCHITECTURES:
        listed = ", ".join(nearest_first(architecture, ARCHITECTURES))
        raise UnsupportedModelError(
            file.path, f"holds the architecture {architecture[:100]!r}; read are {listed}"
        )
    form = architecture_of(settings)
    for key in _MIXTURE:
        if not form.mixture and settings.integer(key, 0):
            raise UnsupportedModelError(
                file.path, f"has {key!r}, but {architecture!r} is read without experts"
            )
    parts = settings.integer("split.count", 1)
    if parts > 1:
        raise UnsupportedModelError(
            file.path,
            f"is one of {parts} parts of a model",
            "merge them: llama-gguf-split --merge FIRST-PART OUT.gguf",
        )
    width = settings.integer("embedding_length")
    if width < 1:
        raise CheckpointError(file.path, f"says that it has a width of {width}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(file.path, "lacks the tensor 'token_embd.weight'", EDITED)
    epsilon, epsilon_field = form.epsilon
    return {
        "architectures": [form.family],
        "hidden_size": width,
        "num_hidden_layers": _num_blocks(file, settings),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": settings.integer("context_length"),
        epsilon_field: settings.number(epsilon),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": _dtype(file),
        **(_layers(file, settings, form) if form.regular else {}),
        **form.fields(settings, file),
    }


def _layers(file: GGUFFile, settings: Settings, form: Architecture) -> dict[str, Any]:
    """Return the sizes of MLPs, and the fields of attention, its positions included."""
    width, heads = settings.integer("embedding_length"), settings.integer("attention.head_count")
    if heads < 1:
        raise CheckpointError(file.path, f"says that it has {heads} heads and a width of {width}")
    head_size = head_size_of(settings)
    latent = "attention.kv_lora_rank" in settings
    if not latent and settings.integer("attention.value_length", head_size) != head_size:
        raise UnsupportedModelError(file.path, "has keys and values of different sizes")
    rotated = rotated_of(settings)
    window = settings.integer("attention.sliding_window", 0)
    return {
        # Of a mixture, it is the size of MLPs that no layer need have.
        "intermediate_size": settings.integer("feed_forward_length", 1 if form.mixture else None),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.integer("attention.head_count_kv", heads),
        "head_dim": head_size,
        "attention_bias": _has_bias(file, settings),
        "rope_theta": settings.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": rotated / head_size if head_size > 0 else 0,
        "rope_parameters": rope_of(file, settings, rotated),
        **({"sliding_window": window, "use_sliding_window": True} if window else {}),
    }


def _num_blocks(file: GGUFFile, settings: Settings) -> int:
    """Return the number of decoder blocks, all of which have tensors.

    Those that predict further tokens are counted in the file, come last, and may be left out.
    """
    count = settings.integer("block_count")
    further = settings.integer("nextn_predict_layers", 0)
    found = {number for name in file.tensors if (number := block_of(name)) is not None}
    if found != set(range(len(found))) or len(found) not in (count, count - further):
        raise CheckpointError(
            file.path, f"says that it has {count:,} blocks, but holds tensors of {len(found):,}"
        )
    return count - further


def _has_bias(file: GGUFFile, settings: Settings) -> bool:
    first = next((name for name in file.tensors if name.endswith("attn_output.weight")), "blk.0.")
    names = [f"blk.{block_of(first) or 0}.attn_{name}.bias" for name in ("q", "output")]
    query, output = (name in file.tensors for name in names)
    if settings.architecture == "llama" and query != output:
        raise UnsupportedModelError(
            file.path, f"has a bias {names[0 if query else 1]!r} without {names[query]!r}"
        )
    return output


def _dtype(file: GGUFFile) -> str:
    """Return the dtype to compute in unless another is asked for.

    That of the floats that most of the matrices' numbers are. Blocks have none; bfloat16 has the
    range of the floats that models are trained in, which float16 has not.
    """
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            name = _DTYPES.get(tensor.stored_as, "bfloat16")
            sizes[name] = sizes.get(name, 0) + tensor.num_bytes
    return max(sizes, key=lambda name: sizes[name], default="float32")
