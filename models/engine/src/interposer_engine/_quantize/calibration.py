"""Calibration: runs a model block by block over a text, quantizing each block before the next.

Only one block's weights are in memory at a time, plus the hidden states of all sequences.
Dimensions: T tokens of a sequence, H hidden size, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from interposer import PluggableLayer
from interposer.errors import ConfigError
from interposer_engine._batch import StepBatch
from interposer_engine._plan import Plan
from interposer_engine._quantize.files import TensorSource
from interposer_engine._sampling_params import SamplingParams
from interposer_engine._scheduler import Chunk
from interposer_engine._sequence import TokenSequence
from interposer_engine._tokenizer import TextTokenizer
from interposer_models import CausalLM
from interposer_models.decoder import CACHED_LAYERS, Decoder, RecurrentLayer
from interposer_ops.devices.host_memory import cache_memory
from interposer_ops.layers.attention import Attention
from interposer_ops.layers.linear import Linear
from interposer_ops.layers.states import StateBatch
from interposer_quantization.writing import SecondMoments

Rounder = Callable[[Mapping[str, torch.Tensor], torch.Tensor], list[torch.Tensor]]
"""Quantizes the weights ``[O, I]`` of layers that run as one matmul, given by name, with the second
moments of their inputs ``[I, I]``; returns the dequantized weights in float32."""


def decoder_of(planned: Plan) -> Decoder:
    """Return the decoder of a planned model, if its blocks can run one by one.

    Raises: ConfigError: the family does not build a ``CausalLM``, or a block needs more than the
        previous block's output.
    """
    if isinstance(planned.model, CausalLM) and planned.model.model.can_run_block_by_block:
        return planned.model.model
    raise ConfigError(
        f"Calibration runs the blocks of a CausalLM one by one, but the family of {planned.path} "
        f"builds a {type(planned.model).__name__}"
        + (" whose blocks need each other" if isinstance(planned.model, CausalLM) else "")
        + ". Try: quantize without calibrate"
    )


class CalibratedBlocks:
    """The decoder blocks of a float32 model, run one by one on the hidden states of a text.

    Args:
        planned: a plan of dtype float32; each block is freed after its run.
        sequences: token ids, all of one length.
    """

    def __init__(
        self, planned: Plan, source: TensorSource, sequences: Sequence[Sequence[int]]
    ) -> None:
        self._decoder = decoder_of(planned)
        self._source = source
        self._device = planned.placement.device.torch_device
        num_tokens = len(sequences[0])
        num_pages = -(-num_tokens // planned.page_size)
        # A pseudo request with consecutive pages, only to build a batch for the backends.
        request = TokenSequence(
            0, list(sequences[0]), SamplingParams(), 0, pages=[list(range(num_pages))]
        )
        # Recurrent layers store the request's state in slot 0.
        request.state_slot = 0
        # All sequences have the same length, so they share positions and cache slots.
        chunks = [Chunk(request, num_tokens)]
        self._batch = StepBatch.build(
            chunks, planned.page_size, self._device, with_states=True, with_prefixes=True
        )
        self._num_pages = num_pages
        self._decoder.reserve_positions(num_tokens, self._device)
        tables = [self._decoder.embed_tokens, self._decoder.embed_positions]
        for table in filter(None, tables):
            # Embeddings run once, for all sequences; then their memory is freed.
            self._load(table)
            table.finalize()
        with torch.inference_mode():
            self._hidden = [
                self._decoder.embed(torch.tensor(ids, device=self._device), self._batch.positions)
                for ids in sequences
            ]
        del self._decoder.embed_tokens, self._decoder.embed_positions, tables

    @property
    def num_blocks(self) -> int:
        """Number of decoder blocks of the model."""
        return len(self._decoder.layers)

    @torch.inference_mode()
    def quantize(self, index: int, names: Iterable[str], rounder: Rounder) -> None:
        """Quantize the named layers of a block in the order of their calls, then run the block.

        Each layer sees inputs computed by the quantized layers before it. Call this method or
        ``skip`` for every block in turn.
        """
        block = self._loaded_block(index)
        quantized = set(names)
        for layer in [module for module in block.modules() if isinstance(module, Linear)]:
            parts = _part_names(layer)
            if parts[0] not in quantized:
                continue
            weight, bias = layer.operands
            moments = SecondMoments(layer.in_features, self._device)

            # The default argument binds this iteration's moments.
            def observing_kernel(
                x: torch.Tensor,
                weight: torch.Tensor,
                bias: torch.Tensor | None,
                moments: SecondMoments = moments,
            ) -> torch.Tensor:
                moments.add(x.flatten(0, -2))
                return functional.linear(x, weight, bias)

            layer.kernel = observing_kernel
            for hidden in self._hidden:
                self._run(block, index, hidden)
            layer.kernel = functional.linear
            rows = weight.split(list(layer.parts.values()))
            dequantized = rounder(dict(zip(parts, rows, strict=True)), moments.mean())
            layer.operands = torch.cat(dequantized), bias
        self._advance(block, index)

    @torch.inference_mode()
    def skip(self, index: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Run an already quantized block with its dequantized weights."""
        block = self._loaded_block(index)
        for layer in [module for module in block.modules() if isinstance(module, Linear)]:
            parts = _part_names(layer)
            if parts[0] in weights:
                weight = torch.cat([weights[name] for name in parts])
                layer.operands = weight.to(self._device), layer.operands[1]
        self._advance(block, index)

    def _loaded_block(self, index: int) -> nn.Module:
        """Load a block whose linear layers have plain weights that can be replaced."""
        block = self._decoder.layers[index]
        self._load(block)
        for layer in block.modules():
            if isinstance(layer, Linear):
                layer.kernel = functional.linear
                # Bypasses finalize, as GPTQ must see and replace weights that no kernel packed.
                layer.operands = layer.get_parameter("weight"), layer._parameters["bias"]
            elif isinstance(layer, PluggableLayer):
                layer.finalize()
        return block

    def _advance(self, block: nn.Module, index: int) -> None:
        """Run a block, replace the hidden states by the outputs, and free the block."""
        for position, hidden in enumerate(self._hidden):
            output, residual = self._run(block, index, hidden)
            # The block leaves the addition to the next block's norm.
            self._hidden[position] = residual + output
        # Keeps the indices of the other blocks.
        self._decoder.layers[index] = nn.Module()

    def _run(
        self, block: nn.Module, index: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a block, and return its output ``[T, H]`` and the residual stream ``[T, H]``."""
        pairs = [
            self._cache_and_plan(module)
            for module in block.modules()
            if isinstance(module, CACHED_LAYERS)
        ]
        caches, plans = ([pair[side] for pair in pairs] for side in (0, 1))
        # A block with one cached layer takes its cache and plan directly, not as lists.
        cache, plan = (values[0] if len(values) == 1 else values for values in (caches, plans))
        cos, sin = self._decoder.angles(self._batch.positions)[index]
        return block(hidden, None, cos, sin, cache, plan, None)  # type: ignore[no-any-return]

    def _cache_and_plan(self, layer: nn.Module) -> tuple[Any, Any]:
        """Return an empty KV cache for a layer, and the layer's attention plan for one sequence."""
        batch = self._batch.attention
        if isinstance(layer, RecurrentLayer):
            state = layer.state_layout().allocate(1, self._device, cache_memory)
            return state, StateBatch.of(batch)
        assert isinstance(layer, Attention)
        layout = layer.backend.kv_layout()
        (cache,) = layout.allocate(1, self._num_pages, self._device, cache_memory)
        return cache, layer.backend.plan(batch)

    def _load(self, module: nn.Module) -> None:
        """Read the parameters of all layers in ``module`` from the checkpoint."""
        for layer in module.modules():
            if not isinstance(layer, PluggableLayer):
                continue
            names = _part_names(layer) if isinstance(layer, Linear) else [layer.prefix]
            for name, parameter in list(layer._parameters.items()):
                if parameter is not None:
                    # A merged layer reads one tensor per part, and concatenates them.
                    stored = getattr(parameter, "stored_as", None)
                    stored_as = (
                        [stored] if stored else [f"{layer_name}.{name}" for layer_name in names]
                    )
                    parts = [self._source.read(layer_name) for layer_name in stored_as]
                    value = torch.cat(parts) if len(parts) > 1 else parts[0]
                    loaded = nn.Parameter(value.to(self._device, parameter.dtype), False)
                    layer.register_parameter(name, loaded)


def _part_names(layer: Linear) -> list[str]:
    parent = layer.prefix.rpartition(".")[0]
    return [f"{parent}.{part}" for part in layer.parts]


_MAX_SEQUENCES = 128
_MAX_TOKENS = 2048


def calibration_sequences(
    file: Path, tokenizer: TextTokenizer, context: int, least_tokens: int
) -> list[list[int]]:
    """Cut a text into at most 128 token sequences of equal length, spread evenly over the text.

    A sequence is as long as the model's context, at most 2048 tokens. An incomplete last sequence
    is dropped.

    Args:
        least_tokens: the smallest allowed total.
    Raises: ConfigError: the file cannot be read, or the text is too short.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calibrate {file}: cannot be read as text in UTF-8: {error}. "
            "Try: a text file with typical inputs of the model"
        ) from error
    tokens = tokenizer.encode(text) if text else []
    length = min(context, _MAX_TOKENS)
    num_available = len(tokens) // length
    # With fewer tokens than inputs, a layer's second moments have no full rank.
    if num_available * length < least_tokens:
        needed = -(-least_tokens // length) * length
        raise ConfigError(
            f"--calibrate {file}: its text has {len(tokens)} tokens, {needed} are needed: as many "
            f"as a layer has inputs, in sequences of {length}. Try: a longer text"
        )
    num_sequences = min(num_available, _MAX_SEQUENCES)
    starts = [index * num_available // num_sequences * length for index in range(num_sequences)]
    return [tokens[start : start + length] for start in starts]
