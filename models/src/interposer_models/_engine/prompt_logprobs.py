"""Log probabilities of prompt tokens, recorded while the prompt is computed in chunks.

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

_MOST_ROWS = 64  # rows per kernel call, which may convert all of them to float32


class PromptLogprobs:
    """Records the log probabilities of prompt tokens in the sequences with ``prompt_logprobs``."""

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError if the model does not predict the tokens of prompts."""
        count = params.prompt_logprobs
        if count is None:
            return
        reason = ""
        if self._runner.sources is not None:
            reason = "the encoder reads the prompt, and nothing predicts its tokens"
        elif self._runner.is_prefix_lm:
            reason = "prompt tokens attend to later ones, so that none is predicted"
        if reason:
            raise RequestError(
                f"prompt_logprobs is {count}, but {reason}. Try: score(prompt, continuations)"
            )

    def prepare(self, params: SamplingParams) -> None:
        """Bind the kernels that a request needs.

        Raises: InterposerError: the policy leaves no kernel.
        """
        self._sampler.editor.prepare(top=params.prompt_logprobs is not None)

    def record(self, chunks: Items[Chunk], logits: torch.Tensor) -> torch.Tensor:
        """Record prompt log probabilities in the sequences; return the rows of logits to sample.

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

    def _record(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """Append the log probabilities of the next prompt tokens to the sequence."""
        # The logits after token i predict token i + 1; the first prompt token has no prediction.
        first, count = len(sequence.prompt_logprobs) + 1, sequence.params.prompt_logprobs or 0
        tokens = sequence.prompt[first : first + len(logits)]
        chosen = torch.tensor(tokens, device=logits.device)
        logprobs, ranks, top, ids = self._sampler.editor.top(logits, chosen)
        rows = zip(ids[:, :count].tolist(), top[:, :count].tolist(), strict=True)
        top_logprobs = (tuple(zip(*row, strict=True)) for row in rows)
        records = zip(tokens, logprobs.tolist(), ranks.tolist(), top_logprobs, strict=True)
        sequence.prompt_logprobs += [PromptLogprob(*record) for record in records]
