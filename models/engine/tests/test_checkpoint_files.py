"""A file is opened by the plugin for its suffix, and errors name that plugin."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from interposer import CheckpointEntry, CheckpointFile, Config, explain, hookimpl, register
from interposer.errors import CheckpointError, PluginError
from interposer_engine import load
from interposer_engine._planning import plan
from interposer_ops.layers.linear import Linear

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"
PROMPT = "import os\n"
TOKENS = [token * 37 % 4096 for token in range(16)]


class Link(CheckpointFile):
    """A file that holds the path of a model directory."""

    @classmethod
    def open(cls, path: Path) -> Link:
        """Return the model that the file leads to."""
        folder = Path(path.read_text(encoding="utf-8"))
        if folder.name == "empty":
            raise CheckpointError(path, "leads to an empty folder")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(path, config, (folder / "model.safetensors").stat().st_size)

    @property
    def folder(self) -> Path:
        """Return the model directory."""
        return Path(self.path.read_text(encoding="utf-8"))

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor."""
        yield from load_file(self.folder / "model.safetensors").items()

    def tokenizer(self) -> str:
        """Return the contents of tokenizer.json."""
        return (self.folder / "tokenizer.json").read_text(encoding="utf-8")


class NoTokenizer(Link):
    """A file whose tokenizer is none."""

    def tokenizer(self) -> str:
        """Return no JSON."""
        return "{"


@hookimpl
def interposer_records() -> list[CheckpointEntry]:
    """Return the formats of this module."""
    return [
        CheckpointEntry(".link", "slow", f"{__name__}:NoTokenizer", score=1.0),
        CheckpointEntry(".link", "fast", f"{__name__}:Link", score=2.0),
        CheckpointEntry(".bad", "bad", f"{__name__}:NoTokenizer"),
    ]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with register(sys.modules[__name__]):
        yield


def gptq_without_order(folder: Path) -> tuple[Path, dict[str, torch.Tensor], list[str]]:
    """Write a config, and return random tensors of GPTQ without ``g_idx``, block by block."""
    folder.mkdir()
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    config["quantization_config"] |= {"sym": False, "desc_act": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").touch()
    shutil.copy(SHIPPED / "tokenizer.json", folder)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(SHIPPED / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            tensors[name] = tensor
            continue
        outputs, inputs = tensor.shape
        for kind, shape in (
            ("qweight", (inputs // 8, outputs)),
            ("qzeros", (inputs // 16, outputs // 8)),
        ):
            words = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator)
            tensors[f"{layer}.{kind}"] = words.to(torch.int32)
        tensors[f"{layer}.scales"] = torch.full((inputs // 16, outputs), 0.01)
    return folder, tensors, sorted(tensors)


def written(path: Path, target: Path) -> Path:
    path.write_text(str(target), encoding="utf-8")
    return path


def test_a_checkpoint_file_loads_the_model_it_describes(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = written(tmp_path / "model.link", SHIPPED)
    lm = load(path, dtype="float32", progress=lambda *facts: told.append(facts))
    reference = load(SHIPPED, dtype="float32")
    assert lm.generate(PROMPT, max_new_tokens=8) == reference.generate(PROMPT, max_new_tokens=8)
    assert lm.path == path
    assert told[-1][0] <= told[-1][1]


def test_a_layer_waits_for_optional_tensors_only_if_names_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ need not store the groups of inputs if groups follow each other."""
    folder, tensors, order = gptq_without_order(tmp_path / "gptq")
    path = written(tmp_path / "model.link", folder)
    ready: list[bool] = []

    def stream(self: Link) -> Iterator[tuple[str, torch.Tensor]]:
        finalized.clear()
        for name in order:
            yield name, tensors[name]
        ready.append(len(finalized) >= 6 * 4)

    finalized: list[object] = []
    finalize = Linear.finalize
    monkeypatch.setattr(Linear, "finalize", lambda layer: finalized.append(finalize(layer)))
    monkeypatch.setattr(Link, "stream", stream)
    without = load(path, dtype="float32").logits(TOKENS)
    monkeypatch.setattr(Link, "names", lambda self: frozenset(tensors))
    logits_with_names = load(path, dtype="float32").logits(TOKENS)
    assert ready == [False, True]
    assert torch.equal(without, logits_with_names)


def test_the_choice_is_explained(tmp_path: Path) -> None:
    explanation = explain(plan(written(tmp_path / "model.link", SHIPPED)))
    (choice,) = (row.choice for row in explanation.rows if row.choice.request.kind == "checkpoint")
    assert choice.chosen.name == "fast"
    assert [refusal.candidate for refusal in choice.refusals] == ["slow"]
    assert "checkpoint '.link'" in str(explanation)


def test_the_checkpoint_error_of_a_plugin_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="leads to an empty folder"):
        plan(written(tmp_path / "model.link", Path("empty")))


def test_an_unexpected_error_names_the_plugin(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="cannot be opened: FileNotFoundError"):
        plan(written(tmp_path / "model.link", tmp_path / "missing"))


def test_an_invalid_tokenizer_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "model.bad", SHIPPED)
    with pytest.raises(CheckpointError, match=r"model\.bad: is not a valid tokenizer"):
        load(path).tokenizer.read()


def test_a_folder_with_a_suffix_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model.link"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        plan(folder, config=Config())


def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    path = written(tmp_path / "model.lnk", SHIPPED)
    with pytest.raises(CheckpointError, match=r"is neither .*\nTry: .*\.bad or .*\.link"):
        plan(path)
