"""Log probabilities of the tokens of prompts, told as their chunks are computed.

Dimensions: R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from interposer.errors import RequestError
from interposer_models._engine.runner import Runner
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.scheduler import Chunk
from interposer_models._engine.sequence import PromptLogprob, Sequence
from interposer_ops.layers.sampler import Sampler

_MOST_ROWS = 64  # that a kernel may hold in float32 at once


class PromptLogprobs:
    """Tells sequences how likely the tokens of their prompts are."""

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError where the tokens of prompts are not predicted."""
        count = params.prompt_logprobs
        if count is None:
            return
        reason = ""
        if self._runner.sources is not None:
            reason = "the encoder reads the prompt, and nothing predicts its tokens"
        elif self._runner.has_prefixes:
            reason = "tokens of a prompt see later ones, so that none is predicted"
        if reason:
            raise RequestError(
                f"prompt_logprobs is {count}, but {reason}. Try: score(prompt, continuations)"
            )

    def prepare(self, params: SamplingParams) -> None:
        """Bind what a request needs.

        Raises: InterposerError: the policy leaves no kernel for it.
        """
        self._sampler.editor.prepare(top=params.prompt_logprobs is not None)

    def tell(self, chunks: Items[Chunk], logits: torch.Tensor) -> torch.Tensor:
        """Add log probabilities to sequences that want them, and return the other rows.

        Args:
            logits: ``[R, V]``, that the chunks want.
        """
        start = 0
        others: list[int] = []
        for chunk in chunks:
            stop = start + chunk.num_told
            for first in range(start, stop, _MOST_ROWS):
                self._tell(chunk.sequence, logits[first : min(first + _MOST_ROWS, stop)])
            start += chunk.num_logits
            others += range(stop, start)
        return logits[torch.tensor(others, dtype=torch.int64, device=logits.device)]

    def _tell(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Add the log probabilities of the next tokens of a prompt."""
        first, count = len(sequence.prompt_logprobs) + 1, sequence.params.prompt_logprobs or 0
        tokens = sequence.prompt[first : first + len(logits)]
        chosen = torch.tensor(tokens, device=logits.device)
        logprobs, ranks, top, ids = self._sampler.editor.top(logits, chosen)
        rows = zip(ids[:, :count].tolist(), top[:, :count].tolist(), strict=True)
        likely = (tuple(zip(*row, strict=True)) for row in rows)
        told = zip(tokens, logprobs.tolist(), ranks.tolist(), likely, strict=True)
        sequence.prompt_logprobs += [PromptLogprob(*each) for each in told]
