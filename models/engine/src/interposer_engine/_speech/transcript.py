"""Transcripts: texts of speech with times, and their forms as subtitles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from interposer_engine._speech.languages import language_names


@dataclass(frozen=True, slots=True)
class TranscriptSegment:
    """A part of a transcript, about a sentence.

    Attributes:
        start, end: Seconds from the start of the sound.
        text: The text, with a leading space if the model wrote one.
        token_ids: Tokens of the segment, with timestamps.
        window_start: Seconds from the start of the sound to that of the window with the segment.
        language: Code of the spoken language, such as "en".
        temperature: Sampling temperature of the window.
        mean_logprob: Mean log probability of the window's tokens.
        compression_ratio: Bytes of the window's text divided by its compressed size; large for
            repeated text.
        no_speech_probability: Probability that the window holds no speech.
    """

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    window_start: float
    language: str
    temperature: float
    mean_logprob: float
    compression_ratio: float
    no_speech_probability: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text of a sound.

    Attributes:
        text: The text of all segments.
        segments: The segments in order.
        language: Code of the spoken language, such as "en"; "" if nothing was said.
        duration: Seconds of the sound.
        task: "transcribe", or "translate" for a text in English.
    """

    text: str
    segments: tuple[TranscriptSegment, ...]
    language: str
    duration: float
    task: str

    @classmethod
    def of(cls, segments: Iterable[TranscriptSegment], duration: float, task: str) -> Transcript:
        """Join segments to a transcript."""
        parts = tuple(segments)
        text = "".join(segment.text for segment in parts).strip()
        return cls(text, parts, parts[0].language if parts else "", duration, task)

    @property
    def language_name(self) -> str:
        """English name of the language, such as "english"; the code if there is no name."""
        return language_names().get(self.language, self.language)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values of JSON."""
        return asdict(self)

    def to_srt(self) -> str:
        """Return SubRip subtitles, one for each segment."""
        blocks = [
            f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n"
            f"{_one_paragraph(segment.text)}\n"
            for number, segment in enumerate(self.segments, 1)
        ]
        return "\n".join(blocks)

    def to_vtt(self) -> str:
        """Return WebVTT subtitles, one for each segment."""
        blocks = [
            f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}\n"
            f"{_one_paragraph(segment.text).replace('-->', '->')}\n"
            for segment in self.segments
        ]
        return "\n".join(["WEBVTT\n", *blocks])


class TranscriptStream:
    """The segments of a sound, one window after the other, as they are decoded.

    Attributes:
        duration: Seconds of the sound.
    """

    def __init__(
        self, windows: Iterator[tuple[TranscriptSegment, ...]], duration: float, task: str
    ) -> None:
        self.duration = duration
        self._windows = windows
        self._task = task
        self._segments: list[TranscriptSegment] = []

    def __iter__(self) -> Iterator[tuple[TranscriptSegment, ...]]:
        """Yield the segments of each window; an empty tuple for a window without speech."""
        for segments in self._windows:
            self._segments += segments
            yield segments

    @property
    def transcript(self) -> Transcript:
        """The transcript of the windows that were read so far."""
        return Transcript.of(self._segments, self.duration, self._task)


def _one_paragraph(text: str) -> str:
    """Return a text without empty lines, which would end the subtitle."""
    return "\n".join(line for line in text.strip().splitlines() if line.strip())


def _time(seconds: float, separator: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    whole_seconds, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{whole_seconds:02}{separator}{milliseconds:03}"
