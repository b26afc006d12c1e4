"""Runs the steps of a model on its KV cache: eagerly, compiled, or as captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from interposer.errors import ConfigError
from interposer_engine._batch import StepBatch
from interposer_engine._compiled import CompiledModel
from interposer_engine._encoder_inputs import EncoderInputs
from interposer_engine._graphs import Capture, DecodeGraphs, GraphBuckets, Plans, Results
from interposer_engine._kv_cache import Caches, PagedModel
from interposer_engine._pages import States
from interposer_engine._prefix_cache import SharedPrefixes
from interposer_engine._scheduler import Chunk
from interposer_models import CausalLM
from interposer_models.decoder import HiddenStates
from interposer_ops.layers.states import StateBatch

if TYPE_CHECKING:
    from interposer_engine._lora.layers import StepAdapters


class Runner:
    """Computes the steps of a model, for chunks whose cache pages the scheduler has assigned.

    Attributes:
        model: A ``PagedModel``, typed ``Any`` because each kind of model has further attributes.
        numerics: Context manager in which weights are prepared and steps compute.
        pools: Page pools, the pool of the widest attention window first.
        encoder_pool: Page pool of the encoder inputs; None without an encoder.
        is_prefix_lm: Whether the tokens of a prompt attend in both directions.
        takes_mutual_runs: Whether tokens of an encoded run can attend in both directions.
        sources: Encodes the encoder inputs of sequences; None without an encoder.
        graphs: Captured graphs of decode steps; None without graphs.
        compiled: The compiled model, which is called instead of ``model``; None without
            compilation.
        prefixes: The prefix cache; None without one.
        adapters: Assigns each token an adapter; None while no adapter is loaded.
        hidden: Receives the hidden states of all tokens of a step; None if not needed.
    """

    adapters: StepAdapters | None = None
    hidden: HiddenStates | None = None

    def __init__(
        self,
        model: PagedModel,
        device: str,
        *,
        page_size: int,
        num_pages: int,
        max_sequences: int,
        max_step_tokens: int,
        capture: Capture | None = None,
        graphs_required: bool = False,
        numerics: Callable[[], AbstractContextManager[None]] = nullcontext,
        compiled: Callable[[Any, list[torch.Tensor]], CompiledModel] | None = None,
        prefixes: Callable[[Caches, list[Any]], SharedPrefixes] | None = None,
    ) -> None:
        """Create the page pools and allocate the KV cache.

        Args:
            num_pages: Number of pages for the tokens of all sequences; pools of windows have fewer.
            capture: ``Platform.capture_graph``, to run decode steps as graphs; None for no graphs.
            graphs_required: Whether a failed capture raises; see ``DecodeGraphs``.
            numerics: Context manager of the platform in which every step computes.
            compiled: Compiles the model for the allocated caches.
            prefixes: Creates the prefix cache over the allocated caches.
        Raises: ConfigError: ``prefixes`` for a model that cannot share prefixes.
        """
        self.model: Any = model
        self.max_sequences, self.max_step_tokens = max_sequences, max_step_tokens
        self.device = device
        self.numerics = numerics
        sizes = page_size, num_pages, max_sequences, max_step_tokens
        caches = Caches(model, *sizes, prefix_cache=prefixes is not None)
        self.backends, self.pools = caches.backends, caches.pools
        self._pool_indices = caches.pool_indices
        self.encoder_pool, self.is_prefix_lm = caches.encoder_pool, caches.is_prefix_lm
        self.takes_mutual_runs = caches.takes_mutual_runs
        self._num_states = len(caches.states)
        self.encoder_inputs: EncoderInputs | None = None
        if self.encoder_pool is not None:
            vocab_size = model.config.vocab_size
            self.encoder_inputs = EncoderInputs(
                model, self.encoder_pool, device, max_step_tokens, vocab_size
            )
        self.graphs: DecodeGraphs | None = None
        num_spare = 0
        if capture is not None:
            # Graphs read the rotary table, which must not move: make it large enough at once.
            model.reserve_positions(self.max_sequence_tokens, device)
            max_tokens = max(
                self.max_sequence_tokens,
                0 if self.encoder_inputs is None else self.encoder_inputs.longest,
            )
            buckets = GraphBuckets.up_to(max_sequences, self.pools[0].pages_for(max_tokens))
            num_spare = DecodeGraphs.pages_for(buckets, page_size)
            self.graphs = DecodeGraphs(
                self._results,
                capture,
                buckets,
                page_size=page_size,
                spare_pages=caches.spare_pages(num_spare),
                device=device,
                backends=self._pool_indices,
                model=model if isinstance(model, nn.Module) else None,
                with_states=bool(self._num_states),
                with_encoder=self.encoder_inputs is not None,
                required=graphs_required,
            )
        self.caches = caches.allocate(device, num_spare)
        self.prefixes = None if prefixes is None else prefixes(caches, self.caches)
        self.compiled = None if compiled is None else compiled(model, self.caches)
        # torch.compile specializes a size of 1, and a page table of one column is rare.
        self._min_pages = 1 if compiled is None else 2

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence in tokens: the context length, or less if the cache is small."""
        context: int = self.model.config.max_position_embeddings
        return min(pool.longest(context) for pool in self.pools)

    @property
    def states(self) -> States:
        """The state tensors of the recurrent layers, in order."""
        return self.caches[len(self.backends) :]

    @property
    def cache_bytes(self) -> int:
        """Memory of all KV-cache pages and recurrent states, in bytes."""
        parts = (cache if isinstance(cache, tuple) else (cache,) for cache in self.caches)
        return sum(tensor.nbytes for part in parts for tensor in part)

    def compute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute the logits that the chunks request, ``[R, V]``; see ``Chunk.num_logits``.

        Writes the keys and values of all tokens to the cache, but does not advance the sequences.
        """
        batch = self._batch(chunks)
        rows: list[int] = []
        stop = 0
        for chunk in chunks:
            stop += chunk.num_rows
            rows += range(stop - chunk.num_logits, stop)
        # Compute logits of some rows only: the output matmul is large for a large vocabulary.
        if len(rows) < stop:
            return self.forward(batch, torch.tensor(rows, dtype=torch.int64, device=self.device))
        # Every row is requested, as in a step of decodes only.
        if self.graphs is None or batch.embedded is not None:
            return self.forward(batch, None)
        results = self.graphs.run(batch)
        if isinstance(results, torch.Tensor):
            return results
        logits, states = results
        if self.hidden is not None:
            self.hidden.latest = states
        return logits

    def record_hidden_states(self, hidden: HiddenStates) -> None:
        """Let later steps write the hidden states of all tokens to ``hidden``.

        Raises: ConfigError: the model is compiled, or is not a ``CausalLM``.
        """
        if self.compiled is not None or not isinstance(self.model, CausalLM):
            obstacle = "compiled" if self.compiled is not None else type(self.model).__name__
            raise ConfigError(
                f"The model is {obstacle}, so its hidden states are not available, which an "
                "MTP head reads. Try: Config(compile='off'), or speculation='ngram'"
            )
        self.hidden = self.model.model.hidden = hidden
        if self.graphs is not None:
            self.graphs.forget()

    def refresh_operands(self) -> None:
        """Drop captured graphs and mark sizes as static again, because kernels got new operands."""
        if self.graphs is not None:
            self.graphs.forget()
        if self.compiled is not None:
            self.compiled.fix_sizes()

    def _results(self, batch: StepBatch, plans: Plans) -> Results:
        """Run the model, and return the logits, and the hidden states if a proposer needs those."""
        logits = self.forward(batch, None, plans)
        if self.hidden is None or self.hidden.latest is None:
            return logits
        return logits, self.hidden.latest

    def compute_all(self, chunk: Chunk) -> torch.Tensor:
        """Compute the logits of every token of a chunk, ``[T, V]``."""
        return self.forward(self._batch([chunk]), None)

    def forward(
        self, batch: StepBatch, rows: torch.Tensor | None, planned: Plans | None = None
    ) -> torch.Tensor:
        """Compute the logits of ``batch``; layers with the same backend share one plan.

        Args:
            rows: Rows of the tokens to compute logits for; None for all.
            planned: Plans of the batch that exist already, by backend.
        """
        # The capacity of a graph is in whole pages, so its last page may exceed the context.
        num_positions = min(
            batch.attention.max_seq_tokens, self.model.config.max_position_embeddings
        )
        self.model.reserve_positions(num_positions, self.device)
        with self.numerics():
            plans = dict(planned or {})
            for backend in self.backends:
                if backend not in plans:
                    plans[backend] = backend.plan(batch.by_pool[self._pool_indices[backend]])
            model: Callable[..., torch.Tensor] = self.compiled or self.model
            inputs: dict[str, Any] = {}
            if batch.embedded is not None:
                # Rare steps of prompts, which would be compiled once more.
                model, inputs = self.model, {"embedded": batch.embedded}
            layer_plans = [plans[backend] for backend in self.backends]
            if self._num_states:
                layer_plans += [StateBatch.of(batch.attention)] * self._num_states
            return model(batch.token_ids, batch.positions, self.caches, layer_plans, rows, **inputs)

    def _batch(self, chunks: Sequence[Chunk]) -> StepBatch:
        if self.adapters is not None:
            self.adapters.assign(chunks)
        if self.encoder_inputs is not None:
            started = [chunk.sequence for chunk in chunks if not chunk.sequence.num_computed]
            if started:
                self.encoder_inputs.encode(started, self.caches, self.numerics)
        return StepBatch.build(
            chunks,
            self.pools[0].page_size,
            self.device,
            self._min_pages,
            with_states=bool(self._num_states),
            with_prefixes=self.is_prefix_lm,
        )
