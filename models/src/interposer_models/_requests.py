"""Checks of prompts and parameters, and the completions of requests."""

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
    """Pair each prompt with sampling parameters.

    Raises: RequestError: there is no prompt, ``n`` is not positive, or parameters are given twice
        or for another number of prompts.
    """
    _check_type("prompts", prompts, "a text or a list of texts or of lists of token ids")
    if type(n) is not int or n < 1:
        raise RequestError(f"n is {n!r}, must be an integer of at least 1")
    texts: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
    return [*zip(texts, chosen_params(params, settings, len(texts)), strict=True)]


def continuations_of(prompt: Prompt, continuations: Sequence[Prompt]) -> list[Prompt]:
    """Return the continuations of a prompt as a list.

    Raises: RequestError: the prompt or a continuation has another type.
    """
    allowed = "a text or a list of token ids"
    _check_type("prompt", prompt, allowed)
    if isinstance(continuations, str):  # iterating a text would score its letters
        raise RequestError(
            f"continuations is the text {continuations!r:.100}, must be a list. "
            f"Try: [{continuations!r:.100}]"
        )
    _check_type("continuations", continuations, "a list of texts or of lists of token ids")
    continuation_list = list(continuations)
    for index, continuation in enumerate(continuation_list):
        _check_type(f"continuations[{index}]", continuation, allowed)
    return continuation_list


def _check_type(name: str, value: object, allowed: str) -> None:
    """Raise RequestError unless ``value`` is a text or lists items in an order."""
    if not is_listing(value):
        raise RequestError(
            f"{name} is {value!r:.100} of the type {type(value).__name__}, must be {allowed}"
        )


def token_ids_of(prompt: Prompt, tokenizer: TextTokenizer) -> Sequence[int]:
    """Return the token ids of a prompt, which may be a text."""
    if not isinstance(prompt, str):
        return prompt
    # An empty text is refused later, even if the tokenizer would add a special token.
    return tokenizer.encode(prompt) if prompt else []


def target_ids(text: Prompt, tokenizer: TextTokenizer, starts: Sequence[int]) -> list[int]:
    """Return the decoder's start tokens, followed by the tokens of a text."""
    if not isinstance(text, str):
        return [*starts, *text]
    tokens = tokenizer.encode(text)
    # The tokenizer may add the forced first token, which the start tokens contain already.
    is_forced = len(starts) > 1 and tokens[:1] == [starts[1]]
    return [*starts, *tokens[is_forced:]]


def completions(streams: Sequence[Stream], n: int) -> list[Completion]:
    """Return the completion of each stream; ``n`` consecutive streams answer one prompt."""
    results: list[Completion] = []
    for index, stream in enumerate(streams):
        completion = stream.completion()
        # Only the first answer to a prompt computed the prompt's log probabilities.
        if index % n and (shared := results[-1].prompt_logprobs):
            completion = replace(completion, prompt_logprobs=shared)
        results.append(completion)
    return results
