"""Masks of logits for transcripts.

Dimensions: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from interposer_engine._sequence import TokenSequence
from interposer_engine._speech.rules import TranscriptRules


def mask_transcripts(logits: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Return logits ``[B, V]`` in which tokens that the rules of a transcript forbid are -inf.

    The probability of ``no_speech`` is recorded in the sequence at its first token.
    """
    forbidden = torch.zeros(logits.shape, dtype=torch.bool)
    rows_by_first_timestamp: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rules = sequence.params.transcript
        if rules is None:
            continue
        if rules.no_speech is not None and not sequence.output:
            probabilities = logits[row].float().softmax(-1)
            sequence.no_speech_probability = probabilities[rules.no_speech].item()
        if len(sequence.output) < len(rules.start):
            forbidden[row] = True
            forbidden[row, _likeliest(logits[row], rules.start[len(sequence.output)])] = False
            continue
        rules.forbid(sequence.output, forbidden[row])
        if rules.first_timestamp is not None:
            rows_by_first_timestamp.setdefault(rules.first_timestamp, []).append(row)
    masked = logits.masked_fill(forbidden.to(logits.device, non_blocking=True), -torch.inf)
    for first_timestamp, rows in rows_by_first_timestamp.items():
        _prefer_timestamps(masked, rows, first_timestamp)
    return masked


def _likeliest(logits: Tensor, tokens: Sequence[int]) -> int:
    if len(tokens) == 1:
        return tokens[0]
    return tokens[int(logits[list(tokens)].argmax())]


def _prefer_timestamps(masked: Tensor, rows: list[int], first_timestamp: int) -> None:
    """Mask all texts in rows where timestamps together are likelier than any token of a text."""
    selected = masked[rows].float()
    texts, timestamps = selected[:, :first_timestamp], selected[:, first_timestamp:]
    is_timestamp = timestamps.logsumexp(-1) > texts.amax(-1)
    index = torch.tensor(rows, device=masked.device)[is_timestamp]
    masked[index, :first_timestamp] = -torch.inf


def check_transcript(rules: TranscriptRules, vocab_size: int) -> str:
    """Return why a model with this vocabulary cannot follow the rules; "" if the model can."""
    if rules.largest_token >= vocab_size:
        return f"names the token {rules.largest_token}, which is outside the vocabulary"
    if not all(rules.start):
        return "has an empty tuple in start, so that no token can come"
    return ""
