"""The pages on troubleshooting, errors and all pages are complete and speak of what exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from interposer import errors

# One worker parses the modules.
pytestmark = pytest.mark.xdist_group("layout")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
ANYTHING = "\0"


@functools.cache
def templates() -> frozenset[str]:
    """Return all texts in the sources, docstrings apart, with NUL for what is filled in."""
    found = set()
    folders = [
        ROOT / name
        for name in ("core", "models", "ops", "quantization", "sandbox", "testing", "tools")
    ]
    for folder in (*folders, *ROOT.glob("platforms/*"), *ROOT.glob("plugins/*")):
        for file in (folder / "src").rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            found |= {text(node) for node in ast.walk(tree) if id(node) not in prose}
    return frozenset(found)


def text(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text(value) for value in values)
        case ast.FormattedValue():
            return ANYTHING
        case _:
            return ""


def occurs(message: str) -> bool:
    """Say whether a text of the sources has the parts of ``message``, in order.

    Between two parts there is something that is filled in.
    """
    filled = f"[^{ANYTHING}]*{ANYTHING}(?s:.*)"
    parts = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    pattern = re.compile(rf"\s?{filled}".join(parts))
    return any(pattern.search(template) for template in templates())


@pytest.mark.parametrize("message", MESSAGES)
def test_message_occurs_in_the_sources(message: str) -> None:
    assert occurs(message)


def test_messages_are_told_once_and_say_something() -> None:
    assert len(MESSAGES) >= 25
    assert len(set(MESSAGES)) == len(MESSAGES)
    assert not [message for message in MESSAGES if len(re.findall("[a-zA-Z]", message)) < 8]


@pytest.mark.parametrize(
    "message",
    ["killed by lightning", "is corrupt: ... content and checksum", "Return the only one accepted"],
)
def test_message_that_nobody_says_is_noticed(message: str) -> None:
    assert not occurs(message)


def test_links_to_groups_lead_somewhere() -> None:
    linked = re.findall(r"^- \[.+\]\(#(.+)\)$", PAGE, re.MULTILINE)
    groups = [
        name.lower().replace(" ", "-") for name in re.findall("^## (.+)$", PAGE, re.MULTILINE)
    ]
    assert linked == groups


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n.endswith("Error")])
def test_every_error_is_documented(name: str) -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert f"`{name}`" in page


def test_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([a-z0-9-]+\.md)\)", index)) == pages


LINKS = re.compile(r"\]\(([a-z0-9./-]*\.md)?(?:#([a-z0-9-]+))?\)")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_links_lead_to_pages_and_their_headings(page: Path) -> None:
    for name, heading in LINKS.findall(page.read_text(encoding="utf-8")):
        target = page.parent / name if name else page
        assert target.is_file(), name
        headings = re.findall("^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub("[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}
        assert not heading or heading in anchors, f"{name}#{heading}"
