"""Constraints as llguidance compiles them.

Nothing here imports torch, so that the process that compiles first starts at once.
"""

from __future__ import annotations

import ctypes
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from interposer.errors import RequestError
from interposer_models._constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Where any white space is allowed, a weak model writes it for ever: each token of it is right.
_JSON = {"whitespace_pattern": r"(?: |\n[ \t]{0,24})"}
_END = "<|interposer-constraint-end|>"
# Each state takes 1 to 2 KB (llguidance's own figure), and comes as a text is followed.
_MOST_STATES = 50_000


def library() -> Any:
    """Return the module llguidance.

    Raises: RequestError: it is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "Constrained output needs the package llguidance, which is not installed. "
            'Try: pip install "interposer-models[constraints]"'
        ) from None
    return llguidance


def grammar_tokenizer(serialized: str, vocab_size: int) -> tuple[LLTokenizer, int]:
    """Return a tokenizer as the library holds it, and a token of its own that ends a text.

    What ends a request differs from request to request, and some models have no such token.

    Args:
        serialized: the content of a tokenizer.json.
    Raises: RequestError: its tokens have no bytes.
    """
    held = library()
    own = Tokenizer.from_str(serialized)
    own.add_special_tokens([_END])
    end = own.token_to_id(_END)
    assert end is not None
    size = max(vocab_size, own.get_vocab_size(), end + 1)
    try:
        return held.LLTokenizer(own.to_str(), n_vocab=size, eos_token=end), end
    except ValueError as error:
        raise RequestError(
            f"Texts cannot be constrained with this tokenizer: {error}. Try: a model whose "
            "tokenizer splits texts into bytes or pieces of them"
        ) from None


def compile_constraint(
    tokenizer: LLTokenizer, constraint: Constraint, *, bounded: bool
) -> LLMatcher:
    """Return the matcher of a constraint, at the empty text, with the first bit mask computed.

    Args:
        bounded: whether its automaton may have a limited number of states only.
    Raises: RequestError: the constraint is malformed or too large.
    """
    held = library()
    try:
        grammar = _grammar(held.LLMatcher, constraint)
    except Exception as error:  # the converter of grammars raises bare Exception
        raise malformed(constraint, str(error)) from error
    limits = held.LLParserLimits(max_lexer_states=_MOST_STATES) if bounded else None
    matcher: LLMatcher = held.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise malformed(constraint, matcher.get_error())
    # Copies share what this finds out, but not an error that it ends in.
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        reason = first.get_error()
        if reason.startswith("NoExtensionBias"):
            reason = "no token of the vocabulary begins such a text"
        raise malformed(constraint, reason)
    return matcher


def _grammar(matchers: Any, constraint: Constraint) -> str:
    """Return a constraint as the library reads it."""
    text = constraint.text
    if constraint.kind == "JSON schema":
        return str(matchers.grammar_from_json_schema(text, _JSON))
    if constraint.kind == "regex":
        return str(matchers.grammar_from_regex(text))
    if constraint.kind == "choice":
        text = "start: " + " | ".join(map(json.dumps, json.loads(text)))
    elif "::=" in text:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        text = gbnf_to_lark(text)
    return str(matchers.grammar_from_lark(text))


def malformed(constraint: Constraint, reason: str) -> RequestError:
    """Return the error of a constraint that cannot be compiled."""
    reason = reason.partition("<state>")[0]  # what the parser was doing helps nobody else
    return RequestError(
        f"The {constraint.kind} {constraint.text!r:.200} cannot be held: {reason.strip():.1000}"
    )


def heap_bytes() -> int:
    """Return the bytes that the allocator has given out in this process.

    Where the C library does not say, the resident memory stands in; 0 where that is unknown too.
    """
    if (read := _mallinfo()) is not None:
        info = read()
        return int(info.uordblks + info.hblkhd)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc 2.33 and later."""

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
def _mallinfo() -> Any:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    function.restype = _MallInfo
    return function
