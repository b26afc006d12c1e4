"""The steps of a model over its caches: eager, compiled or as graphs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from interposer.errors import ConfigError
from interposer_models._decoder.decoder import CausalLM
from interposer_models._decoder.hidden_states import HiddenStates
from interposer_models._engine.batch import StepBatch
from interposer_models._engine.caches import Caches
from interposer_models._engine.compiled_model import CompiledModel
from interposer_models._engine.decode_graphs import Capture, DecodeGraphs, Plans, Results
from interposer_models._engine.graph_buckets import GraphBuckets
from interposer_models._engine.paged_model import PagedModel
from interposer_models._engine.scheduler import Chunk
from interposer_models._engine.shared_prefixes import SharedPrefixes
from interposer_models._engine.sources import Sources
from interposer_models._engine.state_rows import States
from interposer_ops.layers.states import StateBatch

if TYPE_CHECKING:
    from interposer_models._adapters.step import StepAdapters


class Runner:
    """Computes chunks of sequences, whose pages somebody else gives out.

    Attributes:
        model: a ``PagedModel``; of what class it is, whoever built the engine knows.
        numerics: the block in which weights are prepared and steps compute.
        pools: of pages; that of the layers that see farthest is the first one.
        has_prefixes: the tokens of a prompt see each other in both directions.
        sources: encodes those of sequences; None where the model has no encoder.
        graphs: through which steps that only decode run; None without.
        compiled: what is called instead of the model; None where it is not compiled.
        prefixes: shares what prompts that begin alike compute; None without.
        adapters: tells layers the adapter of each token; None where no adapter is loaded.
        hidden: has the states of all tokens of the last step; None where nobody wants them.
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
        """Allocate the cache.

        Args:
            num_pages: that tokens of all sequences may take; layers with windows have fewer.
            capture: of the platform, where decode steps are to be graphs.
            graphs_required: what cannot be captured raises, see ``DecodeGraphs``.
            numerics: of the platform, the block in which every step computes.
            compiled: returns the compiled form of a model over these caches.
            prefixes: returns what shares beginnings in these caches.
        Raises: ConfigError: ``prefixes`` of a model whose prompts have no common beginnings.
        """
        self.model: Any = model
        self.max_sequences, self.max_step_tokens = max_sequences, max_step_tokens
        self.device = device
        self.numerics = numerics
        sizes = page_size, num_pages, max_sequences, max_step_tokens
        held = Caches(model, *sizes, prefix_cache=prefixes is not None)
        self.backends, self.pools, self._places = held.backends, held.pools, held.places
        self.source_pool, self.has_prefixes = held.sources, held.has_prefixes
        self._num_states = len(held.states)
        self.sources: Sources | None = None
        if held.sources is not None:
            vocab_size = model.config.vocab_size
            self.sources = Sources(model, held.sources, device, max_step_tokens, vocab_size)
        self.graphs: DecodeGraphs | None = None
        num_spare = 0
        if capture is not None:
            # What a graph reads must not move, so that the table has to be whole from the start.
            model.reserve_positions(self.longest, device)
            longest = max(self.longest, 0 if self.sources is None else self.sources.longest)
            buckets = GraphBuckets.up_to(max_sequences, self.pools[0].pages_for(longest))
            num_spare = DecodeGraphs.pages_for(buckets, page_size)
            self.graphs = DecodeGraphs(
                self._results,
                capture,
                buckets,
                page_size=page_size,
                spare_pages=held.spare_pages(num_spare),
                device=device,
                backends=self._places,
                model=model if isinstance(model, nn.Module) else None,
                with_states=bool(self._num_states),
                with_sources=self.sources is not None,
                required=graphs_required,
            )
        self.caches = held.allocate(device, num_spare)
        self.prefixes = None if prefixes is None else prefixes(held, self.caches)
        self.compiled = None if compiled is None else compiled(model, self.caches)
        # The compiler makes code of its own for a size of 1, which a table seldom has.
        self._min_pages = 1 if compiled is None else 2

    @property
    def longest(self) -> int:
        """The tokens that a sequence can have: those of the context, as far as the cache goes."""
        context: int = self.model.config.max_position_embeddings
        return min(pool.longest(context) for pool in self.pools)

    @property
    def states(self) -> States:
        """Return the states of the layers that have some, in order."""
        return self.caches[len(self.backends) :]

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of pages and states."""
        parts = (cache if isinstance(cache, tuple) else (cache,) for cache in self.caches)
        return sum(tensor.nbytes for part in parts for tensor in part)

    def compute(self, chunks: Items[Chunk]) -> torch.Tensor:
        """Return the logits that chunks want, ``[R, V]``, see ``Chunk.num_logits``.

        Keys and values of all are in the cache then, though no token is counted as computed.
        """
        batch = self._batch(chunks)
        wanted: list[int] = []
        stop = 0
        for chunk in chunks:
            stop += chunk.num_rows
            wanted += range(stop - chunk.num_logits, stop)
        if len(wanted) < stop:
            return self.forward(batch, torch.tensor(wanted, dtype=torch.int64, device=self.device))
        # A step of decodes alone needs every token.
        if self.graphs is None:
            return self.forward(batch, None)
        results = self.graphs.run(batch)
        if isinstance(results, torch.Tensor):
            return results
        logits, states = results
        if self.hidden is not None:
            self.hidden.latest = states
        return logits

    def watch(self, hidden: HiddenStates) -> None:
        """Let ``hidden`` have the states of all tokens from the next step on.

        Raises: ConfigError: the model is compiled, or it is no ``CausalLM``.
        """
        if self.compiled is not None or not isinstance(self.model, CausalLM):
            what = "compiled" if self.compiled is not None else type(self.model).__name__
            raise ConfigError(
                f"The model is {what}, so that its hidden states are not to be had, which a head "
                "predicts by. Try: Config(compile='off'), or speculation='ngram'"
            )
        self.hidden = self.model.model.hidden = hidden
        if self.graphs is not None:
            self.graphs.forget()

    def renew(self) -> None:
        """Capture steps anew, and fix sizes anew, as layers have got new operands."""
        if self.graphs is not None:
            self.graphs.forget()
        if self.compiled is not None:
            self.compiled.fix_sizes()

    def _results(self, batch: StepBatch, plans: Plans) -> Results:
        """Return logits, and hidden states where somebody wants them."""
        logits = self.forward(batch, None, plans)
        if self.hidden is None or self.hidden.latest is None:
            return logits
        return logits, self.hidden.latest

    def compute_all(self, chunk: Chunk) -> torch.Tensor:
        """Return the logits of every token of a chunk, ``[T, V]``."""
        return self.forward(self._batch([chunk]), None)

    def forward(
        self, batch: StepBatch, rows: torch.Tensor | None, planned: Plans | None = None
    ) -> torch.Tensor:
        """Return the model's logits for ``batch``; layers that share a backend share its plan.

        Args:
            planned: plans of the batch that were made before, by backend.
        """
        # A graph has room for whole pages, of which the last may reach beyond the context.
        needed = min(batch.attention.max_seq_tokens, self.model.config.max_position_embeddings)
        self.model.reserve_positions(needed, self.device)
        with self.numerics():
            plans = dict(planned or {})
            for backend in self.backends:
                if backend not in plans:
                    plans[backend] = backend.plan(batch.by_pool[self._places[backend]])
            model: Callable[..., torch.Tensor] = self.compiled or self.model
            planned_layers = [plans[backend] for backend in self.backends]
            if self._num_states:
                planned_layers += [StateBatch.of(batch.attention)] * self._num_states
            return model(batch.token_ids, batch.positions, self.caches, planned_layers, rows)

    def _batch(self, chunks: Items[Chunk]) -> StepBatch:
        if self.adapters is not None:
            self.adapters.assign(chunks)
        if self.sources is not None:
            fresh = [chunk.sequence for chunk in chunks if not chunk.sequence.num_computed]
            if fresh:
                self.sources.encode(fresh, self.caches, self.numerics)
        return StepBatch.build(
            chunks,
            self.pools[0].page_size,
            self.device,
            self._min_pages,
            with_states=bool(self._num_states),
            with_prefixes=self.has_prefixes,
        )
