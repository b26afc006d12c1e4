"""Constrained output: find the tokens that a grammar allows next.

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
from weakref import WeakSet, WeakValueDictionary

import torch

from interposer.errors import RequestError
from interposer_engine._constrained_decoding.grammar import (
    NO_FIRST_TOKEN,
    compile_constraint,
    grammar_tokenizer,
    heap_bytes,
    library,
    malformed,
)
from interposer_engine._constrained_decoding.limits import ConstraintLimits
from interposer_engine._constrained_decoding.mask_thread import MaskThread
from interposer_engine._constrained_decoding.process import ConstraintProcess, TransientRequestError
from interposer_engine._sampling_params import Constraint
from interposer_engine._tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_WORD = 32  # tokens in one int32 of a bit mask
_MAX_REFUSALS = 1024
_DEFAULT_LIMITS = ConstraintLimits()

End = Literal["stop", "constraint"]


@dataclass(eq=False)
class Compiled:
    """A compiled constraint, shared by the requests that use the same constraint.

    Attributes:
        constraint: Source of the compiled constraint.
        tokenizer: Tokenizer of the model, converted for llguidance.
        matcher: Matcher at the empty text. Requests advance copies of it.
        num_bytes: Memory of the compiled constraint, in bytes.
    """

    constraint: Constraint
    tokenizer: LLTokenizer
    matcher: LLMatcher
    num_bytes: int


class Matcher:
    """Follows the tokens of one request, and computes which tokens its constraint allows next.

    Attributes:
        fault: Why the request cannot continue although its text is incomplete; "" while it can.
    """

    def __init__(
        self,
        compiled: Compiled,
        stop_tokens: frozenset[int],
        end: int,
        on_fault: Callable[[Constraint], None],
    ) -> None:
        """Create a matcher before the first token.

        Args:
            compiled: Compiled constraint.
            stop_tokens: Tokens that end the request.
            end: End token of llguidance, which no model produces.
            on_fault: Called with the constraint when the request cannot continue.
        """
        self.fault = ""
        self._compiled = compiled  # this reference counts the constraint as in use
        self._matcher = compiled.matcher.deep_copy()
        self._stop_tokens = stop_tokens
        self._end = end
        self._on_fault = on_fault

    def compute(self) -> bytes:
        """Return the bit mask of the allowed next tokens in llguidance's format."""
        bits = self._matcher.compute_bitmask()
        mask = int.from_bytes(bits, "little")
        token = self._replacement(mask.bit_length() - 1) if mask.bit_count() == 1 else None
        return bits if token is None else (1 << token).to_bytes(len(bits), "little")

    def _replacement(self, token: int) -> int | None:
        """Return a token of text that must replace the only allowed token; None to keep it.

        If the next text is certain, llguidance allows only the first token into which the tokenizer
        splits the text. In the text of an added token, such as ``<think>`` in a JSON string, that
        is the added token, which llguidance then does not accept as text.
        """
        tokenizer = self._compiled.tokenizer
        if not tokenizer.is_special_token(token) or self._matcher.validate_tokens([token]):
            return None
        text = self._matcher.compute_ff_bytes().decode(errors="ignore")
        return next(iter(tokenizer.greedy_tokenize(text)), None)

    def fill(self, row: torch.Tensor, bits: bytes | None) -> None:
        """Write the bit mask of the allowed next tokens to ``row``.

        Stop tokens are allowed when the text is complete. If no token is allowed, ``fault`` is set,
        and ``row`` allows the stop tokens, or every token if there are none, so that the request
        can end.

        Args:
            row: ``[ceil(V / 32)]``, int32, in host memory, as ``apply_token_bitmask`` reads it.
            bits: Result of ``compute``; None if computing was abandoned.
        """
        stop_tokens = [token for token in self._stop_tokens if token < _WORD * len(row)]
        row.zero_()
        if bits is None and not self.fault:
            # The abandoned thread still runs the matcher, so do not call the matcher here.
            self._fail("computing the allowed next tokens takes too long")
        elif bits is not None:
            allowed = torch.frombuffer(bytearray(bits), dtype=torch.int32)
            num_words = min(len(row), len(allowed))
            row[:num_words] = allowed[:num_words]
            is_complete = self._matcher.is_accepting() and not self._matcher.is_error()
            if self._end < _WORD * len(row):
                _set_bit(row, self._end, False)
            for token in stop_tokens:
                _set_bit(row, token, is_complete)
            if not row.any():
                self._fail(_first_line(self._matcher.get_error()) or "no token can follow")
        if self.fault:
            for token in stop_tokens:
                _set_bit(row, token, True)
            if not stop_tokens:
                row.fill_(-1)

    def advance(self, token: int) -> End | None:
        """Append the request's next token, and return the finish reason if the request ends."""
        if self.fault:
            return "constraint"
        if token in self._stop_tokens:
            return "stop"
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            self._fail(_first_line(self._matcher.get_error()))
            return "constraint"
        # Only the end can follow: end now, without another step of the model.
        return "stop" if self._matcher.is_stopped() else None

    def _fail(self, fault: str) -> None:
        self.fault = fault
        self._on_fault(self._compiled.constraint)


class Constraints:
    """Thread-safe compiler of constraints for one tokenizer, with a cache.

    Without limits, constraints are compiled in this process only. With limits, a child process
    compiles each one first, and one thread at a time compiles.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        """Create an empty cache of compiled constraints.

        The first constraint converts the tokenizer for llguidance, which takes about a second.

        Args:
            tokenizer: Tokenizer of the model.
            vocab_size: Number of logits of the model.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits: ConstraintLimits | None = None
        self._process: ConstraintProcess | None = None
        self._masks: MaskThread | None = None
        # The cache, least recently used first.
        self._cache: OrderedDict[Constraint, Compiled] = OrderedDict()
        # Every compiled constraint that the cache or a request refers to, failed ones included.
        self._alive: WeakSet[Compiled] = WeakSet()
        # The ones that new requests may share.
        self._shared: WeakValueDictionary[Constraint, Compiled] = WeakValueDictionary()
        # Messages of refused constraints, by the SHA-256 of the constraint.
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        self._lock = Lock()
        self._compiling = Lock()

    def limit(self, limits: ConstraintLimits | None) -> None:
        """Set or remove the limits on constraints, and clear the cache.

        Args:
            limits: Limits for constraints of untrusted clients; None removes the limits.
        """
        if (process := self._process) is not None:
            process.close()  # also ends a compilation that is running
        with self._compiling, self._lock:
            if self._masks is not None:
                self._masks.close()
            self._limits, self._process = limits, None
            self._masks = None if limits is None else MaskThread(limits.mask_seconds)
            self._cache.clear()
            self._alive = WeakSet()
            self._shared = WeakValueDictionary()
            self._refusals.clear()

    def compiled(self, constraint: Constraint) -> Compiled:
        """Return a compiled constraint from the cache, or compile it.

        The constraint stays compiled while the caller keeps the result, even if the cache drops it.

        Raises: RequestError: the constraint is malformed, exceeds a limit or matches no text of
            this vocabulary; llguidance is missing or does not support the tokenizer; or the
            constraints in use leave no memory for it.
        """
        if (compiled := self._find(constraint)) is not None:
            return compiled
        if self._limits is None:
            # Compile outside the lock, so that a large grammar does not delay other requests.
            return self._store(self._compile(constraint, 0))
        with self._compiling:
            if (compiled := self._find(constraint)) is not None:
                return compiled
            return self._store(self._compile_limited(constraint))

    def matcher(self, constraint: Constraint, stop_tokens: frozenset[int]) -> Matcher:
        """Return a matcher for a new request, before its first token.

        Args:
            constraint: Constraint of the request.
            stop_tokens: Tokens that end the request.
        Raises: RequestError: as ``compiled``.
        """
        compiled = self.compiled(constraint)
        _, end = self._tokenizer_and_end
        return Matcher(compiled, stop_tokens, end, self._forget)

    def fill(self, rows: Sequence[tuple[Matcher, torch.Tensor]]) -> None:
        """Write the bit mask of each matcher to the matcher's row; see ``Matcher.fill``."""
        if self._masks is None:
            for matcher, row in rows:
                matcher.fill(row, matcher.compute())
            return
        # An abandoned thread may still run a matcher that has a fault, so do not compute its mask.
        running = [(matcher, row) for matcher, row in rows if not matcher.fault]
        masks = self._masks.compute([matcher.compute for matcher, _ in running])
        for (matcher, row), bits in zip(running, masks, strict=True):
            matcher.fill(row, bits)
        for matcher, row in rows:
            if matcher.fault:
                matcher.fill(row, None)

    def _find(self, constraint: Constraint) -> Compiled | None:
        with self._lock:
            compiled = self._shared.get(constraint)
            if compiled is not None and constraint in self._cache:
                self._cache.move_to_end(constraint)
            return compiled

    def _compile_limited(self, constraint: Constraint) -> Compiled:
        """Compile a constraint in the child process, and if that succeeds, in this process.

        Raises: RequestError: as ``compiled``.
        """
        assert self._limits is not None
        key = hashlib.sha256(f"{constraint.kind}\0{constraint.text}".encode()).digest()
        if (reason := self._refusals.get(key)) is not None:
            self._refusals.move_to_end(key)
            raise RequestError(reason)
        try:
            self._limits.check(constraint)
            library()
            if self._process is None:
                self._process = ConstraintProcess(
                    self._tokenizer.serialized(), self._vocab_size, self._limits
                )
            num_bytes = self._process.num_bytes(constraint) + len(constraint.text)
        except TransientRequestError:
            raise
        except RequestError as error:
            self._refusals[key] = str(error)
            if len(self._refusals) > _MAX_REFUSALS:
                self._refusals.popitem(last=False)
            raise
        self._evict_for(num_bytes, self._limits.total_bytes)
        return self._compile(constraint, num_bytes)

    def _evict_for(self, num_bytes: int, allowed: int) -> None:
        """Evict unused constraints from the cache until ``num_bytes`` fit into ``allowed`` bytes.

        Raises: RequestError: the constraints in use take too much memory.
        """
        with self._lock:
            evicted = []
            while self._cache and self._num_bytes() + num_bytes > allowed:
                evicted.append(self._cache.popitem(last=False)[0])
            fits = self._num_bytes() + num_bytes <= allowed
            # A constraint that a request uses takes its memory anyway: put it back into the cache.
            for constraint in reversed(evicted):
                if (compiled := self._shared.get(constraint)) is not None:
                    self._cache[constraint] = compiled
                    self._cache.move_to_end(constraint, last=False)
        if not fits:
            raise RequestError(
                f"The constraints of running requests take the {allowed} bytes allowed for all "
                "constraints. Try: again later, or a simpler constraint"
            )

    def _num_bytes(self) -> int:
        return sum(compiled.num_bytes for compiled in self._alive)

    def _compile(self, constraint: Constraint, num_bytes: int) -> Compiled:
        """Compile a constraint in this process.

        Args:
            constraint: Constraint to compile.
            num_bytes: Its memory as the child process measured; measured here without limits.
        Raises: RequestError: as ``compiled``.
        """
        tokenizer, end = self._tokenizer_and_end
        heap_before = heap_bytes()
        matcher = compile_constraint(tokenizer, constraint, bounded=self._limits is not None)
        if self._limits is None:
            num_bytes = max(len(constraint.text), heap_bytes() - heap_before)
        compiled = Compiled(constraint, tokenizer, matcher, num_bytes)
        # llguidance's vocabulary may be larger than the model's: check the first mask within it.
        probe = Matcher(compiled, frozenset(), end, lambda _: None)
        probe.fill(torch.empty(-(-self._vocab_size // _WORD), dtype=torch.int32), probe.compute())
        if probe.fault and not matcher.is_accepting():
            raise malformed(constraint, NO_FIRST_TOKEN)
        return compiled

    def _store(self, compiled: Compiled) -> Compiled:
        """Add a compiled constraint to the cache, unless another thread added the same one."""
        constraint = compiled.constraint
        with self._lock:
            if (other := self._shared.get(constraint)) is not None:
                return other
            self._alive.add(compiled)
            self._shared[constraint] = self._cache[constraint] = compiled
            allowed = (self._limits or _DEFAULT_LIMITS).total_bytes
            while len(self._cache) > 1 and sum(c.num_bytes for c in self._cache.values()) > allowed:
                self._cache.popitem(last=False)
            return compiled

    def _forget(self, constraint: Constraint) -> None:
        """Remove a constraint from the cache after a request failed with the constraint.

        Copies of a matcher share lexer states, so that the states of the failed request remain.
        """
        with self._lock:
            self._cache.pop(constraint, None)
            self._shared.pop(constraint, None)

    @cached_property
    def _tokenizer_and_end(self) -> tuple[LLTokenizer, int]:
        """The model's tokenizer, converted for llguidance, and the id of the end token."""
        return grammar_tokenizer(self._tokenizer.serialized(), self._vocab_size)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _set_bit(row: torch.Tensor, token: int, allowed: bool) -> None:
    word, bit = divmod(token, _WORD)
    value = int(row[word]) & 0xFFFFFFFF
    value = value | 1 << bit if allowed else value & ~(1 << bit)
    row[word] = value - (1 << _WORD) if value >> (_WORD - 1) else value
