"""A quantized copy of a model is what transformers loads, complete or not there at all."""

from __future__ import annotations

import json
import re
import resource
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from loguru import logger
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from interposer.errors import (
    CheckpointError,
    ConfigError,
    InterposerError,
    StorageError,
    UnknownNameError,
)
from interposer_engine import load
from interposer_engine._commands.quantize import quantize as command
from interposer_engine._quantize.files import TensorSource
from interposer_engine._quantize.quantizer import quantize
from interposer_engine._quantize.rounding import RoundedLayers
from interposer_engine._quantize.writer import WorkFolder
from interposer_ops.quantizers import decode_e8m0, quantize_int8_per_token, quantize_mxfp8
from interposer_quantization import writing
from interposer_quantization.writing import WeightFormat, weight_format

logger.disable("compressed_tensors")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "attention_bias": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOKENS = [token * 37 % 256 for token in range(60)]
TEXT = "".join(chr(97 + number * number % 23) for number in range(64 * 20))
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {"scheme": "fp8"},
    "int8": {"scheme": "int8"},
    "int8 weights only": {"scheme": "int8", "activations": "none"},
    "int4": {"scheme": "int4", "group_size": 32},
    "int4 asymmetric": {"scheme": "int4", "group_size": 16, "asymmetric": True},
    "w4a8": {"scheme": "w4a8", "group_size": 32},
    "w4a8 asymmetric": {
        "scheme": "int4",
        "activations": "int8",
        "group_size": 16,
        "asymmetric": True,
    },
    "mxfp8": {"scheme": "mxfp8"},
    "mxfp4": {"scheme": "mxfp4"},
    "nvfp4": {"scheme": "nvfp4"},
}
# Weights that the library makes bfloat16 of, whatever the model's dtype.
NARROW = ("mxfp8", "mxfp4", "nvfp4")


def write_model(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    torch.manual_seed(5)
    sizes = {name: options.pop(name) for name in [*options] if name != "max_shard_size"}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **sizes}), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path, **options)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain") / "model", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("sharded") / "model", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def library_model(path: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def library_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].float()  # type: ignore[no-any-return]


def stored(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}


def parts_of(layer: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    start = f"{layer}."
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}


def in_mxfp8(x: torch.Tensor) -> torch.Tensor:
    codes, exponents = quantize_mxfp8(x)
    blocks = codes.float().unflatten(-1, (exponents.shape[-1], 32))
    scaled: torch.Tensor = blocks * decode_e8m0(exponents, torch.float32).unsqueeze(-1)
    return scaled.flatten(-2)


def in_int8(x: torch.Tensor) -> torch.Tensor:
    codes, scale = quantize_int8_per_token(x)
    return codes.float() * scale


# Where inputs are rounded by another rule than the library's.
ROUNDED = {"mxfp8": in_mxfp8, "int8": in_int8, "w4a8": in_int8, "w4a8 asymmetric": in_int8}


def format_of(kind: str) -> WeightFormat:
    options = SCHEMES[kind]
    return weight_format(
        options["scheme"],
        options.get("group_size"),
        asymmetric="asymmetric" in options,
        activations=options.get("activations"),
    )


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# compressed-tensors 0.20 cannot load packed zero points: where it plans the tensors of a layer, in
# the branch of PackedQuantizationCompressor.compress for the meta device, it leaves them unpacked.
@pytest.mark.landing(2)
@pytest.mark.parametrize("kind", [kind for kind in SCHEMES if kind != "int4 asymmetric"])
def test_transformers_runs_the_written_checkpoint(kind: str, plain: Path, tmp_path: Path) -> None:
    result = quantize(plain, tmp_path / "out", **SCHEMES[kind])
    dtype = torch.bfloat16 if kind in NARROW else torch.float32
    model, reference = library_model(result.path, dtype), library_model(plain, dtype)
    exact = library_logits(reference)
    logits = library_logits(model)
    chosen = format_of(kind)
    tensors = stored(result.path)
    assert result.num_layers == 14
    for name, module in reference.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        weight = chosen.read(parts_of(name, tensors)).to(dtype)
        assert torch.equal(model.get_submodule(name).weight, weight), name
        module.weight.data = weight
    if chosen.input_settings() is None:
        assert torch.equal(logits, library_logits(reference))
    # Random weights of this size pass on what is lost many times over; nothing related is at 1.4.
    assert (logits - exact).norm() < (0.75 if "4" in kind else 0.3) * exact.norm()


@pytest.mark.landing(2)
@pytest.mark.parametrize("kind", SCHEMES)
def test_the_written_checkpoint_loads_with_near_logits(
    kind: str, plain: Path, tmp_path: Path
) -> None:
    result = quantize(plain, tmp_path / "out", **SCHEMES[kind])
    logits = load(result.path, dtype="float32").logits(TOKENS)
    chosen = format_of(kind)
    if chosen.input_settings() is not None and kind not in ROUNDED:
        expected = library_logits(library_model(result.path, torch.float32))
    else:
        model, tensors = library_model(plain, torch.float32), stored(result.path)
        for name, module in model.named_modules():
            parts = parts_of(name, tensors)
            if isinstance(module, torch.nn.Linear) and "weight_scale" in parts:
                module.weight.data = chosen.read(parts)
                if kind in ROUNDED:
                    module.register_forward_pre_hook(lambda _, args: (ROUNDED[kind](args[0]),))
        expected = library_logits(model)
    # Codes of inputs between two numbers go either way for a difference in the last bit.
    tolerance = 1e-4 if chosen.input_settings() is None else 0.05
    assert (logits - expected).norm() < tolerance * expected.norm()


def test_scales_are_in_the_dtype_of_the_model(plain: Path, sharded: Path, tmp_path: Path) -> None:
    for source, dtype in ((plain, torch.bfloat16), (sharded, torch.float32)):
        result = quantize(source, tmp_path / str(dtype), "int8")
        scales = [t for name, t in stored(result.path).items() if name.endswith("weight_scale")]
        assert len(scales) == 14
        assert {scale.dtype for scale in scales} == {dtype}


def test_merged_layers_share_a_tensor_scale(plain: Path, tmp_path: Path) -> None:
    tensors = stored(quantize(plain, tmp_path / "out", "nvfp4").path)
    scales = {n: float(t) for n, t in tensors.items() if n.endswith("weight_global_scale")}
    for layer in ("model.layers.0", "model.layers.1"):
        attention = {scales[f"{layer}.self_attn.{n}_proj.weight_global_scale"] for n in "qkv"}
        mlp = {scales[f"{layer}.mlp.{n}_proj.weight_global_scale"] for n in ("gate", "up")}
        assert len(attention) == len(mlp) == 1
    assert len(set(scales.values())) == 8


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
def test_one_weight_is_in_memory_at_a_time(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    real = TensorSource.read
    weights: list[weakref.ref[torch.Tensor]] = []
    max_alive = 0

    def counted(source: TensorSource, name: str) -> torch.Tensor:
        nonlocal max_alive
        tensor = real(source, name)
        weights.append(weakref.ref(tensor))
        max_alive = max(max_alive, sum(weight() is not None for weight in weights))
        return tensor

    monkeypatch.setattr(TensorSource, "read", counted)
    quantize(sharded, tmp_path / "out", scheme)
    assert len(weights) >= len(stored(sharded))
    # The second one where it is looked at for a scale that both share.
    assert max_alive == (2 if scheme == "nvfp4" else 1)


def test_shards_and_other_files_keep_their_names(sharded: Path, tmp_path: Path) -> None:
    (sharded / "README.md").write_text("of the model")
    (sharded / "pytorch_model.bin").write_bytes(b"weights of another format")
    result = quantize(sharded, tmp_path / "deep" / "out", "int4", group_size=32)
    assert names_in(result.path) == [
        name for name in names_in(sharded) if name != "pytorch_model.bin"
    ]
    index = json.loads((result.path / "model.safetensors.index.json").read_text())
    file_of_tensor: dict[str, str] = {}
    size = 0
    for file in result.path.glob("*.safetensors"):
        tensors = load_file(file)
        file_of_tensor |= dict.fromkeys(tensors, file.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    assert index == {"metadata": {"total_size": size}, "weight_map": file_of_tensor}
    before, after = stored(sharded), stored(result.path)
    common_names = {name for name in before if name in after}
    assert all(torch.equal(before[name], after[name]) for name in common_names)
    assert {n for n in before if n not in common_names} == {
        f"{name.removesuffix('_packed')}" for name in after if name.endswith("weight_packed")
    }
    for name in ("tokenizer.json", "generation_config.json", "README.md"):
        assert (result.path / name).read_bytes() == (sharded / name).read_bytes()
    config = json.loads((result.path / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert config == json.loads((sharded / "config.json").read_text())
    assert settings["ignore"] == ["lm_head"]
    assert names_in(result.path.parent) == ["out"]
    assert result.bytes_after < result.bytes_before


def test_tied_embeddings_and_ignored_layers_stay_unquantized(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", tie_word_embeddings=True)
    patterns = ["re:.*down_proj", *(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")]
    result = quantize(source, tmp_path / "out", "int8", ignore=patterns)
    assert (result.num_layers, result.num_plain) == (9, 5)
    before, after = stored(source), stored(result.path)
    for name in before:
        plain = "down_proj" in name or ("layers.0.self_attn" in name and "o_proj" not in name)
        if plain or "embed" in name:
            assert torch.equal(before[name], after[name])
    logits = library_logits(library_model(result.path, torch.float32))
    exact = library_logits(library_model(source, torch.float32))
    assert (logits - exact).norm() < 0.1 * exact.norm()


class Interrupted(BaseException):
    """Stands for a signal at a moment of choice."""


def interrupting(activity: str, calls: int) -> Callable[[str, int, int], None]:
    remaining_calls = calls

    def progress(current: str, _done: int, _total: int) -> None:
        nonlocal remaining_calls
        remaining_calls -= current == activity
        if remaining_calls < 0:
            raise Interrupted

    return progress


@pytest.mark.landing(2)
@pytest.mark.parametrize("calls", [0, 20, 25])
def test_an_interrupted_run_is_resumed(sharded: Path, tmp_path: Path, calls: int) -> None:
    options: dict[str, Any] = {"group_size": 32}
    uninterrupted = quantize(sharded, tmp_path / "whole", "int4", **options)
    with pytest.raises(Interrupted):
        quantize(
            sharded, tmp_path / "out", "int4", **options, progress=interrupting("writing", calls)
        )
    assert names_in(tmp_path) == [".out.unfinished", "whole"]
    model = tmp_path / ".out.unfinished" / "model"
    finished = {file.name: file.stat().st_ino for file in model.glob("*.safetensors")}
    assert bool(finished) == (calls > 0)
    assert not list(model.glob("*.part"))
    resumed = quantize(sharded, tmp_path / "out", "int4", **options)
    assert resumed.resumed
    assert not uninterrupted.resumed
    assert contents(resumed.path) == contents(uninterrupted.path)
    assert {n: (resumed.path / n).stat().st_ino for n in finished} == finished
    assert names_in(tmp_path) == ["out", "whole"]


def test_an_interrupted_calibration_is_resumed(plain: Path, tmp_path: Path, text: Path) -> None:
    options: dict[str, Any] = {"group_size": 32, "calibrate": text}
    uninterrupted = quantize(plain, tmp_path / "whole", "int4", **options)
    # In the second block.
    with pytest.raises(Interrupted):
        quantize(
            plain, tmp_path / "out", "int4", **options, progress=interrupting("calibrating", 10)
        )
    layers = tmp_path / ".out.unfinished" / "layers"
    assert names_in(layers) == ["0.safetensors"]
    resumed = quantize(plain, tmp_path / "out", "int4", **options)
    assert resumed.resumed
    assert contents(resumed.path) == contents(uninterrupted.path)


def test_a_run_with_other_settings_is_not_resumed(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        quantize(plain, tmp_path / "out", "fp8", progress=interrupting("writing", 3))
    with pytest.raises(StorageError, match=r"scheme: 'fp8' then, 'int8' now[\s\S]*--restart"):
        quantize(plain, tmp_path / "out", "int8")
    result = quantize(plain, tmp_path / "out", "int8", restart=True)
    assert not result.resumed
    assert contents(result.path) == contents(quantize(plain, tmp_path / "other", "int8").path)


def test_a_run_with_a_changed_source_is_not_resumed(plain: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(plain, source)
    with pytest.raises(Interrupted):
        quantize(source, tmp_path / "out", "fp8", progress=interrupting("writing", 3))
    tensors = load_file(source / "model.safetensors")
    save_file(
        {**tensors, "model.norm.weight": tensors["model.norm.weight"] * 2},
        source / "model.safetensors",
    )
    with pytest.raises(StorageError, match="weights:"):
        quantize(source, tmp_path / "out", "fp8")


def test_an_unknown_work_folder_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / ".out.unfinished"
    folder.mkdir()
    (folder / "diary.txt").write_text("private")
    for restart in (False, True):
        with pytest.raises(StorageError, match="not created by an interrupted run"):
            quantize(plain, tmp_path / "out", "fp8", restart=restart)
    assert names_in(folder) == ["diary.txt"]


def test_an_existing_target_is_refused(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(StorageError, match=r"out: exists already[\s\S]*Try: remove it"):
        quantize(plain, tmp_path / "out", "fp8")
    assert names_in(tmp_path) == ["out"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may exceed 100 kB, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_leaves_nothing_at_the_target(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=r"cannot be written: File too large\nTry: free disk space"
    ):
        quantize(plain, tmp_path / "out", "fp8")
    assert names_in(tmp_path) == [".out.unfinished"]
    assert not list((tmp_path / ".out.unfinished" / "model").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
    assert quantize(plain, tmp_path / "out", "fp8").resumed


def test_a_disk_that_is_too_small_is_reported_before_writing(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"needs \d+ bytes, the disk has 1000 left"):
        quantize(plain, tmp_path / "out", "fp8")


def test_the_files_of_calibration_count_for_the_disk_check(
    plain: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = quantize(plain, tmp_path / "first", "int4", group_size=32).bytes_after
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=needed))
    # Enough for the copy, whose headers are no part of the estimate.
    quantize(plain, tmp_path / "second", "int4", group_size=32)
    with pytest.raises(StorageError, match=r"needs \d+ bytes, the disk has") as caught:
        quantize(plain, tmp_path / "out", "int4", group_size=32, calibrate=text)
    (needed_bytes,) = map(int, re.findall(r"needs (\d+) bytes", str(caught.value)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=needed_bytes))
    file_bytes: list[int] = []
    finish = WorkFolder.finish

    def measured(folder: WorkFolder) -> None:
        for file in folder.root.rglob("*.safetensors"):
            file_bytes.extend(tensor.nbytes for tensor in load_file(file).values())
        finish(folder)

    monkeypatch.setattr(WorkFolder, "finish", measured)
    quantize(plain, tmp_path / "out", "int4", group_size=32, calibrate=text)
    # What is in the files is what was asked for; their headers come on top.
    assert sum(file_bytes) == needed_bytes


@pytest.mark.slow
@pytest.mark.parametrize("act_order", [False, True])
def test_calibrated_logits_are_nearer_to_the_original(
    plain: Path, tmp_path: Path, text: Path, act_order: bool
) -> None:
    tokens = torch.tensor([[ord(c) - 97 + 64 for c in TEXT[:60]]])
    errors = []
    for name, calibrate in (("nearest", None), ("calibrated", text)):
        result = quantize(
            plain,
            tmp_path / name,
            "int4",
            group_size=32,
            act_order=act_order,
            calibrate=calibrate,
        )
        model = library_model(result.path, torch.float32)
        with torch.inference_mode():
            exact = library_model(plain, torch.float32)(tokens).logits
            errors.append((model(tokens).logits - exact).norm())
    assert errors[1] < 0.85 * errors[0]


def test_a_layer_is_calibrated_on_inputs_of_quantized_layers(
    plain: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer gets the inputs that transformers' quantized model gives it."""
    recorded_moments: list[torch.Tensor] = []

    def recorded(moments: torch.Tensor, **options: Any) -> writing.Curvature:
        recorded_moments.append(moments)
        return writing.Curvature(moments, **options)

    monkeypatch.setattr(f"{RoundedLayers.__module__}.Curvature", recorded)
    result = quantize(plain, tmp_path / "out", "int4", group_size=32, calibrate=text)
    model = library_model(result.path, torch.float32)
    inputs: list[torch.Tensor] = []
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_pre_hook(lambda _module, args: inputs.append(args[0].flatten(0, 1)))
    tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
    with torch.inference_mode():
        model(torch.tensor(tokenizer.encode(TEXT).ids).view(20, 64))
    x = inputs[0].double()
    expected = x.T @ x / len(x)
    # Float32 sums in another order, through two blocks.
    assert (recorded_moments[-1] - expected).norm() < 1e-4 * expected.norm()
    assert len(recorded_moments) == 8, "one for each product of a block"


def spoiled(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


Spoil = Callable[[dict[str, torch.Tensor]], None]
DOWN = "model.layers.1.mlp.down_proj.weight"


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[DOWN]


def _round(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN].to(torch.float8_e4m3fn)


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN] = tensors[DOWN][:, :32].contiguous()


def _spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN][3, 4] = torch.nan


@pytest.mark.landing(2)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_drop, "lacks the tensor"),
        (_round, "stored as F8_E4M3, which is no plain weight"),
        (_cut, r"has shape \[64, 32\], the config asks for \[64, 96\]"),
        (_spoil, "infinite or not a number"),
    ],
)
def test_broken_weights_are_refused(
    plain: Path, tmp_path: Path, text: Path, spoil: Spoil, message: str
) -> None:
    source = spoiled(plain, tmp_path / "model", lambda _config: None)
    tensors = load_file(source / "model.safetensors")
    spoil(tensors)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for calibrate in (None, text):
        target = tmp_path / ("calibrated" if calibrate else "nearest")
        with pytest.raises(CheckpointError, match=message):
            quantize(source, target, "int4", group_size=32, calibrate=calibrate)
        assert not target.exists()


REFUSED: list[tuple[dict[str, Any], type[InterposerError], str]] = [
    ({"scheme": "int5"}, UnknownNameError, "Unknown scheme 'int5'.*'int4'"),
    (
        {"scheme": "int4", "group_size": 128},
        ConfigError,
        r"model.layers.0.self_attn.q_proj and 13 more layers: groups of 128 do not divide the 64 "
        r"inputs.*--ignore 're:\.\*down_proj' .*--group-size 32, which",
    ),
    (
        {"scheme": "int4", "group_size": 64},
        ConfigError,
        r"down_proj and 1 more layers: groups of 64 do not divide the 96 inputs. "
        r"Try: --ignore 're:\.\*down_proj', which leaves them plain, or --group-size 32",
    ),
    ({"scheme": "int8", "ignore": ["down_proj"]}, UnknownNameError, r"Try: --ignore 're:\.\*down"),
    ({"scheme": "int8", "ignore": ["re:down_proj"]}, ConfigError, r"matches no linear layer.*re:"),
    ({"scheme": "int8", "ignore": ["re:("]}, ConfigError, "no regular expression"),
    ({"scheme": "int8", "ignore": ["re:.*"]}, ConfigError, "nothing is left"),
    (
        {"scheme": "int8", "ignore": ["re:.*q_proj"]},
        ConfigError,
        "but not all layers of the same matmul",
    ),
    ({"scheme": "int8", "calibrate": "/nowhere/text"}, ConfigError, "cannot be read"),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_impossible_settings_are_refused_before_writing(
    plain: Path, tmp_path: Path, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        quantize(plain, tmp_path / "out", **options)
    assert names_in(tmp_path) == []


@pytest.mark.landing(1)
@pytest.mark.parametrize(
    ("scheme", "ignored", "size"),
    [("int4", (), 32), ("w4a8", (), 32), ("int4", ("re:.*down_proj",), 64)],
)
def test_groups_divide_the_inputs_of_all_layers_by_default(
    plain: Path, tmp_path: Path, scheme: str, ignored: tuple[str, ...], size: int
) -> None:
    result = quantize(plain, tmp_path / "out", scheme, ignore=ignored)
    assert result.group_size == size
    assert load(result.path, cache_tokens=64).generate("def", max_new_tokens=2)[0].token_ids


def test_a_short_text_is_refused(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    for content, message in ((b"a" * 100, "has 100 tokens, 128 are needed"), (b"\xff", "UTF-8")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            quantize(plain, tmp_path / "out", "int8", calibrate=file)
    assert names_in(tmp_path) == ["short.txt"]


def test_a_quantized_model_is_refused(plain: Path, tmp_path: Path) -> None:
    result = quantize(plain, tmp_path / "out", "fp8")
    with pytest.raises(CheckpointError, match=r"is quantized already.*'compressed-tensors'"):
        quantize(result.path, tmp_path / "again", "int8")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        quantize(tmp_path / "none", tmp_path / "out", "fp8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        quantize(tmp_path, tmp_path / "out", "fp8")


def test_the_command_prints_a_summary(plain: Path, tmp_path: Path) -> None:
    application = typer.Typer()
    application.command()(command)
    runner = CliRunner()
    arguments = [str(plain), str(tmp_path / "out"), "--scheme", "int8"]
    arguments += ["--activations", "none"]
    invocation = runner.invoke(application, arguments, catch_exceptions=False)
    assert invocation.exit_code == 0
    assert invocation.stdout.startswith(f"{tmp_path / 'out'}: 14 linear layers in int8, 0.")
    arguments[1] = str(tmp_path / "json")
    invocation = runner.invoke(application, [*arguments, "--json"], catch_exceptions=False)
    facts = json.loads(invocation.stdout)
    assert facts["layers"] == 14
    assert facts["bytes_after"] == sum(
        file.stat().st_size for file in (tmp_path / "json").glob("*.safetensors")
    )
    assert contents(tmp_path / "json") == contents(tmp_path / "out")
