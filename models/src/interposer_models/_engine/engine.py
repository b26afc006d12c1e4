"""Continuous batching: requests over one model join, are computed step by step, and end."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence as Items
from random import Random

import torch

from interposer.errors import RequestError, UnknownNameError
from interposer_models._engine.constraints import Constraints
from interposer_models._engine.logit_edits import RequestEdits
from interposer_models._engine.non_finite import non_finite
from interposer_models._engine.prefix_statistics import PrefixStatistics
from interposer_models._engine.prompt_logprobs import PromptLogprobs
from interposer_models._engine.request_batch import checked_tokens
from interposer_models._engine.runner import Runner
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.sampling_state import SamplingState
from interposer_models._engine.scheduler import Chunk, Scheduler
from interposer_models._engine.sequence import Event, FinishReason, Sequence
from interposer_models._engine.speculation import StepSpeculation
from interposer_models._fair_lock import FairLock
from interposer_ops.layers.sampler import Sampler, SamplingBatch


class Engine:
    """Runs any number of requests over one model and one paged cache.

    A thread must hold ``lock`` while it calls a method or reads tokens, if others use the engine.

    Attributes:
        lock: held by the thread that uses the engine.
        runner: computes the steps; ``model`` and ``device`` are its.
        pools: of pages; that of the layers that see farthest is the first one, ``pool``.
        start_token_ids: with which the decoder of a model with an encoder starts.
        constraints: compiles those of requests; None where there is no tokenizer to do so with.
        speculation: takes the steps, to verify guessed tokens in them; None without.
    """

    constraints: Constraints | None = None
    speculation: StepSpeculation | None = None

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        *,
        stop_token_ids: frozenset[int],
        seed: int | None = None,
        start_token_ids: Items[int] = (),
    ) -> None:
        """Take no request yet.

        Args:
            seed: of the noise of requests that name none of their own; None draws it.
        """
        self.lock = FairLock()
        self.runner = runner
        self.model, self.device = runner.model, runner.device
        self.pools, self.pool = runner.pools, runner.pools[0]
        self.sampler = sampler
        self.stop_token_ids = stop_token_ids
        self.start_token_ids = tuple(start_token_ids)
        self.scheduler = Scheduler(
            self.pools,
            runner.max_sequences,
            runner.max_step_tokens,
            runner.source_pool,
            runner.has_prefixes,
            runner.prefixes,
        )
        size = self.model.config.vocab_size
        self._edits = RequestEdits(sampler, size, stop_token_ids, self.device)
        self._prompts = PromptLogprobs(runner, sampler)
        self._state = SamplingState(size, self.device)
        self._seeds = None if seed is None else Random(seed)
        self._ids = itertools.count()

    @property
    def trouble(self) -> str:
        """The reason why no step can be computed; one process alone knows of none."""
        return ""

    @property
    def prefixes(self) -> PrefixStatistics | None:
        """Return what the prefix cache has saved; None without one."""
        shared = self.runner.prefixes
        return None if shared is None else shared.statistics

    def forget_prefixes(self) -> None:
        """Compute all prompts anew, as after other weights or adapters."""
        if self.runner.prefixes is not None:
            self.runner.prefixes.forget()

    def add(
        self,
        prompt: Items[int],
        params: SamplingParams,
        source: Items[int] | None = None,
        *,
        reads_texts: bool = False,
    ) -> Sequence:
        """Queue a request; it joins the batch at the next step with free capacity.

        Args:
            source: what an encoder reads; ``prompt`` is what its decoder begins with then.
            reads_texts: the caller finds the texts of ``stop``.
        Raises: RequestError: as ``check``; or nobody would find these texts.
        """
        if params.stop and not reads_texts:
            raise RequestError(
                f"stop is {params.stop!r}, but an engine makes no texts of tokens. "
                "Try: start() of the LanguageModel"
            )
        tokens = self.check(prompt, params, source)
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(62) if self._seeds is None else self._seeds.getrandbits(62)
        sequence = self.sequence(tokens, params, seed, source)
        self._prompts.prepare(params)
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
            is longer; or a parameter names an unknown token, or a constraint that cannot be held,
            or log probabilities of a prompt that is not predicted;
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
        self._prompts.check(params)
        self._edits.check(params, self.constraints)
        return tokens

    def _check_adapter(self, params: SamplingParams) -> None:
        known = () if self.runner.adapters is None else self.runner.adapters.names
        if params.adapter is not None and params.adapter not in known:
            hint = "Try: load_adapter(name, folder) of the model"
            raise UnknownNameError("adapter", params.adapter, known, hint)

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
        logits = self.runner.compute(chunks)
        if len(logits) > len(sampled):
            logits = self._prompts.tell(chunks, logits)
        self.scheduler.advance(chunks)
        return self.sample(sampled, logits) if sampled else []

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
                parts.append(self.runner.compute_all(chunk).float())
                self.scheduler.advance([chunk])
        finally:
            self.scheduler.remove(sequence)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def agreed(self, flag: bool) -> bool:
        """Return the answer to a question that time decides, ``flag`` where nobody else asks it."""
        return flag

    @property
    def draws_repeat(self) -> bool:
        """Say whether the noise of requests that name no seed is the same each time."""
        return self._seeds is not None

    def sequence(
        self, tokens: list[int], params: SamplingParams, seed: int, source: Items[int] | None = None
    ) -> Sequence:
        """Return a new sequence without queueing it; ``tokens`` are not checked."""
        pages: list[list[int]] = [[] for _ in self.pools]
        read = self.checked_source(source)
        sequence = Sequence(next(self._ids), tokens, params, seed, pages=pages, source=read)
        if self.runner.adapters is not None:
            sequence.adapter = self.runner.adapters.version(params.adapter)
        return sequence

    def checked_source(self, source: Items[int] | None) -> list[int]:
        """Return the ids of a source as plain integers, none where the model has no encoder.

        Raises: RequestError: see ``Sources.check``; or there is no encoder to read it.
        """
        if self.runner.sources is not None:
            return self.runner.sources.check(source)
        if source is not None:
            raise RequestError("The model has no encoder for a source. Try: give it as the prompt")
        return []

    def checked_tokens(self, token_ids: Items[int]) -> list[int]:
        """Return the ids as plain integers; see ``checked_tokens`` of ``request_batch``."""
        return checked_tokens(token_ids, self.model.config.vocab_size)

    def sample(self, sequences: list[Sequence], logits: torch.Tensor) -> list[Event]:
        """Draw the next token of each sequence from ``logits``, ``[B, V]``."""
        plain = all(sequence.params.takes_likeliest for sequence in sequences)
        if plain:
            batch = SamplingBatch.greedy(len(sequences), self.device)
        else:
            batch = self._state.batch(sequences)
            logits = self._edits.edit(sequences, logits, batch, self.constraints)
        tokens, logprobs = self.sampler(logits, batch)
        if not plain:
            self._edits.tell(sequences, logits, batch, tokens)
        drawn = zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True)
        return [self.append(*each) for each in drawn]

    def append(self, sequence: Sequence, token: int, logprob: float) -> Event:
        """Add a new token to a sequence, which may end by it.

        A token of logits that are not finite is none; the sequence ends with an error instead.
        """
        if logprob != logprob:  # as one NaN or infinite logit of the row makes it
            place = f"after {len(sequence.prompt)} prompt and {len(sequence.output)} new tokens"
            sequence.error = non_finite(f"The logits {place}")
            self._end(sequence, "error")
            return Event(sequence, token, logprob)
        sequence.output.append(token)
        sequence.logprobs.append(logprob)
        if (reason := self._reason(sequence, token)) is not None:
            sequence.has_end_token = reason == "stop" and self._ends(sequence, token)
            self._end(sequence, reason)
        return Event(sequence, token, logprob)

    def _reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Return why a sequence ends with ``token``, None where it does not."""
        params, matcher = sequence.params, sequence.matcher
        if matcher is not None and (reason := matcher.advance(token)) is not None:
            return reason
        if self._ends(sequence, token):
            return "stop"
        full = len(sequence) >= self.model.config.max_position_embeddings
        return "length" if full or len(sequence.output) >= params.max_new_tokens else None

    def _ends(self, sequence: Sequence, token: int) -> bool:
        """Say whether ``token`` is an end token of the model or of the request."""
        params = sequence.params
        return token in params.stop_token_ids or (
            token in self.stop_token_ids and not params.ignore_eos
        )

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.scheduler.remove(sequence)
        if self.runner.adapters is not None:
            self.runner.adapters.leave(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence)
