"""Constrained output: which tokens may come next, by a grammar over the bytes of tokens.

Dimensions: V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Literal
from weakref import WeakValueDictionary

import torch

from interposer.errors import RequestError
from interposer_models._constraint import Constraint
from interposer_models._engine.constraint_grammar import (
    compile_constraint,
    grammar_tokenizer,
    heap_bytes,
    library,
    malformed,
)
from interposer_models._engine.constraint_limits import ConstraintLimits
from interposer_models._engine.constraint_process import ConstraintProcess
from interposer_models._engine.mask_thread import MaskThread
from interposer_models._tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_WORD = 32  # tokens in a word of a bit mask
_MOST_REFUSALS = 1024
_KEPT = ConstraintLimits()

End = Literal["stop", "constraint"]


@dataclass(eq=False)
class Compiled:
    """A constraint that requests may share.

    Attributes:
        constraint: as it was given.
        matcher: at the empty text; copies of it advance.
        num_bytes: of memory that it takes.
    """

    constraint: Constraint
    matcher: LLMatcher
    num_bytes: int


class Matcher:
    """The tokens that one request may produce next, and whether its text is complete.

    Attributes:
        fault: why no token can follow though the text is incomplete; empty while one can.
    """

    def __init__(
        self,
        compiled: Compiled,
        stops: frozenset[int],
        end: int,
        on_fault: Callable[[Constraint], None],
    ) -> None:
        """Begin with the empty text.

        Args:
            stops: tokens that end the request.
            end: the token of the matcher's own end, which no model produces.
            on_fault: called with the constraint when a fault is found.
        """
        self.fault = ""
        self._compiled = compiled  # which is in use for as long as the request is
        self._held = compiled.matcher.deep_copy()
        self._stops = stops
        self._end = end
        self._on_fault = on_fault

    def compute(self) -> bytes:
        """Return the bits of the tokens that may come next, as the library has them."""
        return self._held.compute_bitmask()

    def fill(self, row: torch.Tensor, bits: bytes | None) -> None:
        """Write the bits of the tokens that may come next.

        A stop token may where the text is complete. Where nothing may come, ``fault`` says why,
        and a stop token, or any token if there is none, is left to end the request with.

        Args:
            row: ``[ceil(V / 32)]`` int32 of host memory, as ``apply_token_bitmask`` reads it.
            bits: what ``compute`` returned; None where that takes too long.
        """
        stops = [token for token in self._stops if token < _WORD * len(row)]
        row.zero_()
        if bits is None and not self.fault:
            # Another thread still has the matcher, so that nothing can be asked of it.
            self._end_with("finding the tokens that may come next takes too long")
        elif bits is not None:
            allowed = torch.frombuffer(bytearray(bits), dtype=torch.int32)
            words = min(len(row), len(allowed))
            row[:words] = allowed[:words]
            complete = self._held.is_accepting() and not self._held.is_error()
            if self._end < _WORD * len(row):
                _set(row, self._end, False)
            for token in stops:
                _set(row, token, complete)
            if not row.any():
                self._end_with(_first_line(self._held.get_error()) or "no token can follow")
        if self.fault:
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
            self._end_with(_first_line(self._held.get_error()))
            return "constraint"
        # Nothing but the end can follow, so that no step need be taken for it.
        return "stop" if self._held.is_stopped() else None

    def _end_with(self, fault: str) -> None:
        self.fault = fault
        self._on_fault(self._compiled.constraint)


class Constraints:
    """Compiles the constraints of requests for one tokenizer. Any thread may ask."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        """Read nothing yet: the tokenizer is prepared for the first constraint, for a second."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits: ConstraintLimits | None = None
        self._process: ConstraintProcess | None = None
        self._masks: MaskThread | None = None
        # Those that are kept, oldest first; and all that are in use by anybody.
        self._kept: OrderedDict[Constraint, Compiled] = OrderedDict()
        self._used: WeakValueDictionary[Constraint, Compiled] = WeakValueDictionary()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._lock = Lock()
        self._compiling = Lock()

    def limit(self, limits: ConstraintLimits | None) -> None:
        """Take constraints from now on as those of clients that nobody vouches for, or no longer.

        Args:
            limits: of each; None for none. What was compiled before is forgotten.
        """
        if (process := self._process) is not None:
            process.close()  # which ends what it compiles now
        with self._compiling, self._lock:
            if self._masks is not None:
                self._masks.close()
            self._limits, self._process = limits, None
            self._masks = None if limits is None else MaskThread(limits.mask_seconds)
            self._kept.clear()
            self._used = WeakValueDictionary()
            self._refused.clear()

    def compiled(self, constraint: Constraint) -> Compiled:
        """Return a constraint that is compiled for as long as somebody has what is returned.

        Raises: RequestError: the constraint is malformed or too large, holds for no text of this
            vocabulary, or cannot be compiled for want of a package or of a tokenizer; or others
            that are in use leave it no memory.
        """
        found = self._find(constraint)
        if found is not None:
            return found
        if self._limits is None:
            # Without the lock, so that a large grammar holds up nobody else's.
            return self._keep(self._compile(constraint, 0))
        with self._compiling:
            found = self._find(constraint)
            return self._keep(self._examined(constraint)) if found is None else found

    def matcher(self, constraint: Constraint, stops: frozenset[int]) -> Matcher:
        """Return a matcher of the empty text.

        Raises: RequestError: as ``compiled``.
        """
        found = self.compiled(constraint)
        return Matcher(found, stops, self._prepared[1], self._forget)

    def fill(self, rows: Sequence[tuple[Matcher, torch.Tensor]]) -> None:
        """Write the bits of the tokens that may come next for each matcher, see its ``fill``."""
        if self._masks is None:
            for matcher, row in rows:
                matcher.fill(row, matcher.compute())
            return
        # One with a fault may still be computed by a thread that was left alone.
        sound = [(matcher, row) for matcher, row in rows if not matcher.fault]
        found = self._masks.compute([matcher.compute for matcher, _ in sound])
        for (matcher, row), bits in zip(sound, found, strict=True):
            matcher.fill(row, bits)
        for matcher, row in rows:
            if matcher.fault:
                matcher.fill(row, None)

    def _find(self, constraint: Constraint) -> Compiled | None:
        with self._lock:
            found = self._used.get(constraint)
            if found is not None and constraint in self._kept:
                self._kept.move_to_end(constraint)
            return found

    def _examined(self, constraint: Constraint) -> Compiled:
        """Compile a constraint once more after another process could.

        Raises: RequestError: as ``compiled``.
        """
        assert self._limits is not None
        key = hashlib.sha256(f"{constraint.kind}\0{constraint.text}".encode()).digest()
        if (reason := self._refused.get(key)) is not None:
            self._refused.move_to_end(key)
            raise RequestError(reason)
        try:
            self._limits.check(constraint)
            library()
            if self._process is None:
                self._process = ConstraintProcess(
                    self._tokenizer.serialized(), self._vocab_size, self._limits
                )
            num_bytes = self._process.num_bytes(constraint) + len(constraint.text)
        except RequestError as error:
            self._refused[key] = str(error)
            if len(self._refused) > _MOST_REFUSALS:
                self._refused.popitem(last=False)
            raise
        self._make_room(num_bytes, self._limits.all_bytes)
        return self._compile(constraint, num_bytes)

    def _make_room(self, num_bytes: int, allowed: int) -> None:
        """Give up what is kept and not used until so many bytes are free.

        Raises: RequestError: others that are in use leave no room.
        """
        with self._lock:
            given_up = []
            while self._kept and self._num_bytes() + num_bytes > allowed:
                given_up.append(self._kept.popitem(last=False)[0])
            has_room = self._num_bytes() + num_bytes <= allowed
            # Those that are in use take their memory anyway.
            for constraint in reversed(given_up):
                if (found := self._used.get(constraint)) is not None:
                    self._kept[constraint] = found
                    self._kept.move_to_end(constraint, last=False)
        if not has_room:
            raise RequestError(
                "The constraints of requests that run take the memory that is allowed for them, "
                f"{allowed} bytes. Try: again later, or a simpler constraint"
            )

    def _num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._used.values())

    def _compile(self, constraint: Constraint, num_bytes: int) -> Compiled:
        tokenizer, end = self._prepared
        before = heap_bytes()
        matcher = compile_constraint(tokenizer, constraint, bounded=self._limits is not None)
        if self._limits is None:
            num_bytes = max(len(constraint.text), heap_bytes() - before)
        made = Compiled(constraint, matcher, num_bytes)
        first = Matcher(made, frozenset(), end, lambda _: None)
        first.fill(torch.empty(-(-self._vocab_size // _WORD), dtype=torch.int32), first.compute())
        if first.fault and not matcher.is_accepting():
            raise malformed(constraint, "no token of the vocabulary begins such a text")
        return made

    def _keep(self, made: Compiled) -> Compiled:
        with self._lock:
            if (found := self._used.get(made.constraint)) is not None:
                return found  # another thread was first
            self._used[made.constraint] = self._kept[made.constraint] = made
            allowed = (self._limits or _KEPT).all_bytes
            while len(self._kept) > 1 and sum(c.num_bytes for c in self._kept.values()) > allowed:
                self._kept.popitem(last=False)
            return made

    def _forget(self, constraint: Constraint) -> None:
        """Give up a constraint whose automaton has grown until it failed."""
        with self._lock:
            self._kept.pop(constraint, None)
            self._used.pop(constraint, None)

    @cached_property
    def _prepared(self) -> tuple[LLTokenizer, int]:
        """The tokenizer as the library holds it, and a token of its own that ends a text."""
        return grammar_tokenizer(self._tokenizer.serialized(), self._vocab_size)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _set(row: torch.Tensor, token: int, allowed: bool) -> None:
    word, bit = divmod(token, _WORD)
    value = int(row[word]) & 0xFFFFFFFF
    value = value | 1 << bit if allowed else value & ~(1 << bit)
    row[word] = value - (1 << _WORD) if value >> (_WORD - 1) else value
