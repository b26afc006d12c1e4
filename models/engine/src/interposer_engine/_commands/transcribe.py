"""The subcommand ``interposer transcribe``, which writes the text of a sound.

Heavy modules are imported inside the command, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from interposer_engine._commands.run import discover_plugins, load_with_progress
from interposer_engine.options import Values, load_options, takes
from interposer_tools.imports import frozen_imports
from interposer_tools.options import Kernels, Locked, PlatformName, policy


class TranscriptFormat(StrEnum):
    """Forms of a transcript on standard output."""

    TEXT = "text"
    JSON = "json"
    SRT = "srt"
    VTT = "vtt"


class Task(StrEnum):
    """Text in the spoken language, or a translation to English."""

    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"


# A sound is decoded window by window, so that one request runs at a time.
@takes(options=load_options(without=("max_sequences", "prefix_cache")))
def transcribe(
    model_dir: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, or name on the hub such as openai/whisper-large-v3-turbo.",
        ),
    ],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="The sound: a WAV file; other formats need soundfile. - for stdin."
        ),
    ],
    *,
    form: Annotated[
        TranscriptFormat, typer.Option("--format", help="Form of the result.")
    ] = TranscriptFormat.TEXT,
    language: Annotated[
        str | None,
        typer.Option(help="Spoken language, such as en or english; detected by default."),
    ] = None,
    task: Annotated[
        Task, typer.Option(help="translate writes the text in English.")
    ] = Task.TRANSCRIBE,
    prompt: Annotated[
        str, typer.Option(help="Text before the sound, such as names and terms.")
    ] = "",
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; by default, rising from 0 for bad texts."),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option(help="Let the model write timestamps, which end its segments.")
    ] = True,
    options: Values,
    platform: PlatformName = None,
    kernel: Kernels = None,
    locked: Locked = False,
) -> None:
    """Write the text of speech, segment by segment."""
    config = policy(kernel, platform, locked)
    with frozen_imports():
        discover_plugins(config)
        from interposer_engine._loader import load

    audio = sys.stdin.buffer.read() if file == "-" else file
    lm = load_with_progress(load, model_dir, config=config, **options)
    fixed = {} if temperature is None else {"temperature": temperature}
    settings: dict[str, Any] = {
        **fixed,
        "language": language,
        "task": task.value,
        "prompt": prompt,
        "timestamps": timestamps,
    }
    if form is TranscriptFormat.TEXT:
        for segments in lm.transcribe_stream(audio, **settings):
            for segment in segments:
                print(segment.text.strip(), flush=True)
        return
    transcript = lm.transcribe(audio, **settings)
    if form is TranscriptFormat.JSON:
        print(json.dumps(transcript.to_dict(), indent=2, ensure_ascii=False))
    else:
        print(transcript.to_srt() if form is TranscriptFormat.SRT else transcript.to_vtt(), end="")
