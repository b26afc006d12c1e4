"""Adapter of transformers: eager, with compiled decode steps, and with torchao quantization."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from cpu_engines.contract import MAX_CONTEXT, Engine

__all__ = ["open_engine"]


class Model:
    """A transformers model; its decode steps are compiled for the cache shape unless eager.

    Prefill is always eager: compilation would be repeated for every prompt length.
    """

    def __init__(self, path: Path, option: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch = torch
        self.transformers: Any = transformers
        self.compiled = option != "eager"
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16
        ).eval()
        method, _, group_size = option.partition("-g")
        if group_size:
            _quantize(self.model, method, int(group_size))
        self.forward = self.model.forward
        if self.compiled:
            # Packs plain weights for oneDNN, which requires constants.
            config: Any = importlib.import_module("torch._inductor.config")
            config.freezing = True
            self.forward = torch.compile(self.model.forward, dynamic=False)
        self.caches: dict[tuple[int, int], Any] = {}
        self.cache: Any = None
        self.tokens: Any = None
        self.position = 0

    def reserve(self, batch: int, tokens: int) -> None:
        if not self.compiled:
            self.cache = self.transformers.DynamicCache(config=self.model.config)
            return
        # Attention covers the whole static cache, so the cache is no longer than a row needs.
        room = min(-(-tokens // 128) * 128, MAX_CONTEXT)
        if (batch, room) not in self.caches:
            static = self.transformers.StaticCache
            self.caches[batch, room] = static(config=self.model.config, max_cache_len=room)
        self.cache = self.caches[batch, room]
        self.cache.reset()

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> list[int]:
        ids = self.torch.tensor(prompts)
        self.position = ids.shape[1]
        found = self.model.forward(
            input_ids=ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **self._places(0, self.position),
        )
        return self._sampled(found.logits)

    def step(self) -> list[int]:
        with self.torch.inference_mode() if not self.compiled else self.torch.no_grad():
            found = self.forward(
                input_ids=self.tokens,
                past_key_values=self.cache,
                use_cache=True,
                **self._places(self.position, self.position + 1),
            )
        self.position += 1
        return self._sampled(found.logits)

    def end(self) -> None:
        self.cache = None

    def facts(self) -> dict[str, object]:
        return {"torch": self.torch.__version__, "transformers": self.transformers.__version__}

    def _places(self, first: int, last: int) -> dict[str, Any]:
        places = self.torch.arange(first, last)
        return {"position_ids": places[None], "cache_position": places} if self.compiled else {}

    def _sampled(self, logits: Any) -> list[int]:
        self.tokens = logits[:, -1].argmax(-1, keepdim=True)
        return self.tokens[:, 0].tolist()  # type: ignore[no-any-return]


def _quantize(model: Any, method: str, group_size: int) -> None:
    """Quantize all linear layers; the lm_head is untied from the embedding for that."""
    import torch

    untied = model.lm_head.weight.detach().clone()
    model.lm_head.weight = torch.nn.Parameter(untied, requires_grad=False)
    quantization = importlib.import_module("torchao.quantization")
    # From torchao 0.18, whose CPU layouts are prototypes.
    layouts = importlib.import_module("torchao.prototype.quantization.int4")
    make = {
        "int4": layouts.PrototypeInt4WeightOnlyConfig,
        "w4a8": layouts.Int8DynamicActivationInt4WeightConfig,
    }[method]
    quantization.quantize_(model, make(group_size=group_size))


def open_engine(path: Path, option: str, threads: int) -> Engine:
    """Load the model; ``option`` is eager, compiled, or a torchao scheme: int4-g128, w4a8-g32."""
    return Model(path, option, threads)
