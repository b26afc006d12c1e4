"""Real checkpoints, written by transformers from configs with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.tape import TapePlatform
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from interposer import register
from interposer.hookspecs import hookimpl
from interposer.records import PlatformEntry, Record
from interposer_models._families import examples

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-llama3-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama-yarn-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama-tied-biased": lambda: transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2-windowed": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "qwen3-tied": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=24, head_dim=16),
    "mistral-full": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, sliding_window=24, num_local_experts=5, num_experts_per_tok=2
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **{**SIZES, "head_dim": 32},
        moe_intermediate_size=48,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "qwen3-moe-in-part": lambda: transformers.Qwen3MoeConfig(
        **{**SIZES, "head_dim": 16},
        moe_intermediate_size=40,
        num_experts=7,
        num_experts_per_tok=3,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=24,
        attention_bias=True,
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES,
        head_dim=16,
        sliding_window=24,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={**YARN, "truncate": False},
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **{**SIZES, "num_hidden_layers": 4}, pad_token_id=None
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES, pad_token_id=None),
    "granite": lambda: transformers.GraniteConfig(
        **SIZES,
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        logits_scaling=2.5,
        residual_multiplier=0.7,
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES, sliding_window=24, pad_token_id=None),
}


def example(family: Callable[[], dict[str, dict[str, Any]]], label: str) -> Any:
    """Return the config of transformers for one of the examples of the conformance suite."""
    fields = dict(family()[label])
    (architecture,) = fields.pop("architectures")
    kind = getattr(transformers, architecture).config_class
    return kind(**{**fields, "vocab_size": 256, "max_position_embeddings": 512})


# The conformance suite runs these and others of each family, without bfloat16 and long schedules.
OF_EXAMPLES = {
    f"{family.__name__}-{label}": functools.partial(example, family, label)
    for family, label in (
        (examples.bloom, "three heads"),
        (examples.cohere2, "mixed"),
        (examples.deepseek_v2, "groups"),
        (examples.deepseek_v2, "lite"),
        (examples.deepseek_v3, "groups"),
        (examples.deepseek_v3, "plain"),
        (examples.deepseek_v32, "few"),
        (examples.deepseek_v32, "many"),
        (examples.ernie4_5, "biased"),
        (examples.ernie4_5_moe, "usual"),
        (examples.exaone4, "mixed"),
        (examples.gemma2, "capped"),
        (examples.gemma3, "mixed"),
        (examples.gemma4, "shared"),
        (examples.glm4, "half"),
        (examples.glm4_moe, "groups"),
        (examples.gpt2, "own sizes"),
        (examples.gpt_neox, "quarter"),
        (examples.granite_moe, "scaled"),
        (examples.hunyuan_dense, "raised"),
        (examples.hunyuan_moe, "raised"),
        (examples.llama4, "some"),
        (examples.minimax_m2, "part"),
        (examples.ministral, "some"),
        (examples.mpt, "six heads"),
        (examples.olmo3, "long"),
        (examples.opt, "released"),
        (examples.qwen2_moe, "some"),
        (examples.starcoder2, "windowed"),
        (examples.bamba, "biased"),
        (examples.falcon_h1, "factors"),
        (examples.lfm2, "biased"),
        (examples.mamba2, "biased"),
        (examples.nemotron_h, "biased"),
        (examples.nemotron_h, "experts"),
        (examples.nemotron_h, "latent"),
        (examples.qwen3_5, "tied"),
        (examples.qwen3_5_moe, "other"),
        (examples.qwen3_next, "some"),
    )
}
CONFIGS |= OF_EXAMPLES


def write_checkpoint(config: Any, path: Path, **options: Any) -> Any:
    """Write a model of random weights and a tokenizer of one token per byte; return the model."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or "bias" in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(path, **options)
    write_tokenizer(path)
    return model


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer of one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


# Each of these has what no other one has; the suite of families computes all of them as well.
LANDING_CONFIGS = ("gpt-oss", "granite", "llama-llama3-rope", "qwen2-windowed", "qwen3-moe-in-part")
PARAMS = [
    name if name in LANDING_CONFIGS else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(CONFIGS)
]


@pytest.fixture(scope="session", params=PARAMS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """One of ``CONFIGS``: the model directory and transformers' own model of it."""
    path = tmp_path_factory.mktemp(request.param)
    return path, write_checkpoint(CONFIGS[request.param](), path)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny Llama."""
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(CONFIGS["llama"](), path)
    return path


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The directory of a tiny gpt-oss, and transformers' own model of it."""
    path = tmp_path_factory.mktemp("gpt-oss")
    return path, write_checkpoint(CONFIGS["gpt-oss"](), path)


@pytest.fixture(scope="session")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny Qwen3-MoE."""
    path = tmp_path_factory.mktemp("qwen3-moe")
    write_checkpoint(CONFIGS["qwen3-moe"](), path)
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The directory of the same tiny Llama in several shards, which a test may spoil."""
    write_checkpoint(CONFIGS["llama"](), tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may spoil."""
    target = tmp_path / "model"
    target.mkdir()
    for source in llama.iterdir():
        (target / source.name).write_bytes(source.read_bytes())
    return target


class Tapes:
    """A plugin with a platform whose graphs are lists of calls."""

    @staticmethod
    @hookimpl
    def interposer_records() -> list[Record]:
        return [PlatformEntry("tape", "tests.tape:TapePlatform")]


@pytest.fixture
def tape() -> Iterator[None]:
    """Register the platform, with nothing captured yet."""
    TapePlatform.captured = TapePlatform.replayed = 0
    with register(Tapes, "tapes"):
        yield
