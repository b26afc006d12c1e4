"""Adapters are asked for as models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serve.tests.conftest import NAME, events, serving
from tests.adapter_files import write_adapter

from interposer.errors import ConfigError
from interposer_engine import LanguageModel
from interposer_serve import application

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve")]

SIZES = {"model.layers.1.self_attn.q_proj": (256, 256), "model.layers.2.mlp.down_proj": (256, 688)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, SIZES, seed=seed)
        for seed, name in enumerate(("one", "two"))
    }


@pytest.fixture(scope="module")
def adapted(offline: LanguageModel, folders: dict[str, Path]) -> Iterator[LanguageModel]:
    for name, folder in folders.items():
        offline.load_adapter(name, folder)
    yield offline
    for name in folders:
        offline.remove_adapter(name)


def test_an_adapter_is_requested_as_a_model(adapted: LanguageModel) -> None:
    expected = {
        name: adapted.generate("import os", adapter=None if name == NAME else name)[0].text
        for name in (NAME, "one", "two")
    }
    assert len({*expected.values()}) == 3
    with serving(adapted) as server:
        for name, text in expected.items():
            answer = server.complete(model=name).body
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
            parts = events(server.complete(model=name, stream=True).body)
            assert {part["model"] for part in parts} == {name}
            assert "".join(part["choices"][0]["text"] for part in parts) == text
        assert server.chat(model="one").body["model"] == "one"
        listed = server.ask("/v1/models").body["data"]
        assert [(entry["id"], entry.get("parent")) for entry in listed] == [
            (NAME, None),
            ("one", NAME),
            ("two", NAME),
        ]
        assert server.ask("/v1/models/two").body == listed[2]
        refused = server.complete(model="three")
        message = f"model is 'three'; allowed is 'one', 'two', '{NAME}'"
        assert (refused.status, refused.error["message"]) == (404, message)
        assert server.ask("/v1/models/three").status == 404


def test_the_model_and_an_adapter_must_have_different_names(adapted: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="The model and an adapter are both called 'one'"):
        application(adapted, "one")
