"""The page chats, and shows what was chosen, in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from serve.tests.browser import Page, opened, program
from serve.tests.conftest import NAME, Served, serving
from tests.waiting import wait_until

from interposer_engine import LanguageModel, load
from interposer_serve import ModelSource

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]


@pytest.fixture
def chromium() -> str:
    found = program()
    if found is None:
        pytest.skip("needs Chromium. Try: apt-get install chromium")
    return found


@pytest.fixture
def page(chromium: str, served: Served, tmp_path: Path) -> Iterator[Page]:
    with opened(chromium, served.url, tmp_path) as page:
        page.wait("document.body?.dataset.explained === 'true'")
        yield page


def ask(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.click("#send")


def test_the_page_holds_a_conversation(page: Page, offline: LanguageModel) -> None:
    page.fill("#tokens", "12")
    messages = []
    # What is said is shown as it is, whatever it would be in the markup of a page.
    for text in ("import os", "<img src=x onerror=alert(1)>"):
        messages.append({"role": "user", "content": text})
        ask(page, text)
        page.wait("document.body.dataset.busy === 'false'")
        answer = offline.chat(messages, max_new_tokens=12).text
        messages.append({"role": "assistant", "content": answer})
    assert page.texts(".message") == [message["content"] for message in messages]
    assert page.evaluate("document.querySelector('#messages img')") is None
    assert page.text("#figures").startswith("12 tokens, first after ")
    page.click("#clear")
    assert page.texts(".message") == []
    assert page.complaints == []


def test_the_page_shows_selected_kernels_and_reasons(page: Page, served: Served) -> None:
    explanation = served.ask("/explanation").body
    assert page.texts("#models option") == [NAME]
    assert page.text("#model") == "1024 tokens of context"
    assert explanation["device"]["name"] in page.text("#device")
    assert page.texts("#notes li") == explanation["notes"]
    chosen = page.texts("#choices tr td:nth-child(3)")
    assert chosen == [f"{row['chosen']} ({row['provider']})" for row in explanation["choices"]]
    why = page.texts("#choices tr td:nth-child(4)")
    for text, row in zip(why, explanation["choices"], strict=True):
        assert text.startswith(row["why"])
        assert all(refusal["reason"] in text for refusal in row["refused"])
    assert page.complaints == []


def test_an_answer_can_be_stopped(page: Page, served: Served) -> None:
    running = served.lm.engine.scheduler.running
    page.fill("#tokens", "100000")
    ask(page, "import os")
    page.wait("document.querySelector('.message.assistant')?.textContent.length > 0")
    assert len(running) == 1
    page.click("#stop")
    page.wait("document.body.dataset.busy === 'false'")
    wait_until(lambda: not running)
    ask(page, " ")
    page.wait("document.body.dataset.busy === 'false'")
    assert page.texts(".message.error") == []


def test_the_page_chats_with_the_chosen_model(
    chromium: str, chat_folder: Path, tmp_path: Path
) -> None:
    load_model = partial(load, chat_folder, "float32", cache_tokens=1024)
    sources = [ModelSource(name=name, load=load_model) for name in ("first", "second")]
    with (
        serving(sources, None, default="second") as served,
        opened(chromium, served.url, tmp_path) as page,
    ):
        page.wait("document.body?.dataset.explained === 'true'")
        assert page.texts("#models option") == ["second", "first"]
        page.evaluate(
            "document.querySelector('#models').value = 'first';"
            "document.querySelector('#models').dispatchEvent(new Event('change'))"
        )
        page.wait("document.querySelector('#model').textContent === 'unloaded'")
        page.fill("#tokens", "2")
        ask(page, "import os")
        page.wait("document.querySelector('#model').textContent === '1024 tokens of context'")
        page.wait("document.querySelectorAll('#choices tr').length > 0")
        assert page.complaints == []


def test_refusals_and_keys_are_shown(chromium: str, lm: LanguageModel, tmp_path: Path) -> None:
    with serving(lm, keys=["open"]) as served, opened(chromium, served.url, tmp_path) as page:
        page.wait("document.querySelector('#device')?.textContent.includes('API key')")
        page.fill("#key", "open")
        page.wait("document.body.dataset.explained === 'true'")
        page.fill("#temperature", "-1")
        ask(page, "import os")
        page.evaluate("send('import os')")  # past the checks of the form
        page.wait("document.body.dataset.busy === 'false'")
        (error,) = page.texts(".message.error")
        assert error.startswith("temperature is -1; allowed is a number from 0")
