"""Adapters are asked for as models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serve.tests.conftest import NAME, Answer, events, serving
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


def test_adapters_come_and_go_while_the_server_runs(
    offline: LanguageModel, folders: dict[str, Path]
) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    key = {"authorization": "Bearer manager"}
    new = {"lora_name": "new", "lora_path": str(folders["one"])}
    plain = offline.generate("import os", max_new_tokens=16)[0].text
    with serving(offline, keys=["client"], management_keys=["manager"]) as server:

        def complete(name: str) -> Answer:
            body = {"model": name, "prompt": "import os"}
            return server.ask("/v1/completions", body, authorization="Bearer client")

        assert complete("new").status == 404
        assert server.ask(load, new, **key).body == {"status": "loaded", "lora_name": "new"}
        first = complete("new").body["choices"][0]["text"]
        assert first != plain
        again = server.ask(load, new, **key)
        assert (again.status, "'new'" in again.error["message"]) == (400, True)
        other = {**new, "lora_path": str(folders["two"]), "load_inplace": True}
        assert server.ask(load, other, **key).status == 200
        assert complete("new").body["choices"][0]["text"] not in (first, plain)
        assert server.ask(unload, {"lora_name": "new"}, **key).status == 200
        assert complete("new").status == 404
        assert server.ask(unload, {"lora_name": "new"}, **key).status == 400
        assert server.ask(load, {**new, "lora_path": "/nothing"}, **key).status == 400
        taken = server.ask(load, {**new, "lora_name": NAME}, **key)
        assert (taken.status, taken.error["param"]) == (400, "lora_name")
    assert "new" not in offline.adapters


def test_only_a_management_key_changes_the_server(
    offline: LanguageModel, folders: dict[str, Path]
) -> None:
    path, body = "/v1/load_lora_adapter", {"lora_name": "new", "lora_path": str(folders["one"])}
    with serving(offline, keys=["client"], management_keys=["manager"]) as server:
        for key in ("client", "other", ""):
            assert server.ask(path, body, authorization=f"Bearer {key}").status == 401
        assert server.ask("/v1/models", authorization="Bearer manager").status == 401
    with serving(offline) as server:
        assert server.ask(path, body).status == 404
    with pytest.raises(ConfigError, match="is an API key and a management key"):
        application(offline, NAME, keys=["same"], management_keys=["same"])
