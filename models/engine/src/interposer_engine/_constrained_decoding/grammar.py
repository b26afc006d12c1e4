"""Compilation of constraints with the library llguidance.

This module must not import torch, so that the child process which imports it starts quickly.
"""

from __future__ import annotations

import ctypes
import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from interposer.errors import RequestError, install_command
from interposer_engine._sampling_params import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# If any white space were allowed, a weak model could write white space without end.
_JSON = {"whitespace_pattern": r"(?: |\n[ \t]{0,24})"}
_END = "<|interposer-constraint-end|>"
NO_FIRST_TOKEN = "no token of the vocabulary can start a matching text"
# llguidance adds lexer states while it follows a text. Each takes 1 to 2 KB by its documentation.
_MAX_LEXER_STATES = 50_000


def library() -> Any:
    """Import and return the module llguidance.

    Raises: RequestError: llguidance is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "Constrained output needs the package llguidance, which is not installed. "
            f"Try: {install_command('interposer-engine[constraints]')}"
        ) from None
    return llguidance


def grammar_tokenizer(serialized: str, vocab_size: int) -> tuple[LLTokenizer, int]:
    """Convert a tokenizer for llguidance, and add an end token that no model produces.

    llguidance requires one end token for all requests. The model's own end tokens cannot serve:
    each request may have others, and some models have none.

    Args:
        serialized: Content of a tokenizer.json.
        vocab_size: Number of logits of the model.
    Returns: The tokenizer of llguidance, and the id of the added end token.
    Raises: RequestError: the tokenizer's tokens do not map to bytes.
    """
    llguidance = library()
    tokenizer = Tokenizer.from_str(serialized)
    tokenizer.add_special_tokens([_END])
    end = tokenizer.token_to_id(_END)
    assert end is not None
    size = max(vocab_size, tokenizer.get_vocab_size(), end + 1)
    try:
        return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=end), end
    except ValueError as error:
        raise RequestError(
            f"Texts cannot be constrained with this tokenizer: {error}. Try: a model whose "
            "tokenizer splits texts into bytes or pieces of them"
        ) from None


def compile_constraint(
    tokenizer: LLTokenizer, constraint: Constraint, *, bounded: bool
) -> LLMatcher:
    """Compile a constraint to a matcher, and compute the bit mask of the allowed first tokens.

    Args:
        tokenizer: Result of ``grammar_tokenizer``.
        bounded: Whether to limit the number of lexer states.
    Raises: RequestError: the constraint is malformed or too large.
    """
    llguidance = library()
    try:
        grammar = _grammar(llguidance.LLMatcher, constraint)
    except Exception as error:  # llguidance's grammar converter raises bare Exception
        raise malformed(constraint, str(error)) from error
    limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES) if bounded else None
    matcher: LLMatcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise malformed(constraint, matcher.get_error())
    # Copies share computed lexer states but no error: use a copy, so the matcher stays usable.
    probe = matcher.deep_copy()
    probe.compute_bitmask()
    if probe.is_error():
        reason = probe.get_error()
        if reason.startswith("NoExtensionBias"):
            reason = NO_FIRST_TOKEN
        raise malformed(constraint, reason)
    return matcher


def _grammar(matcher_class: Any, constraint: Constraint) -> str:
    """Convert a constraint to the grammar format of llguidance."""
    text = constraint.text
    if constraint.kind == "JSON schema":
        return str(matcher_class.grammar_from_json_schema(text, _JSON))
    if constraint.kind == "regex":
        return str(matcher_class.grammar_from_regex(text))
    if constraint.kind == "choice":
        text = "start: " + " | ".join(map(json.dumps, json.loads(text)))
    elif "::=" in text:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        text = gbnf_to_lark(text)
    return str(matcher_class.grammar_from_lark(text))


def malformed(constraint: Constraint, reason: str) -> RequestError:
    """Return the error for a constraint that cannot be compiled."""
    # llguidance appends a dump of its parser's state, which does not help users.
    reason = reason.partition("<state>")[0]
    return RequestError(
        f"The {constraint.kind} {constraint.text!r:.200} cannot be compiled: {reason.strip():.1000}"
    )


def heap_bytes() -> int:
    """Return the heap memory that this process has allocated, in bytes.

    Uses mallinfo2 of glibc. On other C libraries returns the resident memory, or 0 where
    /proc is missing.
    """
    if (mallinfo2 := _mallinfo2()) is not None:
        info = mallinfo2()
        return int(info.uordblks + info.hblkhd)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class _MallInfo(ctypes.Structure):
    """The C struct ``mallinfo2`` of glibc 2.33 and later: statistics of the heap."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


@cache
def _mallinfo2() -> Any:
    """Return glibc's function mallinfo2, or None where the C library has none."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    function.restype = _MallInfo
    return function
