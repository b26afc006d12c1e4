"""Validation of prompts and parameters, and sampling batches of several sequences."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from collections.abc import Sequence as Items
from typing import Any

from interposer.errors import RequestError
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.sequence import Sequence
from interposer_ops.layers.sampler import Penalties, SamplingBatch


def is_listing(value: object) -> bool:
    """Return whether a value lists items in an order, as lists, arrays and generators do."""
    return hasattr(value, "__iter__") and not isinstance(
        value, bytes | bytearray | memoryview | Mapping | Set
    )


def checked_tokens(token_ids: Items[int], vocab_size: int) -> list[int]:
    """Return the ids as plain integers.

    Accepts every type that Python can use as an index, such as elements of arrays.

    Raises: RequestError: there is no token, or a token is not in the vocabulary.
    """
    if not is_listing(token_ids):
        raise RequestError(
            f"The prompt is {token_ids!r:.100} of the type {type(token_ids).__name__}, "
            "must be a text or a list of token ids"
        )
    tokens = [_integer(token_id) for token_id in token_ids]
    if not tokens:
        raise RequestError("The prompt is empty. Try: give at least one token")
    for token_id in tokens:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"Token id {token_id} is outside the vocabulary of {vocab_size}")
    return tokens


def chosen_params(
    params: SamplingParams | Items[SamplingParams] | None, settings: dict[str, Any], count: int
) -> list[SamplingParams]:
    """Return the sampling parameters of each of ``count`` prompts.

    Raises: RequestError: both ``params`` and ``settings`` are set, or the numbers differ.
    """
    if params is not None and settings:
        raise RequestError(f"Give either params or single settings, not both: {sorted(settings)}")
    if params is None:
        return [SamplingParams(**settings)] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    params_list = list(params) if isinstance(params, Items) else [params]
    for item in params_list:
        if not isinstance(item, SamplingParams):
            raise RequestError(f"params holds {item!r}, must be SamplingParams, one or a list")
    if len(params_list) != count:
        raise RequestError(f"{len(params_list)} params were given for {count} prompts")
    return params_list


def sampling_batch(
    sequences: Items[Sequence], vocab_size: int, device: str, ahead: Items[int] | None = None
) -> SamplingBatch:
    """Build the sampling parameters of one row of logits per sequence, without penalties.

    Args:
        ahead: Number of tokens between the next token of a sequence and the token of the row, for
            each row; None for 0.
    """
    params = [sequence.params for sequence in sequences]
    if all(p.takes_likeliest for p in params):
        return SamplingBatch.greedy(len(params), device)
    # Noise is a function of seed and step, so a token draws the same noise in any batch.
    steps = [len(sequence.output) for sequence in sequences]
    if ahead is not None:
        steps = [step + offset for step, offset in zip(steps, ahead, strict=True)]
    return SamplingBatch.build(
        temperature=[p.temperature for p in params],
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        seeds=[sequence.seed for sequence in sequences],
        steps=steps,
        device=device,
    )


def penalties_of(sequences: Items[Sequence], vocab_size: int, device: str) -> Penalties:
    """Build the penalties of the sequences, with the counts of used tokens."""
    params = [sequence.params for sequence in sequences]
    return Penalties.build(
        repetition=[p.repetition_penalty for p in params],
        presence=[p.presence_penalty for p in params],
        frequency=[p.frequency_penalty for p in params],
        prompts=[sequence.prompt for sequence in sequences],
        outputs=[sequence.output for sequence in sequences],
        vocab_size=vocab_size,
        device=device,
    )


def _integer(token_id: object) -> int:
    try:
        # Python's booleans are integers, but a boolean among token ids is a mistake.
        if not isinstance(token_id, bool):
            return operator.index(token_id)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise RequestError(
        f"Token id {token_id!r} is not an integer. Try: lm.tokenizer.encode(text), or one prompt "
        "after the other"
    )
