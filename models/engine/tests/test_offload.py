"""Offloaded weights: tokens, places and reasons are the same as the plan says."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.conftest import SIZES, write_checkpoint, write_tokenizer
from safetensors.torch import save_file
from tests.test_bare_platform import Board, policy
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import interposer
from interposer import Config, hookimpl, register
from interposer.errors import ConfigError
from interposer.records import PlatformEntry
from interposer_engine import LanguageModel, load
from interposer_engine._offload.planning import BlockSize, plan_offload
from interposer_engine._packed.file import MappedMemory, PackedFile
from interposer_ops.layers.moe.experts import Experts

PROMPTS = [[5, 6, 7, 8], [9] * 40]
LAYERS = 9  # of which no number of buffers is a divisor of all


class Dock(Board):
    """The processor posing as a device that copies from pinned memory; queues nothing."""

    name = "dock"
    streams: ClassVar[list[str]] = []

    @contextmanager
    def stream(self, device: str) -> Iterator[None]:
        Dock.streams.append(device)
        yield

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


class MappingDock(Dock):
    """A dock that also reads host memory in place."""

    name = "mapping-dock"
    mapped = 0

    def map_host_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        MappingDock.mapped += tensor.nbytes
        return tensor.view(-1)


@pytest.fixture
def docks() -> Iterator[None]:
    entries = [
        PlatformEntry(kind.name, f"{__name__}:{kind.__name__}", score=-5.0)
        for kind in (Dock, MappingDock)
    ]
    plugin = SimpleNamespace(interposer_records=hookimpl(lambda: entries))
    with register(plugin, name="acme-docks"):
        yield


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep")
    write_checkpoint(LlamaConfig(**{**SIZES, "num_hidden_layers": LAYERS}), path)
    return path


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    sizes: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    sizes |= {"moe_intermediate_size": 32, "num_hidden_layers": 6}
    config = Qwen3MoeConfig(**{**SIZES, **sizes})
    write_checkpoint(config, path)
    return path


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    """Packed files in a folder of their own, and small caches."""
    (tmp_path / "verdicts").symlink_to(Path(os.environ["INTERPOSER_CACHE_DIR"], "verdicts"))
    return {"config": Config(cache_dir=tmp_path), "cache_tokens": 256, "max_sequences": 2}


def tokens(lm: LanguageModel) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in lm.generate(PROMPTS, max_new_tokens=8)]


def told(lm: LanguageModel) -> list[str]:
    return [note for note in lm.resolver.notes if note.startswith("offload")]


@pytest.mark.landing(1)
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("model", ["deep", "mixture"])
def test_offloaded_models_generate_the_tokens_of_a_resident_one(
    model: str, quantization: str | None, own: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    lm = load(path, quantization=quantization, offload="65%", **own)
    notes = "\n".join(told(lm))
    assert ("streamed" if model == "deep" else "experts mapped") in notes
    assert "resident" in notes
    expected = tokens(load(path, quantization=quantization, offload=False, **own))
    assert tokens(lm) == expected
    assert tokens(lm) == expected  # buffers hold what the last step has left


def test_blocks_computed_out_of_order_wait_for_weights(deep: Path, own: dict[str, Any]) -> None:
    del own["cache_tokens"]  # the step that is measured computes one block alone
    lm = load(deep, offload="65%", **own)
    assert tokens(lm) == tokens(load(deep, offload=False, **own))


def test_moe_models_stream_only_weights_of_every_token(mixture: Path, own: dict[str, Any]) -> None:
    resident = load(mixture, offload="100%", **own)
    assert told(resident) == []
    lm = load(mixture, offload="370KB", **own)
    notes = "\n".join(told(lm))
    assert "streamed" in notes
    assert "experts mapped" in notes
    assert tokens(lm) == tokens(resident)


def loaded_experts(
    tmp_path: Path, quantization: str | None, own: dict[str, Any]
) -> tuple[LanguageModel, Path, Callable[[], float]]:
    """Load a model whose experts are mapped.

    Returns: the model, its packed file, and a function that returns how many bytes the experts
        have that tokens were routed to until then.
    """
    path = tmp_path / "model"
    sizes: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 2, "head_dim": 16}
    sizes |= {"moe_intermediate_size": 512, "num_hidden_layers": 2, "hidden_size": 256}
    write_checkpoint(Qwen3MoeConfig(**{**SIZES, **sizes}), path)
    options: dict[str, Any] = {"dtype": "float32", "quantization": quantization, **own}
    load(path, offload="20%", **options)  # writes the packed file
    gc.collect()
    (packed,) = (tmp_path / "packed").glob("*.safetensors")
    forget(packed)
    lm = load(path, offload="20%", **options)
    assert "experts mapped" in "\n".join(told(lm))
    chosen: set[tuple[int, int]] = set()  # layers and experts

    def note(layer: Any, arguments: Any) -> None:
        chosen.update((id(layer), expert) for expert in arguments[2].flatten().tolist())

    for layer in lm.engine.model.modules():
        if isinstance(layer, Experts):
            layer.register_forward_pre_hook(note)
    # Matrices of attention are smaller, and the embedding alone has so many bytes.
    memories = [size for _, size in PackedFile.open(packed).facts.memories]
    expert_bytes = sum(s for s in memories if s >= 100_000 and s != 256 * 256 * 4) / 64
    return lm, packed, lambda: len(chosen) * expert_bytes


@pytest.mark.landing(1)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_only_routed_experts_are_advised(
    quantization: str | None, tmp_path: Path, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: set[tuple[int, int]] = set()  # memories of the file and pages of theirs
    advise = MappedMemory.advise

    def record(self: MappedMemory, number: int, start: int = 0, stop: int | None = None) -> None:
        size = self._memories[number][1]
        last = size if stop is None else min(stop, size)
        pages = range(max(start, 0) // mmap.PAGESIZE, -(-last // mmap.PAGESIZE))
        requested.update((number, page) for page in pages)
        advise(self, number, start, stop)

    lm, _, chosen_bytes = loaded_experts(tmp_path, quantization, own)
    monkeypatch.setattr(MappedMemory, "advise", record)
    for prompt in ([5], [6, 7, 8]):
        lm.generate([prompt], max_new_tokens=1)
        num_bytes = len(requested) * mmap.PAGESIZE
        assert chosen_bytes() <= num_bytes <= 1.1 * chosen_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's mincore")
@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_only_routed_experts_are_read(
    quantization: str | None, tmp_path: Path, own: dict[str, Any]
) -> None:
    lm, packed, chosen_bytes = loaded_experts(tmp_path, quantization, own)
    control = tmp_path / "control"
    control.write_bytes(bytes(packed.stat().st_size))
    forget(control)
    if cached_bytes(control):
        pytest.skip("needs a file system that does not keep files in memory")
    before = settled(lambda: cached_bytes(packed))
    with control.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for prompt in ([5], [6, 7, 8]):
            lm.generate([prompt], max_new_tokens=1)
            os.pread(file.fileno(), int(chosen_bytes()), 0)
            expected = settled(lambda: cached_bytes(control))
            num_bytes = settled(lambda: cached_bytes(packed)) - before
            assert 0.95 * expected <= num_bytes <= 1.3 * expected


def forget(path: Path) -> None:
    """Let the system forget a file that nobody has mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(path: Path) -> int:
    """Return the bytes of a file that the system holds in memory."""
    library = ctypes.CDLL(None, use_errno=True)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=protection) as mapped,
    ):
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        assert not library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), pages)
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def settled(number: Callable[[], int]) -> int:
    """Return a number once it stays as it is: what was begun to be read is there."""
    last, current = -1, number()
    while current != last:
        time.sleep(0.05)
        last, current = current, number()
    return current


@pytest.mark.landing(1)
@pytest.mark.parametrize("platform", ["dock", "mapping-dock"])
@pytest.mark.parametrize("model", ["deep", "mixture"])
def test_a_device_gets_blocks_from_host_memory(
    model: str, platform: str, docks: None, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    options: dict[str, Any] = {"config": policy(platform), "cache_tokens": 256, "max_sequences": 2}
    Dock.streams.clear()
    MappingDock.mapped = 0
    lm = load(path, offload="65%", **options)
    maps = model == "mixture" and platform == "mapping-dock"
    assert bool(MappingDock.mapped) == maps
    assert ("experts mapped" if maps else "copied from host memory") in "\n".join(told(lm))
    loaded = len(Dock.streams)
    assert tokens(lm) == tokens(load(path, offload=False, **options))
    assert maps or len(Dock.streams) > loaded + LAYERS // 3


def test_graphs_and_compilation_are_refused(deep: Path, own: dict[str, Any], tape: None) -> None:
    graphs = policy("tape", graphs="on")
    with pytest.raises(ConfigError, match=r"graphs='on' was requested, but weights are offloaded"):
        load(deep, offload="65%", **{**own, "config": graphs})
    own["config"] = own["config"].model_copy(update={"compile": "on"})
    with pytest.raises(ConfigError, match="weights are offloaded"):
        load(deep, offload="65%", **own)


def test_offloaded_weights_cannot_be_updated(deep: Path, own: dict[str, Any]) -> None:
    lm = load(deep, offload="65%", **own)
    with pytest.raises(ConfigError, match=r"cannot be updated.*offload=False"):
        lm.update_weights({"model.norm.weight": torch.ones(64)})


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("half", r"offload is 'half', must be True, False, a number of bytes, or a size"),
        (0.5, r"offload is 0.5, must be"),
        (-1, r"offload is -1 bytes, must be at least 0"),
        ("120%", r"offload is 120%, must be at most 100% of the weights"),
        (1 << 10, r"0.0 MiB may be resident.*Try: a budget of \d+ bytes at least"),
    ],
)
def test_budgets_are_sizes(asked: Any, text: str, deep: Path, own: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=text):
        load(deep, offload=asked, **own)


def test_offload_needs_packed_files(deep: Path, own: dict[str, Any]) -> None:
    own["config"] = own["config"].model_copy(update={"packed": "off"})
    with pytest.raises(ConfigError, match="packed='auto'"):
        load(deep, offload=True, **own)


@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(0, 99)), min_size=1, max_size=40),
    st.integers(0, 200),
    st.integers(0, 4000),
    st.sampled_from(["disk", "host"]),
    st.booleans(),
)
def test_resident_weights_and_buffers_fit_the_budget(
    blocks: list[tuple[int, int]], others: int, budget: int, source: Any, can_map: bool
) -> None:
    sizes = [BlockSize(str(i), *block) for i, block in enumerate(blocks)]
    try:
        plan = plan_offload(sizes, others, budget, source, can_map=can_map)
    except ConfigError as error:
        min_bytes = int(str(error).rpartition("a budget of ")[2].split()[0])
        assert min_bytes > budget
        plan_offload(sizes, others, min_bytes, source, can_map=can_map)
        return
    resident_bytes, largest = others, 0
    for place in plan.places:
        streamed = 0
        for where, num_bytes in (
            (place.where, place.size.num_bytes),
            (place.experts, place.size.expert_bytes),
        ):
            resident_bytes += num_bytes * (where == "resident")
            streamed += num_bytes * (where == "streamed")
        largest = max(largest, streamed)
        assert can_map or place.experts == place.where
    assert resident_bytes + plan.num_buffers * largest <= budget
    assert plan.offloads == (others + sum(map(sum, blocks)) > budget)
    is_resident = [number not in plan.streamed for number in range(len(sizes))]
    if len({size.num_bytes for size in sizes}) == 1 and any(is_resident) and can_map:
        gaps = "".join("x" if block else "." for block in is_resident).strip(".").split("x")
        inner = [len(gap) for gap in gaps[1:-1]]
        assert not inner or max(inner) - min(inner) <= 1  # evenly between the others


def test_a_plan_for_a_described_device_lists_streamed_blocks(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
    sizes |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    weights = {"weight_map": {"lm_head.weight": "model-00001.safetensors"}}
    save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "model-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(weights), encoding="utf-8")
    notes = interposer.explain(tmp_path, device="rtx4090").notes
    first, *further_lines = [note for note in notes if note.startswith("offload")]
    assert "Try: load(..., offload=True)" in first
    assert any("streamed" in note and "copied from host memory" in note for note in further_lines)
    fitting = interposer.explain(tmp_path, device="mi300x").notes
    assert not any(note.startswith("offload") for note in fitting)


# Limited after its imports, which do not count. Where no group can be made, the budget is given and
# the rise of resident memory is compared with that of a plain tensor of ``limit`` bytes.
LIMITED = """
import contextlib, json, re, sys
from pathlib import Path
import torch
import interposer_engine
from interposer import Config
from memory_limit import limited

def resident():
    found = re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])

path, folder, limit = *sys.argv[1:3], int(sys.argv[3])
config = Config(cache_dir=Path(folder))
interposer_engine.plan(path, config=config)
options = {"config": config, "cache_tokens": 64, "max_sequences": 1, "max_step_tokens": 16}
before = resident()
with contextlib.ExitStack() as stack:
    try:
        group = stack.enter_context(limited(limit))
    except OSError:
        group, options["offload"] = None, f"{limit * 6 // 10 >> 20}MiB"
    lm = interposer_engine.load(path, **options)
    (done,) = lm.generate([[1, 2, 3]], max_new_tokens=3)
    if group is None:
        peak, before = resident() - before, resident()
        control = torch.ones(limit, dtype=torch.uint8)
        limit = resident() - before
    else:
        names = "memory.max_usage_in_bytes", "memory.peak"
        peak = max(int((group / n).read_text()) for n in names if (group / n).exists())
notes = [note for note in lm.resolver.notes if note.startswith("offload")]
print(json.dumps([list(done.token_ids), notes, peak, limit, group is not None]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc/self/status")
@pytest.mark.process
@pytest.mark.slow
def test_a_model_larger_than_the_memory_is_offloaded(tmp_path: Path, own: dict[str, Any]) -> None:
    limit, path = 64 << 20, tmp_path / "model"
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16}
    config = LlamaConfig(**{**SIZES, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    write_tokenizer(path)
    num_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert num_bytes > 1.4 * limit
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "benchmarks")}
    command = [sys.executable, "-c", LIMITED, str(path), str(tmp_path), str(limit)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert process.returncode == 0, process.stderr
    token_ids, notes, peak, max_bytes, is_limited = json.loads(process.stdout.splitlines()[-1])
    assert peak <= max_bytes
    assert ("by default" if is_limited else "as requested") in notes[0]
    assert any("streamed" in note for note in notes)
    lm = load(path, offload=False, **own)
    (expected,) = lm.generate([[1, 2, 3]], max_new_tokens=3)
    assert tuple(token_ids) == expected.token_ids
