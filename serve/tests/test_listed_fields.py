"""The page of the server lists each field of the bodies that request text."""

from __future__ import annotations

import re
from pathlib import Path

from interposer_serve._requests import ChatBody, CompletionBody

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def test_the_page_of_the_server_lists_each_field_once() -> None:
    listing = PAGE.read_text().split("Supported fields: ")[1].split("\n\n")[0]
    listed = re.findall(r"`([a-z_]+)[^`]*`", listing)
    fields = {*CompletionBody.model_fields, *ChatBody.model_fields} - {"model"}
    assert sorted(listed) == sorted(fields)
