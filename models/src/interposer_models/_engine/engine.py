"""The runner: schedules, computes and samples, one step at a time."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
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
from interposer_models._engine.request_batch import checked_tokens, sampling_batch
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.scheduler import Chunk, Scheduler
from interposer_models._engine.sequence import Event, FinishReason, Sequence
from interposer_models._engine.sources import Sources
from interposer_models._engine.speculation import StepSpeculation
from interposer_ops.layers.sampler import Sampler
from interposer_ops.layers.states import StateBatch

if TYPE_CHECKING:
    from interposer_models._adapters.step import StepAdapters


class Engine:
    """Runs any number of requests over one model and one paged cache. Not thread-safe.

    Attributes:
        model: a ``PagedModel``; of what class it is, whoever built the engine knows.
        graphs: through which steps that only decode run; None without.
        compiled: what is called instead of the model; None where it is not compiled.
        numerics: the block in which weights are prepared and steps compute.
        pools: of pages; that of the layers that see farthest is the first one, ``pool``.
        sources: encodes those of sequences; None where the model has no encoder.
        start_token_ids: with which the decoder of such a model starts.
        constraints: compiles those of requests; None where there is no tokenizer to do so with.
        adapters: tells layers the adapter of each token; None where no adapter is loaded.
        speculation: takes the steps, to verify guessed tokens in them; None without.
    """

    constraints: Constraints | None = None
    adapters: StepAdapters | None = None
    speculation: StepSpeculation | None = None

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
        start_token_ids: Items[int] = (),
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
        self.start_token_ids = tuple(start_token_ids)
        size, limits = model.config.vocab_size, (max_sequences, max_step_tokens)
        self.sources: Sources | None = None
        if held.sources is not None:
            self.sources = Sources(model, held.sources, device, max_step_tokens, size)
        self._has_prefixes = held.has_prefixes
        self._edits = RequestEdits(sampler, size, stop_token_ids, device)
        self.scheduler = Scheduler(self.pools, *limits, held.sources, held.has_prefixes)
        self.graphs: DecodeGraphs | None = None
        num_spare = 0
        if capture is not None:
            # What a graph reads must not move, so that the table has to be whole from the start.
            model.reserve_positions(self.longest, device)
            longest = max(self.longest, 0 if self.sources is None else self.sources.longest)
            buckets = GraphBuckets.up_to(max_sequences, self.pool.pages_for(longest))
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
                with_sources=self.sources is not None,
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

    def add(
        self, prompt: Items[int], params: SamplingParams, source: Items[int] | None = None
    ) -> Sequence:
        """Queue a request; it joins the batch at the next step that has room.

        Args:
            source: what an encoder reads; ``prompt`` is what its decoder begins with then.
        Raises: RequestError: as ``check``.
        """
        tokens = self.check(prompt, params, source)
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(62) if self._seeds is None else self._seeds.getrandbits(62)
        sequence = self.sequence(tokens, params, seed, source)
        if not params.takes_likeliest:
            sequence.matcher = self._edits.prepare(params, self.constraints)
        self.scheduler.add(sequence)
        return sequence

    def check(
        self, prompt: Items[int], params: SamplingParams, source: Items[int] | None = None
    ) -> list[int]:
        """Return the prompt as ``add`` takes it; any thread may ask.

        Raises: RequestError: the prompt is empty, holds an unknown token, leaves no room for a new
            token in the model's context or in the cache, or has to be computed in one step and
            is longer; or a parameter names an unknown token, or a constraint that cannot be held;
            or the source is as ``Sources.check`` says, or given to a model without an encoder.
            UnknownNameError: no adapter of the name is loaded.
        """
        tokens = self.checked_tokens(prompt)
        self.checked_source(source)
        self._check_adapter(params)
        context = self.model.config.max_position_embeddings
        if len(tokens) >= context:
            raise RequestError(
                f"The prompt has {len(tokens)} tokens, the model's context is {context} and must "
                f"hold at least one new token besides. Try: shorten it to {context - 1}"
            )
        for pool in self.pools:
            pool.check(min(len(tokens) + params.max_new_tokens, context))
        self.scheduler.check(len(tokens))
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
            self._end(sequence, "cancelled")

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Compute the next step and return its new tokens.

        None come while prompts are computed in chunks, nor when there is nothing to do; ``busy``
        tells the two apart.
        """
        chunks = self.scheduler.next_step()
        if not chunks:
            return []
        return self.run(chunks) if self.speculation is None else self.speculation.step(chunks)

    def run(self, chunks: Items[Chunk]) -> list[Event]:
        """Compute chunks without drafts, and return the new tokens."""
        sampled = [chunk.sequence for chunk in chunks if chunk.is_last]
        logits = self.compute(chunks)
        self.scheduler.advance(chunks)
        return self.sample(sampled, logits) if sampled else []

    def compute(self, chunks: Items[Chunk]) -> torch.Tensor:
        """Return the logits of the newest token and of the drafts of each last chunk, ``[R, V]``.

        Keys and values of all are in the cache then, though no token is counted as computed.
        """
        batch = self._batch(chunks)
        wanted: list[int] = []
        stop = 0
        for chunk in chunks:
            stop += chunk.num_rows
            if chunk.is_last:
                wanted += range(stop - 1 - len(chunk.drafts), stop)
        if len(wanted) < stop:
            return self.forward(batch, torch.tensor(wanted, dtype=torch.int64, device=self.device))
        # A step of decodes alone needs every token.
        return self.forward(batch, None) if self.graphs is None else self.graphs.run(batch)

    @torch.inference_mode()
    def logits(
        self,
        token_ids: Items[int],
        adapter: str | None = None,
        num_prompt: int | None = None,
        source: Items[int] | None = None,
    ) -> torch.Tensor:
        """Return the logits after every token, ``[T, V]`` float32.

        Args:
            num_prompt: how many tokens are the prompt, which see each other in both directions in a
                prefix-LM; None takes all.
        Raises: RequestError, UnknownNameError: as ``add``, though a full context is allowed; or
            ``num_prompt`` is not from 1 to T.
        """
        tokens, params = self.checked_tokens(token_ids), SamplingParams(adapter=adapter)
        self._check_adapter(params)
        context = self.model.config.max_position_embeddings
        if len(tokens) > context:
            raise RequestError(f"{len(tokens)} tokens exceed the model's context of {context}")
        for pool in self.pools:
            pool.check(len(tokens))
        count = len(tokens) if num_prompt is None else num_prompt
        if not 1 <= count <= len(tokens):
            raise RequestError(f"num_prompt is {count}, must be from 1 to {len(tokens)} tokens")
        sequence = self.sequence(tokens[:count], params, 0, source)
        sequence.output += tokens[count:]
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

    @property
    def draws_repeat(self) -> bool:
        """Say whether the noise of requests that name no seed is the same each time."""
        return self._seeds is not None

    def sequence(
        self, tokens: list[int], params: SamplingParams, seed: int, source: Items[int] | None = None
    ) -> Sequence:
        """Return a sequence that nobody queued; ``tokens`` are not checked."""
        pages: list[list[int]] = [[] for _ in self.pools]
        read = self.checked_source(source)
        sequence = Sequence(next(self._ids), tokens, params, seed, pages=pages, source=read)
        if self.adapters is not None:
            sequence.adapter = self.adapters.version(params.adapter)
        return sequence

    def checked_source(self, source: Items[int] | None) -> list[int]:
        """Return the ids of a source as plain integers, none where the model has no encoder.

        Raises: RequestError: see ``Sources.check``; or there is no encoder to read it.
        """
        if self.sources is not None:
            return self.sources.check(source)
        if source is not None:
            raise RequestError("The model has no encoder for a source. Try: give it as the prompt")
        return []

    def _batch(self, chunks: Items[Chunk]) -> StepBatch:
        if self.adapters is not None:
            self.adapters.assign(chunks)
        if self.sources is not None:
            fresh = [chunk.sequence for chunk in chunks if not chunk.sequence.num_computed]
            if fresh:
                self.sources.encode(fresh, self.caches, self.numerics)
        return StepBatch.build(
            chunks,
            self.pool.page_size,
            self.device,
            self._min_pages,
            with_states=bool(self._num_states),
            with_prefixes=self._has_prefixes,
        )

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
        """Return the ids as plain integers; see ``checked_tokens`` of ``request_batch``."""
        return checked_tokens(token_ids, self.model.config.vocab_size)

    def sample(self, sequences: list[Sequence], logits: torch.Tensor) -> list[Event]:
        """Draw the next token of each sequence from ``logits``, ``[B, V]``."""
        plain = all(sequence.params.takes_likeliest for sequence in sequences)
        batch = sampling_batch(sequences, self.model.config.vocab_size, self.device)
        if not plain:
            logits = self._edits.edit(sequences, logits)
        tokens, logprobs = self.sampler(logits, batch)
        if not plain:
            self._edits.tell(sequences, logits, batch, tokens)
        drawn = zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True)
        return [self.append(*each) for each in drawn]

    def append(self, sequence: Sequence, token: int, logprob: float) -> Event:
        """Add a new token to a sequence, which may end by it."""
        sequence.output.append(token)
        sequence.logprobs.append(logprob)
        if (reason := self._reason(sequence, token)) is not None:
            self._end(sequence, reason)
        return Event(sequence, token, logprob)

    def _reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Return why a sequence ends with ``token``, None where it does not."""
        params, matcher = sequence.params, sequence.matcher
        if matcher is not None and (reason := matcher.advance(token)) is not None:
            return reason
        if token in params.stop_token_ids or (
            token in self.stop_token_ids and not params.ignore_eos
        ):
            return "stop"
        full = len(sequence) >= self.model.config.max_position_embeddings
        return "length" if full or len(sequence.output) >= params.max_new_tokens else None

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.scheduler.remove(sequence)
        if self.adapters is not None:
            self.adapters.leave(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence)
