"""Requests that meet in an engine, for properties that hold under any schedule."""

from __future__ import annotations

from hypothesis import strategies as st

REQUESTS = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=5
)
"""Tokens of the prompt, new tokens, and the first token of each."""
