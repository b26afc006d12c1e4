"""Sampling: choose one token for each sequence of a batch.

Dimensions: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from interposer import PluggableLayer, Site
from interposer.errors import RequestError
from interposer_ops.layers.logit_edits import LogitEditor
from interposer_ops.sampling._sampling import apply_penalties, sample_tokens

__all__ = ["Penalties", "Sampler", "SamplingBatch"]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Arguments of ``apply_penalties`` without the logits, in the op's order."""

    prompt_mask: Tensor
    output_counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    @classmethod
    def build(
        cls,
        *,
        repetition: Sequence[float],
        presence: Sequence[float],
        frequency: Sequence[float],
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        vocab_size: int,
        device: str,
    ) -> Penalties:
        """Build the penalty tensors of B requests from lists with one item per request.

        Args:
            repetition, presence, frequency: penalties as ``apply_penalties`` defines them.
            prompts: token ids of the prompts.
            outputs: token ids generated so far.
        Raises: RequestError: a token id is outside the vocabulary.
        """
        return cls(
            _counts(prompts, vocab_size, device) > 0,
            _counts(outputs, vocab_size, device),
            *_columns([repetition, presence, frequency], torch.float32, device),
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Arguments of ``sample_tokens`` without the logits, in the op's order, and the penalties.

    None: no request of the batch uses the parameter.
    """

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seeds: Tensor
    steps: Tensor
    penalties: Penalties | None

    @property
    def all_greedy(self) -> bool:
        """Whether every row takes the token with the largest logit."""
        return self.temperature is None

    @staticmethod
    @lru_cache(maxsize=1024)
    def greedy(num_rows: int, device: str) -> SamplingBatch:
        """Return a cached batch of greedy requests without penalties.

        Seeds and steps are zeros that greedy sampling never reads.
        """
        # The cached tensors are used inside and outside of inference mode.
        with torch.inference_mode(False):
            unread = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return SamplingBatch(None, None, None, None, unread, unread, None)

    @classmethod
    def build(
        cls,
        *,
        temperature: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        seeds: Sequence[int],
        steps: Sequence[int],
        device: str,
        penalties: Penalties | None = None,
    ) -> SamplingBatch:
        """Build the sampling arguments of B requests from lists with one item per request.

        The parameters are defined by the op ``sample_tokens``.
        """
        # Truncation has no effect on greedy rows, so only the parameters of random rows count.
        is_random = [value > 0 for value in temperature]

        def is_used(values: Sequence[float], neutral: float) -> bool:
            return any(
                row and value != neutral for row, value in zip(is_random, values, strict=True)
            )

        # The columns are views of two tensors: two copies to the device instead of six.
        floats = _columns([temperature, top_p, min_p], torch.float32, device)
        integers = _columns([top_k, seeds, steps], torch.int64, device)
        return cls(
            temperature=floats[0] if any(is_random) else None,
            top_k=integers[0] if is_used(top_k, 0) else None,
            top_p=floats[1] if is_used(top_p, 1) else None,
            min_p=floats[2] if is_used(min_p, 0) else None,
            seeds=integers[1],
            steps=integers[2],
            penalties=penalties,
        )


class Sampler(PluggableLayer):
    """Apply the penalties that requests ask for, then sample one token per row."""

    layer_id = "sampler"

    def __init__(self, site: Site, vocab_size: int) -> None:
        super().__init__(site)
        self.penalize = site.bind(apply_penalties, vocab_size=vocab_size, counts_dtype="int32")
        self.sample = site.bind(sample_tokens, vocab_size=vocab_size)
        # Penalised logits are wider than the model's, and a kernel is chosen for one dtype.
        self.sample_penalized = self.sample
        wide = torch.promote_types(site.dtype, torch.float32)
        if wide != site.dtype:
            at = replace(site, dtype=wide)
            self.sample_penalized = at.bind(sample_tokens, vocab_size=vocab_size)
        # The engine calls the editor before and after this layer, so a replacement layer need not
        # implement edits.
        self.editor = LogitEditor(site, vocab_size)

    def forward(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Sample one token per row, and return the tokens with their log probabilities.

        Args:
            logits: ``[B, V]``, dtype of the site.
            batch: sampling parameters of the B requests, on the device of ``logits``.
        Returns: ``(tokens, logprobs)``, ``[B]`` int64 and ``[B]`` float32. The logprobs are natural
            logs, after penalties, before temperature and truncation.
        """
        sample = self.sample
        if batch.penalties is not None:
            logits = self.penalized(logits, batch.penalties)
            sample = self.sample_penalized
        truncation = batch.top_k, batch.top_p, batch.min_p
        return sample(logits, batch.temperature, *truncation, batch.seeds, batch.steps)

    def penalized(self, logits: Tensor, penalties: Penalties) -> Tensor:
        """Apply penalties to ``logits`` ``[B, V]``, in float32 or wider."""
        tokens = penalties.prompt_mask, penalties.output_counts
        factors = penalties.repetition, penalties.presence, penalties.frequency
        return self.penalize(logits, *tokens, *factors)

    def top_logprobs(
        self, logits: Tensor, batch: SamplingBatch, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log probabilities and ids of the likeliest tokens of each row.

        Args:
            logits: the logits that ``tokens`` were sampled from.
            tokens: ``[B]`` int64.
        Returns: ``[B, N]`` descending, and ``[B, N]`` int64; N is ``MOST_LIKELY`` or V. The softmax
            is that of the sampled tokens' log probabilities.
        """
        if batch.penalties is not None:
            logits = self.penalized(logits, batch.penalties)
        return self.editor.top(logits, tokens)[2:]


def _columns(
    lists: Sequence[Sequence[float]], dtype: torch.dtype, device: str
) -> tuple[Tensor, ...]:
    return torch.tensor(lists, dtype=dtype, device=device).unbind(0)


def _counts(sequences: Sequence[Sequence[int]], vocab_size: int, device: str) -> Tensor:
    """Count the occurrences of each token in each sequence, ``[B, V]`` int32."""
    tokens = list(chain.from_iterable(sequences))
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < vocab_size:
            raise RequestError(f"Token id {token} is outside the vocabulary of {vocab_size}")
    rows = [row for row, sequence in enumerate(sequences) for _ in sequence]
    indices = torch.tensor([rows, tokens], dtype=torch.int64, device=device)
    ones = torch.ones(len(tokens), dtype=torch.int32, device=device)
    counts = torch.zeros(len(sequences), vocab_size, dtype=torch.int32, device=device)
    return counts.index_put_(tuple(indices), ones, accumulate=True)
