"""Models by name, from a hub on the loopback that speaks the protocol as far as it is asked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from huggingface_hub import constants
from models.adapt.tests.test_without_family import FAMILIES
from models.conftest import write_checkpoint
from safetensors.torch import load_file, save_file
from tests.adapter_files import write_adapter
from torch import Tensor

import interposer
from interposer.errors import CheckpointError, UnsupportedModelError
from interposer_engine import load, quantize

STDLIB = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
NAME = "acme/stdlib-lm"
NEEDED = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
pytestmark = pytest.mark.process


@dataclass
class Repository:
    """A model as the hub has it.

    Attributes:
        folder: its files, of whatever commit.
        commits: by branch or tag.
        gated: readable only with the token ``"granted"``.
        cut: the first transfer of a file ends after so many bytes, by its name.
        broken: files that the server refuses to give.
    """

    folder: Path
    commits: dict[str, str] = field(default_factory=lambda: {"main": "1" * 40})
    gated: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def files(self) -> dict[str, bytes]:
        """Return the content of each file by its name."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in found}


@dataclass
class Hub:
    """The repositories of a server, and what was asked of it.

    Attributes:
        fetched: names of files and the first byte that was asked for, in order.
        on_file: called with the name of a file that is sent.
    """

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    fetched: list[tuple[str, int]] = field(default_factory=list)
    on_file: Callable[[str], object] = lambda name: None


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@contextmanager
def served_hub() -> Iterator[Hub]:
    """Serve a hub within a ``with`` block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def _answer(self, *, with_body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        try:
            if parts[:2] == ["api", "models"]:
                self._tell(parts[2:])
            elif parts[2:3] != ["resolve"]:
                raise _Refused(404, "NotFound")
            else:
                self._send_file(parts, with_body)
        except _Refused as refused:
            self.send_response(refused.status)
            self.send_header("X-Error-Code", refused.code)
            self.send_header("X-Error-Message", refused.code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _repository(self, name: str) -> Repository:
        repository = self.hub.repositories.get(name)
        if repository is None:
            raise _Refused(404, "RepoNotFound")
        if repository.gated and self.headers.get("Authorization") != "Bearer granted":
            raise _Refused(403, "GatedRepo")
        return repository

    def _commit(self, repository: Repository, revision: str) -> str:
        if revision in repository.commits.values():
            return revision
        if revision not in repository.commits:
            raise _Refused(404, "RevisionNotFound")
        return repository.commits[revision]

    def _tell(self, parts: list[str]) -> None:
        """Answer ``NAMESPACE/NAME[/revision|tree/REVISION]``."""
        name, (what, revision) = "/".join(parts[:2]), [*parts[2:4], "revision", "main"][:2]
        # Descriptions of gated models are public, their files are not.
        repository = self.hub.repositories.get(name)
        if repository is None:
            raise _Refused(404, "RepoNotFound")
        commit = self._commit(repository, revision)
        files = repository.files()
        said: object = {"id": name, "sha": commit, "siblings": [{"rfilename": f} for f in files]}
        if what == "tree":
            said = [
                {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}
                for path, content in files.items()
            ]
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, parts: list[str], with_body: bool) -> None:
        """Answer ``NAMESPACE/NAME/resolve/REVISION/FILE``, or a part of it."""
        name, revision, file = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        repository = self._repository(name)
        commit, content = self._commit(repository, revision), repository.files().get(file)
        if content is None:
            raise _Refused(404, "EntryNotFound")
        if file in repository.broken:
            raise _Refused(403, "Forbidden")
        asked = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
        start = int(asked[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if not with_body:
            return
        self.hub.fetched.append((file, start))
        self.hub.on_file(file)
        if (length := repository.cut.pop(file, None)) is not None:
            self.wfile.write(content[start : start + length])
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(content[start:])


def _etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a hub with the shipped model, and let the library ask it and nobody else."""
    folder = tmp_path / "served"
    shutil.copytree(STDLIB, folder)
    with served_hub() as served:
        served.repositories[NAME] = Repository(folder)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield served


def test_a_hub_name_loads_the_same_model_as_its_folder(hub: Hub) -> None:
    prompt = "def main():"
    named = load(NAME, cache_tokens=512).generate(prompt, max_new_tokens=8)
    assert named == load(STDLIB, cache_tokens=512).generate(prompt, max_new_tokens=8)


def test_only_needed_files_are_downloaded_and_only_once(hub: Hub) -> None:
    folder = hub.repositories[NAME].folder
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    for other in (
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "onnx/config.json",
        "flax.msgpack",
    ):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"not for us")
    load(NAME, cache_tokens=512)
    assert {name for name, _ in hub.fetched} == NEEDED
    assert len(hub.fetched) == len(NEEDED)
    load(NAME, cache_tokens=512)
    assert len(hub.fetched) == len(NEEDED)


def test_only_the_shards_that_the_index_names_are_loaded(hub: Hub, tmp_path: Path) -> None:
    folder = hub.repositories[NAME].folder
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-all.safetensors")
    halves: dict[str, dict[str, Tensor]] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for number, (name, tensor) in enumerate(tensors.items()):
        halves[f"model-{number % 2 + 1}.safetensors"][name] = tensor
    for file, half in halves.items():
        save_file(half, folder / file)
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load(NAME, cache_tokens=512)
    fetched = {name for name, _ in hub.fetched if name.endswith(".safetensors")}
    assert fetched == {*halves}


def test_explaining_downloads_no_weights(hub: Hub) -> None:
    assert "rms_norm" in str(interposer.explain(NAME))
    assert "model.safetensors" not in {name for name, _ in hub.fetched}


def test_an_unsupported_model_is_refused_before_weights_are_downloaded(hub: Hub) -> None:
    config = hub.repositories[NAME].folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["Other"]}))
    with pytest.raises(UnsupportedModelError, match="Other"):
        load(NAME)
    assert "model.safetensors" not in {name for name, _ in hub.fetched}


@pytest.mark.slow
def test_a_model_without_family_is_downloaded_and_adapted(hub: Hub) -> None:
    model = write_checkpoint(FAMILIES["gemma"](), hub.repositories[NAME].folder)
    lm = load(NAME, "float32", cache_tokens=64)
    expected = model(torch.tensor([[5, 9, 3]])).logits[0]
    torch.testing.assert_close(lm.logits([5, 9, 3]), expected, rtol=1e-4, atol=1e-4)


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub) -> None:
    hub.repositories[NAME].commits["v2/final"] = "2" * 40
    for revision in ("v2/final", "2" * 40):
        lm = load(f"{NAME}@{revision}", cache_tokens=512)
        assert lm.path.name == "2" * 40
    with pytest.raises(CheckpointError, match="acme/stdlib-lm@v3: has no such revision"):
        load(f"{NAME}@v3")


def test_weights_are_of_the_commit_of_the_description(hub: Hub) -> None:
    repository = hub.repositories[NAME]
    moved = {"main": "2" * 40, "old": "1" * 40}
    hub.on_file = lambda name: repository.commits.update(moved) if name == "config.json" else None
    assert load(NAME, cache_tokens=512).path.name == "1" * 40
    assert repository.commits == moved


def test_an_interrupted_download_is_resumed(hub: Hub) -> None:
    # The library keeps whole pieces of 10 MiB.
    size = (STDLIB / "model.safetensors").stat().st_size
    hub.repositories[NAME].cut["model.safetensors"] = size - 1000
    lm = load(NAME, cache_tokens=512)
    starts = [start for name, start in hub.fetched if name == "model.safetensors"]
    assert starts == [0, 10 * 2**20]
    assert (lm.path / "model.safetensors").read_bytes() == (
        STDLIB / "model.safetensors"
    ).read_bytes()


def test_a_failed_download_is_reported_and_resumed(hub: Hub) -> None:
    hub.repositories[NAME].broken.add("model.safetensors")
    with pytest.raises(CheckpointError, match=f"{NAME}: cannot be fetched: .*403") as caught:
        load(NAME)
    assert "run it again: downloaded parts are kept" in str(caught.value)
    hub.repositories[NAME].broken.clear()
    load(NAME, cache_tokens=512)
    assert len(hub.fetched) == len(NEEDED)


def test_pickled_weights_are_refused_with_an_alternative(hub: Hub) -> None:
    folder = hub.repositories[NAME].folder
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors\nTry: choose a reposit"):
        load(NAME)
    assert "pytorch_model.bin" not in {name for name, _ in hub.fetched}


def test_an_adapter_by_name_downloads_two_files(hub: Hub, tmp_path: Path) -> None:
    sizes = {"model.layers.0.self_attn.q_proj": (256, 256)}
    folder = write_adapter(tmp_path / "adapter", sizes)
    (folder / "optimizer.pt").write_bytes(b"not for us")
    hub.repositories["team/adapter"] = Repository(folder)
    lm = load(STDLIB, cache_tokens=512)
    lm.load_adapter("named", "team/adapter@main")
    lm.load_adapter("own", folder)
    # Files are fetched side by side.
    assert sorted(name for name, _ in hub.fetched) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert torch.equal(lm.logits([1, 2], adapter="named"), lm.logits([1, 2], adapter="own"))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    hub.repositories["team/pickled"] = Repository(folder)
    with pytest.raises(CheckpointError, match=r"is missing\nTry: save it as safetensors"):
        lm.load_adapter("pickled", "team/pickled")


def test_a_missing_model_a_gated_one_and_no_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="neither a folder here nor a model at http"):
        load("acme/nothing")
    hub.repositories[NAME].gated = True
    with pytest.raises(CheckpointError, match=f"is gated\nTry: ask for access at {hub.url}/acme"):
        load(NAME)
    monkeypatch.setenv("HF_TOKEN", "granted")
    load(NAME, cache_tokens=512)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load(NAME, cache_tokens=512)
    with pytest.raises(CheckpointError, match="not in the cache\nTry: unset HF_HUB_OFFLINE"):
        load("acme/other")


def test_a_folder_stays_a_folder(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(STDLIB, tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    load(NAME, cache_tokens=512)
    assert not hub.fetched
    with pytest.raises(CheckpointError, match="nothing-of-this-name: does not exist"):
        load("nothing-of-this-name")
    with pytest.raises(CheckpointError, match="does not exist"):
        load("./acme/nothing")


@pytest.mark.slow
def test_a_model_is_quantized_by_name(hub: Hub, tmp_path: Path) -> None:
    quantize(NAME, tmp_path / "quantized", scheme="int8")
    assert load(tmp_path / "quantized", cache_tokens=512).generate("def", max_new_tokens=2)


@pytest.mark.slow
def test_commands_respect_the_settings_of_the_hub_library(hub: Hub, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "interposer_tools", "run", NAME, "--prompt", "def", "--json"],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"]
    assert (tmp_path / "home" / "hub" / "models--acme--stdlib-lm").is_dir()
