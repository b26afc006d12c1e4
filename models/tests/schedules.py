"""Requests that meet in an engine, for properties that hold under any schedule."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from interposer_engine import Completion, LanguageModel, SamplingParams

REQUESTS = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=5
)
"""Tokens of the prompt, new tokens, and the first token of each."""


def kinds_of_requests(
    kinds: tuple[dict[str, Any], ...] | list[dict[str, Any]],
) -> st.SearchStrategy[list[tuple[int, int, dict[str, Any]]]]:
    """Draw tokens of the prompt, new tokens, and one of the kinds of parameters, of each."""
    each = st.tuples(st.integers(1, 60), st.integers(1, 40), st.sampled_from(kinds))
    return st.lists(each, min_size=1, max_size=6)


def beside_one_that_leaves(
    lm: LanguageModel, prompts: list[list[int]], params: list[SamplingParams], steps: int
) -> list[Completion]:
    """Return the completions of requests that come when another one leaves after some steps."""
    leaving = lm.engine.add([5, 6] * 10, SamplingParams(max_new_tokens=40))
    for _ in range(steps):
        lm.engine.step()
    lm.engine.cancel(leaving)
    return lm.generate(prompts, params)
