"""Tensors of the tokens that requests of a step rule out, favour or ask to be told of.

Dimensions: B sequences, V vocabulary.
"""

from __future__ import annotations

import torch

from interposer.errors import RequestError
from interposer_models._engine.constraints import Constraints, Matcher
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.sampling_state import Kept
from interposer_models._engine.sequence import Sequence
from interposer_ops.layers.logit_edits import LogitEdits
from interposer_ops.layers.sampler import Sampler, SamplingBatch

_NO_TOKEN = -1


class RequestEdits:
    """Edits logits before tokens are drawn from them, and tells the likeliest tokens after."""

    def __init__(
        self, sampler: Sampler, vocab_size: int, stop_token_ids: frozenset[int], device: str
    ) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._stop_token_ids = stop_token_ids
        self._device = device
        self._biases: Kept[tuple[torch.Tensor, torch.Tensor]] = Kept()
        self._leasts: Kept[tuple[torch.Tensor, torch.Tensor]] = Kept()

    def check(self, params: SamplingParams, constraints: Constraints | None) -> None:
        """Raise RequestError where the engine cannot do what parameters ask for."""
        for token in params.logit_bias:
            if token >= self._vocab_size:
                raise RequestError(
                    f"logit_bias holds the token id {token}, which is outside the vocabulary of "
                    f"{self._vocab_size}"
                )
        if params.min_tokens and len(self._stops(params)) >= self._vocab_size:
            raise RequestError(
                "min_tokens rules out every token, since each of them ends the request. "
                "Try: fewer stop_token_ids"
            )
        if params.constraint is not None:
            self._matcher(params, constraints)

    def prepare(self, params: SamplingParams, constraints: Constraints | None) -> Matcher | None:
        """Return the matcher of a request, None without a constraint, and bind what it needs.

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
        """Return the logits ``[B, V]`` from which the next tokens are drawn."""
        params = [sequence.params for sequence in sequences]
        if not any(p.edits_logits for p in params):
            return logits
        bias = least = None
        if any(p.logit_bias for p in params):
            bias = self._biases.of(sequences, lambda: self._bias(params))
        if any(p.min_tokens for p in params):
            least = batch.steps, *self._leasts.of(sequences, lambda: self._least(params))
        edits = LogitEdits(bias, least, self._bitmask(sequences, constraints))
        return self._sampler.editor.edit(logits, edits)

    def tell(
        self,
        sequences: list[Sequence],
        logits: torch.Tensor,
        batch: SamplingBatch,
        tokens: torch.Tensor,
    ) -> None:
        """Add the likeliest tokens to sequences that ask for them; those ruled out are none."""
        if not any(sequence.params.top_logprobs for sequence in sequences):
            return
        top, ids = self._sampler.top_logprobs(logits, batch, tokens)
        for sequence, values, likely in zip(sequences, top.tolist(), ids.tolist(), strict=True):
            if count := sequence.params.top_logprobs:
                pairs = zip(likely[:count], values[:count], strict=True)
                told = tuple((token, value) for token, value in pairs if value > -float("inf"))
                sequence.top_logprobs.append(told)

    def _matcher(self, params: SamplingParams, constraints: Constraints | None) -> Matcher:
        assert params.constraint is not None
        if constraints is None:
            raise RequestError(
                "A constraint is over texts, and this engine has no tokenizer to read them with. "
                "Try: the engine of a LanguageModel"
            )
        return constraints.matcher(params.constraint, self._stops(params))

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end a request, of those that the model can produce."""
        own = frozenset() if params.ignore_eos else self._stop_token_ids
        named = own.union(params.stop_token_ids)
        return frozenset(token for token in named if token < self._vocab_size)

    def _bias(self, params: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self._listed([[*p.logit_bias] for p in params])
        values = torch.zeros(tokens.shape, dtype=torch.float32)
        for row, p in enumerate(params):
            values[row, : len(p.logit_bias)] = torch.tensor([*p.logit_bias.values()])
        return tokens.to(self._device), values.to(self._device)

    def _least(self, params: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
        stops = [[*self._stops(p)] if p.min_tokens else [] for p in params]
        least = torch.tensor([p.min_tokens for p in params], device=self._device)
        return least, self._listed(stops).to(self._device)

    def _bitmask(
        self, sequences: list[Sequence], constraints: Constraints | None
    ) -> torch.Tensor | None:
        matchers = [sequence.matcher for sequence in sequences]
        if not any(matchers):
            return None
        # Computed while the device computes the logits; a row of a free request allows all.
        mask = torch.full((len(matchers), -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        rows = [(matcher, mask[row]) for row, matcher in enumerate(matchers) if matcher is not None]
        assert constraints is not None  # which made the matchers
        constraints.fill(rows)
        return mask.to(self._device, non_blocking=True)

    @staticmethod
    def _listed(lists: list[list[int]]) -> torch.Tensor:
        most = max(1, *map(len, lists))
        padded = [row + [_NO_TOKEN] * (most - len(row)) for row in lists]
        return torch.tensor(padded, dtype=torch.int64)
