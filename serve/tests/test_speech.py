"""A model that hears behind the server: transcripts as OpenAI's client asks for them."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from models.engine.tests.test_audio import wav
from models.tests.speech_checkpoints import write_speech_model
from serve.tests.conftest import Answer, Served, events, read, serving
from tests.waiting import WAIT_SECONDS, wait_until

from interposer_engine import LanguageModel, load
from interposer_serve import Limits
from interposer_serve._errors import ApiError
from interposer_serve._forms import parse_form

NAME = "whisper"
PATH = "/v1/audio/transcriptions"
PROCESS = [pytest.mark.process, pytest.mark.xdist_group("serve")]


def form(**fields: Any) -> bytes:
    """Return the body of a form; bytes are the content of files."""
    parts = []
    for name, value in fields.items():
        for item in value if isinstance(value, list) else [value]:
            file = '; filename="a.wav"' if isinstance(item, bytes) else ""
            kind = "\r\nContent-Type: audio/wav" if file else ""
            head = f'--XX\r\nContent-Disposition: form-data; name="{name}"{file}{kind}\r\n\r\n'
            parts.append(head.encode() + (item if file else str(item).encode()) + b"\r\n")
    return b"".join(parts) + b"--XX--\r\n"


FORM = "multipart/form-data; boundary=XX"


def sound(seconds: float) -> bytes:
    count = round(seconds * 16000)
    noise = torch.randn(count, generator=torch.Generator().manual_seed(1))
    return wav((noise * torch.linspace(0.01, 0.2, count)).clamp(-1, 1))


SPEECH = sound(1.7)
# Takes the likeliest tokens, as 0 does, but retries no window at temperatures that draw others.
STEADY = 1e-6


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    path = tmp_path_factory.mktemp(NAME)
    write_speech_model(path)
    return load(path, "float32", platform="cpu", cache_tokens=640, max_sequences=4)


@pytest.fixture(scope="module")
def heard(hearing: LanguageModel) -> Iterator[Served]:
    limits = Limits(audio_bytes=200_000, audio_seconds=5.0)
    with serving(hearing, NAME, limits=limits) as running:
        yield running


def ask(served: Served, path: str = PATH, **fields: Any) -> Answer:
    content = form(**{"file": SPEECH, "model": NAME, **fields})
    request = urllib.request.Request(served.url + path, content, {"content-type": FORM})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            return read(answer)
    except urllib.error.HTTPError as error:
        return read(error)


class TestServed:
    pytestmark = PROCESS

    def test_the_openai_client_gets_transcripts(
        self, heard: Served, hearing: LanguageModel
    ) -> None:
        with openai.OpenAI(base_url=f"{heard.url}/v1", api_key="none") as client:
            audio = client.audio
            plain = audio.transcriptions.create(
                model=NAME,
                file=("a.wav", SPEECH),
                temperature=STEADY,
                language="en",
                timeout=WAIT_SECONDS,
            )
            verbose: Any = audio.transcriptions.create(
                model=NAME,
                file=("a.wav", SPEECH),
                temperature=STEADY,
                language="en",
                response_format="verbose_json",
                timestamp_granularities=["segment"],
            )
            text: Any = audio.transcriptions.create(
                model=NAME,
                file=("a.wav", SPEECH),
                temperature=STEADY,
                response_format="text",
                language="de",
            )
            with warnings.catch_warnings():
                # The newest release of the client deprecates translations.
                warnings.simplefilter("ignore", DeprecationWarning)
                translated = audio.translations.create(
                    model=NAME, file=("a.wav", SPEECH), temperature=STEADY
                )
            stream = audio.transcriptions.create(
                model=NAME, file=("a.wav", SPEECH), temperature=STEADY, language="en", stream=True
            )
            parts: list[Any] = [*stream]
        assert plain.text
        assert translated.text is not None
        assert (verbose.language, verbose.duration) == ("english", 1.7)
        assert verbose.text == "".join(each.text for each in verbose.segments).strip()
        assert [each.id for each in verbose.segments] == [*range(len(verbose.segments))]
        assert verbose.segments[-1].seek > 0
        assert text.endswith("\n")
        assert {part.type for part in parts[:-1]} == {"transcript.text.delta"}
        assert parts[-1].type == "transcript.text.done"
        assert "".join(part.delta for part in parts[:-1]).strip() == parts[-1].text

    def test_texts_and_times_are_those_without_a_server(
        self, heard: Served, hearing: LanguageModel
    ) -> None:
        expected = hearing.transcribe(SPEECH, language="en", temperature=STEADY)
        fields: dict[str, Any] = {"language": "en", "temperature": STEADY}
        body = ask(heard, response_format="verbose_json", **fields).body
        assert body["text"] == expected.text
        assert [(s["start"], s["end"]) for s in body["segments"]] == [
            (s.start, s.end) for s in expected.segments
        ]
        assert ask(heard, **fields).body["text"] == expected.text
        assert ask(heard, response_format="srt", **fields).body == expected.to_srt()
        assert ask(heard, response_format="vtt", **fields).body == expected.to_vtt()
        streamed = ask(heard, stream="true", **fields)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *deltas, done = events(streamed.body)
        assert "".join(delta["delta"] for delta in deltas).strip() == expected.text
        assert done["usage"] == {"type": "duration", "seconds": 2}

    @pytest.mark.parametrize(
        ("fields", "status", "reason"),
        [
            ({"response_format": "xml"}, 400, "response_format is 'xml'; allowed is 'json'"),
            ({"temperature": "warm"}, 400, "temperature is 'warm'; allowed is a number from 0"),
            ({"temperature": 2}, 400, "temperature is 2.0; allowed is a number from 0 to 1"),
            ({"language": "klingon"}, 400, "'klingon', which the model does not know"),
            ({"stream": "yes"}, 400, "stream is 'yes'; allowed is true or false"),
            ({"stream": "true", "response_format": "srt"}, 400, "allowed with stream are 'json'"),
            ({"timestamp_granularities[]": ["word"]}, 400, "times of single words"),
            ({"beam_size": 5}, 400, "beam_size"),
            ({"file": "a text"}, 400, "file is a text; allowed is a file"),
            ({"file": b"no sound"}, 400, "not a WAV file|is not WAV, FLAC, MP3"),
            ({"file": b"no sound", "stream": "true"}, 400, "not a WAV file|is not WAV, FLAC, MP3"),
            ({"file": sound(5.5)}, 400, r"lasts 6 seconds, the limit is 5"),
            ({"file": bytes(200_001)}, 413, "more than the allowed 200000 bytes"),
            ({"model": "other"}, 404, "other"),
        ],
        ids=str,
    )
    def test_unusable_requests_are_refused(
        self, heard: Served, fields: dict[str, Any], status: int, reason: str
    ) -> None:
        answer = ask(heard, **fields)
        assert answer.status == status
        assert re.search(reason, answer.error["message"])

    def test_a_model_that_hears_has_no_chats_and_others_no_transcripts(
        self, heard: Served, served: Served
    ) -> None:
        chat = heard.ask("/v1/chat/completions", {"model": NAME, "messages": []})
        assert chat.status == 404
        assert served.ask(PATH, b"{}").status == 404
        (entry,) = heard.ask("/v1/models").body["data"]
        assert entry["capabilities"] == ["transcription"]

    def test_forms_of_foreign_web_pages_are_refused(self, heard: Served) -> None:
        content = form(file=SPEECH, model=NAME)
        foreign = heard.ask(PATH, content, content_type=FORM, origin="https://evil.example")
        assert (foreign.status, foreign.error["code"]) == (403, "wrong_origin")
        own = heard.ask(PATH, content, content_type=FORM, origin=heard.url)
        assert own.status == 200
        as_json = heard.ask(PATH, {"model": NAME})
        assert as_json.status == 415

    def test_a_full_queue_refuses_transcripts(self, hearing: LanguageModel) -> None:
        with serving(hearing, NAME, limits=Limits(queue=0)) as served, ThreadPoolExecutor() as pool:
            endpoints = served.app.state.models.loaded(NAME)
            with hearing.engine.lock:  # so that no transcript ends
                running = [pool.submit(ask, served) for _ in range(4)]
                wait_until(lambda: endpoints.num_unfinished == 4, "four transcripts")
                refused = ask(served)
            assert (refused.status, refused.error["code"]) == (429, "queue_full")
            assert [each.result().status for each in running] == [200] * 4
            assert ask(served).status == 200
            assert not endpoints.num_unfinished

    def test_a_late_transcript_ends_with_an_error(self, hearing: LanguageModel) -> None:
        with serving(hearing, NAME, limits=Limits(deadline_seconds=1.0)) as served:
            with hearing.engine.lock:  # so that no transcript ends
                answer = ask(served)
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")

    def test_salts_separate_the_sounds_of_a_client(
        self, heard: Served, hearing: LanguageModel
    ) -> None:
        num_encoded: list[int] = []
        convolution: torch.nn.Module = hearing.engine.model.get_submodule("encoder.conv1")
        hook = convolution.register_forward_hook(
            lambda _, inputs, __: num_encoded.append(len(inputs[0]))
        )
        speech, counts = sound(0.4), []
        try:
            for salt in ("a", "a", "b"):
                before = len(num_encoded)
                answer = ask(heard, file=speech, temperature=STEADY, language="en", cache_salt=salt)
                assert answer.status == 200
                counts.append(len(num_encoded) - before)
        finally:
            hook.remove()
        first, repeated, other = counts
        assert repeated < first == other
        refused = ask(heard, file=speech, cache_salt="a" * 1025)
        assert (refused.status, refused.error["param"]) == (400, "cache_salt")

    def test_the_document_describes_the_form(self, heard: Served) -> None:
        document = heard.ask("/openapi.json").body
        operation = document["paths"][PATH]["post"]
        (kind,) = operation["requestBody"]["content"]
        assert kind == "multipart/form-data"
        fields = document["components"]["schemas"]["TranscriptionBody"]["properties"]
        assert fields["file"]["format"] == "binary"
        assert {"language", "prompt", "response_format", "stream"} <= set(fields)


def test_a_form_has_texts_lists_and_files() -> None:
    content = form(file=b"\r\n--X\0", model="m", **{"names[]": ["a", "b"]})
    expected = {"file": b"\r\n--X\0", "model": "m", "names": ["a", "b"]}
    assert parse_form(content, FORM) == expected
    assert parse_form(content, 'Multipart/Form-Data; charset=x; boundary="XX"') == expected


@pytest.mark.parametrize(
    ("content", "kind", "reason"),
    [
        (form(a=1), "multipart/form-data", "no valid boundary"),
        (form(a=1), "multipart/form-data; boundary=YY", "without its boundary"),
        (form(a=1)[:-6], FORM, "cut off"),
        (form(**{f"n{i}": 1 for i in range(65)}), FORM, "too many parts"),
        (form(a=[1, 2]), FORM, "field 'a' twice"),
        (b"--XX\r\nno header\r\n--XX--", FORM, "has no header"),
        (b"--XX\r\nContent-Type: text/plain\r\n\r\na\r\n--XX--", FORM, "has no name"),
        (form(a="b").replace(b"b\r\n", b"\xff\r\n"), FORM, "a is no text in UTF-8"),
        (b"", FORM, "without its boundary"),
    ],
    ids=range(9),
)
def test_malformed_forms_are_refused(content: bytes, kind: str, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        parse_form(content, kind)
