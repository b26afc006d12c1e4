"""A headless Chromium that is told what to do through two pipes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import WAIT_SECONDS, wait_until

# Without a network of its own, so that the page alone is asked for.
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--remote-debugging-pipe",
)


def program() -> str | None:
    """Return the path of Chromium, if it is installed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Page:
    """One page, by the DevTools protocol."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands = commands
        self._replies = os.fdopen(replies, "rb")
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Return the result of a command."""
        self._count += 1
        command: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]
            entry = message.get("params", {}).get("entry", {})
            is_complaint = entry.get("level") in ("warning", "error")
            if message.get("method") == "Runtime.exceptionThrown" or is_complaint:
                self.complaints.append(json.dumps(message["params"]))

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        wait_until(
            lambda: self.evaluate(condition),
            lambda: (condition, self.complaints, self.text("body")),
        )

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.evaluate(f"{elements}.map((one) => one.textContent)"))

    def fill(self, selector: str, text: str) -> None:
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(
            f"{element}.value = {json.dumps(text)}; {element}.dispatchEvent(new Event('change'))"
        )

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            part = os.read(self._replies.fileno(), 1 << 16)
            assert part, "Chromium has ended"
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)

    def close(self) -> None:
        self._replies.close()
        os.close(self._commands)


@contextmanager
def opened(chromium: str, url: str, profile: Path) -> Iterator[Page]:
    """Open ``url``, and close the browser afterwards."""
    to_read, commands = os.pipe()
    replies, to_write = os.pipe()
    script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
    command = ["bash", "-c", script, chromium, *OPTIONS, f"--user-data-dir={profile}"]
    environment = {**os.environ, "HOME": str(profile)}
    with (profile / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stderr=log, stdout=log, pass_fds=(to_read, to_write)
        )
    os.close(to_read)
    os.close(to_write)
    page = Page(commands, replies)
    try:
        page.call("Page.navigate", url=url)
        yield page
    finally:
        page.close()
        process.terminate()
        process.wait(WAIT_SECONDS)
