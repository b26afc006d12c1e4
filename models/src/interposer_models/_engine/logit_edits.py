"""Logit edits of requests (bias, minimum length, constraints), and top log probabilities.

Dimensions: B sequences, V vocabulary.
"""

from __future__ import annotations

import torch

from interposer.errors import RequestError
from interposer_models._engine.constraints import Constraints, Matcher
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.sampling_state import CachedValue
from interposer_models._engine.sequence import Sequence
from interposer_ops.layers.logit_edits import LogitEdits
from interposer_ops.layers.sampler import Sampler, SamplingBatch

_NO_TOKEN = -1


class RequestEdits:
    """Edits logits before sampling, and records the likeliest tokens after it."""

    def __init__(
        self, sampler: Sampler, vocab_size: int, stop_token_ids: frozenset[int], device: str
    ) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._stop_token_ids = stop_token_ids
        self._device = device
        self._biases: CachedValue[tuple[torch.Tensor, torch.Tensor]] = CachedValue()
        self._min_lengths: CachedValue[tuple[torch.Tensor, torch.Tensor]] = CachedValue()

    def check(self, params: SamplingParams, constraints: Constraints | None) -> None:
        """Raise RequestError if the engine cannot apply the parameters of a request."""
        for token in params.logit_bias:
            if token >= self._vocab_size:
                raise RequestError(
                    f"logit_bias holds the token id {token}, which is outside the vocabulary of "
                    f"{self._vocab_size}"
                )
        if params.min_tokens and len(self._end_tokens(params)) >= self._vocab_size:
            raise RequestError(
                "min_tokens rules out every token, since each of them ends the request. "
                "Try: fewer stop_token_ids"
            )
        if params.constraint is not None:
            self._matcher(params, constraints)

    def prepare(self, params: SamplingParams, constraints: Constraints | None) -> Matcher | None:
        """Bind the kernels that a request needs, and return the matcher; None without a constraint.

        Raises: InterposerError: the policy leaves no kernel for one of the parameters.
        """
        self._sampler.editor.prepare(
            bias=bool(params.logit_bias),
            least=bool(params.min_tokens),
            bitmask=params.constraint is not None,
            top=bool(params.top_logprobs),
        )
        return None if params.constraint is None else self._matcher(params, constraints)

    def edit(
        self,
        sequences: list[Sequence],
        logits: torch.Tensor,
        batch: SamplingBatch,
        constraints: Constraints | None,
    ) -> torch.Tensor:
        """Return the edited logits ``[B, V]``, from which the next tokens are drawn."""
        params = [sequence.params for sequence in sequences]
        if not any(p.edits_logits for p in params):
            return logits
        bias = min_lengths = None
        if any(p.logit_bias for p in params):
            bias = self._biases.of(sequences, lambda: self._bias_tensors(params))
        if any(p.min_tokens for p in params):
            min_lengths = (
                batch.steps,
                *self._min_lengths.of(sequences, lambda: self._min_length_tensors(params)),
            )
        edits = LogitEdits(bias, min_lengths, self._bitmask(sequences, constraints))
        return self._sampler.editor.edit(logits, edits)

    def record_top_logprobs(
        self,
        sequences: list[Sequence],
        logits: torch.Tensor,
        batch: SamplingBatch,
        tokens: torch.Tensor,
    ) -> None:
        """Append the likeliest allowed tokens to the sequences with ``top_logprobs``."""
        if not any(sequence.params.top_logprobs for sequence in sequences):
            return
        top, ids = self._sampler.top_logprobs(logits, batch, tokens)
        for sequence, values, token_ids in zip(sequences, top.tolist(), ids.tolist(), strict=True):
            if count := sequence.params.top_logprobs:
                # Tokens that the edits exclude have a log probability of -inf.
                pairs = zip(token_ids[:count], values[:count], strict=True)
                top_logprobs = tuple(
                    (token, value) for token, value in pairs if value > -float("inf")
                )
                sequence.top_logprobs.append(top_logprobs)

    def _matcher(self, params: SamplingParams, constraints: Constraints | None) -> Matcher:
        assert params.constraint is not None
        if constraints is None:
            raise RequestError(
                "A constraint needs a tokenizer, and this engine has none. "
                "Try: the engine of a LanguageModel"
            )
        return constraints.matcher(params.constraint, self._end_tokens(params))

    def _end_tokens(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens of the vocabulary that end a request."""
        model_tokens = frozenset() if params.ignore_eos else self._stop_token_ids
        stop_tokens = model_tokens.union(params.stop_token_ids)
        return frozenset(token for token in stop_tokens if token < self._vocab_size)

    def _bias_tensors(self, params: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self._padded_ids([[*p.logit_bias] for p in params])
        values = torch.zeros(tokens.shape, dtype=torch.float32)
        for row, p in enumerate(params):
            values[row, : len(p.logit_bias)] = torch.tensor([*p.logit_bias.values()])
        return tokens.to(self._device), values.to(self._device)

    def _min_length_tensors(
        self, params: list[SamplingParams]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end_tokens = [[*self._end_tokens(p)] if p.min_tokens else [] for p in params]
        min_tokens = torch.tensor([p.min_tokens for p in params], device=self._device)
        return min_tokens, self._padded_ids(end_tokens).to(self._device)

    def _bitmask(
        self, sequences: list[Sequence], constraints: Constraints | None
    ) -> torch.Tensor | None:
        matchers = [sequence.matcher for sequence in sequences]
        if not any(matchers):
            return None
        # The device computes the logits meanwhile. The row of an unconstrained request allows all.
        mask = torch.full((len(matchers), -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        rows = [(matcher, mask[row]) for row, matcher in enumerate(matchers) if matcher is not None]
        assert constraints is not None  # the matchers come from it
        constraints.fill(rows)
        return mask.to(self._device, non_blocking=True)

    @staticmethod
    def _padded_ids(lists: list[list[int]]) -> torch.Tensor:
        width = max(1, *map(len, lists))
        padded = [row + [_NO_TOKEN] * (width - len(row)) for row in lists]
        return torch.tensor(padded, dtype=torch.int64)
