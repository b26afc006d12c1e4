"""The runner: schedules, computes and samples, one step at a time."""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from interposer.errors import RequestError, UnknownNameError
from interposer_models._engine.batch import StepBatch
from interposer_models._engine.caches import Caches
from interposer_models._engine.compiled_model import CompiledModel
from interposer_models._engine.constraints import Constraints
from interposer_models._engine.decode_graphs import Capture, DecodeGraphs, Plans
from interposer_models._engine.graph_buckets import GraphBuckets
from interposer_models._engine.logit_edits import RequestEdits
from interposer_models._engine.paged_model import PagedModel
from interposer_models._engine.prefix_pages import PrefixPool, PrefixStatistics
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.scheduler import Chunk, Scheduler
from interposer_models._engine.sequence import Sequence
from interposer_ops.layers.sampler import Sampler, SamplingBatch
from interposer_ops.layers.states import StateBatch

if TYPE_CHECKING:
    from interposer_models._adapters.step import StepAdapters


@dataclass(frozen=True, slots=True)
class Event:
    """A new token of a sequence, with its natural-log probability."""

    sequence: Sequence
    token_id: int
    logprob: float


class Engine:
    """Runs any number of requests over one model and one paged cache. Not thread-safe.

    Attributes:
        model: a ``PagedModel``; of what class it is, whoever built the engine knows.
        graphs: through which steps that only decode run; None without.
        compiled: what is called instead of the model; None where it is not compiled.
        numerics: the block in which weights are prepared and steps compute.
        pools: of pages; that of the layers that see farthest is the first one, ``pool``.
        constraints: compiles those of requests; None where there is no tokenizer to do so with.
        adapters: tells layers the adapter of each token; None where no adapter is loaded.
    """

    constraints: Constraints | None = None
    adapters: StepAdapters | None = None

    def __init__(
        self,
        model: PagedModel,
        sampler: Sampler,
        device: str,
        *,
        stop_token_ids: frozenset[int],
        page_size: int,
        num_pages: int,
        max_sequences: int,
        max_step_tokens: int,
        capture: Capture | None = None,
        graphs_required: bool = False,
        numerics: Callable[[], AbstractContextManager[None]] = nullcontext,
        seed: int | None = None,
        compiled: Callable[[Any, list[torch.Tensor]], CompiledModel] | None = None,
        prefix_cache: bool = False,
    ) -> None:
        """Allocate the cache.

        Args:
            num_pages: that tokens of all sequences may take; layers with windows have fewer.
            capture: of the platform, where decode steps are to be graphs.
            graphs_required: what cannot be captured raises, see ``DecodeGraphs``.
            numerics: of the platform, the block in which every step computes.
            seed: of the noise of requests that name none of their own; None draws it.
            compiled: returns the compiled form of a model over these caches.
            prefix_cache: pages of equal beginnings are shared, see ``PrefixPool``.
        Raises: ConfigError: ``prefix_cache`` of a model that keeps more than pages of all tokens.
        """
        self.numerics = numerics
        self._seeds = None if seed is None else Random(seed)
        self.model: Any = model
        self.sampler = sampler
        self.device = device
        self.stop_token_ids = stop_token_ids
        sizes = page_size, num_pages, max_sequences, max_step_tokens
        held = Caches(model, *sizes, prefix_cache)
        self.backends, self.pools, self._places = held.backends, held.pools, held.places
        self.pool, self._num_states = self.pools[0], held.num_states
        self._edits = RequestEdits(sampler, model.config.vocab_size, stop_token_ids, device)
        self.scheduler = Scheduler(self.pools, max_sequences, max_step_tokens)
        self.graphs: DecodeGraphs | None = None
        num_spare = 0
        if capture is not None:
            # What a graph reads must not move, so that the table has to be whole from the start.
            model.reserve_positions(self.longest, device)
            buckets = GraphBuckets.up_to(max_sequences, self.pool.pages_for(self.longest))
            num_spare = DecodeGraphs.pages_for(buckets, page_size)
            self.graphs = DecodeGraphs(
                lambda batch, plans: self.forward(batch, None, plans),
                capture,
                buckets,
                page_size=page_size,
                spare_pages=held.spare_pages(num_spare),
                device=device,
                backends=self._places,
                model=model if isinstance(model, nn.Module) else None,
                with_states=bool(self._num_states),
                required=graphs_required,
            )
        self.caches = held.allocate(device, num_spare)
        self.compiled = None if compiled is None else compiled(model, self.caches)
        # The compiler makes code of its own for a size of 1, which a table seldom has.
        self._min_pages = 1 if compiled is None else 2
        self._ids = itertools.count()

    @property
    def prefixes(self) -> PrefixStatistics | None:
        """Return what the prefix cache has saved; None without one."""
        return self.pool.statistics if isinstance(self.pool, PrefixPool) else None

    def forget_prefixes(self) -> None:
        """Compute all prompts anew, as after other weights or adapters."""
        if isinstance(self.pool, PrefixPool):
            self.pool.forget()

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of pages and states."""
        parts = (cache if isinstance(cache, tuple) else (cache,) for cache in self.caches)
        return sum(tensor.nbytes for part in parts for tensor in part)

    def add(self, prompt: Items[int], params: SamplingParams) -> Sequence:
        """Queue a request; it joins the batch at the next step that has room.

        Raises: RequestError: as ``check``.
        """
        tokens = self.check(prompt, params)
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(62) if self._seeds is None else self._seeds.getrandbits(62)
        sequence = self._sequence(tokens, params, seed)
        if not params.takes_likeliest:
            sequence.matcher = self._edits.prepare(params, self.constraints)
        self.scheduler.add(sequence)
        return sequence

    def check(self, prompt: Items[int], params: SamplingParams) -> list[int]:
        """Return the prompt as ``add`` takes it; any thread may ask.

        Raises: RequestError: the prompt is empty, holds an unknown token, or leaves no room for
            a new token in the model's context or in the cache; or a parameter names an unknown
            token, or a constraint that cannot be held.
            UnknownNameError: no adapter of the name is loaded.
        """
        tokens = self.checked_tokens(prompt)
        self._check_adapter(params)
        context = self.model.config.max_position_embeddings
        if len(tokens) >= context:
            raise RequestError(
                f"The prompt has {len(tokens)} tokens, the model's context is {context} and must "
                f"hold at least one new token besides. Try: shorten it to {context - 1}"
            )
        for pool in self.pools:
            pool.check(min(len(tokens) + params.max_new_tokens, context))
        self._edits.check(params, self.constraints)
        return tokens

    def _check_adapter(self, params: SamplingParams) -> None:
        known = () if self.adapters is None else self.adapters.names
        if params.adapter is not None and params.adapter not in known:
            hint = "Try: load_adapter(name, folder) of the model"
            raise UnknownNameError("adapter", params.adapter, known, hint)

    @property
    def longest(self) -> int:
        """The tokens that a sequence can have: those of the context, as far as the cache goes."""
        context: int = self.model.config.max_position_embeddings
        return min(pool.longest(context) for pool in self.pools)

    @property
    def busy(self) -> bool:
        """Say whether any request is unfinished."""
        return self.scheduler.busy

    def cancel(self, sequence: Sequence) -> None:
        """End a request early and free its pages; one that has ended stays as it is."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "cancelled"
            self.scheduler.remove(sequence)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Compute the next step and return its new tokens.

        None come while prompts are computed in chunks, nor when there is nothing to do; ``busy``
        tells the two apart.
        """
        chunks = self.scheduler.next_step()
        if not chunks:
            return []
        batch = self._batch(chunks)
        sampled = [chunk for chunk in chunks if chunk.is_last]
        rows = None  # a step of decodes alone needs every token
        if len(sampled) < batch.token_ids.shape[0]:
            rows = batch.attention.query_starts[1:][[chunk.is_last for chunk in chunks]] - 1
        if rows is None and self.graphs is not None:
            logits = self.graphs.run(batch)
        else:
            logits = self.forward(batch, rows)
        self.scheduler.advance(chunks)
        return self._sample(sampled, logits) if sampled else []

    @torch.inference_mode()
    def logits(self, token_ids: Items[int], adapter: str | None = None) -> torch.Tensor:
        """Return the logits after every token, ``[T, V]`` float32.

        Raises: RequestError, UnknownNameError: as ``add``, though a full context is allowed.
        """
        tokens, params = self.checked_tokens(token_ids), SamplingParams(adapter=adapter)
        self._check_adapter(params)
        context = self.model.config.max_position_embeddings
        if len(tokens) > context:
            raise RequestError(f"{len(tokens)} tokens exceed the model's context of {context}")
        for pool in self.pools:
            pool.check(len(tokens))
        sequence = self._sequence(tokens, params, seed=0)
        sequence.state_slot = self.pool.take_slot()
        parts = []
        try:
            while sequence.num_computed < len(sequence):
                chunk = self.scheduler.next_alone(sequence)
                if chunk is None:
                    raise RequestError(
                        "The cache is full of running requests. Try: finish or cancel some"
                    )
                parts.append(self.forward(self._batch([chunk]), None).float())
                self.scheduler.advance([chunk])
        finally:
            self.scheduler.remove(sequence)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _sequence(self, tokens: list[int], params: SamplingParams, seed: int) -> Sequence:
        pages: list[list[int]] = [[] for _ in self.pools]
        return Sequence(next(self._ids), tokens, params, seed, pages=pages)

    def _batch(self, chunks: list[Chunk]) -> StepBatch:
        if self.adapters is not None:
            self.adapters.assign(chunks)
        page_size, has_states = self.pool.page_size, bool(self._num_states)
        return StepBatch.build(chunks, page_size, self.device, self._min_pages, has_states)

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

    def checked_tokens(self, token_ids: Items[int]) -> list[int]:
        """Return the ids as plain integers; RequestError if none, or one not in the vocabulary.

        Whatever Python takes for an index is an integer here, such as those of arrays.
        """
        if isinstance(token_ids, bytes) or not hasattr(token_ids, "__iter__"):
            raise RequestError(
                f"The prompt is {token_ids!r}, must be a text or a list of token ids"
            )
        tokens = [_integer(token_id) for token_id in token_ids]
        if not tokens:
            raise RequestError("The prompt is empty. Try: give at least one token")
        size = self.model.config.vocab_size
        for token_id in tokens:
            if not 0 <= token_id < size:
                raise RequestError(f"Token id {token_id} is outside the vocabulary of {size}")
        return tokens

    def _sample(self, chunks: list[Chunk], logits: torch.Tensor) -> list[Event]:
        sequences = [chunk.sequence for chunk in chunks]
        plain = all(sequence.params.takes_likeliest for sequence in sequences)
        batch = self._sampling_batch(sequences, plain)
        if not plain:
            logits = self._edits.edit(sequences, logits)
        tokens, logprobs = self.sampler(logits, batch)
        if not plain:
            self._edits.tell(sequences, logits, batch, tokens)
        events = []
        for sequence, token, logprob in zip(
            sequences, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            sequence.output.append(token)
            sequence.logprobs.append(logprob)
            self._finish(sequence, token)
            events.append(Event(sequence, token, logprob))
        return events

    def _sampling_batch(self, sequences: list[Sequence], plain: bool) -> SamplingBatch:
        params = [sequence.params for sequence in sequences]
        if plain:
            return SamplingBatch.greedy(len(params), self.device)
        return SamplingBatch.build(
            temperature=[p.temperature for p in params],
            top_k=[p.top_k for p in params],
            top_p=[p.top_p for p in params],
            min_p=[p.min_p for p in params],
            seeds=[sequence.seed for sequence in sequences],
            steps=[len(sequence.output) for sequence in sequences],
            repetition=[p.repetition_penalty for p in params],
            presence=[p.presence_penalty for p in params],
            frequency=[p.frequency_penalty for p in params],
            prompts=[sequence.prompt for sequence in sequences],
            outputs=[sequence.output for sequence in sequences],
            vocab_size=self.model.config.vocab_size,
            device=self.device,
        )

    def _finish(self, sequence: Sequence, token: int) -> None:
        params = sequence.params
        matcher = sequence.matcher
        if matcher is not None and (reason := matcher.advance(token)) is not None:
            sequence.finish_reason = reason
        elif token in params.stop_token_ids or (
            token in self.stop_token_ids and not params.ignore_eos
        ):
            sequence.finish_reason = "stop"
        elif (
            len(sequence.output) >= params.max_new_tokens
            or len(sequence) >= self.model.config.max_position_embeddings
        ):
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            self.scheduler.remove(sequence)


def _integer(token_id: object) -> int:
    try:
        if not isinstance(token_id, bool):
            return operator.index(token_id)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RequestError(
        f"Token id {token_id!r} is not an integer. Try: lm.tokenizer.encode(text), or one prompt "
        "after the other"
    )
