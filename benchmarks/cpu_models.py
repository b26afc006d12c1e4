"""Write a model with random weights, and the same weights in the format of every other engine.

    python benchmarks/cpu_models.py qwen3-0.6b DIR [--formats hf gguf openvino onnx ...]

DIR/hf is the model directory; next to it are GGUF files and folders for OpenVINO and
onnxruntime-genai. Their converters run in the engines' environments, which are created if needed.
Only on request: "adapters", four LoRA adapters of rank 16 for all linear layers of blocks, for PEFT
and for llama.cpp, and "compressed": compressed-tensors checkpoints in DIR/int8, DIR/w8a16,
DIR/w4a16 and DIR/w4a8. The shape stdlib-lm is the model that this repository ships. Existing files
are kept. If a format cannot be written, the reason is printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from cpu_peers import ENVIRONMENTS, Unavailable, cache_folder, environment_python, source_tree
from interposer_engine import Checkpoint, quantize
from random_model import SHAPES

# Small enough for a smoke test; sizes are multiples of every format's block size.
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}

SHIPPED = Path(__file__).parents[1] / "examples" / "models" / "stdlib-lm"
ADAPTERS, RANK = 4, 16

# Numbers of enum llama_ftype in llama.h; "pure" quantizes all tensors alike, also the embedding.
LLAMA_TYPES = {"f16": (1, False), "q8_0": (7, False), "q4_0": (2, True), "q4_k_m": (15, False)}

# Options of optimum-cli. Embedding and lm_head stay in 8 bits unless all layers are selected.
OPENVINO = {
    "fp16": ["--weight-format", "fp16"],
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--ratio", "1.0", "--group-size", "128", "--sym"],
    "int4-all": [
        *("--weight-format", "int4", "--ratio", "1.0", "--group-size", "128", "--sym"),
        "--all-layers",
    ],
}
ONNX = {"int4": ["-p", "int4", "--extra_options", "int4_accuracy_level=4", "int4_block_size=32"]}

# Scheme, input bits and group size, by vLLM's name for such a checkpoint.
COMPRESSED: dict[str, tuple[str, str | None, int | None]] = {
    "int8": ("int8", None, None),
    "w8a16": ("int8", "none", None),
    "w4a16": ("int4", None, 32),
    "w4a8": ("w4a8", None, 32),
}


def write_hugging_face(config: Any, folder: Path) -> None:
    """Write the model directory in bfloat16; every token has a text, for engines that need one."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "num_local_experts" in written:
        # Format of transformers of 2025, which OpenVINO's exporter needs.
        written["num_experts"] = written["num_local_experts"]
        written["head_dim"] = config.hidden_size // config.num_attention_heads
        (folder / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*symbols, *(f"<{number}>" for number in range(len(symbols), config.vocab_size))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def config_of(shape: str, **changes: Any) -> Any:
    """Load the configuration of a shape, with some sizes changed."""
    config = SHAPES["qwen3-0.6b" if shape == "tiny" else shape]()
    sizes = {**(TINY if shape == "tiny" else {}), **changes}
    if hasattr(config, "layer_types") and "num_hidden_layers" in sizes:
        config.layer_types = config.layer_types[: sizes["num_hidden_layers"]]
    for name, value in sizes.items():
        setattr(config, name, value)
    return config


def write_bf16_gguf(source: Path, target: Path, environments: Path) -> None:
    """Write the GGUF file by llama.cpp's converter, in the Python that has transformers."""
    tree = source_tree(ENVIRONMENTS["llama_cpp"], environments) / "vendor" / "llama.cpp"
    _run([sys.executable, Path(__file__).with_name("gguf_conversion.py"), tree, source, target])


def write_adapters(source: Path, target: Path, environments: Path) -> None:
    """Write random LoRA adapters in PEFT's format, and convert them for llama.cpp."""
    sizes = {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in Checkpoint.open(source).stream()
        if name.endswith("_proj.weight")
    }
    tree = source_tree(ENVIRONMENTS["llama_cpp"], environments) / "vendor" / "llama.cpp"
    for number in range(ADAPTERS):
        folder = target / str(number)
        folder.mkdir(parents=True)
        generator = torch.Generator().manual_seed(number)
        tensors = {
            f"base_model.model.{name}.lora_{side}.weight": (
                0.02 * torch.randn(shape, generator=generator)
            ).bfloat16()
            for name, (outputs, inputs) in sizes.items()
            for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
        }
        save_file(tensors, folder / "adapter_model.safetensors")
        kinds = sorted({name.rpartition(".")[2] for name in sizes})
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": kinds}
        (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        program = tree / "convert_lora_to_gguf.py"
        options = ["--base", source, "--outfile", folder.with_suffix(".gguf"), "--outtype", "bf16"]
        _run([sys.executable, program, *options, folder])


def write_llama_cpp(source: Path, target: Path, kind: str, environments: Path) -> None:
    """Quantize a GGUF file by llama.cpp."""
    number, pure = LLAMA_TYPES[kind]
    script = (
        "import llama_cpp, sys\n"
        "options = llama_cpp.llama_model_quantize_default_params()\n"
        f"options.ftype, options.pure = {number}, {pure}\n"
        "source, target = (name.encode() for name in sys.argv[1:])\n"
        "sys.exit(llama_cpp.llama_model_quantize(source, target, options))\n"
    )
    _run([_python("llama_cpp", environments), "-c", script, str(source), str(target)])


def write_openvino(source: Path, target: Path, kind: str, environments: Path) -> None:
    python = _python("openvino", environments)
    command = [python.parent / "optimum-cli", "export", "openvino", "--model", source]
    _run([*command, "--task", "text-generation-with-past", *OPENVINO[kind], target])


def write_onnx(source: Path, target: Path, kind: str, environments: Path) -> None:
    command = [
        _python("onnx", environments),
        "-m",
        "onnxruntime_genai.models.builder",
        "-m",
        source,
    ]
    cache = target.with_suffix(".cache")
    _run([*command, "-o", target, "-e", "cpu", "-c", cache, *ONNX[kind]])
    shutil.rmtree(cache, ignore_errors=True)


def write_compressed(source: Path, target: Path, kind: str) -> None:
    """Quantize the linear layers by rounding to nearest; embedding and lm_head stay unquantized."""
    scheme, activations, group_size = COMPRESSED[kind]
    quantize(source, target, scheme, activations=activations, group_size=group_size)


def _python(name: str, environments: Path) -> Path:
    return environment_python(ENVIRONMENTS[name], environments)


def _run(command: list[Any]) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit {done.returncode}"]
        raise Unavailable(lines[-1])


def made(shape: str, folder: Path, formats: list[str], environments: Path) -> Iterator[str]:
    """Write the missing models; yield a line per format, with the reason of a failure."""
    plain = folder / "hf"
    write: Callable[[Path], object] = partial(shutil.copytree, SHIPPED)
    if shape != SHIPPED.name:
        write = partial(write_hugging_face, config_of(shape))
    bf16 = folder / "bf16.gguf"
    parts: list[tuple[str, Path, Callable[[Path], object]]] = [
        ("hf", plain, write),
        ("gguf", bf16, partial(write_bf16_gguf, plain, environments=environments)),
        *(
            (
                "gguf",
                folder / f"{kind}.gguf",
                partial(write_llama_cpp, bf16, kind=kind, environments=environments),
            )
            for kind in LLAMA_TYPES
        ),
        *(
            (
                "openvino",
                folder / f"openvino-{kind}",
                partial(write_openvino, plain, kind=kind, environments=environments),
            )
            for kind in OPENVINO
        ),
        *(
            (
                "onnx",
                folder / f"onnx-{kind}",
                partial(write_onnx, plain, kind=kind, environments=environments),
            )
            for kind in ONNX
        ),
        (
            "adapters",
            folder / "adapters",
            partial(write_adapters, plain, environments=environments),
        ),
        *(
            ("compressed", folder / kind, partial(write_compressed, plain, kind=kind))
            for kind in COMPRESSED
        ),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, target, write in parts:
        if name not in formats:
            continue
        if target.exists():
            yield (f"{target}: was there")
            continue
        unfinished = target.with_name(f"unfinished-{target.name}")
        started = time.perf_counter()
        try:
            write(unfinished)
        except Unavailable as error:
            yield (f"{target}: not made: {error}")
            continue
        unfinished.rename(target)
        yield (f"{target}: {time.perf_counter() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=[*sorted(SHAPES), "tiny", SHIPPED.name])
    parser.add_argument("directory", type=Path)
    known = ["hf", "gguf", "openvino", "onnx", "adapters", "compressed"]
    parser.add_argument("--formats", nargs="+", choices=known, default=known[:4])
    parser.add_argument("--environments", type=Path, default=cache_folder())
    arguments = parser.parse_args()
    folder, environments = arguments.directory.absolute(), arguments.environments.absolute()
    for line in made(arguments.shape, folder, arguments.formats, environments):
        print(line, flush=True)


if __name__ == "__main__":
    main()
