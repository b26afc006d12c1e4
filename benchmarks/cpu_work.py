"""The bytes that a decoder has to read and the products it has to compute, whatever runs it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open

__all__ = ["MODEL_WEIGHTS", "ModelWork"]

# Bytes of a weight as the formats store it, with 16 bits of scale for 32 codes of 4 bits.
MODEL_WEIGHTS = {16: 2.0, 8: 1.0, 4: 0.5625}
# A recurrent state is decayed, read by a key, changed by an outer product and read by a query.
STATE_PRODUCTS = 3


@dataclass(frozen=True)
class ModelWork:
    """The least that steps of a decoder take, by its ``config.json`` and the sizes of its weights.

    Attributes:
        config: as read.
        weights: how many numbers each matrix has, by the name in the checkpoint.
    """

    config: Mapping[str, Any]
    weights: Mapping[str, int]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read a model directory."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        sizes: dict[str, int] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    shape = file.get_slice(name).get_shape()
                    sizes |= {name: math.prod(shape)} if len(shape) > 1 else {}
        return cls(config, sizes)

    def weights_read(self, batch: int) -> float:
        """Return how many weights a step of ``batch`` tokens reads, experts drawn evenly."""
        share = 1 - (1 - self.experts_asked) ** batch
        return self.dense + share * self.routed + self.head

    def state_bytes(self, context: float, bytes_per_number: float = 2.0) -> float:
        """Return what a step reads of one sequence's cache, and reads and writes of its states."""
        kept = sum(layer.kept(context) for layer in self.layers)
        states = sum(layer.state for layer in self.layers)
        return kept * bytes_per_number + 2 * states * 4.0

    def decode_bytes(self, bits: int, batch: int, context: float) -> float:
        """Return what a step reads: each asked weight once, and the cache of each request."""
        return self.weights_read(batch) * MODEL_WEIGHTS[bits] + batch * self.state_bytes(context)

    def prefill_flops(self, tokens: int) -> float:
        """Return the operations of a prompt, whose last token alone asks for logits."""
        weights = self.dense + self.experts_asked * self.routed
        mixing = sum(layer.mixed(tokens) for layer in self.layers)
        return 2.0 * (weights * tokens + mixing + self.head)

    @property
    def dense(self) -> int:
        """Weights that every token asks: all but experts, embedding and head."""
        outer = ("embed_tokens.weight", "lm_head.weight")
        names = (n for n in self.weights if not _is_expert(n) and not n.endswith(outer))
        return sum(self.weights[name] for name in names)

    @property
    def routed(self) -> int:
        return sum(size for name, size in self.weights.items() if _is_expert(name))

    @property
    def head(self) -> int:
        return int(self.config["vocab_size"] * self.config["hidden_size"])

    @property
    def experts_asked(self) -> float:
        """The share of the experts that one token asks."""
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        number = next((self.config[name] for name in names if name in self.config), None)
        return self.config["num_experts_per_tok"] / number if number else 0.0

    @property
    def layers(self) -> Iterator[Mixing]:
        c = self.config
        heads, kind = c["num_attention_heads"], "full_attention"
        size = c.get("head_dim") or c["hidden_size"] // heads
        for number in range(c["num_hidden_layers"]):
            kind = (c.get("layer_types") or [kind] * (number + 1))[number]
            if kind == "linear_attention":
                state = c["linear_key_head_dim"] * c["linear_value_head_dim"]
                yield Mixing(state=c["linear_num_value_heads"] * state)
            elif "kv_lora_rank" in c:
                key = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
                numbers = c["kv_lora_rank"] + c["qk_rope_head_dim"]
                yield Mixing(numbers=numbers, products=heads * (key + c["v_head_dim"]))
            else:
                window = c["sliding_window"] if kind == "sliding_attention" else math.inf
                numbers = 2 * c["num_key_value_heads"] * size
                yield Mixing(numbers=numbers, products=2 * heads * size, window=window)


@dataclass(frozen=True)
class Mixing:
    """The work of one layer between tokens.

    Attributes:
        numbers: kept of each token.
        products: multiplications of a query with what is kept of one token.
        window: how many tokens a query sees.
        state: numbers of a recurrent state, whatever the context.
    """

    numbers: int = 0
    products: int = 0
    window: float = math.inf
    state: int = 0

    def kept(self, context: float) -> float:
        return self.numbers * min(context, self.window)

    def mixed(self, tokens: int) -> float:
        """Return the multiplications of a prompt, of whose scores half are masked."""
        seen = min(tokens, self.window)
        pairs = tokens * seen - seen**2 / 2
        return self.products * pairs + STATE_PRODUCTS * self.state * tokens


def _is_expert(name: str) -> bool:
    return re.search(r"\.experts\.\d+\.", name) is not None
