"""Packed weights: mapped where they fit, refused with a reason where they do not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapter_files import write_adapter
from tests.landing import landing_sample

from interposer import Config, register
from interposer.errors import ConfigError
from interposer.records import Kernel
from interposer_engine import LanguageModel, load, pack, quantize
from interposer_ops.linear import linear
from interposer_tools import main

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
PROMPT = [5, 6, 7, 8]
W4A8 = {"quant_method": "w4a8", "group_size": 16}
OFF, ON = Config(packed="off"), Config(packed="on")


def loaded(path: Path, config: Config, **options: Any) -> LanguageModel:
    return load(path, config=config, cache_tokens=256, max_sequences=2, **options)


def tokens(lm: LanguageModel, **options: Any) -> tuple[int, ...]:
    (completion,) = lm.generate([PROMPT], max_new_tokens=8, **options)
    return completion.token_ids


def told(lm: LanguageModel) -> list[str]:
    return [note for note in lm.resolver.notes if note.startswith("packed weights")]


def settled() -> None:
    """Wait until what was loaded is in the cache."""
    for thread in threading.enumerate():
        if thread.name == "interposer-packed":
            thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """Let packed files lie in a folder of their own, while verdicts are the ones of all tests."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "verdicts").symlink_to(Path(os.environ["INTERPOSER_CACHE_DIR"], "verdicts"))
    yield folder
    settled()


@pytest.fixture
def on(cache: Path) -> Config:
    return Config(packed="on", cache_dir=cache)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    "quantization", landing_sample([None, "int8", "fp8", W4A8], every=3), ids=str
)
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_mapped_weights_give_the_same_tokens(
    model: str, quantization: Any, on: Config, cache: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(model)
    expected = tokens(loaded(path, OFF, quantization=quantization))
    first = loaded(path, on, quantization=quantization)
    settled()
    (file,) = files(cache / "packed")
    file_identity = file.stat().st_mtime_ns, file.stat().st_ino
    second = loaded(path, on, quantization=quantization)
    assert tokens(first) == tokens(second) == expected
    assert file.stat().st_ino == file_identity[1]
    assert file.stat().st_mtime_ns > file_identity[0]  # the last use
    for lm in (first, second):
        (note,) = told(lm)
        assert note.endswith(f"mapped from {file}")


@pytest.mark.landing(1)
@pytest.mark.parametrize("head", ["int8", "int4"])
def test_tied_tables_with_rounded_inputs_are_mapped(head: str, on: Config) -> None:
    quantization = {"quant_method": "int8", "head": head, "head_activations": "int8"}
    expected = tokens(loaded(SHIPPED, OFF, quantization=quantization))
    first = loaded(SHIPPED, on, quantization=quantization)
    settled()
    second = loaded(SHIPPED, on, quantization=quantization)
    assert tokens(first) == tokens(second) == expected
    for lm in (first, second):
        (note,) = told(lm)
        assert ", mapped from" in note


@pytest.mark.landing(1)
@pytest.mark.parametrize("quantization", ["int8", "int4", "w4a8"])
def test_experts_that_are_lists_of_layers_are_mapped(
    quantization: str, on: Config, gpt_oss: tuple[Path, Any]
) -> None:
    path = gpt_oss[0]
    settings: dict[str, str | int] = {"quant_method": quantization}
    if quantization != "int8":
        settings["group_size"] = 16
    expected = loaded(path, OFF, quantization=settings)
    first = loaded(path, on, quantization=settings)
    settled()
    second = loaded(path, on, quantization=settings)
    for lm in (first, second):
        (note,) = told(lm)
        assert "mapped from" in note
        assert torch.equal(lm.logits(PROMPT), expected.logits(PROMPT))
    name = "model.layers.0.mlp.experts."
    stored = load_file(path / "model.safetensors")
    changed = {key: tensor * -1 for key, tensor in stored.items() if key.startswith(name)}
    assert changed
    for lm in (second, expected):
        lm.update_weights(changed)
    assert torch.equal(second.logits(PROMPT), expected.logits(PROMPT))
    assert not torch.equal(second.logits(PROMPT), first.logits(PROMPT))


def test_a_quantized_checkpoint_is_mapped(llama: Path, tmp_path: Path, on: Config) -> None:
    quantize(llama, tmp_path / "int8", "int8")
    expected = tokens(loaded(tmp_path / "int8", OFF))
    assert tokens(loaded(tmp_path / "int8", on)) == expected
    settled()
    assert tokens(loaded(tmp_path / "int8", on)) == expected


def test_a_packed_file_next_to_the_model_is_mapped(copied: Path) -> None:
    packed = pack(copied, quantization="int8")
    assert packed.path.parent == copied / "interposer-packed"
    lm = loaded(copied, Config(), quantization="int8")
    assert told(lm) == [f"packed weights: 0 MiB, mapped from {packed.path}"]
    assert tokens(lm) == tokens(loaded(copied, OFF, quantization="int8"))
    # Small models are not kept without being asked for.
    assert told(loaded(copied, Config())) == [
        f"packed weights: not used, {packed.path}: it was packed for another quantization: "
        '"int8", not null'
    ]


def test_a_configuration_with_infinity_is_mapped(copied: Path) -> None:
    """As Mamba 2 has one: JSON itself knows none, Python writes and reads it."""
    config = json.loads((copied / "config.json").read_text())
    config["time_step_limit"] = [0.0, float("inf")]
    (copied / "config.json").write_text(json.dumps(config))
    packed = pack(copied)
    assert told(loaded(copied, Config())) == [f"packed weights: 0 MiB, mapped from {packed.path}"]
    config["time_step_limit"] = [0.0, 1.0]
    (copied / "config.json").write_text(json.dumps(config))
    assert "it was packed for another config" in told(loaded(copied, Config()))[0]


def test_small_models_are_not_packed(llama: Path, cache: Path) -> None:
    assert told(loaded(llama, Config(cache_dir=cache))) == []
    assert not (cache / "packed").exists()


def test_a_changed_checkpoint_is_read_again(copied: Path) -> None:
    pack(copied)
    stored = load_file(copied / "model.safetensors")
    stored["model.layers.0.mlp.down_proj.weight"] *= -1
    save_file(stored, copied / "model.safetensors", {"format": "pt"})
    lm = loaded(copied, Config())
    (note,) = told(lm)
    assert "it was packed for another checkpoint: model.safetensors, " in note
    assert tokens(lm) == tokens(loaded(copied, OFF))


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("level", "x86_64 little sse2"),
        ("code of interposer-ops", "0.0.1 (0123456789abcdef)"),
        ("format", "99"),
    ],
)
def test_a_file_of_another_version_or_cpu_level_is_refused(
    copied: Path, name: str, old: str
) -> None:
    file = pack(copied).path
    rewrite(file, name, old)
    (note,) = told(loaded(copied, Config()))
    expected = f"it has format {old!r}" if name == "format" else f"another {name}: {old}, not "
    assert expected in note


def rewrite(file: Path, name: str, text: str) -> None:
    """Let a packed file say something else of how it was made."""
    from interposer.tooling import checksum

    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    value = json.loads(header["__metadata__"]["interposer"])
    for facts in (value["asked"], value["made_by"], value):
        if name in facts:
            facts[name] = text
    header["__metadata__"] = {"interposer": json.dumps(value), "checksum": checksum(value)}
    file.write_bytes(
        content[:8] + json.dumps(header).encode().ljust(length) + content[8 + length :]
    )


def test_a_kernel_of_another_layout_is_refused(
    copied: Path, make_plugin: Callable[..., ModuleType]
) -> None:
    def kernel(layout: int) -> ModuleType:
        module = f"{__name__}:"
        function, prepare = f"{module}turned_linear", f"{module}turned"
        record = Kernel("linear", "linear_turned", function, "cpu", prepare=prepare, score=99.0)
        return make_plugin("turned", replace(record, layout=layout))

    with register(kernel(1)):
        pack(copied)
        lm = loaded(copied, Config())
        assert "mapped from" in told(lm)[0]
        assert tokens(lm) == tokens(loaded(copied, OFF))
    with register(kernel(2)):
        (note,) = told(loaded(copied, Config()))
        assert "turned/linear_turned in code, layout 1, not turned/linear_turned in code" in note
    with register(kernel(0)):
        with pytest.raises(ConfigError, match="linear_turned prepares constants and states no"):
            pack(copied)
        with pytest.raises(ConfigError, match="packed='on' was requested, but turned/linear"):
            loaded(copied, ON)


def turned(weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    return {"weight": weight.T.contiguous(), "bias": bias}


def turned_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return linear(x, weight.T, bias)


@pytest.mark.landing(1)
@pytest.mark.parametrize("harm", ["cut off", "header", "no packed weights"])
def test_a_damaged_file_is_refused(copied: Path, harm: str) -> None:
    file = pack(copied).path
    content = bytearray(file.read_bytes())
    if harm == "cut off":
        del content[-4096:]
    elif harm == "header":
        at = content.index(b"llama" if b"llama" in content else b"made_by")
        content[at : at + 4] = b"xxxx"
    file.write_bytes(content)
    if harm == "no packed weights":
        shutil.copy(copied / "model.safetensors", file)
    lm = loaded(copied, Config())
    (note,) = told(lm)
    assert note.startswith(f"packed weights: not used, {file}: it ")
    assert tokens(lm) == tokens(loaded(copied, OFF))


def test_checking_finds_damaged_weights(copied: Path) -> None:
    from interposer_engine._packed.packing import check_packed

    file = pack(copied).path
    assert check_packed(copied) == {file: ""}
    with file.open("r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        opened.write(b"\xff" * 64)
    assert "memories differ from their checksums" in check_packed(copied)[file]


def test_an_update_of_mapped_weights_stays_in_this_process(copied: Path) -> None:
    file = pack(copied).path
    before = file.read_bytes()
    lm, second = loaded(copied, Config()), loaded(copied, Config())
    expected = tokens(second)
    stored = load_file(copied / "model.safetensors")
    lm.update_weights([(name, -tensor) for name, tensor in stored.items()])
    assert tokens(lm) != expected
    assert tokens(second) == expected
    assert file.read_bytes() == before


def test_adapters_join_weights_that_are_mapped(copied: Path, tmp_path: Path) -> None:
    sizes = {f"model.layers.{i}.self_attn.o_proj": (64, 64) for i in range(3)}
    adapter = write_adapter(tmp_path / "adapter", sizes)
    plain = loaded(copied, OFF, adapters={"a": adapter})
    pack(copied)
    lm = loaded(copied, Config(), adapters={"a": adapter})
    assert "mapped from" in told(lm)[0]
    assert tokens(lm, adapter="a") == tokens(plain, adapter="a")
    assert tokens(lm) == tokens(plain)


@pytest.mark.slow
@pytest.mark.process
def test_a_process_waits_for_another_that_writes(llama: Path, on: Config, cache: Path) -> None:
    script = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from interposer import Config\n"
        "from interposer_models import load\n"
        "config = Config(packed='on', cache_dir=sys.argv[2])\n"
        "lm = load(sys.argv[1], config=config, cache_tokens=256, max_sequences=2)\n"
        "print(list(lm.generate([[5, 6, 7, 8]], max_new_tokens=8)[0].token_ids), flush=True)\n"
        "[t.join() for t in threading.enumerate() if t.name == 'interposer-packed']\n"
    )
    command = [sys.executable, "-c", script, str(llama), str(cache)]
    expected = [*tokens(loaded(llama, OFF))]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for child in both:
        out, _ = child.communicate(timeout=120)
        assert json.loads(out) == expected
    assert len(files(cache / "packed")) == 1
    assert not list((cache / "packed").glob("*.part"))
    assert [*tokens(loaded(llama, on))] == expected


def test_the_cache_evicts_the_least_recently_used_file(llama: Path, cache: Path) -> None:
    def kept(quantization: str | None, max_bytes: int) -> LanguageModel:
        config = Config(packed="on", cache_dir=cache, packed_bytes=max_bytes)
        lm = loaded(llama, config, quantization=quantization)
        settled()
        return lm

    first = kept(None, 1 << 30)
    kept("int8", 1 << 30)
    older, newer = sorted(files(cache / "packed"), key=lambda path: path.stat().st_mtime_ns)
    os.utime(older, ns=(0, 0))
    kept("fp8", older.stat().st_size + newer.stat().st_size)
    assert older not in files(cache / "packed")
    assert newer in files(cache / "packed")
    assert tokens(first) == tokens(loaded(llama, OFF))  # what is mapped stays
    with pytest.raises(ConfigError, match="packed_bytes allows 1000"):
        kept(None, 1000)


def test_loading_works_without_a_writable_cache(llama: Path, cache: Path) -> None:
    (cache / "packed").write_text("a file, where the folder should be")
    with pytest.raises(ConfigError, match=r"packed='on' was requested, but .* cannot be written"):
        loaded(llama, Config(packed="on", cache_dir=cache))


@pytest.mark.process
@pytest.mark.slow
def test_the_benchmark_reports_each_way_to_load(llama: Path) -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "models_starting.py"
    command = [sys.executable, str(script), str(llama), "--tokens", "256"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    *rows, vocabulary, last = process.stdout.splitlines()
    assert vocabulary.startswith("vocabulary")
    assert [row.split()[:2] for row in rows] == [["none", way] for way in WAYS]
    assert all("load_s" in row and "anonymous" in row for row in rows)
    assert "to its first token" in last


WAYS = ("read", "first", "mapped")


def test_the_command_packs_and_checks(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["interposer", "pack", str(copied), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    code, out = command("--quantization", "int8", "--json")
    facts = json.loads(out)
    assert (code, facts["bytes"] > 0) == (0, True)
    assert "mapped from" in told(loaded(copied, Config(), quantization="int8"))[0]
    assert command("--check") == (0, f"{facts['path']}: sound\n")
    code, out = command("--check", "--output", "nowhere")
    assert (code, out) == (0, f"{copied} has no packed file in nowhere.\n")
    with Path(facts["path"]).open("r+b") as opened:
        opened.seek(-64, os.SEEK_END)
        opened.write(b"\xff" * 64)
    code, out = command("--check", "--json")
    (fault,) = json.loads(out)["files"].values()
    assert (code, "differ from their checksums" in fault) == (1, True)
