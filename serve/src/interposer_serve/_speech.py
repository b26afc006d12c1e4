"""Answers requests for transcripts: each is decoded in a thread, and all share the engine."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from interposer.tooling import steady_time_ns
from interposer_engine import (
    AudioLimits,
    LanguageModel,
    Transcript,
    TranscriptSegment,
    TranscriptStream,
)
from interposer_serve._answering import (
    CLIENT_CLOSED_REQUEST,
    EventStream,
    cache_salt,
    disconnected,
)
from interposer_serve._errors import ApiError, Gone
from interposer_serve._format import compact_json
from interposer_serve._limits import Limits
from interposer_serve._speech_requests import SpeechBody
from interposer_serve._threads import in_daemon_thread

PATHS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
_STOP_SECONDS = 10.0  # for windows that are being decoded
_PLAIN = "text/plain; charset=utf-8"


class SpeechAnswering:
    """Transcribes the speech of requests, some at once, while others wait."""

    def __init__(self, lm: LanguageModel, limits: Limits) -> None:
        self._lm = lm
        self._limits = limits
        self._audio_limits = AudioLimits(
            limits.audio_bytes, limits.audio_seconds, limits.audio_samples
        )
        num_threads = lm.engine.scheduler.max_sequences
        self._capacity = num_threads + limits.queue
        self._threads = ThreadPoolExecutor(num_threads, "interposer-speech")
        self._jobs: set[_Job] = set()

    @property
    def num_unfinished(self) -> int:
        """Number of transcripts that run or wait."""
        return len(self._jobs)

    def end(self) -> None:
        """End every unfinished transcript with an error."""
        error = ApiError(
            503, "The server stopped before the answer was complete", code="server_ends"
        )
        for job in self._jobs:
            job.fail(error)

    async def stop(self) -> None:
        """Cancel all transcripts; a thread ends with its current window."""
        for job in self._jobs:
            job.fail(Gone())
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await in_daemon_thread(partial(self._threads.shutdown, cancel_futures=True))

    async def respond(self, request: Request, body: SpeechBody) -> Response:
        """Return the transcript of a request, whole or as a stream of events.

        Raises: ApiError: the queue is full, the deadline has passed, or the speech is unusable.
        """
        streams = body.streams
        if len(self._jobs) >= self._capacity:
            raise ApiError(
                429,
                f"{len(self._jobs)} transcripts are running or waiting; allowed are "
                f"{self._capacity}. Try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )

        settings = {**body.settings, "cache_salt": cache_salt(request, body.cache_salt)}

        def start() -> TranscriptStream:
            return self._lm.transcribe_stream(body.file, limits=self._audio_limits, **settings)

        job = _Job(start)
        self._jobs.add(job)
        self._threads.submit(job.run)
        if streams:
            events = self._events(request, job)
            try:
                # The first window is awaited, so that unusable speech gets a status of its own.
                first = await anext(events)
            except Gone:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return EventStream(_chained(first, events), partial(job.fail, Gone()), ApiError.event)
        async with self._watched(request, job):
            try:
                async for _ in job:
                    pass
            except Gone:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            transcript = job.transcript
            return await asyncio.to_thread(_response, transcript, body.response_format)

    @asynccontextmanager
    async def _watched(self, request: Request, job: _Job) -> AsyncIterator[None]:
        """Cancel a job at the deadline, when the client disconnects, or at the end of the block."""
        seconds = self._limits.deadline_seconds
        elapsed = (steady_time_ns() - int(request.state.received)) / 1e9
        late = ApiError(504, f"The answer took longer than {seconds:g} s", code="deadline_exceeded")
        deadline = asyncio.get_running_loop().call_later(seconds - elapsed, job.fail, late)
        watch = asyncio.create_task(_fail_on_disconnect(request, job))
        try:
            yield
        finally:
            deadline.cancel()
            watch.cancel()
            job.fail(Gone())
            self._jobs.discard(job)

    async def _events(self, request: Request, job: _Job) -> AsyncGenerator[bytes, None]:
        """Yield the events of each window, and the last event."""
        async with self._watched(request, job):
            async for segments in job:
                deltas = (segment.text for segment in segments)
                yield b"".join(_event("transcript.text.delta", delta=delta) for delta in deltas)
            fields = {"text": job.transcript.text, "usage": _usage(job.transcript)}
            yield _event("transcript.text.done", **fields) + b"data: [DONE]\n\n"


class _Job:
    """A transcript that a thread computes, and a task of the event loop reads."""

    def __init__(self, start: Callable[[], TranscriptStream]) -> None:
        self._start = start
        self._stream: TranscriptStream | None = None
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[tuple[TranscriptSegment, ...] | Exception | None]
        self._results = asyncio.Queue()
        self._is_cancelled = threading.Event()

    @property
    def transcript(self) -> Transcript:
        """The complete transcript, after the last window was read."""
        assert self._stream is not None
        return self._stream.transcript

    def run(self) -> None:
        """Decode the windows one after the other, in the job's thread."""
        try:
            if self._is_cancelled.is_set():
                return
            self._stream = self._start()
            for segments in self._stream:
                if self._is_cancelled.is_set():
                    return
                self._put(segments)
            self._put(None)
        except Exception as error:  # noqa: BLE001 - raised in the task that reads the transcript
            self._put(error)

    def fail(self, error: Exception) -> None:
        """Cancel the transcript after the current window; its reader gets ``error``."""
        self._is_cancelled.set()
        self._results.put_nowait(error)

    def _put(self, result: tuple[TranscriptSegment, ...] | Exception | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._results.put_nowait, result)
        except RuntimeError:  # the event loop is closed, so there is no reader
            self._is_cancelled.set()

    def __aiter__(self) -> _Job:
        return self

    async def __anext__(self) -> tuple[TranscriptSegment, ...]:
        """Return the segments of the next window.

        Raises:
            StopAsyncIteration: the transcript is complete.
            Exception: the error that ended the transcript early.
        """
        result = await self._results.get()
        if result is None:
            raise StopAsyncIteration
        if isinstance(result, Exception):
            raise result
        return result


async def _fail_on_disconnect(request: Request, job: _Job) -> None:
    await disconnected(request)
    job.fail(Gone())


async def _chained(
    first: bytes, events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


def _event(kind: str, **fields: object) -> bytes:
    return f"data: {compact_json({'type': kind, **fields})}\n\n".encode(errors="replace")


def _usage(transcript: Transcript) -> dict[str, object]:
    return {"type": "duration", "seconds": math.ceil(transcript.duration)}


def _response(transcript: Transcript, form: str) -> Response:
    """Return the response with a transcript in one of OpenAI's formats."""
    match form:
        case "text":
            return Response(transcript.text + "\n", media_type=_PLAIN)
        case "srt":
            return Response(transcript.to_srt(), media_type=_PLAIN)
        case "vtt":
            return Response(transcript.to_vtt(), media_type="text/vtt; charset=utf-8")
        case "json":
            return JSONResponse({"text": transcript.text, "usage": _usage(transcript)})
    segments = [
        {
            "id": index,
            "seek": round(segment.window_start * 100),
            "start": segment.start,
            "end": segment.end,
            "text": segment.text,
            "tokens": segment.token_ids,
            "temperature": segment.temperature,
            "avg_logprob": segment.mean_logprob,
            "compression_ratio": segment.compression_ratio,
            "no_speech_prob": segment.no_speech_probability,
        }
        for index, segment in enumerate(transcript.segments)
    ]
    return JSONResponse(
        {
            "task": transcript.task,
            "language": transcript.language_name,
            "duration": transcript.duration,
            "text": transcript.text,
            "segments": segments,
            "usage": _usage(transcript),
        }
    )
