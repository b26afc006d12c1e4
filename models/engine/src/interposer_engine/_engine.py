"""The engine: continuous batching of requests, which share one model and run step by step.

Each answer to a request is a ``TokenSequence``. The scheduler gives it a ``Chunk`` of a step; all
chunks together are a ``StepBatch`` of the model and a ``SamplingBatch`` of the sampler. A new token
is an ``Event``, and a ``Delta`` once a ``Stream`` has added the text.

Dimensions: R rows of logits, B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from random import Random

import torch

from interposer.errors import ContextLengthError, RequestError, UnknownNameError
from interposer_engine._constrained_decoding.constraints import Constraints
from interposer_engine._embedded_input import EmbeddedInput, PromptTokens
from interposer_engine._encoder_features import FeatureSource
from interposer_engine._encoder_inputs import Source, source_key
from interposer_engine._locks import FairLock
from interposer_engine._prefix_pool import PrefixStatistics
from interposer_engine._prompt_runs import Run, place_runs
from interposer_engine._runner import Runner
from interposer_engine._sampling import (
    RequestEdits,
    SamplingState,
    checked_prompt,
    checked_tokens,
    non_finite,
)
from interposer_engine._sampling_params import SamplingParams
from interposer_engine._scheduler import Chunk, Scheduler
from interposer_engine._sequence import Event, FinishReason, PromptLogprob, TokenSequence
from interposer_engine._speculation.api import StepSpeculation
from interposer_ops.layers.sampler import Sampler, SamplingBatch

_MOST_ROWS = 64  # rows per kernel call, which may convert all of them to float32


class Engine:
    """Runs any number of requests on one model and one paged KV cache.

    If several threads use the engine, a thread must hold ``lock`` to call methods or to read
    tokens.

    Attributes:
        lock: Lock of the engine.
        runner: Computes the steps; owns ``model`` and ``device``.
        pools: Page pools, the pool of the widest attention window first.
        pool: The first of ``pools``.
        start_token_ids: Tokens that start the decoder of a model with an encoder.
        constraints: Compiles constraints of requests; None if the engine has no tokenizer.
        speculation: Runs the steps with draft tokens; None without speculative decoding.
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
        start_token_ids: Sequence[int] = (),
    ) -> None:
        """Create an engine without requests.

        Args:
            stop_token_ids: End tokens of the model.
            seed: Seed of the noise of requests without a seed; None draws random seeds.
            start_token_ids: See ``Engine``.
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
            runner.encoder_pool,
            runner.is_prefix_lm,
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
        """Reason why no step can run, such as a lost rank; "" while steps can run."""
        return ""

    @property
    def prefixes(self) -> PrefixStatistics | None:
        """Statistics of the prefix cache; None if the engine has no prefix cache."""
        prefix_cache = self.runner.prefixes
        return None if prefix_cache is None else prefix_cache.statistics

    def forget_prefixes(self) -> None:
        """Forget computed prefixes and encoder inputs, because weights or adapters have changed."""
        if self.runner.prefixes is not None:
            self.runner.prefixes.forget()
        if self.runner.encoder_pool is not None:
            self.runner.encoder_pool.forget()

    def add(
        self,
        prompt: PromptTokens,
        params: SamplingParams,
        source: Source | None = None,
        *,
        reads_texts: bool = False,
    ) -> TokenSequence:
        """Queue a request, which joins the batch at the next step with free capacity.

        Args:
            prompt: Token ids, and runs of tokens whose vectors an encoder has computed.
            source: Token ids or features of the encoder input, if the model has an encoder;
                ``prompt`` then holds the first decoder tokens.
            reads_texts: Whether the caller searches the output for the texts of ``stop``.
        Raises: RequestError: as ``check``; or ``stop`` is set and the caller does not search for
            stop texts.
        """
        if params.stop and not reads_texts:
            raise RequestError(
                f"stop is {params.stop!r}, but an engine does not detokenize. "
                "Try: start() of the LanguageModel"
            )
        tokens = self.check(prompt, params, source)
        seed = params.seed
        if seed is None:
            seed = secrets.randbits(62) if self._seeds is None else self._seeds.getrandbits(62)
        sequence = self.sequence(tokens, params, seed, source)
        self._prompts.prepare(params)
        # Only greedy requests without reports skip the logit edits in ``sample``.
        if not params.takes_likeliest:
            sequence.matcher = self._edits.prepare(params, self.constraints)
        self.scheduler.add(sequence)
        return sequence

    def check(
        self, prompt: PromptTokens, params: SamplingParams, source: Source | None = None
    ) -> list[int | EmbeddedInput]:
        """Return the tokens of the prompt, checked for ``add``. Any thread may call this.

        Raises:
            RequestError: the prompt is empty, has an unknown token, or leaves no space for a new
                token in the model's context, in the cache or in a step; a parameter names an
                unknown token, an unusable constraint, or log probabilities of a prompt that the
                model does not predict; ``source`` fails ``EncoderInputs.check``, or is set for a
                model without an encoder; or the model cannot take a run of the prompt.
            UnknownNameError: no adapter of the name is loaded.
        """
        tokens = checked_prompt(prompt, self.model.config.vocab_size)
        self.checked_source(source)
        self._check_adapter(params)
        token_ids, runs = place_runs(tokens)
        for run in runs:
            self._check_run(run.input)
        num_tokens, context = len(token_ids), self.model.config.max_position_embeddings
        if num_tokens >= context:
            raise ContextLengthError(
                f"The prompt has {num_tokens} tokens, the model's context is {context} and must "
                f"hold at least one new token in addition. Try: shorten it to {context - 1}"
            )
        for pool in self.pools:
            pool.check(min(num_tokens + params.max_new_tokens, context))
        self.scheduler.check(num_tokens, runs)
        self._prompts.check(params, has_runs=bool(runs))
        self._edits.check(params, self.constraints)
        return tokens

    def _check_run(self, run: EmbeddedInput) -> None:
        """Raise RequestError if the model cannot take an encoded run."""
        config, kind = self.model.config, run.kind
        hidden_size = getattr(config, "hidden_size", None)
        reason, advice = "", "give it as text"
        if self.runner.encoder_inputs is not None:
            reason = "the model's encoder reads token ids"
        elif not getattr(self.model, "takes_embeddings", False):
            reason = "the model takes no vectors in place of token ids"
        elif self.runner.hidden is not None:
            reason = "the head that proposes draft tokens reads embeddings of token ids"
            advice = "load(..., speculation='ngram')"
        elif run.attends_both_ways and not (
            self.runner.takes_mutual_runs or self.runner.is_prefix_lm
        ):
            reason = "the attention of the loaded model is causal, and its tokens attend both ways"
            advice = "load without text_only=True"
        elif run.positions is not None and getattr(config, "mrope_section", None) is None:
            reason = "it has three positions per token, and the model has one"
            advice = "the encoder of the same checkpoint"
        elif run.embeddings.shape[1] != hidden_size:
            reason = f"its vectors have {run.embeddings.shape[1]} elements, the model {hidden_size}"
            advice = "the encoder of the same checkpoint"
        elif run.layer_embeddings is not None and len(run.layer_embeddings) > (
            num_layers := config.num_hidden_layers
        ):
            num_vectors = len(run.layer_embeddings)
            reason = f"it has vectors after {num_vectors} blocks, the model has {num_layers}"
            advice = "the encoder of the same checkpoint"
        if reason:
            raise RequestError(f"The prompt holds an {kind}, but {reason}. Try: {advice}")

    def _check_adapter(self, params: SamplingParams) -> None:
        adapter_names = () if self.runner.adapters is None else self.runner.adapters.names
        if params.adapter is not None and params.adapter not in adapter_names:
            hint = "Try: load_adapter(name, folder) of the model"
            raise UnknownNameError("adapter", params.adapter, adapter_names, hint)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.busy

    def cancel(self, sequence: TokenSequence) -> None:
        """End a request early and free its cache pages; do nothing after the request's end."""
        if sequence.finish_reason is None:
            self._end(sequence, "cancelled")

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Compute the next step: schedule, run, sample, and deliver the new tokens.

        Each new token is an event. Another thread than the caller's may have started the request,
        so the event is also added to the unread ones of a sequence that has a reader. The list is
        empty while prompts are computed in chunks, and when there is nothing to do; ``busy``
        distinguishes the two.
        """
        chunks = self.scheduler.next_step()
        if not chunks:
            return []
        if self.speculation is not None:
            return self.speculation.step(chunks)
        sequences, logits = self.run(chunks)
        tokens, logprobs = self.sample(sequences, logits)
        return self.deliver(sequences, tokens, logprobs)

    def run(self, chunks: Sequence[Chunk]) -> tuple[list[TokenSequence], torch.Tensor]:
        """Run one step for the chunks without speculative decoding, and count tokens as computed.

        Returns: the sequences that get a new token, and their logits, ``[B, V]``.
        """
        sequences = [chunk.sequence for chunk in chunks if chunk.is_last]
        logits = self.runner.compute(chunks)
        # More rows than sampled sequences: some chunks request logits for prompt log probabilities.
        if len(logits) > len(sequences):
            logits = self._prompts.record(chunks, logits)
        self.scheduler.advance(chunks)
        return sequences, logits

    @torch.inference_mode()
    def logits(
        self,
        token_ids: PromptTokens,
        adapter: str | None = None,
        num_prompt: int | None = None,
        source: Source | None = None,
    ) -> torch.Tensor:
        """Compute the logits after every token, ``[T, V]`` float32.

        Args:
            token_ids: Token ids and encoded runs; T counts the tokens of the runs, too.
            num_prompt: Number of prompt tokens, which attend in both directions in a prefix-LM;
                None for all.
            source: Token ids or features of the encoder input.
        Raises: RequestError, UnknownNameError: as ``add``, except that a full context is allowed;
            or ``num_prompt`` is not from 1 to T, or within a run.
        """
        params, vocab_size = SamplingParams(adapter=adapter), self.model.config.vocab_size
        tokens, runs = place_runs(checked_prompt(token_ids, vocab_size))
        self._check_adapter(params)
        for run in runs:
            self._check_run(run.input)
        context = self.model.config.max_position_embeddings
        if len(tokens) > context:
            raise ContextLengthError(
                f"{len(tokens)} tokens exceed the model's context of {context}"
            )
        for pool in self.pools:
            pool.check(len(tokens))
        count = len(tokens) if num_prompt is None else num_prompt
        if not 1 <= count <= len(tokens):
            raise RequestError(f"num_prompt is {count}, must be from 1 to {len(tokens)} tokens")
        if runs and count < runs[-1].stop:
            raise RequestError(
                f"num_prompt is {count}, must be at least {runs[-1].stop}, the end of the "
                f"{runs[-1].input.kind}"
            )
        sequence = self._sequence(tokens[:count], runs, params, 0, source)
        # Tokens after the prompt count as output, which attends causally in a prefix-LM.
        sequence.output += tokens[count:]
        # This sequence is not queued, so the scheduler never assigns a slot.
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

    def agree(self, flag: bool) -> bool:
        """Return the flag that all ranks agree on, for decisions that depend on time."""
        return flag

    @property
    def has_fixed_seed(self) -> bool:
        """Whether requests without a seed get the same noise in every run."""
        return self._seeds is not None

    def sequence(
        self,
        tokens: PromptTokens,
        params: SamplingParams,
        seed: int,
        source: Source | None = None,
    ) -> TokenSequence:
        """Create a sequence, but do not queue the sequence or check its tokens."""
        return self._sequence(*place_runs(tokens), params, seed, source)

    def _sequence(
        self,
        token_ids: list[int],
        runs: tuple[Run, ...],
        params: SamplingParams,
        seed: int,
        source: Source | None,
    ) -> TokenSequence:
        pages: list[list[int]] = [[] for _ in self.pools]
        encoder_input = self.checked_source(source)
        sequence = TokenSequence(
            next(self._ids), token_ids, params, seed, runs, pages=pages, source=encoder_input
        )
        if self.runner.adapters is not None:
            sequence.adapter = self.runner.adapters.version(params.adapter)
        if self.runner.encoder_inputs is not None:
            salt = params.cache_salt
            sequence.source_key = source_key(encoder_input, salt, sequence.adapter)
        return sequence

    def checked_source(self, source: Source | None) -> list[int] | FeatureSource:
        """Check an encoder input; return an empty list if the model has no encoder.

        Raises: RequestError: see ``EncoderInputs.check``; or ``source`` is set for a model without
            an encoder.
        """
        if self.runner.encoder_inputs is not None:
            return self.runner.encoder_inputs.check(source)
        if source is not None:
            raise RequestError(
                "source is set, but the model has no encoder. Try: give it as the prompt"
            )
        return []

    def checked_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Check token ids, and return plain integers.

        Raises: RequestError: there are no ids, or an id is outside of the vocabulary.
        """
        return checked_tokens(token_ids, self.model.config.vocab_size)

    def sample(
        self, sequences: list[TokenSequence], logits: torch.Tensor
    ) -> tuple[list[int], list[float]]:
        """Draw the next token of each sequence from ``logits``, ``[B, V]``.

        Returns: the tokens, and their natural-log probabilities.
        """
        if not sequences:
            return [], []
        plain = all(sequence.params.takes_likeliest for sequence in sequences)
        if plain:
            batch = SamplingBatch.greedy(len(sequences), self.device)
        else:
            batch = self._state.batch(sequences)
            logits = self._edits.edit(sequences, logits, batch, self.constraints)
        tokens, logprobs = self.sampler(logits, batch)
        if not plain:
            self._edits.record_top_logprobs(sequences, logits, batch, tokens)
        return tokens.tolist(), logprobs.tolist()

    def deliver(
        self, sequences: Sequence[TokenSequence], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> list[Event]:
        """Append the sampled token of each sequence; see ``append``."""
        samples = zip(sequences, tokens, logprobs, strict=True)
        return [self.append(*sample) for sample in samples]

    def append(self, sequence: TokenSequence, token: int, logprob: float) -> Event:
        """Append a new token to a sequence, and return the event for the reader of the request.

        The sequence ends if the token ends it. If the logits were not finite, the sequence ends
        with an error and the token is not appended.
        """
        reason: FinishReason | None = "error"
        if logprob != logprob:  # one NaN or infinite logit makes the log probability NaN
            place = f"after {len(sequence.prompt)} prompt and {len(sequence.output)} new tokens"
            sequence.error = non_finite(f"The logits {place}")
        else:
            sequence.output.append(token)
            sequence.logprobs.append(logprob)
            reason = self._finish_reason(sequence, token)
            sequence.has_end_token = reason == "stop" and self._is_end_token(sequence, token)
        top_logprobs = sequence.top_logprobs[-1] if sequence.top_logprobs else ()
        event = Event(sequence, token, logprob, top_logprobs, reason)
        # The token of an error is not part of the answer.
        if sequence.unread is not None and reason != "error":
            sequence.unread.append(event)
        if reason is not None:
            self._end(sequence, reason)
        return event

    def _finish_reason(self, sequence: TokenSequence, token: int) -> FinishReason | None:
        """Return the finish reason if the sequence ends with ``token``, else None."""
        params, matcher = sequence.params, sequence.matcher
        if matcher is not None and (reason := matcher.advance(token)) is not None:
            return reason
        if self._is_end_token(sequence, token):
            return "stop"
        context_is_full = len(sequence) >= self.model.config.max_position_embeddings
        return (
            "length" if context_is_full or len(sequence.output) >= params.max_new_tokens else None
        )

    def _is_end_token(self, sequence: TokenSequence, token: int) -> bool:
        """Return whether ``token`` is an end token of the model or of the request."""
        params = sequence.params
        return token in params.stop_token_ids or (
            token in self.stop_token_ids and not params.ignore_eos
        )

    def _end(self, sequence: TokenSequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.scheduler.remove(sequence)
        if self.runner.adapters is not None:
            self.runner.adapters.request_ended(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence)


class PromptLogprobs:
    """Records log probabilities of prompt tokens for requests with ``prompt_logprobs``."""

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def check(self, params: SamplingParams, has_runs: bool) -> None:
        """Raise RequestError if the model does not compute log probabilities of prompt tokens.

        Args:
            has_runs: Whether the prompt has encoded runs.
        """
        count = params.prompt_logprobs
        if count is None:
            return
        reason = ""
        if self._runner.encoder_inputs is not None:
            reason = "the encoder reads the prompt, and nothing predicts its tokens"
        elif self._runner.is_prefix_lm:
            reason = "prompt tokens attend to later ones, so that none is predicted"
        elif has_runs:
            reason = "the prompt holds tokens of an encoder, which have no ids to predict"
        if reason:
            raise RequestError(
                f"prompt_logprobs is {count}, but {reason}. Try: score(prompt, continuations)"
            )

    def prepare(self, params: SamplingParams) -> None:
        """Bind the kernels for the prompt log probabilities that a request asks for.

        Raises: InterposerError: the policy leaves no kernel.
        """
        self._sampler.editor.prepare(top=params.prompt_logprobs is not None)

    def record(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> torch.Tensor:
        """Record prompt log probabilities; return the rows of logits from which to sample.

        Args:
            logits: ``[R, V]``, the requested rows of all chunks.
        """
        start = 0
        sampled_rows: list[int] = []
        for chunk in chunks:
            stop = start + chunk.num_prompt_logits
            for first in range(start, stop, _MOST_ROWS):
                self._record(chunk.sequence, logits[first : min(first + _MOST_ROWS, stop)])
            start += chunk.num_logits
            sampled_rows += range(stop, start)
        return logits[torch.tensor(sampled_rows, dtype=torch.int64, device=logits.device)]

    def _record(self, sequence: TokenSequence, logits: torch.Tensor) -> None:
        """Append the log probabilities of a chunk's prompt tokens to the sequence."""
        # The logits after token i predict token i + 1; the first prompt token has no prediction.
        first, count = len(sequence.prompt_logprobs) + 1, sequence.params.prompt_logprobs or 0
        tokens = sequence.prompt[first : first + len(logits)]
        chosen = torch.tensor(tokens, device=logits.device)
        logprobs, ranks, top, ids = self._sampler.editor.top(logits, chosen)
        rows = zip(ids[:, :count].tolist(), top[:, :count].tolist(), strict=True)
        top_logprobs = (tuple(zip(*row, strict=True)) for row in rows)
        records = zip(tokens, logprobs.tolist(), ranks.tolist(), top_logprobs, strict=True)
        sequence.prompt_logprobs += [PromptLogprob(*record) for record in records]
