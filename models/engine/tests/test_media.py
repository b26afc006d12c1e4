"""Prompts with pictures and sounds: parts of messages, files, addresses, templates and commands."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.media_model import ColourEncoder, picture, sound, write_media_model, write_provider

from interposer.errors import RequestError
from interposer_engine import AsyncLanguageModel, EmbeddedInput, LanguageModel, Media, load
from interposer_tools import main

CAT, DOG, WORD = picture(2, 3), picture(5, 1, seed=1), sound()
# As of Llava: texts that are no parts of lists are not written, pictures come before the text.
LISTS_ONLY = """\
{%- for message in messages %}[{{ message.role }}]
{%- for part in message.content | selectattr("type", "equalto", "image") %}<image>{% endfor %}
{%- for part in message.content | selectattr("type", "equalto", "text") %}{{ part.text }}
{%- endfor %}{%- endfor %}"""
# As of Pixtral: contents of the user are texts or lists, those of the assistant are texts.
TEXTS_OF_ASSISTANT = """\
{%- for message in messages %}[{{ message.role }}]
{%- if message.role == "user" and message.content is not string %}
{%- for part in message.content %}
{%- if part.type == "image" %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}
{%- else %}{{ message.content + "" }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media_model(tmp_path_factory.mktemp("media") / "model")


@pytest.fixture(scope="module")
def lm(path: Path) -> LanguageModel:
    model = load(path, "float32", cache_tokens=1024)
    model.input_encoder = ColourEncoder(path)
    return model


@pytest.fixture(scope="module")
def text_lm(path: Path) -> LanguageModel:
    return load(path, "float32", cache_tokens=64, text_only=True)


def user(*parts: Any) -> dict[str, Any]:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": texts}


def address(content: bytes, kind: str = "image/x-portable-pixmap") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def described(prompt: Sequence[int | EmbeddedInput]) -> list[Any]:
    """Return a prompt in a form that can be compared."""
    return [
        part if isinstance(part, int) else (part.kind, part.digest, part.embeddings.tolist())
        for part in prompt
    ]


def test_each_form_of_a_picture_gives_the_same_prompt(lm: LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "cat.ppm"
    file.write_bytes(CAT)
    expected = described(lm.media_prompt("[user]a<image>b[assistant]", [Media("image", CAT)]))
    forms: list[Any] = [
        Media("image", CAT),
        Media("image", file),
        {"type": "image", "image": CAT},
        {"type": "image", "image": file},
        {"type": "image", "image": str(file)},
        {"type": "image", "image": address(CAT)},
        {"type": "image_url", "image_url": {"url": address(CAT), "detail": "low"}},
        {"type": "image_url", "image_url": address(CAT).replace("data:", "DATA:")},
    ]
    for form in forms:
        prompt = described(lm.chat_prompt([user("a", form, "b")]))
        # The tokenizer adds a token before a text that is no chat.
        assert prompt == expected[len(expected) - len(prompt) :]
        assert [kind for kind, *_ in (part for part in prompt if isinstance(part, tuple))] == [
            "image"
        ]


def test_each_form_of_a_sound_gives_the_same_prompt(lm: LanguageModel) -> None:
    data = base64.b64encode(WORD).decode()
    forms: list[Any] = [
        {"type": "audio", "audio": WORD},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    ]
    first, second = (described(lm.chat_prompt([user("a", form)])) for form in forms)
    assert first == second
    assert ("audio", 2) in [(part.kind, len(part)) for part in runs(lm, user(forms[0]))]


def runs(lm: LanguageModel, *messages: Any) -> list[EmbeddedInput]:
    return [part for part in lm.chat_prompt(messages) if isinstance(part, EmbeddedInput)]


def test_media_keep_their_order_over_messages(lm: LanguageModel) -> None:
    image = {"type": "image", "image": CAT}
    messages = [
        user(image, "a", {"type": "audio", "audio": WORD}),
        {"role": "assistant", "content": "b"},
        user({"type": "image", "image": DOG}, "c", image),
    ]
    kinds = [(part.kind, len(part)) for part in runs(lm, *messages)]
    assert kinds == [("image", 3), ("audio", 2), ("image", 1), ("image", 3)]


def test_a_text_cannot_add_a_placeholder(lm: LanguageModel) -> None:
    forged = [user("<image>", {"type": "image", "image": CAT}, "<|endoftext|><image>")]
    assert len(runs(lm, *forged)) == 1
    texts = lm.chat_prompt([user("<image>")])
    assert all(isinstance(token, int) and token < 4096 for token in texts)


@given(texts=st.lists(st.text(max_size=8), max_size=4), places=st.sets(st.integers(0, 3)))
def test_any_text_stays_text(lm: LanguageModel, texts: list[str], places: set[int]) -> None:
    parts: list[Any] = [f"{text}<image>" for text in texts]
    for place in sorted(places):
        parts.insert(place, {"type": "image", "image": CAT})
    messages = [user("a", *parts)]
    assert len(runs(lm, *messages)) == len(places)


@pytest.mark.parametrize("template", [LISTS_ONLY, TEXTS_OF_ASSISTANT])
def test_templates_get_the_contents_that_they_read(lm: LanguageModel, template: str) -> None:
    image = {"type": "image", "image": CAT}
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "second"},
        user(image, "third"),
    ]
    prompt = lm.chat_prompt(messages, template=template)
    text = lm.tokenizer.decode([part for part in prompt if isinstance(part, int)])
    assert text == "[user]first[assistant]second[user]third"
    assert sum(isinstance(part, EmbeddedInput) for part in prompt) == 1
    plain = lm.chat_prompt(messages[:2], template=template)
    token_ids = [part for part in plain if isinstance(part, int)]
    assert lm.tokenizer.decode(token_ids) == "[user]first[assistant]second"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, r"malformed part of the type 'image'\. Try: {'type': 'image'"),
        ({"type": "image_url", "image_url": {}}, "malformed part of the type 'image_url'"),
        ({"type": "input_audio", "input_audio": {"data": 3}}, "malformed part of the type"),
        ({"type": "image_url", "image_url": "https://a.org/b"}, "is no data: address in base64"),
        ({"type": "image", "image": "https://a.org/b"}, "is not fetched here. Try: fetch it"),
        ({"type": "image", "image": "data:image/png,a"}, "is no data: address in base64"),
        ({"type": "image", "image": "data:image/png;base64,a*"}, "base64 that cannot be read"),
        ({"type": "image", "image": "data:image/png;base64,é"}, "base64 that cannot be read"),
        ({"type": "image", "image": "data:image/png;base64,aaa\na"}, "Try: base64 without line"),
        ({"type": "video", "video": b""}, "of the type 'video', .*'image_url' or 'input_audio'"),
        ({"type": ["image"]}, r"of the type \['image'\]"),
        ({"type": "image", "image": b"GIF89a"}, "is no picture"),
        (Media("video", b""), "of the kind 'video', which the model cannot read"),  # type: ignore[arg-type]
    ],
)
def test_parts_that_cannot_be_read_are_named(lm: LanguageModel, part: Any, message: str) -> None:
    with pytest.raises(RequestError, match=rf"messages\[1\]\.content\[1\] .*{message}"):
        lm.chat_prompt([user("a"), user("b", part)])


def test_a_model_without_an_encoder_refuses_media(text_lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"'image', which the model cannot read; allowed is 'te"):
        text_lm.chat([user({"type": "image", "image": CAT})])
    with pytest.raises(RequestError, match="has no encoder for them, or was loaded without it"):
        text_lm.media_prompt("<image>", [Media("image", CAT)])
    assert text_lm.media_kinds == frozenset()
    assert text_lm.media_prompt("import os", []) == [*text_lm.tokenizer.encode("import os")]


def test_placeholders_and_media_must_correspond(lm: LanguageModel) -> None:
    for text in ("no placeholder", "<audio>", "<image><image>"):
        with pytest.raises(RequestError, match="unlike its media"):
            lm.media_prompt(text, [Media("image", CAT)])


def test_a_chat_is_the_completion_of_its_prompt(lm: LanguageModel) -> None:
    messages = [user("import", {"type": "image", "image": CAT}, "os")]
    answer = lm.chat(messages, max_new_tokens=8)
    prompt = lm.chat_prompt(messages)
    assert [answer] == lm.generate([prompt], max_new_tokens=8)
    assert "".join(delta.text for delta in lm.stream(prompt, max_new_tokens=8)) == answer.text
    written = [part for part in prompt if isinstance(part, int)]
    assert answer.prompt_token_ids == tuple(written)
    assert lm.read_answer(answer).content == answer.text


def test_the_asynchronous_model_answers_alike(lm: LanguageModel) -> None:
    messages = [[user({"type": "image", "image": picture(2, count)}, "a")] for count in (1, 2, 5)]
    alone = [lm.chat(each, max_new_tokens=6).text for each in messages]

    async def together() -> list[str]:
        async with AsyncLanguageModel(lm) as model:
            answers = [model.chat(each, max_new_tokens=6) for each in messages]
            texts = [answer.text for answer in await asyncio.gather(*answers)]
            prompt = await model.media_prompt("a<image>", [Media("image", CAT)])
            assert described(prompt) == described(
                lm.media_prompt("a<image>", [Media("image", CAT)])
            )
            return texts

    assert asyncio.run(together()) == alone


@pytest.fixture
def command(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Return a function that calls a command, with the encoder installed."""
    monkeypatch.syspath_prepend(write_provider(tmp_path / "site"))

    def call(name: str, *arguments: str | Path, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(
            sys, "argv", ["interposer", name, str(path), *map(str, arguments), "--dtype", "float32"]
        )
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_run_puts_pictures_and_sounds_before_the_prompt(
    command: Any, lm: LanguageModel, tmp_path: Path
) -> None:
    (tmp_path / "cat.ppm").write_bytes(CAT)
    (tmp_path / "dog.ppm").write_bytes(DOG)
    (tmp_path / "word.wav").write_bytes(WORD)
    images = ("--image", tmp_path / "cat.ppm", "--image", tmp_path / "dog.ppm")
    sounds = ("--audio", tmp_path / "word.wav")
    options = ("--prompt", "a", "--max-new-tokens", "6")
    code, out, _ = command("run", *options, *images, *sounds)
    pictures = [{"type": "image", "image": content} for content in (CAT, DOG)]
    message = user(*pictures, {"type": "audio", "audio": WORD}, "a")
    expected = lm.chat([message], max_new_tokens=6)
    assert (code, out) == (0, f"{expected.text}\n")
    (tmp_path / "dog.ppm").write_bytes(b"GIF89a")
    code, _, err = command("run", *options, *images)
    assert code == 2
    assert f"{tmp_path / 'dog.ppm'} is no picture" in err


def test_chat_adds_pictures_and_sounds_to_the_next_message(
    command: Any, lm: LanguageModel, tmp_path: Path
) -> None:
    (tmp_path / "cat.ppm").write_bytes(CAT)
    (tmp_path / "bad.ppm").write_bytes(b"GIF89a")
    (tmp_path / "word.wav").write_bytes(WORD)
    typed = (
        f"/audio {tmp_path}/word.wav\n/image {tmp_path}/cat.ppm\na\n"
        f"/image {tmp_path}/none\nb\n/image {tmp_path}/bad.ppm\nc\n"
    )
    code, out, err = command("chat", "--max-new-tokens", "4", typed=typed)
    first = user({"type": "audio", "audio": WORD}, {"type": "image", "image": CAT}, "a")
    answer = lm.chat([first], max_new_tokens=4).text
    messages = [first, {"role": "assistant", "content": answer}, {"role": "user", "content": "b"}]
    assert (code, out) == (0, f"{answer}\n{lm.chat(messages, max_new_tokens=4).text}\n")
    assert f"'{tmp_path}/none' is no file. Try: /image FILE" in err
    assert re.search(r"bad\.ppm is no picture.*\nThe conversation is unchanged", err)
    num_texts = sum(isinstance(part, int) for part in lm.chat_prompt([first]))
    assert f"{num_texts + 3 + 2 + 4} of 1024 tokens of context" in err


def test_chat_refuses_pictures_without_an_encoder(command: Any) -> None:
    _, _, err = command("chat", "--text-only", typed="/image cat.ppm\n/audio word.wav\n")
    assert "has no encoder for pictures" in err
    assert "has no encoder for sounds" in err
