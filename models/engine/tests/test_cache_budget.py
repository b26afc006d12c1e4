"""The cache takes what the largest step leaves, and explain says what it was reckoned with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.adapter_files import write_adapter
from tests.tape import DEVICE, TapePlatform
from torch.utils._python_dispatch import TorchDispatchMode

from interposer import Config, Device, Memory, explain, register
from interposer.errors import ConfigError, PluginError
from interposer.hookspecs import hookimpl
from interposer.records import Kernel, PlatformEntry, Record
from interposer_engine import EmbeddedInput, LanguageModel, load
from interposer_engine._kv_cache import CacheGroup, CacheShape
from interposer_engine._kv_cache_budget import StepMemory, cache_budget
from interposer_ops.devices.memory_profile import MemoryProfile, MemorySnapshot, memory_profile

PLUGINS = frozenset({"interposer-models", "interposer-ops", "interposer-quantization"})
MIB = 2**20


class Shapes(TorchDispatchMode):
    """The shapes of all results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.found.add(tuple(result.shape))
        return result


class Gauge(TapePlatform):
    """An accelerator of 1000 MiB; weights take 200, others 100, and a step 80 at its peak."""

    name = "gauge"
    device_type = "gauge"
    free: ClassVar[int] = 700
    shapes: ClassVar[list[Shapes]] = []

    def devices(self) -> Sequence[Device]:
        return [Device("gauge", "cpu", "a gauge", DEVICE.capability)]

    def synchronize(self, device: str) -> None:
        pass

    def memory(self, device: str) -> Memory:
        return Memory(total_bytes=1000 * MIB, free_bytes=self.free * MIB)

    def memory_profile(self, device: str) -> AbstractContextManager[MemoryProfile]:
        reserved = iter((200, 320))
        peaks = iter((200, 280))

        def snapshot(_: str) -> MemorySnapshot:
            # Of the 120 that torch took, it keeps 40 that no tensor uses.
            kept = next(reserved)
            free = self.free + 200 - kept
            return MemorySnapshot(free * MIB, 1000 * MIB, kept * MIB, next(peaks) * MIB)

        return self._watched(memory_profile(device, snapshot, lambda _: None))

    @contextmanager
    def _watched(self, profile: AbstractContextManager[MemoryProfile]) -> Iterator[MemoryProfile]:
        self.shapes.append(Shapes())
        with profile as measured, self.shapes[-1]:
            yield measured


class Blind(TapePlatform):
    """An accelerator that measures no step."""

    name = "blind"
    device_type = "blind"

    def devices(self) -> Sequence[Device]:
        return [Device("blind", "cpu", "blind", DEVICE.capability)]


def full_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Find no memory."""
    raise torch.OutOfMemoryError("tried to allocate 9.00 GiB")


class Gauges:
    records: ClassVar[list[Record]] = []

    @classmethod
    @hookimpl
    def interposer_records(cls) -> list[Record]:
        own = f"{__name__}:"
        return [
            PlatformEntry("gauge", f"{own}Gauge"),
            PlatformEntry("blind", f"{own}Blind"),
            PlatformEntry("tape", "tests.tape:TapePlatform"),
            Kernel("linear", "linear_full", f"{own}full_linear", "gauge", score=-9.0),
        ]


@pytest.fixture(autouse=True)
def gauge(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Gauge, "shapes", [])
    with register(Gauges, "gauges"):
        yield


def loaded(path: Path, platform: str = "gauge", **settings: Any) -> LanguageModel:
    kernels = settings.pop("kernels", {})
    config = Config(platform=platform, plugins=PLUGINS, canary="off", graphs="off", kernels=kernels)
    return load(path, config=config, **settings)


def test_the_cache_takes_a_fraction_of_the_memory_that_the_largest_step_leaves(llama: Path) -> None:
    lm = loaded(llama, max_sequences=40, max_step_tokens=700)
    (shapes,) = Gauge.shapes
    # A context of 512 holds a prompt of 511; 38 sequences of one token make the step full.
    assert (700, 64) in shapes.found
    assert (40, 256) in shapes.found  # a row of logits each
    page = sum(backend.kv_layout().page_bytes() for backend in lm.engine.runner.backends)
    small = 40 + 44  # pages of that step's own cache, which are free again
    rest = 700 * MIB - 80 * MIB + small * page
    assert lm.engine.pool.num_pages == min(int(rest * 0.9) // page, 40 * 512 // 16)
    (note,) = [n for n in explain(lm).notes if n.startswith("KV cache")]
    assert "within 0.9 of the " in note
    assert note.endswith(
        "cpu has 1000.0 MiB, of which weights and all else in use take 299.0 MiB, and a step of "
        "700 tokens 80.0 MiB"
    )
    assert lm.generate([[1, 2, 3]], max_new_tokens=2)[0].finish_reason == "length"


def test_memory_fraction_sets_the_size_of_the_cache(llama: Path) -> None:
    few, more = (loaded(llama, memory_fraction=f, max_step_tokens=64) for f in (0.01, 0.02))
    page = sum(backend.kv_layout().page_bytes() for backend in few.engine.runner.backends)
    assert few.engine.pool.num_pages > 100
    assert abs(more.engine.pool.num_pages - 2 * few.engine.pool.num_pages) <= 1
    assert few.engine.pool.num_pages * page <= 0.01 * 621 * MIB


class Encoder:
    """An input encoder that computes a vector of 64 elements for each token of a sample."""

    kinds = frozenset({"image"})
    max_step_tokens = 0
    max_cached_bytes = 30 * MIB
    error: ClassVar[Exception | None] = None

    def embed(
        self, token_ids: Any, media: Any, *, cache_salt: str = ""
    ) -> list[int | EmbeddedInput]:
        return list(token_ids)

    def run_sample(self, max_tokens: int) -> int:
        if self.error is not None:
            raise self.error
        return len(torch.zeros(max_tokens - 1, 64))


def provide(checkpoint: Any, planned: Any) -> Encoder:
    return Encoder()


@pytest.fixture
def seeing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the Llama checkpoint for which an installed package has an encoder."""
    info = tmp_path / "site" / "acme_eyes-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-eyes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[interposer.input_encoders]\na-eyes = {__name__}:provide\n"
    )
    monkeypatch.syspath_prepend(info.parent)
    path = tmp_path / "seeing"
    shutil.copytree(llama, path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**config, "vision_config": {"depth": 1}}))
    return path


def cache_note(lm: LanguageModel) -> str:
    (note,) = [n for n in explain(lm).notes if n.startswith("KV cache")]
    return note


def test_an_accelerator_leaves_memory_for_a_step_of_the_encoder(seeing: Path, llama: Path) -> None:
    options: dict[str, Any] = {"memory_fraction": 0.02, "max_step_tokens": 64}
    lm = loaded(seeing, **options)
    assert (63, 64) in Gauge.shapes[0].found
    assert (64, 64) in Gauge.shapes[1].found
    assert cache_note(lm).endswith(
        "a step of 64 tokens 80.0 MiB, and a step of 63 tokens of the input encoder 80.0 MiB"
    )
    page = sum(backend.kv_layout().page_bytes() for backend in lm.engine.runner.backends)
    # The vectors that the encoder keeps are not on the device.
    for text_lm in (loaded(llama, **options), loaded(seeing, **options, text_only=True)):
        missing = text_lm.engine.pool.num_pages - lm.engine.pool.num_pages
        assert missing == pytest.approx(0.02 * 80 * MIB / page, abs=1)
        assert "encoder" not in cache_note(text_lm)


def test_a_host_leaves_memory_for_the_vectors_that_an_encoder_keeps(
    seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Encoder, "error", AssertionError("a step on a host takes seconds"))
    config = Config(platform="cpu", canary="off")
    lm = load(seeing, "float32", config=config, memory_fraction=0.001, max_step_tokens=64)
    note = cache_note(lm)
    assert note.endswith(
        "a step of 64 tokens of the input encoder an unknown amount, and its cached vectors up to "
        "30.0 MiB"
    )
    monkeypatch.setattr(Encoder, "max_cached_bytes", 2**50)
    with pytest.raises(
        ConfigError, match=r"No memory is left.*Try: load\(\.\.\., text_only=True\), a"
    ):
        load(seeing, "float32", config=config, max_step_tokens=64)


def test_a_platform_that_measures_nothing_knows_no_step_of_an_encoder(seeing: Path) -> None:
    note = cache_note(loaded(seeing, "blind", max_sequences=8))
    assert note.endswith("and a step of 2048 tokens of the input encoder an unknown amount")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            torch.OutOfMemoryError("tried to allocate 9.00 GiB"),
            ConfigError,
            r"A step of up to 64 tokens of the input encoder does not fit into the memory of cpu "
            r"beside the weights: .*9\.00 GiB.*Try: load\(\.\.\., text_only=True\), or a smaller",
        ),
        (
            ZeroDivisionError("no pixels"),
            PluginError,
            r"Plugin 'Encoder' of .*test_cache_budget: run_sample\(64\) failed: .*no pixels",
        ),
    ],
)
def test_an_encoder_that_fails_on_its_sample_is_an_error(
    seeing: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[Exception],
    text: str,
) -> None:
    monkeypatch.setattr(Encoder, "error", error)
    with pytest.raises(kind, match=text):
        loaded(seeing, max_step_tokens=64)
    assert loaded(seeing, max_step_tokens=64, text_only=True).input_encoder is None


def test_adapters_come_before_the_cache(llama: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "wide", {"lm_head": (256, 64)}, rank=2000)
    how: dict[str, Any] = {"memory_fraction": 0.02, "max_step_tokens": 64}
    plain, adapted = loaded(llama, **how), loaded(llama, **how, adapters={"wide": folder})
    page = sum(backend.kv_layout().page_bytes() for backend in plain.engine.runner.backends)
    room = 2 * 2000 * (256 + 64) * 4  # the present matrices, and those that may replace them
    missing = plain.engine.pool.num_pages - adapted.engine.pool.num_pages
    assert missing == pytest.approx(0.02 * room / page, abs=1)
    assert missing >= 2
    notes = explain(adapted).notes
    assert any(n.startswith(f"{room / MIB:.1f} MiB are kept for 1 adapters") for n in notes)
    tokens = 700 * MIB // page * 16
    with pytest.raises(ConfigError, match=r"cache_tokens is \d+, the free memory holds"):
        loaded(llama, cache_tokens=tokens, adapters={"wide": folder})


def test_a_platform_that_measures_no_step_gives_a_quarter(llama: Path) -> None:
    lm = loaded(llama, "tape", max_sequences=8)
    (note,) = [n for n in explain(lm).notes if n.startswith("KV cache")]
    assert "within 0.25 of the 256.0 MiB that are left" in note
    assert note.endswith("a step of 2048 tokens an unknown amount")


def test_spare_pages_of_graphs_count(llama: Path) -> None:
    config = Config(platform="tape", plugins=PLUGINS, canary="off", graphs="on")
    lm = load(llama, config=config, memory_fraction=0.02)
    plain = loaded(llama, "tape", memory_fraction=0.02)
    assert plain.engine.pool.num_pages - lm.engine.pool.num_pages == 4  # of 16 slots, for 64 rows


def test_an_error_without_free_memory_names_its_users(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gauge, "free", 80)
    with pytest.raises(ConfigError) as caught:
        loaded(llama, max_sequences=1, max_step_tokens=16, memory_fraction=0.001)
    text = str(caught.value)
    assert text.startswith("No memory is left for the KV cache, which needs 0.0 MiB at least and m")
    assert (
        "of which weights and all else in use take 920.0 MiB, and a step of 16 tokens 80.0" in text
    )
    assert "Try: a smaller max_step_tokens or max_sequences, a larger memory_fraction" in text


def test_a_step_that_exceeds_the_memory_is_an_error(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"A step of 64 tokens of 4 sequences does not fit into"):
        loaded(llama, max_sequences=4, max_step_tokens=64, kernels={"linear": "gauges/linear_full"})


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, True, "much", float("nan")])
def test_an_invalid_fraction_is_refused(llama: Path, fraction: Any) -> None:
    with pytest.raises(ConfigError, match="must be a number above 0 and at most 1"):
        loaded(llama, memory_fraction=fraction)


def test_setting_the_size_twice_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"say the size of the cache twice\. Try: leave"):
        loaded(llama, memory_fraction=0.5, cache_tokens=64)


def test_a_host_measures_a_part_of_a_step(llama: Path) -> None:
    config = Config(platform="cpu", canary="off")
    lm = load(llama, "float32", config=config, max_sequences=4, memory_fraction=0.001)
    (note,) = [n for n in explain(lm).notes if n.startswith("KV cache")]
    assert "within 0.001 of the " in note
    assert "and a step of 2048 tokens " in note
    assert len(lm.engine.model.model.layers) == len(lm.engine.runner.caches) == 3
    assert lm.generate([[1, 2, 3]], max_new_tokens=2)[0].finish_reason == "length"


@given(
    st.integers(-(2**30), 2**36),
    st.one_of(st.none(), st.integers(0, 2**34)),
    st.integers(1, 2**22),
    st.integers(1, 256),
    st.integers(1, 2**24),
    st.floats(0.001, 1.0),
    st.integers(0, 16),
)
def test_a_budget_stays_within_the_fraction(
    free: int,
    step: int | None,
    page_bytes: int,
    page_size: int,
    wanted: int,
    fraction: float,
    spare: int,
) -> None:
    memory = StepMemory(64, step, free, 2**37, shared=False)
    shape = CacheShape([CacheGroup(None, 1, page_bytes, None)], page_size, spare)
    allowed = fraction * memory.available_bytes
    try:
        actual = cache_budget(memory, "cuda:0", shape, max_tokens=wanted, fraction=fraction)
    except ConfigError:
        assert (1 + spare) * page_bytes > allowed - page_bytes
        return
    pages = -(-actual.tokens // page_size)
    assert actual.cache_bytes == (pages + spare) * page_bytes <= allowed
    # Nothing that is wanted and fits is left out.
    assert actual.tokens == wanted or (pages + spare + 1) * page_bytes > allowed - page_bytes
