"""The benchmark of images and speech gives every engine equal weights and equal inputs."""

from __future__ import annotations

import importlib
import io
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(name)


def ggml_tensors(data: bytes, at: int) -> Iterator[tuple[str, np.ndarray]]:
    """Read the tensors at the end of whisper.cpp's file."""
    while at < len(data):
        num_dims, length, is_half = struct.unpack_from("<3i", data, at)
        shape = struct.unpack_from(f"<{num_dims}i", data, at + 12)[::-1]
        at += 12 + 4 * num_dims
        name = data[at : at + length].decode()
        values = np.frombuffer(data, "<f2" if is_half else "<f4", int(np.prod(shape)), at + length)
        at += length + values.nbytes
        yield name, values.reshape(shape)


@pytest.mark.slow  # whisper.cpp has no vocabulary of less than 51,865 tokens
def test_whisper_cpp_gets_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    source, target = tmp_path / "hf", tmp_path / "model.bin"
    source.mkdir()
    module("media_models").write_whisper(source, 4, 1, 1, torch.float32)
    module("whisper_ggml").write_whisper_ggml(source, target)
    data = target.read_bytes()
    assert struct.unpack_from("<12i", data) == (
        *(0x67676D6C, 51865),
        *(1500, 4, 1, 1),
        *(448, 4, 1, 1),
        *(80, 1),
    )
    bands, frequencies = struct.unpack_from("<2i", data, 48)
    at = 56 + 4 * bands * frequencies
    (num_texts,) = struct.unpack_from("<i", data, at)
    at += 4
    texts = []
    for _ in range(num_texts):
        (length,) = struct.unpack_from("<i", data, at)
        texts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    assert (bands, frequencies, num_texts) == (80, 201, 50257)
    assert {bytes([byte]) for byte in range(256)} < set(texts)
    found = dict(ggml_tensors(data, at))
    weights = load_file(source / "model.safetensors")
    assert len(found) == len([name for name in weights if not name.startswith("proj_out")])
    for theirs, ours in {
        "encoder.conv1.bias": "encoder.conv1.bias",
        "encoder.blocks.0.attn.query.weight": "encoder.layers.0.self_attn.q_proj.weight",
        "decoder.blocks.0.cross_attn.key.weight": "decoder.layers.0.encoder_attn.k_proj.weight",
        "decoder.token_embedding.weight": "decoder.embed_tokens.weight",
    }.items():
        weight = weights[f"model.{ours}"].numpy()
        np.testing.assert_allclose(found[theirs].reshape(weight.shape), weight, atol=1e-3)
    assert found["encoder.positional_embedding"].dtype == np.float32
    assert found["encoder.conv1.weight"].dtype == np.float16
    assert not found["decoder.token_embedding.weight"][50257:].any()


def test_llama_cpp_gets_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    models = module("media_models")
    source, target = tmp_path / "hf", tmp_path / "gguf"
    source.mkdir()
    models.write_llava(source, "tiny")
    models.write_gguf(source, target, "bf16")
    readers = [gguf.GGUFReader(target / f"{name}.gguf") for name in ("text", "mmproj")]
    found = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    weights = load_file(source / "model.safetensors")
    names = {name: models.gguf_name(name) for name in weights}
    unread = {name for name, target_name in names.items() if target_name is None}
    assert set(found) == set(names.values()) - {None}
    assert all("post_layernorm" in name for name in unread)
    for name, weight in weights.items():
        if name in unread:
            continue
        tensor = found[names[name] or ""]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        expected = weight.float().numpy()
        if tensor.name == "v.position_embd.weight":  # llama.cpp has the class vector last
            expected = np.roll(expected, -1, axis=0)
        np.testing.assert_array_equal(values, expected)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    fields = readers[1].fields
    assert fields["clip.projector_type"].contents() == "mlp"
    assert fields["clip.vision.image_size"].contents() == config["vision_config"]["image_size"]
    assert readers[0].fields["qwen2.block_count"].contents() == 2


def test_images_of_a_benchmark_are_png_files_of_the_given_size() -> None:
    contract = module("media_engines.contract")
    pixels = np.asarray(Image.open(io.BytesIO(contract.picture(3, 336))))
    assert pixels.shape == (336, 336, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == 49
    plain = np.asarray(Image.open(io.BytesIO(contract.picture(3, 56, blocks=1))))
    assert len(np.unique(plain.reshape(-1, 3), axis=0)) == 1
    assert contract.picture(3, 56) == contract.picture(3, 56) != contract.picture(4, 56)


def test_a_table_has_medians_ratios_and_reasons(tmp_path: Path) -> None:
    records = module("media").Records(tmp_path / "media.json")
    ours, theirs = "interposer:bf16", "transformers:bf16"
    records.rounds["encode"] = [
        {ours: {"seconds": first}, theirs: {"seconds": second}}
        for first, second in ((1.0, 1.5), (2.0, 4.0), (1.0, 2.5))
    ]
    records.failures["encode"] = {"openvino:f16": "not installed: no wheel"}
    records.save()
    lines = list(module("media").Records(tmp_path / "media.json").table())
    assert "| vectors of an image | interposer:bf16 | 1000 (1000-2000) | 3 | - |" in lines
    assert "| vectors of an image | transformers:bf16 | 2500 (1500-4000) | 3 | x2.00 |" in lines
    assert "| vectors of an image | openvino:f16 | not installed: no wheel | 0 | - |" in lines


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_rows_are_measured_and_added_to_earlier_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    media, models = module("media"), module("media_models")
    list(models.made(tmp_path, "tiny", ["hf"], tmp_path))
    rows = ["encode", "answer", "batch", "whisper-base-16"]
    chosen = ["--engines", "interposer", "transformers", "--threads", "1", "--rounds", "1"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["media", str(tmp_path), "--rows", *rows, *chosen])
        media.main()
    table = capsys.readouterr().out
    records = media.Records(tmp_path / "media.json")
    for row in rows:
        assert len(records.rounds[row]) == 2
        assert "transformers:bf16" in records.facts
        assert "interposer:bf16" in records.checks[row]
    assert table.count("| interposer:bf16 |") >= 2 * 5
