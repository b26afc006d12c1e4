"""Several models in one server: loaded on demand, unloaded, put to sleep, and changed."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from serve.tests.conftest import Answer, Served, events, serving
from tests.adapter_files import write_adapter
from tests.waiting import WAIT_SECONDS, wait_until

from interposer.errors import CheckpointError, ConfigError
from interposer_adapt import Encoder, load_encoder
from interposer_engine import LanguageModel, Meeting, MemoryNeed, load, send_weights
from interposer_serve import Limits, ModelSource, application
from interposer_serve._endpoints import Endpoints
from interposer_serve._errors import ApiError
from interposer_serve._models import Models
from interposer_serve._vectors import VectorEndpoints

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("serve-models")]

MANAGER = {"authorization": "Bearer manager"}
CLIENT = {"authorization": "Bearer client"}
LONG_STREAM = {"prompt": "import os", "max_tokens": 1000, "stream": True, "ignore_eos": True}
ADAPTER_SIZES = {
    "model.layers.1.self_attn.q_proj": (256, 256),
    "model.layers.2.mlp.down_proj": (256, 688),
}


@dataclass
class Loader:
    """Loads the shipped model, and keeps what it has loaded."""

    folder: Path
    loaded: list[LanguageModel] = field(default_factory=list)

    def __call__(self) -> LanguageModel:
        self.loaded.append(load(self.folder, "float32", cache_tokens=4096, max_sequences=8))
        return self.loaded[-1]

    @property
    def open(self) -> list[LanguageModel]:
        return [lm for lm in self.loaded if "closed" not in repr(lm)]


@dataclass(frozen=True)
class Several:
    """A server with several models."""

    served: Served
    loaders: Mapping[str, Loader]

    def ask(self, path: str, body: Any = None) -> Answer:
        return self.served.ask(path, body, **CLIENT)

    def manage(self, path: str, body: Any = None) -> Answer:
        return self.served.ask(path, b"" if body is None else body, **MANAGER)

    def complete(self, name: str, **fields: Any) -> Answer:
        body = {"model": name, "prompt": "import os", "max_tokens": 4, "temperature": 0, **fields}
        return self.ask("/v1/completions", body)

    def text(self, name: str) -> str:
        answer = self.complete(name)
        assert answer.status == 200, answer.body
        assert answer.body["model"] == name
        text: str = answer.body["choices"][0]["text"]
        return text

    def statuses(self) -> dict[str, str]:
        listed = self.ask("/v1/models").body["data"]
        return {entry["id"]: entry["status"]["value"] for entry in listed}


@contextmanager
def several(
    folder: Path,
    names: Collection[str] = ("a", "b"),
    *,
    max_loaded: int | None = None,
    limits: Limits | None = None,
    by_name: Mapping[str, Mapping[str, Any]] | None = None,
    **common: Any,
) -> Iterator[Several]:
    loaders = {name: Loader(folder) for name in names}
    sources = [
        ModelSource(
            name=name,
            **{"load": loaders[name], "path": folder, **common, **(by_name or {}).get(name, {})},
        )
        for name in names
    ]
    with serving(
        sources,
        None,
        max_loaded=max_loaded,
        limits=limits,
        keys=["client"],
        management_keys=["manager"],
    ) as served:
        yield Several(served, loaders)
    assert not any(loader.open for loader in loaders.values()), "the server closes its models"


def in_thread(call: Callable[[], Answer]) -> Future[Answer]:
    executor = ThreadPoolExecutor(1)
    future = executor.submit(call)
    executor.shutdown(wait=False)
    return future


def test_each_request_is_answered_by_the_model_that_it_names(chat_folder: Path) -> None:
    with several(chat_folder, ["a", "b", "c"]) as server:
        assert server.statuses() == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        expected = server.text("a")
        assert server.text("b") == expected
        assert server.statuses() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        for name in ("", None):
            body = {"model": name, "prompt": "import os", "max_tokens": 1}
            assert server.ask("/v1/completions", body).body["model"] == "a"
        without = server.ask("/v1/completions", {"prompt": "import os", "max_tokens": 1})
        assert without.body["model"] == "a"
        chat = {"model": "b", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert server.ask("/v1/chat/completions", chat).body["model"] == "b"
        assert server.ask("/v1/messages", chat).body["model"] == "b"
        stream = events(server.complete("b", stream=True).body)
        assert "".join(part["choices"][0]["text"] for part in stream) == expected
        unknown = server.complete("d")
        message = "model is 'd'; allowed is 'a', 'b', 'c'"
        assert (unknown.status, unknown.error["message"]) == (404, message)
        wrong = server.ask("/v1/completions", {"model": 3, "prompt": "import os"})
        assert (wrong.status, wrong.error["param"]) == (400, "model")
        names = {'model="a"', 'model="b"'}
        lines = server.ask("/metrics").body.splitlines()
        counted = [line for line in lines if line.startswith("interposer_generations_total{")]
        assert all(any(name in line for line in counted) for name in names)
        assert not any('model="c"' in line for line in lines)
        assert server.ask("/explanation?model=b").body["choices"]
        assert server.ask("/explanation?model=c").error["code"] == "model_not_loaded"
        assert server.ask("/v1/models/b").body["max_model_len"] == 1024
        assert server.ask("/v1/models/c").body["max_model_len"] is None


def test_a_model_is_unloaded_for_another_one(chat_folder: Path) -> None:
    with several(chat_folder, ["a", "b", "c"], max_loaded=2) as server:
        texts = [server.text(name) for name in "abcab"]
        assert len({*texts}) == 1
        # The model that was not used for the longest time goes: a for c, b for a, c for b.
        assert server.statuses() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        assert [len(server.loaders[name].loaded) for name in "abc"] == [2, 2, 1]
        assert [len(server.loaders[name].open) for name in "abc"] == [1, 1, 0]
        # Counters of unloaded models stay, their gauges do not.
        lines = server.ask("/metrics").body.splitlines()
        of_c = {line.partition("{")[0] for line in lines if 'model="c"' in line}
        assert "interposer_generated_tokens_total" in of_c
        assert "interposer_cache_pages" not in of_c


def test_models_are_unloaded_while_memory_is_short(chat_folder: Path) -> None:
    def need(size: int) -> MemoryNeed:
        return MemoryNeed(weight_bytes=size, free_bytes=100, total_bytes=100, device="cpu")

    sizes = {"a": 30, "b": 20, "c": 70}
    by_name = {name: {"memory": partial(need, size)} for name, size in sizes.items()}
    with several(chat_folder, sizes, by_name=by_name) as server:
        for name in "ab":
            server.text(name)
        assert server.statuses() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        server.text("c")  # 70 of 100 leave no room for 20, as caches need memory, too
        assert server.statuses() == {"a": "unloaded", "b": "unloaded", "c": "loaded"}


def test_a_model_in_use_is_not_unloaded(chat_folder: Path) -> None:
    with several(chat_folder, max_loaded=1) as server:
        body = {**LONG_STREAM, "model": "a"}
        with server.served.connect("/v1/completions", body, **CLIENT) as connection:
            assert b"data:" in connection.recv(1 << 16) + connection.recv(1 << 16)
            other = in_thread(partial(server.complete, "b"))
            waiting = in_thread(partial(server.complete, "a"))
            # Later requests to a wait for b, which would never get a place otherwise.
            wait_until(lambda: server.statuses() == {"a": "loaded", "b": "loading"})
            assert not other.done()
        assert other.result(WAIT_SECONDS).status == 200
        assert waiting.result(WAIT_SECONDS).status == 200


def test_an_idle_model_is_unloaded(chat_folder: Path) -> None:
    by_name = {"b": {"idle_seconds": 0.0}, "c": {"idle_seconds": 0.0, "keep_loaded": True}}
    with several(chat_folder, ["a", "b", "c"], by_name=by_name) as server:
        for _ in range(2):
            server.text("b")
            wait_until(lambda: server.statuses()["b"] == "unloaded")
        assert server.statuses() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert len(server.loaders["b"].loaded) == 2


def test_a_model_that_cannot_be_loaded_fails_alone(chat_folder: Path) -> None:
    failures = [CheckpointError(chat_folder / "model.safetensors", "is gone", "copy it again")]

    def load_b() -> LanguageModel:
        if failures:
            raise failures.pop()
        return server.loaders["b"]()

    with several(chat_folder, by_name={"b": {"load": load_b}}) as server:
        refused = server.complete("b")
        assert (refused.status, refused.error["code"]) == (503, "model_not_loaded")
        assert "is gone" in refused.error["message"]
        assert str(chat_folder) not in refused.error["message"]
        assert server.statuses()["b"] == "unloaded"
        assert server.text("a") == server.text("b")


def test_requests_that_wait_for_a_load_are_limited_in_number_and_time(chat_folder: Path) -> None:
    started, may_end = threading.Event(), threading.Event()

    def load_b() -> LanguageModel:
        started.set()
        assert may_end.wait(WAIT_SECONDS)
        return server.loaders["b"]()

    limits = Limits(queue=1, deadline_seconds=1.0)
    with several(chat_folder, by_name={"b": {"load": load_b}}, limits=limits) as server:
        first = in_thread(partial(server.complete, "b"))
        assert started.wait(WAIT_SECONDS)
        wait_until(lambda: server.complete("b").status == 429 or first.done())
        late = first.result(WAIT_SECONDS)
        assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
        assert server.text("a")  # other models answer while one loads
        may_end.set()
        wait_until(lambda: server.statuses()["b"] == "loaded")
        assert server.text("b")


def test_a_model_sleeps_until_it_is_woken(chat_folder: Path) -> None:
    with several(chat_folder) as server:
        expected = server.text("b")
        assert server.manage("/sleep?model=b&level=1").body == {"model": "b", "status": "sleeping"}
        assert not server.loaders["b"].open
        assert server.served.ask("/is_sleeping?model=b", **MANAGER).body == {"is_sleeping": True}
        refused = server.complete("b")
        assert (refused.status, refused.error["code"]) == (503, "model_sleeping")
        assert server.text("a") == expected
        assert server.manage("/wake_up?model=b").body == {"model": "b", "status": "loaded"}
        assert server.served.ask("/is_sleeping?model=b", **MANAGER).body == {"is_sleeping": False}
        assert server.text("b") == expected
        assert server.manage("/sleep?model=b&level=3").error["param"] == "level"
        assert server.manage("/sleep?model=d").error["code"] == "model_not_found"


def test_only_management_keys_load_and_unload(chat_folder: Path) -> None:
    with several(chat_folder) as server:
        for path, body in (("/models/load", {"model": "b"}), ("/sleep", b"")):
            assert server.served.ask(path, body, **CLIENT).status == 401
        loaded = server.manage("/models/load", {"model": "b"})
        assert loaded.body == {"model": "b", "status": "loaded"}
        assert server.statuses()["b"] == "loaded"
        unloaded = server.manage("/models/unload", {"model": "b"})
        assert unloaded.body == {"model": "b", "status": "unloaded"}
        assert server.text("b")


def test_adapters_of_clients_survive_an_unload(chat_folder: Path, tmp_path: Path) -> None:
    adapters = {n: write_adapter(tmp_path / n, ADAPTER_SIZES, seed=1) for n in ("new", "old")}
    with several(chat_folder) as server:
        plain = server.text("b")
        for name, path in adapters.items():
            body = {"model": "b", "lora_name": name, "lora_path": str(path)}
            assert server.manage("/v1/load_lora_adapter", body).status == 200
        unload = {"model": "b", "lora_name": "old"}
        assert server.manage("/v1/unload_lora_adapter", unload).status == 200
        expected = server.text("new")
        assert expected != plain
        server.manage("/models/unload", {"model": "b"})
        assert {*server.statuses()} == {"a", "b", "new"}
        assert server.text("new") == expected
        assert server.complete("old").status == 404
        for taken in ("a", "b"):
            body = {"model": "b", "lora_name": taken, "lora_path": str(adapters["new"])}
            assert server.manage("/v1/load_lora_adapter", body).error["param"] == "lora_name"
        body = {"model": "a", "lora_name": "new", "lora_path": str(adapters["new"])}
        assert server.manage("/v1/load_lora_adapter", body).error["param"] == "lora_name"


def test_weights_are_updated_from_files(chat_folder: Path, tmp_path: Path) -> None:
    weights = load_file(chat_folder / "model.safetensors")
    norm = "model.norm.weight"
    save_file({norm: -weights[norm]}, tmp_path / "part.safetensors")
    by_name = {"b": {"idle_seconds": 0.0}}
    with several(chat_folder, max_loaded=2, by_name=by_name) as server:
        plain = server.text("a")
        for refused in (
            {"model": "b"},
            {"model": "b", "path": str(tmp_path), "address": "tcp://127.0.0.1:1"},
            {"model": "b", "path": str(tmp_path / "missing")},
        ):
            assert server.manage("/update_weights", refused).status == 400
        body = {"model": "b", "path": str(tmp_path)}
        assert server.manage("/update_weights", body).body == {"status": "updated", "moved": []}
        changed = server.text("b")
        assert changed != plain
        # The changed weights are nowhere else, so the idle model stays.
        assert server.statuses()["b"] == "loaded"
        server.manage("/models/unload", {"model": "b"})
        assert server.text("b") == plain


def test_weights_are_updated_by_a_trainer(chat_folder: Path, tmp_path: Path) -> None:
    weights = load_file(chat_folder / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    address = f"file://{tmp_path}/meeting"
    with several(chat_folder) as server:
        plain = server.text("b")
        body = {"model": "b", "address": address, "rank": 1, "size": 2}
        update = in_thread(partial(server.manage, "/update_weights", body))
        send_weights(weights, Meeting(address, 0, 2))
        assert update.result(WAIT_SECONDS).body["status"] == "updated"
        assert server.text("b") != plain == server.text("a")


def test_encoders_and_language_models_share_a_server(chat_folder: Path) -> None:
    by_name = {"b": {"load": partial(load_encoder, chat_folder, "float32"), "is_encoder": True}}
    with several(chat_folder, by_name=by_name) as server:
        answer = server.ask("/v1/embeddings", {"model": "b", "input": "import os"})
        assert len(answer.body["data"][0]["embedding"]) == 256
        refused = server.ask("/v1/embeddings", {"model": "a", "input": "import os"})
        assert (refused.status, refused.error["code"]) == (404, "unknown_url")
        assert "The model 'a' has no endpoint /v1/embeddings" in refused.error["message"]
        assert server.complete("b").status == 404
        paths = server.ask("/openapi.json").body["paths"]
        assert {"/v1/embeddings", "/v1/chat/completions", "/models/load"} <= {*paths}
        loads = {"model": "b", "lora_name": "x", "lora_path": "x"}
        assert server.manage("/v1/load_lora_adapter", loads).error["code"] == "not_honoured"


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ([], {}, "There is no model to serve"),
        (["a", "a"], {}, "called 'a'"),
        (["a", "b"], {"default": "c"}, "The default model is 'c'; allowed is 'a', 'b'"),
        (["a", "b"], {"max_loaded": 0}, "max_loaded is 0"),
        (["a", "b"], {"name": "a"}, "name is 'a', but each ModelSource has its own"),
    ],
)
def test_contradicting_models_are_refused(
    sources: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        application([ModelSource(name=name, load=Loader(Path())) for name in sources], **options)


def test_a_source_has_either_a_model_or_a_loader() -> None:
    with pytest.raises(ConfigError, match="neither of model and load"):
        ModelSource(name="a")
    sources = [ModelSource(name=name, load=Loader(Path()), keep_loaded=True) for name in "ab"]
    with pytest.raises(ConfigError, match="2 models stay loaded, but max_loaded is 2"):
        application([*sources, ModelSource(name="c", load=Loader(Path()))], max_loaded=2)


def test_a_single_model_needs_a_name(lm: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="The model has no name for clients"):
        application(lm)


class Panic(BaseException):
    """As the Rust code of a tokenizer may raise."""


@pytest.mark.parametrize("failure", [Panic, SystemExit, StopIteration, MemoryError, TimeoutError])
def test_any_failure_of_a_load_ends_the_requests_that_wait(
    chat_folder: Path, failure: type[BaseException]
) -> None:
    num_loads = 0

    def load_b() -> LanguageModel:
        nonlocal num_loads
        num_loads += 1
        raise failure("of the load")

    with several(chat_folder, by_name={"b": {"load": load_b}}) as server:
        refused = server.complete("b")
        assert (refused.status, refused.error["code"]) == (503, "model_not_loaded")
        assert "of the load" not in refused.error["message"]
        assert num_loads == 1
        assert server.text("a")


def test_a_place_is_taken_until_the_model_is_closed(chat_folder: Path) -> None:
    loaders: dict[str, Loader] = {}

    def load_b() -> LanguageModel:
        assert not loaders["a"].open, "both models are in memory"
        return loaders["b"]()

    with several(chat_folder, max_loaded=1, by_name={"b": {"load": load_b}}) as server:
        loaders.update(server.loaders)
        unload = in_thread(partial(server.manage, "/models/unload", {"model": "a"}))
        assert server.text("b")
        assert unload.result(WAIT_SECONDS).status == 200


def test_a_model_that_becomes_idle_goes_instead_of_a_busy_one(chat_folder: Path) -> None:
    with several(chat_folder, ["a", "b", "c"], max_loaded=2) as server:
        streams = {name: {**LONG_STREAM, "model": name} for name in "ab"}
        with server.served.connect("/v1/completions", streams["a"], **CLIENT) as first:
            assert b"data:" in first.recv(1 << 16) + first.recv(1 << 16)
            with server.served.connect("/v1/completions", streams["b"], **CLIENT) as second:
                assert b"data:" in second.recv(1 << 16) + second.recv(1 << 16)
                other = in_thread(partial(server.complete, "c"))
                wait_until(lambda: server.statuses()["c"] == "loading")
            assert other.result(WAIT_SECONDS).status == 200
            assert server.statuses() == {"a": "loaded", "b": "unloaded", "c": "loaded"}


def test_a_load_without_clients_is_given_up(chat_folder: Path) -> None:
    with several(chat_folder, max_loaded=1) as server:
        stream = {**LONG_STREAM, "model": "a"}
        with server.served.connect("/v1/completions", stream, **CLIENT) as connection:
            assert b"data:" in connection.recv(1 << 16) + connection.recv(1 << 16)
            body = {"model": "b", "prompt": "import os", "max_tokens": 1}
            with server.served.connect("/v1/completions", body, **CLIENT):
                wait_until(lambda: server.statuses()["b"] == "loading")
            wait_until(lambda: server.statuses()["b"] == "unloaded")
            assert server.text("a")
        assert server.loaders["b"].loaded == []


def test_a_model_that_fails_or_is_too_large_does_not_unload_others_again(
    chat_folder: Path,
) -> None:
    def load_b() -> LanguageModel:
        raise CheckpointError(chat_folder, "is broken", "copy it again")

    def need() -> MemoryNeed:
        return MemoryNeed(weight_bytes=200, free_bytes=100, total_bytes=100, device="cpu")

    by_name: dict[str, dict[str, Any]] = {"b": {"load": load_b}, "c": {"memory": need}}
    with several(chat_folder, ["a", "b"], max_loaded=1, by_name=by_name) as server:
        for _ in range(2):
            assert server.complete("b").error["code"] == "model_not_loaded"
            assert server.text("a")
        assert len(server.loaders["a"].loaded) == 2  # only the first failure has unloaded it
    with several(chat_folder, ["a", "c"], by_name=by_name) as server:
        assert server.text("c")
        assert server.statuses()["a"] == "loaded"


def test_bodies_of_waiting_requests_are_limited(chat_folder: Path) -> None:
    may_end = threading.Event()

    def load_b() -> LanguageModel:
        assert may_end.wait(WAIT_SECONDS)
        return server.loaders["b"]()

    limits = Limits(total_body_bytes=3000)
    with several(chat_folder, by_name={"b": {"load": load_b}}, limits=limits) as server:
        waiting = in_thread(partial(server.complete, "b", user="x" * 2000))
        wait_until(lambda: server.statuses()["b"] == "loading")
        refused = server.complete("b", user="x" * 2000)
        assert (refused.status, refused.error["code"]) == (503, "bodies_full")
        may_end.set()
        assert waiting.result(WAIT_SECONDS).status == 200


def test_a_server_that_stops_ends_the_requests_that_wait(chat_folder: Path) -> None:
    may_end = threading.Event()
    loaded = threading.Event()

    def load_b() -> LanguageModel:
        assert may_end.wait(WAIT_SECONDS)
        lm = server.loaders["b"]()
        loaded.set()
        return lm

    with several(chat_folder, by_name={"b": {"load": load_b}}) as server:
        waiting = in_thread(partial(server.complete, "b"))
        wait_until(lambda: server.statuses()["b"] == "loading")
    # The server has ended while the model was loading, and closes it once it is loaded.
    may_end.set()
    assert loaded.wait(WAIT_SECONDS)
    wait_until(lambda: not server.loaders["b"].open)
    assert waiting.exception(WAIT_SECONDS) or waiting.result().status >= 500


def test_errors_show_no_path_of_adapters(chat_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "secret"
    broken.mkdir()
    with several(chat_folder) as server:
        body = {"model": "b", "lora_name": "new", "lora_path": str(broken)}
        refused = server.manage("/v1/load_lora_adapter", body)
        assert refused.status == 400

    def load_b() -> LanguageModel:
        return load(chat_folder, "float32", cache_tokens=512, adapters={"own": broken})

    by_name = {"b": {"load": load_b, "adapters": {"own": str(broken)}}}
    with several(chat_folder, by_name=by_name) as server:
        refused = server.complete("own")
        assert refused.status == 503
        assert str(tmp_path) not in refused.error["message"]


@pytest.mark.parametrize("name", [0, False, [], {}])
def test_a_name_that_is_no_text_is_refused(chat_folder: Path, name: Any) -> None:
    with several(chat_folder, ["a"]) as server:
        assert server.ask("/v1/completions", {"model": name, "prompt": "x"}).status == 400
        assert server.manage("/models/unload", {"model": name}).status == 400
        assert server.statuses() == {"a": "loaded"}


def test_a_queue_of_zero_serves(chat_folder: Path) -> None:
    with several(chat_folder, limits=Limits(queue=0)) as server:
        assert server.text("b") == server.text("a")


def test_an_unloaded_model_leaves_memory(chat_folder: Path) -> None:
    encoders: list[weakref.ref[Any]] = []

    def load_b() -> Any:
        encoder = load_encoder(chat_folder, "float32")
        encoders.append(weakref.ref(encoder.adapted.model))
        return encoder

    by_name = {"b": {"load": load_b, "is_encoder": True}}
    with several(chat_folder, by_name=by_name) as server:
        server.served.app.state.models.freeze_objects()
        try:
            server.ask("/v1/embeddings", {"model": "b", "input": "import os"})
            server.manage("/models/unload", {"model": "b"})
            assert encoders[0]() is None
            model = weakref.ref(server.loaders["a"].loaded[0].engine.model)
            server.loaders["a"].loaded.clear()
            server.manage("/models/unload", {"model": "a"})
            assert model() is None
        finally:
            gc.unfreeze()


def test_a_failed_load_is_tried_again_after_a_while(chat_folder: Path) -> None:
    now, num_loads, is_mended = 0.0, 0, False

    def new_endpoints(model: Any, name: str) -> Endpoints:
        return VectorEndpoints(model, name, Limits())

    def load_a() -> Encoder:
        return load_encoder(chat_folder, "float32")

    def load_b() -> Encoder:
        nonlocal num_loads
        num_loads += 1
        if not is_mended:
            raise CheckpointError(chat_folder, "is broken", "copy it again")
        return load_a()

    async def outcomes() -> list[str]:
        nonlocal now, is_mended
        sources = [
            ModelSource(name="a", load=load_a, is_encoder=True),
            ModelSource(name="b", load=load_b, is_encoder=True),
        ]
        models = Models(sources, new_endpoints, max_loaded=1, clock=lambda: now)
        await models.start()
        seen: list[str] = []
        for seconds in (0.0, 6.0, 6.0):
            now += seconds
            is_mended = seconds > 0
            (await models.use("a", 60.0)).end()
            try:
                (await models.use("b", 60.0)).end()
            except ApiError as error:
                seen.append(str(error.code))
            else:
                seen.append("loaded")
        await models.stop()
        return seen

    # Refused without another try after 6 s, although requests went on; tried again after 12 s.
    assert asyncio.run(outcomes()) == ["model_not_loaded", "model_not_loaded", "loaded"]
    assert num_loads == 2


def test_relative_paths_are_no_parts_of_errors(
    chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(chat_folder)
    with several(chat_folder, ["a"], path=".") as server:
        refused = server.complete("a", temperature=-1.5)
        assert "temperature is -1.5" in refused.error["message"]


def test_an_application_starts_again(chat_folder: Path) -> None:
    loader = Loader(chat_folder)
    app = application([ModelSource(name="a", load=loader)])

    async def start_and_stop() -> None:
        async with app.router.lifespan_context(app):
            assert len(loader.open) == 1

    for _ in range(2):
        asyncio.run(start_and_stop())
        assert not loader.open
