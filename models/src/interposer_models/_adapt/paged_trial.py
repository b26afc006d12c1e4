"""The trial of a paged decoder: it must compute what its model computes without a cache.

A prompt is computed in chunks and token by token, beside another sequence at the end of the
context. Whatever a model keeps elsewhere than in pages, or mixes between tokens of a row, shows in
the logits. The layer is then the first whose outputs differ though its inputs do not.

Dimensions: T tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from interposer_models._adapt.attention_trace import UnservedLayerError
from interposer_models._adapt.noise import alone, bound_of, distance, rounded
from interposer_models._adapt.paged_decoder import PagedDecoder
from interposer_models._adapt.trial_length import further_tokens
from interposer_models._engine.batch import StepBatch
from interposer_models._engine.pages import PagePool
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.scheduler import Chunk
from interposer_models._engine.sequence import Sequence

# Tokens of the prompt and of the other sequence in each step. The other comes first in odd ones.
_STEPS = ((5, 3), (4, 2), (1, 1), (1, 1), (1, 1), (1, 0))
_OUT = "out "
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

States = dict[tuple[str, int, str], Tensor]
"""By module, call and place among what it gets and returns: ``[T, ...]``."""


def try_paging(
    paged: PagedDecoder, device: str, numerics: Callable[[], AbstractContextManager[None]]
) -> None:
    """Run both, and compare the logits of every token.

    The bound is what roundings explain. One at the embeddings is measured; each block has a few,
    which are independent, in either run. The bound is twice their root of the sum of squares.

    Raises: UnservedLayerError: they disagree, or the model fails in rows of several sequences.
    """
    vocabulary, context = paged.config.vocab_size, paged.config.max_position_embeddings
    count = sum(count for count, _ in _steps(paged))
    prompt = [(7 * i + 3) % vocabulary for i in range(min(count, context))]
    with numerics(), torch.inference_mode():
        expected = alone(paged.model, prompt, device)
        noisy = rounded(paged.model, prompt, device)
        try:
            found = _in_steps(paged, prompt, device)
        except FAILURES as error:
            if isinstance(error, UnservedLayerError):
                raise
            reason = f"fails on a row of several sequences: {type(error).__name__}: {error}"
            raise UnservedLayerError("", type(paged.model).__name__, reason) from error
        bound = bound_of(paged.model, expected, noisy, len(paged.attention_layers))
        apart = distance(found, expected)
        if not apart <= bound:
            raise _culprit(paged, prompt, device, bound)


def _steps(paged: PagedDecoder) -> tuple[tuple[int, int], ...]:
    """Return the tokens of both sequences in each step; the prompt exceeds what layers see."""
    (count, other), *others = _STEPS
    further, _ = further_tokens(paged.model)
    return ((count + further, other), *others)


def _in_steps(
    paged: PagedDecoder, prompt: list[int], device: str, states: list[States] | None = None
) -> Tensor:
    """Return ``[T, V]`` of the paged decoder.

    Args:
        states: of the prompt's tokens, one entry for each step is added.
    """
    size, context = paged.page_size, paged.config.max_position_embeddings
    steps = _steps(paged)
    other_length = min(sum(count for _, count in steps), context)
    pool = PagePool(2 * -(-max(len(prompt), other_length) // size), size)
    caches = [
        layer.backend.kv_layout().allocate(1, pool.num_pages, device)[0]
        for layer in paged.attention_layers
    ]
    vocabulary = paged.config.vocab_size
    other = [(5 * i + 1) % vocabulary for i in range(other_length)]
    pair = [Sequence(i, each, SamplingParams(), 0) for i, each in enumerate((prompt, other))]
    found = []
    for number, wanted in enumerate(steps):
        chunks = []
        for sequence, count in zip(pair, wanted, strict=True):
            left = min(count, len(sequence) - sequence.num_computed)
            if left:
                pool.extend(sequence.pages[0], sequence.num_computed + left)
                chunks.append(Chunk(sequence, left))
        if number % 2:
            chunks.reverse()
        if not chunks:
            break
        batch = StepBatch.build(chunks, size, device)
        owners = [chunk.sequence.id for chunk in chunks for _ in range(chunk.num_tokens)]
        is_other = torch.tensor(owners, device=device)
        far = is_other * (context - other_length)
        batch = replace(batch, positions=batch.positions + far)
        mine = (is_other == 0).nonzero()[:, 0]
        plans = {layer.backend: None for layer in paged.attention_layers}
        planned = {backend: backend.plan(batch.attention) for backend in plans}
        recorded: AbstractContextManager[States] = nullcontext({})
        if states is not None:
            recorded = _recorded(paged.model, len(owners))
        with recorded as seen:
            logits = paged(
                batch.token_ids,
                batch.positions,
                caches,
                [planned[layer.backend] for layer in paged.attention_layers],
            )
        if states is not None:
            states.append({key: each[mine] for key, each in seen.items()})
        found.append(logits[mine])
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.num_tokens
    return torch.cat(found)


def _culprit(
    paged: PagedDecoder, prompt: list[int], device: str, bound: float
) -> UnservedLayerError:
    """Return what to say of the first module that computes something else."""
    with _recorded(paged.model, len(prompt)) as expected:
        alone(paged.model, prompt, device)
    steps: list[States] = []
    _in_steps(paged, prompt, device, steps)
    kinds = {name: type(module).__name__ for name, module in paged.model.named_modules()}
    reason = "computes something else with a paged cache: it keeps a state that pages do not hold"
    strayed: set[tuple[str, int]] = set()
    for key, whole in expected.items():
        name, call, place = key
        parts = [step[key] for step in steps if key in step]
        if len(parts) < len(steps) or len({part.shape[1:] for part in parts}) > 1:
            continue
        joined = torch.cat(parts)
        if joined.shape == whole.shape and not distance(joined, whole) <= bound:
            if place.startswith(_OUT) and (name, call) not in strayed:
                return UnservedLayerError(name, kinds[name], reason)
            strayed.add((name, call))
    return UnservedLayerError("", type(paged.model).__name__, reason)


@contextmanager
def _recorded(model: nn.Module, num_tokens: int) -> Iterator[States]:
    """Note what modules get and return that has a row for each of the tokens, as they end."""
    states: States = {}
    calls: dict[str, int] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: object) -> None:
            call = calls[name] = calls.get(name, -1) + 1
            places = {f"in {place}": each for place, each in enumerate(given)}
            places |= {f"in {place}": each for place, each in named.items()}
            results = out if isinstance(out, tuple | list) else (out,)
            places |= {f"{_OUT}{place}": each for place, each in enumerate(results)}
            for place, each in places.items():
                if (
                    isinstance(each, Tensor)
                    and each.is_floating_point()
                    and each.shape[:2] == (1, num_tokens)
                ):
                    states[name, call, place] = each[0].clone()

        return hook

    hooks = [
        module.register_forward_hook(note(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
