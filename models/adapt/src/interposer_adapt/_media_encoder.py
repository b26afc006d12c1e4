"""Encoders of the pictures or sounds of prompts: placeholders, cache and batches.

Any number of threads prepare media, and the thread that gets the encoder encodes the media of all
that wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Size, dtype

from interposer import Resolver
from interposer.errors import RequestError, described, foreign_errors
from interposer_adapt._api import Adapted
from interposer_engine import EmbeddedInput, Media
from interposer_engine.parts import DEFAULT_MAX_STEP_TOKENS, FairLock

CACHED_BYTES = 512 << 20
_MAX_BATCH_BYTES = 256 << 20
# Decoding and resizing a picture of 64 megapixels takes 1 GiB.
_MAX_CALLS = 4

Tokens = list[int | EmbeddedInput]


class MediaPlan(Protocol):
    """The fields of a plan that an encoder reads; ``dtype`` is that of the model."""

    @property
    def path(self) -> Path: ...

    @property
    def dtype(self) -> dtype: ...

    def numerics(self) -> AbstractContextManager[None]: ...


class Source(Protocol):
    """A medium whose content is in memory, but not decoded.

    Attributes:
        place: name of the medium in errors.
        digest: hash of the content; media with equal digests have equal vectors.
    """

    @property
    def place(self) -> str: ...

    @property
    def digest(self) -> bytes: ...


class Prepared(Protocol):
    """A medium that is ready for the encoder.

    Attributes:
        source: the content.
        count: number of tokens that get vectors.
        nbytes: size of the encoder's inputs in bytes.
        shapes: the shapes that the media of a batch have in common.
    """

    @property
    def source(self) -> Source: ...

    @property
    def count(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def shapes(self) -> tuple[tuple[str, Size], ...]: ...


class Vectors(Protocol):
    """Vectors of a medium.

    Attributes:
        nbytes: size in bytes.
    """

    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Source)
P = TypeVar("P", bound=Prepared)
V = TypeVar("V", bound=Vectors)


@dataclass(slots=True, eq=False)
class _Job(Generic[P]):
    """A medium that waits for the encoder, then its tokens or the error."""

    medium: P
    cache_salt: str
    tokens: Tokens | None = None
    error: BaseException | None = None


class MediaEncoder(ABC, Generic[S, P, V]):
    """Base of encoders of one kind of media.

    Subclasses read and prepare one medium, compute the vectors of a batch, and state the tokens of
    a medium. Four calls at a time decode their media; media that meanwhile wait for the encoder
    are encoded together, in steps of limited tokens and bytes. The vectors of recent media are
    kept.

    Attributes:
        kinds: kinds of media that the encoder takes.
        max_step_tokens: most tokens of a step; a medium with more tokens is encoded alone.
        max_cached_bytes: most bytes of vectors to keep.
        noun: name of a medium in errors, whose plural ends with "s".
        token_id: the placeholder for a medium in a prompt.
    """

    kinds: frozenset[str]
    noun: ClassVar[str]

    def __init__(
        self,
        adapted: Adapted[Any],
        token_id: int,
        plan: MediaPlan,
        max_media: int,
        cached_bytes: int,
    ) -> None:
        """Create an encoder.

        Args:
            adapted: the model that computes the vectors.
            token_id: the placeholder.
            plan: the plan of the model that reads the vectors.
            max_media: largest number of media in a prompt.
            cached_bytes: size of the vectors to keep.
        """
        self.token_id = token_id
        self.max_step_tokens = DEFAULT_MAX_STEP_TOKENS
        self.max_cached_bytes = cached_bytes
        self._adapted = adapted
        self._numerics = plan.numerics
        self._max_media = max_media
        self._cache = _TokenCache(cached_bytes)
        self._calls = BoundedSemaphore(_MAX_CALLS)
        self._encoder_lock = FairLock()
        self._queue: list[_Job[P]] = []
        self._queue_lock = Lock()

    @property
    def resolver(self) -> Resolver:
        """The resolver that chose the encoder's kernels."""
        return self._adapted.resolver

    def embed(
        self, token_ids: Sequence[int], media: Sequence[Media], *, cache_salt: str = ""
    ) -> Tokens:
        """Put media in place of the placeholders of a prompt. Any thread may call this.

        Args:
            token_ids: a prompt with one placeholder for each medium, in order.
            media: the media.
            cache_salt: only calls with the same salt share cached vectors; the time of a call
                would tell whether another client has sent the same medium.
        Returns: the prompt. A medium becomes vectors, on the CPU, and token ids, such as the
            separators of a picture's rows.
        Raises: RequestError: a medium cannot be decoded, exceeds a limit or has the wrong kind;
            or the number of placeholders is not that of media.
        """
        for medium in media:
            if medium.kind not in self.kinds:
                raise RequestError(
                    f"{medium.place or 'The medium'} is of the kind {medium.kind!r}; "
                    f"the model takes {', '.join(sorted(self.kinds))}"
                )
        texts: list[list[int]] = [[]]
        for token_id in token_ids:
            if token_id == self.token_id:
                texts.append([])
            else:
                texts[-1].append(token_id)
        if len(texts) - 1 != len(media):
            raise RequestError(
                f"The prompt has {len(texts) - 1} placeholders for {self.noun}s (token id "
                f"{self.token_id}), but {len(media)} {self.noun}s are given. Try: lm.chat, whose "
                f"template writes a placeholder for each {self.noun}"
            )
        if len(media) > self._max_media:
            raise RequestError(
                f"The prompt has {len(media)} {self.noun}s, at most {self._max_media} are "
                f"accepted. Try: fewer {self.noun}s in a prompt"
            )
        prompt: Tokens = [*texts[0]]
        for tokens, text in zip(self._encoded(media, cache_salt), texts[1:], strict=True):
            self._extend(prompt, tokens)
            self._extend(prompt, text)
        return prompt

    def run_sample(self, max_tokens: int) -> int:
        """Encode equal media in one step, and drop the vectors; ``load`` measures the memory.

        Args:
            max_tokens: most tokens of the step; one medium is encoded even if it has more.
        Returns: the number of tokens.
        """
        sample = self._sample(max_tokens)
        size = max(1, min(max_tokens // sample.count, _MAX_BATCH_BYTES // sample.nbytes))
        with self._numerics():
            self._vectors([sample] * size)
        return size * sample.count

    @abstractmethod
    def _sample(self, max_tokens: int) -> P:
        """Return a large medium of at most ``max_tokens``, or the smallest that there is."""

    @abstractmethod
    def _read(self, medium: Media) -> S:
        """Read the content of a medium.

        Raises: RequestError: the content cannot be read, or exceeds a limit.
        """

    @abstractmethod
    def _prepare(self, source: S) -> P:
        """Decode a medium, and compute the inputs of the encoder.

        Raises: RequestError: the medium cannot be decoded, or exceeds a limit.
        """

    @abstractmethod
    def _vectors(self, media: Sequence[P]) -> Sequence[V]:
        """Compute the vectors of media with inputs of equal shapes."""

    @abstractmethod
    def _tokens(self, medium: P, vectors: V) -> Tokens:
        """Return the tokens of a medium, with vectors."""

    def _extend(self, prompt: Tokens, tokens: Tokens | list[int]) -> None:
        """Append tokens of a text or a medium to the prompt."""
        prompt += tokens

    def _encoded(self, media: Sequence[Media], cache_salt: str) -> list[Tokens]:
        """Return the tokens of each medium."""
        encoded: dict[bytes, Tokens] = {}
        digests: list[bytes] = []
        # The limit on calls bounds the memory that decoded media take in all of them.
        with self._calls:
            jobs: list[_Job[P]] = []
            for medium in media:
                source = self._read(medium)
                digests.append(source.digest)
                if any(source.digest == job.medium.source.digest for job in jobs):
                    continue
                tokens = encoded.get(source.digest) or self._cache.get(cache_salt, source.digest)
                if tokens is not None:
                    encoded[source.digest] = tokens
                    continue
                jobs.append(_Job(self._prepare(source), cache_salt))
                if sum(job.medium.nbytes for job in jobs) > _MAX_BATCH_BYTES:
                    encoded |= self._encode(jobs)
                    jobs = []
            encoded |= self._encode(jobs)
        return [encoded[digest] for digest in digests]

    def _encode(self, jobs: list[_Job[P]]) -> dict[bytes, Tokens]:
        """Encode the media of ``jobs`` with those of other threads; return tokens by digest."""
        with self._queue_lock:
            self._queue += jobs
        # The first thread that gets the lock encodes the media of all that wait.
        with self._encoder_lock:
            with self._queue_lock:
                queue, self._queue = self._queue, []
            try:
                for batch in _batches(queue, self.max_step_tokens):
                    self._run(batch)
            except BaseException:
                for job in queue:
                    job.error = RequestError(f"The encoder of {self.noun}s was interrupted")
                raise
        encoded: dict[bytes, Tokens] = {}
        for job in jobs:
            if job.tokens is None:
                assert job.error is not None
                raise job.error
            encoded[job.medium.source.digest] = job.tokens
        return encoded

    def _run(self, batch: Sequence[_Job[P]]) -> None:
        """Encode media of equal shapes; if they fail together, one by one."""
        try:
            with self._numerics():
                vectors = self._vectors([job.medium for job in batch])
            for job, medium_vectors in zip(batch, vectors, strict=True):
                job.tokens = self._tokens(job.medium, medium_vectors)
                digest = job.medium.source.digest
                self._cache.put(job.cache_salt, digest, job.tokens, medium_vectors.nbytes)
        except foreign_errors() as error:
            if len(batch) == 1:
                place = batch[0].medium.source.place
                batch[0].error = RequestError(
                    f"{place} fails in the model's {self.noun} encoder: {described(error)[:200]}. "
                    "Try: another size or duration"
                )
                return
            for job in batch:
                self._run([job])


class _TokenCache:
    """The tokens of recent media, by salt and digest; the oldest are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str, bytes], tuple[Tokens, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, salt: str, digest: bytes) -> Tokens | None:
        """Return the tokens of a medium, None if they are not kept."""
        key = salt, digest
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, salt: str, digest: bytes, tokens: Tokens, num_bytes: int) -> None:
        """Keep the tokens of a medium, unless they alone exceed the size of the cache."""
        key = salt, digest
        with self._lock:
            if key in self._entries or num_bytes > self._max_bytes:
                return
            self._entries[key] = tokens, num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, (_, freed_bytes) = self._entries.popitem(last=False)
                self._num_bytes -= freed_bytes


def _batches(jobs: Sequence[_Job[P]], max_tokens: int) -> Iterator[list[_Job[P]]]:
    """Divide media into batches of equal shapes, and of limited tokens and bytes."""
    by_shape: dict[Any, list[_Job[P]]] = {}
    for job in jobs:
        by_shape.setdefault(job.medium.shapes, []).append(job)
    for group in by_shape.values():
        batch: list[_Job[P]] = []
        num_tokens = num_bytes = 0
        for job in group:
            num_tokens += job.medium.count
            num_bytes += job.medium.nbytes
            if batch and (num_tokens > max_tokens or num_bytes > _MAX_BATCH_BYTES):
                yield batch
                batch, num_tokens, num_bytes = [], job.medium.count, job.medium.nbytes
            batch.append(job)
        yield batch
