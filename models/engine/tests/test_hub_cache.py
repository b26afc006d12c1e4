"""The commands ``list``, ``pull`` and ``remove`` manage the models in the hub library's cache."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from models.engine.tests.test_hub_models import NAME, NEEDED, STDLIB, Repository, served_hub
from tests.commands import Command

from interposer_engine import load

pytestmark = pytest.mark.process


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the library use an empty cache, which does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def test_an_empty_cache_is_listed_with_the_next_action(cache: Path, command: Command) -> None:
    code, out, _ = command("list")
    assert code == 0
    assert out == "No model is in the cache. Try: interposer pull Qwen/Qwen3-0.6B\n"
    assert json.loads(command("list", "--json")[1]) == {"version": 1, "models": []}


def test_a_model_is_pulled_listed_and_removed(
    cache: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "served"
    shutil.copytree(STDLIB, folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickled weights of another program")
    with served_hub() as hub:
        hub.repositories[NAME] = Repository(folder)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        code, out, _ = command("pull", NAME)
        assert code == 0
        assert {name for name, _ in hub.fetched} == NEEDED
        assert out.startswith(f"{NAME}: 1")
        assert str(cache) in out
        code, _, err = command("pull", "acme/nothing")
        assert code == 1
        assert "neither a folder here nor a model at http" in err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load(NAME, cache_tokens=512).generate("def", max_new_tokens=2)
    code, out, _ = command("list")
    title, row = out.splitlines()
    assert title.split() == ["name", "revision", "size", "last", "used", "loads"]
    assert row.split()[:2] == [NAME, "main"]
    assert row.endswith("  yes")
    (model,) = json.loads(command("list", "--json")[1])["models"]
    assert (model["commit"], model["refs"], model["loads"]) == ("1" * 40, ["main"], True)

    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    code, out, _ = command("remove", NAME)
    assert (code, cache.exists()) == (1, True)
    assert "Remove this and free 1" in out
    assert len(json.loads(command("list", "--json")[1])["models"]) == 1
    code, out, _ = command("remove", f"{NAME}@main", "--yes")
    assert code == 0
    assert out.endswith(" MB freed\n")
    assert json.loads(command("list", "--json")[1])["models"] == []


def test_models_that_do_not_load_are_listed_with_the_reason(cache: Path, command: Command) -> None:
    texts = {
        "unknown": {"config.json": '{"architectures": ["AcmeForCausalLM"]}'},
        "adapter": {"adapter_config.json": "{}"},
        "half": {"config.json": '{"architectures": ["LlamaForCausalLM"]}'},
        "corrupt": {"config.json": "{"},
    }
    for name, files in texts.items():
        repository = cache / f"models--acme--{name}"
        snapshot = repository / "snapshots" / ("2" * 40)
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("2" * 40)
        for file, text in files.items():
            (snapshot / file).write_text(text)
    models = json.loads(command("list", "--json")[1])["models"]
    reasons = {model["name"]: model["reason"] for model in models}
    assert reasons.pop("acme/corrupt").startswith("is not valid JSON")
    assert reasons == {
        "acme/unknown": "no model family for AcmeForCausalLM",
        "acme/adapter": "a LoRA adapter",
        "acme/half": "1 of 1 weight files are missing",
    }


def test_a_wrong_name_gets_the_next_action(
    cache: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = command("remove", "acme/nothing", "--yes")
    assert code == 2
    assert "Unknown cached model 'acme/nothing'" in err
    assert "There is no cached model." in err
    assert "`interposer list` lists its models." in err
    code, _, err = command("pull", "nothing")
    assert code == 2
    assert err == "error: 'nothing' is no name on a hub. Try: a name such as Qwen/Qwen3-0.6B\n"
    (tmp_path / "acme" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "'acme/folder' is a path on this disk" in command("pull", "acme/folder")[2]
