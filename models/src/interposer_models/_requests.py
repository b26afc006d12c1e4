"""Prompts and parameters as callers give them, and the completions that they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from interposer.errors import RequestError
from interposer_models._engine.request_batch import chosen_params, is_listing
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._stream import Completion, Stream
from interposer_models._tokenizer import TextTokenizer

Prompt = str | Sequence[int]


def requests(
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    settings: dict[str, Any],
    n: int,
) -> list[tuple[Prompt, SamplingParams]]:
    """Return each prompt with its parameters.

    Raises: RequestError: the prompts or ``n`` are none, or parameters are given twice or for
        another number of prompts.
    """
    _check_type("prompts", prompts, "a text or a list of texts or of lists of token ids")
    if type(n) is not int or n < 1:
        raise RequestError(f"n is {n!r}, must be an integer of at least 1")
    texts: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
    return [*zip(texts, chosen_params(params, settings, len(texts)), strict=True)]


def continuations_of(prompt: Prompt, continuations: Sequence[Prompt]) -> list[Prompt]:
    """Return the continuations of a prompt as a list.

    Raises: RequestError: they or the prompt are of another type.
    """
    allowed = "a text or a list of token ids"
    _check_type("prompt", prompt, allowed)
    if isinstance(continuations, str):  # whose letters are no continuations
        raise RequestError(
            f"continuations is the text {continuations!r:.100}, must be a list. "
            f"Try: [{continuations!r:.100}]"
        )
    _check_type("continuations", continuations, "a list of texts or of lists of token ids")
    listed = list(continuations)
    for index, continuation in enumerate(listed):
        _check_type(f"continuations[{index}]", continuation, allowed)
    return listed


def _check_type(name: str, value: object, allowed: str) -> None:
    """Check that an argument is a text or lists items in an order.

    Raises: RequestError: it is neither, such as a dict, whose keys are no prompts.
    """
    if not is_listing(value):
        raise RequestError(
            f"{name} is {value!r:.100} of the type {type(value).__name__}, must be {allowed}"
        )


def token_ids_of(prompt: Prompt, tokenizer: TextTokenizer) -> Sequence[int]:
    """Return the ids of a prompt that may be a text."""
    if not isinstance(prompt, str):
        return prompt
    # An empty text is no prompt, though a tokenizer may put a special token in front.
    return tokenizer.encode(prompt) if prompt else []


def target_ids(text: Prompt, tokenizer: TextTokenizer, starts: Sequence[int]) -> list[int]:
    """Return what the decoder of an encoder-decoder begins with, and a text behind it."""
    if not isinstance(text, str):
        return [*starts, *text]
    tokens = tokenizer.encode(text)
    # A tokenizer may write the token that is forced to be the first one.
    is_forced = len(starts) > 1 and tokens[:1] == [starts[1]]
    return [*starts, *tokens[is_forced:]]


def completions(streams: Sequence[Stream], n: int) -> list[Completion]:
    """Return what was produced, where the ``n`` answers to each prompt follow each other."""
    told: list[Completion] = []
    for place, stream in enumerate(streams):
        own = stream.completion()
        # The first one alone asked for the log probabilities of their prompt.
        if place % n and (shared := told[-1].prompt_logprobs):
            own = replace(own, prompt_logprobs=shared)
        told.append(own)
    return told
