"""Runs of encoded tokens within a sequence: their virtual token ids, and positions of all tokens.

A sequence has a token id for every token, because pages, chunks and keys of the prefix cache count
tokens. The tokens of a run have virtual ids, which are outside of every vocabulary. Equal ids mean
equal vectors. No model, sampler or answer gets a virtual id.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import shake_128

from interposer_engine._embedded_input import EmbeddedInput, PromptTokens

FIRST_VIRTUAL_ID = 2**32
"""The least virtual token id."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """An encoded run of a prompt, with its place in the sequence.

    Attributes:
        input: The run.
        start: Number of tokens before the run.
        first_position: Position from which the positions of the run count.
    """

    input: EmbeddedInput
    start: int
    first_position: int

    @property
    def stop(self) -> int:
        """Number of tokens up to the end of the run."""
        return self.start + len(self.input)

    @property
    def position_shift(self) -> int:
        """Position minus number of preceding tokens, for the tokens after the run."""
        num_positions = self.input.num_positions
        count = len(self.input) if num_positions is None else num_positions
        return self.first_position + count - self.stop


def place_runs(prompt: PromptTokens) -> tuple[list[int], tuple[Run, ...]]:
    """Return the token ids of a prompt, virtual ones for the tokens of runs, and the runs."""
    token_ids: list[int] = []
    runs: list[Run] = []
    shift = 0
    for part in prompt:
        if isinstance(part, EmbeddedInput):
            run = Run(part, len(token_ids), len(token_ids) + shift)
            token_ids += _virtual_ids(part)
            runs.append(run)
            shift = run.position_shift
        else:
            token_ids.append(part)
    return token_ids, tuple(runs)


def _virtual_ids(run: EmbeddedInput) -> list[int]:
    """Return an id for each token of a run, from the digest of the run."""
    numbers = array("Q", shake_128(run.digest).digest(8 * len(run)))
    # 62 bits, so that the sum fits 64 bits with a sign.
    return [FIRST_VIRTUAL_ID + (number >> 2) for number in numbers]


def without_runs(token_ids: Sequence[int], runs: Sequence[Run]) -> list[int]:
    """Return the token ids outside of the runs."""
    outside: list[int] = []
    start = 0
    for run in runs:
        outside += token_ids[start : run.start]
        start = run.stop
    return [*outside, *token_ids[start:]]


def overlapping(runs: Sequence[Run], start: int, stop: int) -> Iterator[tuple[Run, range]]:
    """Yield the runs that have tokens from ``start`` to ``stop - 1``, with these tokens."""
    for run in runs:
        tokens = range(max(start, run.start), min(stop, run.stop))
        if tokens:
            yield run, tokens


def token_positions(runs: Sequence[Run], start: int, stop: int) -> list[list[int]]:
    """Return time, height and width of the tokens ``start`` to ``stop - 1`` of a sequence."""
    axes: list[list[int]] = [[], [], []]
    shift, at = 0, start
    for run in runs:
        if run.stop <= start:
            shift = run.position_shift
    for run, tokens in overlapping(runs, start, stop):
        for axis in axes:
            axis += range(at + shift, tokens.start + shift)
        offsets = range(tokens.start - run.start, tokens.stop - run.start)
        columns: Sequence[Sequence[int]] = [offsets] * 3
        if run.input.positions is not None:
            columns = run.input.positions[offsets.start : offsets.stop].T.tolist()
        for axis, column in zip(axes, columns, strict=True):
            axis += [run.first_position + offset for offset in column]
        at, shift = tokens.stop, run.position_shift
    for axis in axes:
        axis += range(at + shift, stop + shift)
    return axes
