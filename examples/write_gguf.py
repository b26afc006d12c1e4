"""Write a Llama, Qwen2 or Qwen3 model directory as a GGUF file; needs pip install gguf.

python examples/write_gguf.py examples/models/stdlib-lm stdlib-lm-q8_0.gguf --type q8_0

The tokenizer must be a byte-level one. llama.cpp's converter reads many more models, and its
llama-quantize writes more types.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import quantize
from safetensors.torch import load_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    source: Path,
    target: Path,
    stored_as: str = "f16",
    types: Mapping[str, str] | None = None,
    pre: str = "gpt-2",
) -> None:
    """Write the model in ``source`` to the file ``target``.

    ``types`` says how tensors with a part of their name are stored, instead of as ``stored_as``.
    What has one dimension is float32, and float16 what blocks do not divide.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(target, architecture)
    add_config(writer, config)
    if (source / "tokenizer.json").exists():
        text = (source / "tokenizer.json").read_text(encoding="utf-8")
        add_tokenizer(writer, json.loads(text), config, pre)
    for name, tensor in load_file(source / "model.safetensors").items():
        stored = gguf_name(name)
        values = tensor.float()
        if architecture == "llama" and ("attn_q." in stored or "attn_k." in stored):
            key = "num_attention_heads" if "attn_q" in stored else "num_key_value_heads"
            values = interleaved(values, config[key])
        kind = next((t for part, t in (types or {}).items() if part in stored), stored_as)
        number = gguf.GGMLQuantizationType[("f32" if values.ndim == 1 else kind).upper()]
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:
            number = gguf.GGMLQuantizationType.F16
        try:
            data = quantize(values.contiguous().numpy(), number)
        except NotImplementedError:
            raise SystemExit(
                f"{number.name} cannot be written by the gguf library. Try: --type q8_0, or "
                "llama-quantize of llama.cpp"
            ) from None
        writer.add_tensor(stored, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    number, _, inner = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{INNER[inner]}.{kind}"


def interleaved(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows, reordered so that each rotated pair is adjacent."""
    rows: torch.Tensor = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return rows


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any], pre: str
) -> None:
    model = tokenizer["model"]
    ids = {**model["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}
    special = {t["content"] for t in tokenizer["added_tokens"] if t["special"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    steps = (tokenizer["post_processor"] or {}).get("single", [])
    writer.add_add_bos_token(bool(steps) and "SpecialToken" in steps[0])
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    if config.get("eos_token_id") is not None:
        writer.add_eos_token_id(config["eos_token_id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", default="f16", help="f32, f16, bf16, q8_0, q4_0, ...")
    options = parser.parse_args()
    write_gguf(options.source, options.target, options.type)


if __name__ == "__main__":
    main()
