"""Constrained output: which tokens may come next, by a grammar over the bytes of tokens.

Dimensions: V vocabulary.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import torch
from tokenizers import Tokenizer

from interposer.errors import RequestError
from interposer_models._constraint import Constraint
from interposer_models._tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_WORD = 32  # tokens in a word of a bit mask
_MOST_COMPILED = 64
# Where any white space is allowed, a weak model writes it for ever: each token of it is right.
_JSON = {"whitespace_pattern": r"(?: |\n[ \t]{0,24})"}
_END = "<|interposer-constraint-end|>"

End = Literal["stop", "constraint"]


class Matcher:
    """The tokens that one request may produce next, and whether its text is complete.

    Attributes:
        fault: why no token can follow though the text is incomplete; empty while one can.
    """

    def __init__(self, held: LLMatcher, stops: frozenset[int], end: int) -> None:
        """Begin with the empty text.

        Args:
            held: advances with each token; nobody else does it.
            stops: tokens that end the request.
            end: the token of the matcher's own end, which no model produces.
        """
        self.fault = ""
        self._held = held
        self._stops = stops
        self._end = end

    def fill(self, row: torch.Tensor) -> None:
        """Write the bits of the tokens that may come next.

        A stop token may where the text is complete. Where nothing may come, ``fault`` says why,
        and a stop token, or any token if there is none, is left to end the request with.

        Args:
            row: ``[ceil(V / 32)]`` int32 of host memory, as ``apply_token_bitmask`` reads it.
        """
        allowed = torch.frombuffer(bytearray(self._held.compute_bitmask()), dtype=torch.int32)
        words = min(len(row), len(allowed))
        row.zero_()
        row[:words] = allowed[:words]
        complete = self._held.is_accepting() and not self._held.is_error()
        stops = [token for token in self._stops if token < _WORD * len(row)]
        if self._end < _WORD * len(row):
            _set(row, self._end, False)
        for token in stops:
            _set(row, token, complete)
        if not row.any():
            self.fault = _first_line(self._held.get_error()) or "no token can follow"
            for token in stops:
                _set(row, token, True)
            if not stops:
                row.fill_(-1)

    def advance(self, token: int) -> End | None:
        """Take the request's next token; return why the request ends with it, if it does."""
        if self.fault:
            return "constraint"
        if token in self._stops:
            return "stop"
        self._held.consume_token(token)
        if self._held.is_error():
            self.fault = _first_line(self._held.get_error())
            return "constraint"
        # Nothing but the end can follow, so that no step need be taken for it.
        return "stop" if self._held.is_stopped() else None


class Constraints:
    """Compiles the constraints of requests for one tokenizer. Any thread may ask."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        """Read nothing yet: the tokenizer is prepared for the first constraint, for a second."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def matcher(self, constraint: Constraint, stops: frozenset[int]) -> Matcher:
        """Return a matcher of the empty text.

        Raises: RequestError: the constraint is malformed or too large, holds for no text of this
            vocabulary, or cannot be compiled for want of a package or of a tokenizer.
        """
        # Compiled without the lock, so that a large grammar holds up nobody else's.
        with self._lock:
            held = self._compiled.get(constraint)
        if held is None:
            held = self._compile(constraint)
        with self._lock:
            self._compiled[constraint] = held
            self._compiled.move_to_end(constraint)
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
            return Matcher(held.deep_copy(), stops, self._prepared[1])

    def _compile(self, constraint: Constraint) -> LLMatcher:
        tokenizer, end = self._prepared
        matchers = _library().LLMatcher
        try:
            grammar = _grammar(matchers, constraint)
        except Exception as error:  # the converter of grammars raises bare Exception
            raise _malformed(constraint, str(error)) from error
        held: LLMatcher = matchers(tokenizer, grammar, log_level=0)
        if held.is_error():
            raise _malformed(constraint, held.get_error())
        first = Matcher(held.deep_copy(), frozenset(), end)
        first.fill(torch.empty(-(-self._vocab_size // _WORD), dtype=torch.int32))
        if first.fault and not held.is_accepting():
            raise _malformed(constraint, "no token of the vocabulary begins such a text")
        return held

    @cached_property
    def _prepared(self) -> tuple[LLTokenizer, int]:
        """The tokenizer as the library holds it, and a token of its own that ends a text.

        What ends a request differs from request to request, and some models have no such token.
        """
        library = _library()
        own = Tokenizer.from_str(self._tokenizer.serialized())
        own.add_special_tokens([_END])
        end = own.token_to_id(_END)
        assert end is not None
        size = max(self._vocab_size, own.get_vocab_size(), end + 1)
        try:
            return library.LLTokenizer(own.to_str(), n_vocab=size, eos_token=end), end
        except ValueError as error:
            raise RequestError(
                f"Texts cannot be constrained with this tokenizer: {error}. Try: a model whose "
                "tokenizer splits texts into bytes or pieces of them"
            ) from None


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "Constrained output needs the package llguidance, which is not installed. "
            'Try: pip install "interposer-models[constraints]"'
        ) from None
    return llguidance


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


def _malformed(constraint: Constraint, reason: str) -> RequestError:
    return RequestError(
        f"The {constraint.kind} {constraint.text!r:.200} cannot be held: {reason.strip():.1000}"
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _set(row: torch.Tensor, token: int, allowed: bool) -> None:
    word, bit = divmod(token, _WORD)
    value = int(row[word]) & 0xFFFFFFFF
    value = value | 1 << bit if allowed else value & ~(1 << bit)
    row[word] = value - (1 << _WORD) if value >> (_WORD - 1) else value
