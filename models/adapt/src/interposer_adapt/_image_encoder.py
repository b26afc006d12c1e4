"""The encoder of a model's images: pictures in, prompts with vectors in place of pictures out.

The tokens of a picture come from the processor of transformers, run on that picture alone. They
replace the placeholder as token ids: text of a user can never become a placeholder.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any, Protocol

from torch import Size, Tensor, dtype

from interposer import Resolver
from interposer.errors import RequestError, described, foreign_errors
from interposer_adapt._image_decoding import ImageLimits, ImageSource, decode_image, read_image
from interposer_adapt._image_tower import ImageTower, ImageVectors
from interposer_engine import EmbeddedInput, Media
from interposer_engine.parts import FairLock

_BOTH_WAYS = frozenset({"gemma3"})
"""Values of ``model_type``: the tokens of a picture attend to each other in both directions."""
_CACHED_BYTES = 512 << 20
_MAX_BATCH_BYTES = 256 << 20
# Decoding and resizing a picture of 64 megapixels takes 1 GiB.
_MAX_CALLS = 4
_MAX_NEWLINES = 32
_TEXT_INPUTS = frozenset({"attention_mask", "input_ids", "mm_token_type_ids", "token_type_ids"})

Tokens = list[int | EmbeddedInput]


class ImagePlan(Protocol):
    """The fields of a plan that an encoder reads; ``dtype`` is that of the model."""

    @property
    def path(self) -> Path: ...

    @property
    def dtype(self) -> dtype: ...

    def numerics(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """A picture that is ready for the encoder.

    Attributes:
        source: the content.
        token_ids: the tokens that stand for the picture.
        count: the number of tokens among them that get vectors.
        inputs: the encoder's inputs, by name.
    """

    source: ImageSource
    token_ids: list[int]
    count: int
    inputs: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the encoder's inputs in bytes."""
        return sum(tensor.nbytes for tensor in self.inputs.values())

    @property
    def shapes(self) -> tuple[tuple[str, Size], ...]:
        """The shapes that the pictures of a batch have in common."""
        return tuple((name, tensor.shape[1:]) for name, tensor in sorted(self.inputs.items()))


@dataclass(slots=True, eq=False)
class _Job:
    """A picture that waits for the encoder, then its tokens or the error."""

    image: PreparedImage
    tokens: Tokens | None = None
    error: BaseException | None = None


class ImageEncoder:
    """Encodes the pictures of prompts by the image encoder of a transformers model.

    ``interposer.explain(encoder)`` lists its kernels. Any thread may call ``embed``. Four calls at
    a time decode and resize their pictures; pictures that meanwhile wait for the encoder are
    encoded together. The vectors of recent pictures are kept.

    Attributes:
        kinds: kinds of media that the encoder takes.
        limits: limits on the pictures of one prompt.
        token_id: the placeholder for a picture in a prompt.
    """

    kinds = frozenset({"image"})

    def __init__(
        self,
        tower: ImageTower,
        processor: Any,
        plan: ImagePlan,
        *,
        limits: ImageLimits | None = None,
        cached_bytes: int = _CACHED_BYTES,
    ) -> None:
        """Create an encoder.

        Args:
            tower: computes the vectors.
            processor: a processor of transformers with a fast tokenizer.
            plan: the plan of the model that reads the vectors.
            limits: limits on the pictures of a prompt; None takes those of ``ImageLimits``.
            cached_bytes: size of the vectors to keep.
        """
        config = tower.adapted.model.config
        self.limits = ImageLimits() if limits is None else limits
        # image_token_id of some processors is the token that gets vectors.
        self.token_id: int = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        self._tower = tower
        self._processor = processor
        self._numerics = plan.numerics
        # The tokens that get vectors, which are not the placeholder in all models.
        self._vector_id: int = config.image_token_id
        self._attends_both_ways = config.model_type in _BOTH_WAYS
        self._newlines = _newlines(processor.tokenizer)
        settings = [config.to_dict(), processor.image_processor.to_dict()]
        settings += [str(plan.path), str(plan.dtype)]
        self._seed = json.dumps(settings, sort_keys=True, default=str).encode()
        self._cache = _TokenCache(cached_bytes)
        self._calls = BoundedSemaphore(_MAX_CALLS)
        self._encoder_lock = FairLock()
        self._queue: list[_Job] = []
        self._queue_lock = Lock()

    @property
    def resolver(self) -> Resolver:
        """The resolver that chose the encoder's kernels."""
        return self._tower.adapted.resolver

    def embed(self, token_ids: Sequence[int], media: Sequence[Media]) -> Tokens:
        """Put pictures in place of the placeholders of a prompt. Any thread may call this.

        Args:
            token_ids: a prompt with one placeholder for each picture, in order.
            media: the pictures.
        Returns: the prompt. A picture becomes vectors, on the CPU, and token ids, such as the
            separators of its rows.
        Raises: RequestError: a picture cannot be decoded, exceeds a limit or has the wrong kind;
            or the number of placeholders is not that of pictures.
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
                f"The prompt has {len(texts) - 1} placeholders for images (token id "
                f"{self.token_id}), but {len(media)} images are given. Try: lm.chat, whose "
                "template writes a placeholder for each image"
            )
        if len(media) > self.limits.images:
            raise RequestError(
                f"The prompt has {len(media)} images, at most {self.limits.images} are accepted"
            )
        prompt: Tokens = [*texts[0]]
        for image, text in zip(self._encoded(media), texts[1:], strict=True):
            self._extend(prompt, image)
            self._extend(prompt, text)
        return prompt

    def _encoded(self, media: Sequence[Media]) -> list[Tokens]:
        """Return the tokens of each picture."""
        encoded: dict[bytes, Tokens] = {}
        digests: list[bytes] = []
        # The limit on calls bounds the memory that decoded pictures take in all of them.
        with self._calls:
            jobs: list[_Job] = []
            for medium in media:
                source = read_image(medium, self.limits)
                digests.append(source.digest)
                if any(source.digest == job.image.source.digest for job in jobs):
                    continue
                tokens = encoded.get(source.digest) or self._cache.get(source.digest)
                if tokens is not None:
                    encoded[source.digest] = tokens
                    continue
                jobs.append(_Job(self._prepare(source)))
                if sum(job.image.nbytes for job in jobs) > _MAX_BATCH_BYTES:
                    encoded |= self._encode(jobs)
                    jobs = []
            encoded |= self._encode(jobs)
        return [encoded[digest] for digest in digests]

    def _prepare(self, source: ImageSource) -> PreparedImage:
        """Decode a picture, and run the processor on it.

        Raises: RequestError: the picture cannot be decoded or processed.
        """
        image = decode_image(source)
        try:
            out = self._processor(
                images=[image],
                text=[self._processor.image_token],
                return_tensors="pt",
                add_special_tokens=False,
            )
        except foreign_errors() as error:
            raise RequestError(
                f"{source.place}, {image.width} x {image.height} pixels, is refused by the model's "
                f"image processor: {described(error)[:200]}"
            ) from error
        token_ids = out["input_ids"][0].tolist()
        names = self._tower.input_names & out.keys() - _TEXT_INPUTS
        inputs = {name: out[name] for name in names}
        return PreparedImage(source, token_ids, token_ids.count(self._vector_id), inputs)

    def _encode(self, jobs: list[_Job]) -> dict[bytes, Tokens]:
        """Encode the pictures of ``jobs`` with those of other threads; return tokens by digest."""
        with self._queue_lock:
            self._queue += jobs
        # The first thread that gets the lock encodes the pictures of all that wait.
        with self._encoder_lock:
            with self._queue_lock:
                queue, self._queue = self._queue, []
            try:
                for batch in _batches(queue):
                    self._run(batch)
            except BaseException:
                for job in queue:
                    job.error = RequestError("The encoder of images was interrupted")
                raise
        encoded: dict[bytes, Tokens] = {}
        for job in jobs:
            if job.tokens is None:
                assert job.error is not None
                raise job.error
            encoded[job.image.source.digest] = job.tokens
        return encoded

    def _run(self, batch: Sequence[_Job]) -> None:
        """Encode pictures of equal shapes; if they fail together, one by one."""
        try:
            with self._numerics():
                images = [job.image for job in batch]
                vectors = self._tower.encode(
                    [image.inputs for image in images], [image.count for image in images]
                )
            for job, image_vectors in zip(batch, vectors, strict=True):
                job.tokens = self._tokens(job.image, image_vectors)
                self._cache.put(job.image.source.digest, job.tokens, image_vectors.nbytes)
        except foreign_errors() as error:
            if len(batch) == 1:
                place = batch[0].image.source.place
                batch[0].error = RequestError(
                    f"{place} fails in the model's image encoder: {described(error)[:200]}. "
                    "Try: a picture of another size"
                )
                return
            for job in batch:
                self._run([job])

    def _tokens(self, image: PreparedImage, vectors: ImageVectors) -> Tokens:
        """Put vectors in place of the image tokens of a picture."""
        rope = self._tower.rope_positions(image.inputs, self._vector_id, image.count)
        positions, num_positions = (None, None) if rope is None else rope
        tokens: Tokens = []
        start = 0
        for is_vector, group in groupby(
            image.token_ids, lambda token_id: token_id == self._vector_id
        ):
            token_ids = list(group)
            if not is_vector:
                tokens += token_ids
                continue
            end = start + len(token_ids)
            layers = vectors.layer_embeddings
            tokens.append(
                EmbeddedInput(
                    kind="image",
                    digest=blake2b(
                        self._seed + image.source.digest + start.to_bytes(8, "little")
                    ).digest(),
                    embeddings=vectors.embeddings[start:end],
                    positions=positions,
                    num_positions=num_positions,
                    attends_both_ways=self._attends_both_ways,
                    layer_embeddings=None if layers is None else layers[:, start:end],
                )
            )
            start = end
        return tokens

    def _extend(self, prompt: Tokens, tokens: Tokens | list[int]) -> None:
        """Append tokens; newlines on both sides of the border become the tokens of one text.

        Gemma 3 has newlines around a picture, and one token for several newlines.
        """
        num_before = _count_newlines(reversed(prompt), self._newlines)
        num_after = _count_newlines(tokens, self._newlines)
        if num_before and num_after:
            border = [*prompt[-num_before:], *tokens[:num_after]]
            text = "\n" * sum(self._newlines[token] for token in border)
            merged = self._processor.tokenizer.encode(text, add_special_tokens=False)
            prompt[-num_before:] = merged
            tokens = tokens[num_after:]
        prompt += tokens


class _TokenCache:
    """The tokens of recent pictures, by digest of the content; the oldest are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[bytes, tuple[Tokens, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, digest: bytes) -> Tokens | None:
        """Return the tokens of a picture, None if they are not kept."""
        with self._lock:
            if digest not in self._entries:
                return None
            self._entries.move_to_end(digest)
            return self._entries[digest][0]

    def put(self, digest: bytes, tokens: Tokens, num_bytes: int) -> None:
        """Keep the tokens of a picture, unless they alone exceed the size of the cache."""
        with self._lock:
            if digest in self._entries or num_bytes > self._max_bytes:
                return
            self._entries[digest] = tokens, num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, (_, freed_bytes) = self._entries.popitem(last=False)
                self._num_bytes -= freed_bytes


def _batches(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Divide pictures into batches of equal shapes and limited size."""
    by_shape: dict[Any, list[_Job]] = {}
    for job in jobs:
        by_shape.setdefault(job.image.shapes, []).append(job)
    for group in by_shape.values():
        batch: list[_Job] = []
        num_bytes = 0
        for job in group:
            if batch and num_bytes + job.image.nbytes > _MAX_BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append(job)
            num_bytes += job.image.nbytes
        yield batch


def _newlines(tokenizer: Any) -> dict[Any, int]:
    """Return the tokens that consist of newlines, with the number of newlines."""
    counts = {}
    for count in range(1, _MAX_NEWLINES):
        token_ids = tokenizer.encode("\n" * count, add_special_tokens=False)
        if len(token_ids) == 1:
            counts[token_ids[0]] = count
    return counts


def _count_newlines(tokens: Any, newlines: Mapping[Any, int]) -> int:
    """Return the number of tokens at the beginning that consist of newlines."""
    count = 0
    for token in tokens:
        if token not in newlines:
            break
        count += 1
    return count
