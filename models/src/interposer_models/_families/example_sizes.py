"""Config fields that the small test models of all families share."""

from __future__ import annotations

from typing import Any

Examples = dict[str, dict[str, Any]]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    # Larger than in real configs, so that random small models have clearly different logits.
    "initializer_range": 0.1,
    # No special tokens: generation then ends only at the token limit.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = {"sliding_window": 24}


def configs(architecture: str, **changes: dict[str, Any]) -> Examples:
    """Build contents of config.json of an architecture, one per label with the label's changes."""
    return {
        label: {"architectures": [architecture], **SIZES, **fields}
        for label, fields in changes.items()
    }
